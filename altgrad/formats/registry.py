"""Formats by name.

A name is looked up among the registered formats and the tables of `tables`. Any other is read as ``E<e>M<m>``,
optionally followed by ``FN``, ``IEEE`` or ``FNUZ`` for its special codes; without a suffix every code is a number.
``UE<e>M<m>`` is unsigned, as NVIDIA writes it (UE4M3, UE8M0). Names are case-sensitive: ``bf16`` is the unquantized
baseline, not the format BF16.
"""

import re
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np

from altgrad.common.errors import did_you_mean
from altgrad.formats.floats import FloatFormat
from altgrad.formats.format import MAX_BITS, Format, in_float32
from altgrad.formats.tables import TABLES, TableFormat, named_table

_SPLIT_NAME = re.compile(r"(U?)E(0|[1-9]\d?)M(0|[1-9]\d?)(FN|IEEE|FNUZ)?")


class UnknownFormatError(ValueError):
    """No format has this name; the message lists the nearest ones."""


def _p3109(precision: int, domain: str) -> FloatFormat:
    """Return IEEE P3109 binary8p<precision>, signed; ``domain`` is e (extended, with infinities) or f (finite)."""
    specials = "p3109" if domain == "e" else "fnuz"
    return FloatFormat(f"binary8p{precision}{domain}", 8 - precision, precision - 1, specials=specials)


_FORMATS = [
    FloatFormat("E0M7", 0, 7),
    FloatFormat("E1M6", 1, 6),
    FloatFormat("E2M5", 2, 5),
    FloatFormat("E3M4", 3, 4),
    FloatFormat("E4M3", 4, 3, specials="fn"),  # OCP OFP8
    FloatFormat("E5M2", 5, 2, specials="ieee"),  # OCP OFP8
    FloatFormat("E6M1", 6, 1),
    FloatFormat("E7M0", 7, 0),
    FloatFormat("E4M3FNUZ", 4, 3, specials="fnuz"),
    FloatFormat("E5M2FNUZ", 5, 2, specials="fnuz"),
    FloatFormat("E3M4IEEE", 3, 4, specials="ieee"),
    FloatFormat("E4M3IEEE", 4, 3, specials="ieee"),
    FloatFormat("E2M1", 2, 1),  # OCP MX elements
    FloatFormat("E2M3", 2, 3),
    FloatFormat("E3M2", 3, 2),
    FloatFormat("E8M0", 8, 0, specials="fn", signed=False),  # OCP MX scale: 2^(code - 127), 0xFF is NaN
    *[_p3109(precision, domain) for domain in "ef" for precision in range(1, 9)],
    FloatFormat("FP16", 5, 10, specials="ieee"),
    FloatFormat("BF16", 8, 7, specials="ieee"),
]
_BY_NAME = {fmt.name: fmt for fmt in _FORMATS}
_ALIASES = {
    "INT8": "E0M7",
    "INT4": "E0M3",
    "E4M3FN": "E4M3",
    "UE8M0": "E8M0",
    "E5M10": "FP16",
    "E8M7": "BF16",
    **{f"binary8p{precision}": f"binary8p{precision}e" for precision in range(1, 9)},
}


def format_names() -> tuple[str, ...]:
    """Return the registered names without aliases. `get_format` also takes any other ``ExMy`` of up to 16 bits."""
    return (*_BY_NAME, *TABLES)


def get_format(name: str | Format) -> Format:
    """Return the format called ``name``; a `Format` is returned as it is.

    Raises:
        UnknownFormatError: no such format; the message lists near matches.
        TypeError: ``name`` is neither a string nor a Format.
    """
    if isinstance(name, Format):
        return name
    if not isinstance(name, str):
        raise TypeError(f"name: expected a format name or a Format, got {type(name).__name__}")
    if name in TABLES:
        return named_table(name)
    name = _ALIASES.get(name, name)
    return _BY_NAME.get(name) or _parse(name)


def definition(fmt: Format) -> dict[str, Any]:
    """Return the fields of a JSON file that define ``fmt``, for `from_definition`; of a table with a name, the name."""
    if fmt.name in TABLES and named_table(fmt.name) == fmt:
        return {"name": fmt.name}
    fields: dict[str, Any] = asdict(fmt)  # type: ignore[call-overload] # both kinds are dataclasses
    return {name: value for name, value in fields.items() if (name, value) != ("scale_to", "max")}


def from_definition(fields: dict[str, Any]) -> Format:
    """Return the format whose `definition` is ``fields``."""
    if fields.keys() == {"name"}:
        return get_format(fields["name"])
    tuples: dict[str, Any] = {name: tuple(its) if isinstance(its, list) else its for name, its in fields.items()}
    return FloatFormat(**tuples) if "exponent_bits" in fields else TableFormat(**tuples)


@cache
def _parse(name: str) -> FloatFormat:
    parsed = _SPLIT_NAME.fullmatch(name)
    if parsed is None:
        splits = f"E<exponent bits>M<mantissa bits> of up to {MAX_BITS} bits"
        listed = f"; known are those that `python -m altgrad.formats` lists, and {splits}"
        raise UnknownFormatError(f"unknown format {name!r}{did_you_mean(name, (*format_names(), *_ALIASES), listed)}")
    specials = (parsed[4] or "finite").lower()
    try:
        return FloatFormat(name, int(parsed[2]), int(parsed[3]), specials=specials, signed=not parsed[1])
    except ValueError as error:
        raise UnknownFormatError(f"unknown format {name!r} ({error})") from None


# --- codebooks, in which optimizer states are encoded ----------------------------------------------------------------

#: Upper limit of `Codebook.largest`: beyond it the float32 scale of a small tensor would not be a normal number.
LARGEST = 2.0**64


@dataclass(frozen=True, eq=False)
class Codebook:
    """The values of a format's codes, as an optimizer state has them.

    Attributes:
        fmt: the format.
        values: values of codes 0, 1, ..., ascending: float32, (n,). Magnitudes if codes have a sign bit.
        thresholds: the smallest float32 that is rounded to code 1, 2, ...: float32, (n - 1,).
        sign_code: the sign bit as a number, such as 0x80; 0 for a `TableFormat`, whose codes here are the places of its
            values.
    """

    fmt: Format
    values: np.ndarray
    thresholds: np.ndarray
    sign_code: int = 0

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
        table: np.ndarray = np.pad(self.values, (0, (1 << self.fmt.bits) - len(self.values)))
        if self.sign_code:
            table = np.nan_to_num(self.fmt.code_values, nan=0, posinf=0, neginf=0).astype(np.float32)
        return table


@cache
def codebook(fmt: str | Format) -> Codebook:
    """Return the codebook of a format or its name; ``ValueError`` if float32 cannot hold one of its values."""
    fmt = get_format(fmt)
    values, sign_code = fmt.values, 0
    if isinstance(fmt, FloatFormat):
        values, sign_code = fmt.magnitudes, fmt.sign_code
    values, thresholds = in_float32(values, fmt.thresholds[1 - len(values) :])
    if not fmt.fits(24, -149, 127):
        raise ValueError(f"{fmt.name} has values that no float32 is")
    return Codebook(fmt, values, thresholds, sign_code)
