"""Codebooks: the values of the codes of a format, or of a quantization map, as tables.

A map is no floating-point format but a table. The maps here are for optimizer states: the dynamic maps of 8 bits
(Dettmers et al. 2021, arXiv:2110.02861, section 2.1; ``create_dynamic_map`` of bitsandbytes and torchao) and torchao's
maps of 4 bits (Li et al. 2023, arXiv:2309.01507). Their largest value is 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise

import numpy as np

from altgrad.formats.format import Format
from altgrad.formats.registry import get_format

#: Upper limit of `Codebook.largest`: beyond it the float32 scale of a small tensor would not be a normal number.
LARGEST = 2.0**64


@dataclass(frozen=True, eq=False)
class Codebook:
    """The values of the codes of a format or a map.

    Attributes:
        name: name of the format or the map.
        bits: width of a code.
        values: values of codes 0, 1, ..., ascending: float32, (n,). Magnitudes if codes have a sign bit.
        thresholds: the smallest number that is rounded to code 1, 2, ...: float32, (n - 1,). A format's ties go to the
            even code, a map's to the larger value, with differences in float32 as in torchao.
        sign_code: the sign bit as a number, such as 0x80; 0 if codes have no sign bit.
        negative_zero: whether the code with the sign bit alone means -0.
        fmt: the format; None for a map.
    """

    name: str
    bits: int
    values: np.ndarray
    thresholds: np.ndarray
    sign_code: int = 0
    negative_zero: bool = False
    fmt: Format | None = None

    @property
    def signed(self) -> bool:
        """Whether there are negative values."""
        return self.sign_code > 0 or bool(self.values[0] < 0)

    @property
    def largest(self) -> float:
        """The scaling target: the largest value, but at most `LARGEST`."""
        return min(float(self.values[-1]), LARGEST)

    @property
    def smallest(self) -> float:
        """The smallest positive value."""
        return float(self.values[self.values > 0][0])

    @cached_property
    def code_values(self) -> np.ndarray:
        """The value of every code that is a finite number, 0 for the others: float32, (2^bits,)."""
        table = np.zeros(1 << self.bits, np.float32)
        table[: len(self.values)] = self.values
        if self.sign_code:
            first = 0 if self.negative_zero else 1
            table[self.sign_code + first : self.sign_code + len(self.values)] = -self.values[first:]
        return table


def map_names() -> tuple[str, ...]:
    """Return the names of the quantization maps."""
    return tuple(_MAPS)


def codebook(name: str | Format) -> Codebook:
    """Return the codebook of a `Format`, or of the map or format called ``name``.

    Raises:
        UnknownFormatError: neither a map nor a format has this name.
        ValueError: float32 cannot hold a value of the format.
    """
    if isinstance(name, str) and name in _MAPS:
        return _of_map(name)
    return _of_format(get_format(name, also=map_names()))


@cache
def _of_format(fmt: Format) -> Codebook:
    values = fmt.magnitudes.astype(np.float32)
    if not (np.isfinite(values).all() and (values == fmt.magnitudes).all()):
        raise ValueError(f"{fmt.name} has values that no float32 is")
    between = ((fmt.magnitudes[:-1] + fmt.magnitudes[1:]) / 2).astype(np.float32)
    to_even = np.arange(1, len(values)) % 2 == 0
    thresholds = np.where(to_even, between, np.nextafter(between, np.float32(np.inf)))
    return Codebook(fmt.name, fmt.bits, values, thresholds, fmt.sign_code, fmt.has_negative_zero, fmt)


@cache
def _of_map(name: str) -> Codebook:
    values = np.array(sorted(_MAPS[name]()), np.float32)
    thresholds = np.array([_first_up(*pair) for pair in pairwise(values)], np.float32)
    return Codebook(name, int(np.log2(len(values))), values, thresholds)


def _first_up(below: np.float32, above: np.float32) -> np.float32:
    """Return the smallest float32 at least as near to ``above`` as to ``below``."""

    def goes_up(x: np.float32) -> bool:
        return bool(x - below >= (above - below) * np.float32(0.5))

    x = np.float32((np.float64(below) + np.float64(above)) / 2)
    while goes_up(x):
        x = np.nextafter(x, np.float32(-np.inf))
    while not goes_up(x):
        x = np.nextafter(x, np.float32(np.inf))
    return x


def _dynamic(signed: bool, exponents: int, bits: int) -> list[float]:
    """Return the values of a dynamic map, unsorted: ``exponents`` decades, each with twice the steps of the last."""
    lowest, values = bits - 1 - exponents, [0.0, 1.0]
    steps = [1 << (i + lowest + (0 if signed else 1)) for i in range(exponents)]
    decades = [(10 ** (i + 1 - exponents), count) for i, count in enumerate(steps)]
    if lowest:  # the remaining codes go to the top decade
        decades.append((1, (1 << lowest) - 1))
    for decade, count in decades:
        means = (np.float32(decade) * _means(count)).tolist()
        values += means + ([-mean for mean in means] if signed else [])
    return values


def _means(count: int) -> np.ndarray:
    """Return the midpoints of ``count`` equal steps from 0.1 to 1, float32; step edges are torch.linspace's."""
    low, high, places = np.float32(0.1), np.float32(1), np.arange(count + 1)
    step = np.float64((high - low) / np.float32(count))  # so that a product and a sum are rounded once, as by an FMA
    edges = np.where(places < (count + 1) // 2, low + step * places, high - step * (count - places)).astype(np.float32)
    return (edges[:-1] + edges[1:]) / np.float32(2)


_MAPS = {
    "dynamic8": lambda: _dynamic(True, 7, 8),
    "unsigned_dynamic8": lambda: _dynamic(False, 7, 8),
    "dynamic4": lambda: _dynamic(True, 3, 4),
    "unsigned_linear4": lambda: [i / 16 for i in range(1, 17)],
}
