"""Stores an optimizer moment as codes and scales, by tensor operations; `altgrad.numerics.cpu`'s `codec.h` in loops.

A float32 tensor is divided into groups: the whole tensor, rows of its last dimension, or blocks of the flattened
tensor. The last block may be shorter. The scale of a group is ``max(amax, 1e-12) / largest``, where ``largest`` is the
codebook's largest value. The scale is float32, as in torchao, or rounded up to a power of two (E8M0). ``x / scale`` is
rounded to a code, and a code decodes to ``value * scale``. With ``root``, the square root of x is stored.

COAT's range expansion (Xi et al. 2024, arXiv:2410.19313, section 4) raises the magnitudes of a group to the power
``k = log(R of the codebook) / log(R of the group)``, with R the largest over the smallest nonzero magnitude. A code is
of ``(|x| / amax)^k * largest``, and the stored scale is the amax. Logarithms and powers are in float64, so that
differences between math libraries rarely change a code.

Infinities saturate. NaN, which finite gradients never cause, is stored as the largest value.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from altgrad.config.arms import Arm
from altgrad.config.state import Moment, State
from altgrad.formats.floats import FloatFormat
from altgrad.formats.registry import Codebook
from altgrad.model.quantized.data_parallel import is_sharded
from altgrad.numerics import compute_scale, loops, uniform
from altgrad.optim.sharded import from_part, local, parts_by_rows

#: Lower bound of a group's amax, as in torchao and bitsandbytes; a group of zeros has it.
LEAST_AMAX = 1e-12
INFINITE = torch.finfo(torch.float32).max
SCALE, POWER = "_scale", "_power"  # suffixes of a moment's name for its scales and powers
#: The moments that may be codes, each with what is added to a parameter's number to get its random stream. Streams
#: from 2^31 on belong to a model's operands.
STREAMS = {"exp_avg": 1 << 30, "momentum_buffer": 1 << 30, "exp_avg_sq": 1 << 29}
MOMENTS = tuple(STREAMS)

# What `codec.h` gets per moment, made by `packed`: a header with these fields, the codes' values, and a table.
CHUNK = 512  # elements per chunk in the loops; for larger blocks an extra pass finds the scales
TENSOR, ROW = 0, 1  # values of the field ``block`` for these granularities; a block has more elements
FIELDS = (
    "mapped", "bits", "mantissa_bits", "bias", "sign_code", "negative_zero", "root", "stochastic", "power_of_two",
    "block", "stream", "lowest", "entry", "entries", "largest", "spacing", "max",
)  # fmt: skip
HEADER = 32
_NUMBERS = {
    "header": HEADER, "chunk": CHUNK, "tensor": TENSOR, "row": ROW, "least_amax": float(np.float32(LEAST_AMAX))
}  # fmt: skip
DEFINITIONS = loops.enumeration("codec", FIELDS) + loops.numbers("codec", _NUMBERS)


class Coding:
    """Encodes and decodes a moment by its settings, on one device."""

    def __init__(self, moment: Moment, device: torch.device | None = None) -> None:
        self.moment, self.book = moment, moment.codebook
        self.packed = self.book.fmt.bits <= 4
        self.values = torch.tensor(self.book.values, device=device)
        self.thresholds = torch.tensor(self.book.thresholds, device=device)
        self.code_values = torch.tensor(self.book.code_values, device=device)

    def zeros(self, shape: torch.Size) -> dict[str, Tensor]:
        """Return an all-zero moment encoded as by `encode`. float32 scales are 0, since a map may lack a zero."""
        parts = self.encode(self.values.new_zeros(shape), nearest=True)
        if self.moment.scale == "float32":
            parts[SCALE].zero_()
        return parts

    def encode(self, x: Tensor, stream: Tensor | None = None, *, nearest: bool = False) -> dict[str, Tensor]:
        """Return codes and scales.

        Args:
            x: float32, any shape.
            stream: random stream for stochastic rounding, as `uniform` takes it.
            nearest: round to nearest even if the settings say stochastic.

        Returns:
            Tensors by name suffix. ``""``: codes with the shape of ``x``, uint8, or int16 beyond 8 bits; codes of at
            most 4 bits lie two in a byte, the first in the upper half, shape (ceil(n / 2),). ``"_scale"``: (groups,)
            float32, or uint8 exponents for E8M0. ``"_power"``, only with ``expand``: (groups,) float32.
        """
        groups = self._groups(x.clamp(-INFINITE, INFINITE))
        if self.moment.root:
            groups = groups.double().sqrt().float()  # torch's float32 sqrt is not correctly rounded on all devices
        amax = groups.abs().amax(-1, keepdim=True).clamp(LEAST_AMAX, INFINITE)
        parts = {}
        if self.moment.expand:
            k, scale = self._power(groups, amax), amax
            share = ((groups.abs() / amax).double().log2() * k.double()).exp2()
            scaled = torch.copysign((share * self.book.largest).float(), groups)
            parts[POWER] = k.flatten()
        else:
            scale = amax / self.book.largest
            if self.moment.scale == "E8M0":
                scale = 1 / compute_scale(amax, self.book.largest, scale_format="E8M0")
            scaled = groups / scale
        by_chance = self.moment.rounding == "stochastic" and not nearest
        found = self._rounded(self._flat(scaled, x.numel()), stream if by_chance else None)
        found = found.to(torch.uint8 if self.book.fmt.bits <= 8 else torch.int16)
        parts[SCALE] = scale.flatten()
        if self.moment.scale == "E8M0":
            parts[SCALE] = ((parts[SCALE].view(torch.int32) >> 23) & 255).to(torch.uint8)
        if self.packed:
            found = pad(found, (0, found.numel() % 2))
            return {"": found[::2] << 4 | found[1::2], **parts}
        return {"": found.view(x.shape), **parts}

    def decode(self, parts: dict[str, Tensor], shape: torch.Size) -> Tensor:
        """Return the moment decoded from ``parts``, the result of `encode`: float32, of shape ``shape``."""
        codes, count = parts[""].flatten(), math.prod(shape)
        if self.packed:
            codes = torch.stack([codes >> 4, codes & 15], -1).flatten()[:count]
        values = self._groups(self.code_values[codes.int() & 0xFFFF].view(shape))
        scale = parts[SCALE]
        if self.moment.scale == "E8M0":
            scale = (scale.int() << 23).view(torch.float32)
        scale = scale.unsqueeze(-1)
        if self.moment.expand:
            share = ((values.double().abs() / self.book.largest).log2() * (1 / parts[POWER].double()[:, None])).exp2()
            found = torch.copysign((share * scale.double()).float(), values)
        else:
            found = values * scale
        if self.moment.root:
            found = found.square()
        return self._flat(found, count).view(shape)

    def _groups(self, x: Tensor) -> Tensor:
        """Return ``x`` as (groups, elements); a short last block is padded with zeros."""
        if self.moment.granularity == "tensor" or (x.ndim < 2 and self.moment.granularity == "row"):
            return x.reshape(1, -1)
        if self.moment.granularity == "row":
            return x.reshape(-1, x.shape[-1])
        return pad(x.flatten(), (0, -x.numel() % self.moment.block)).view(-1, self.moment.block)

    def _flat(self, groups: Tensor, count: int) -> Tensor:
        return groups.flatten()[:count]

    def _power(self, groups: Tensor, amax: Tensor) -> Tensor:
        magnitude = groups.abs()
        least = torch.where(magnitude > 0, magnitude, amax).amin(-1, keepdim=True)
        binades = (amax.double() / least.double()).log2()
        k = math.log2(self.book.largest / self.book.smallest) / binades
        return torch.where(binades > 0, k, 1.0).float()

    def _rounded(self, x: Tensor, stream: Tensor | None) -> Tensor:
        """Return the int64 code of each scaled number; without a ``stream``, rounded to nearest."""
        magnitude = x.abs() if self.book.sign_code else x
        if stream is None:
            codes = torch.bucketize(magnitude, self.thresholds, right=True)
        else:
            magnitude = magnitude.clamp(self.values[0], self.values[-1])
            codes = torch.bucketize(magnitude, self.values[1:], right=True)
            below, above = self.values[codes], self.values[(codes + 1).clamp_max(len(self.values) - 1)]
            share = ((magnitude - below) / (above - below)).nan_to_num(0.0)
            codes = codes + (uniform(x.shape, stream) < share)
        if self.book.sign_code:
            negative = torch.signbit(x) if self.book.fmt.has_negative_zero else (x < 0) & (codes > 0)
            codes = codes + self.book.sign_code * negative
        return codes


class Codings:
    """The codings that an arm uses for the moments of each parameter."""

    def __init__(self, arm: Arm) -> None:
        self.state = arm.state
        self._known: dict[torch.device, dict[str, Coding]] = {}

    def of(self, p: Tensor) -> dict[str, Coding]:
        """Return ``{moment name: coding}`` of the moments of ``p`` stored as codes; ``{}`` if ``p`` is too small."""
        if self.state is None or p.numel() < self.state.least:
            return {}
        if p.device not in self._known:
            self._known[p.device] = codings_of(self.state, p.device)
        return self._known[p.device]

    def in_parts(self, p: Tensor) -> bool:
        """Return whether each process stores only the codes of its part of a sharded ``p``.

        True if no scale and no random number depends on elements outside the part.
        """
        return is_sharded(p) and all(_is_local(p, coding.moment) for coding in self.of(p).values())


def codings_of(state: State | None, device: torch.device) -> dict[str, Coding]:
    """Return ``{moment name: coding}`` for the moments that an arm's ``state`` section stores as codes."""
    moments = {} if state is None else {name: state.of(name) for name in MOMENTS}
    return {name: Coding(moment, device) for name, moment in moments.items() if moment is not None}


def _is_local(p: Tensor, moment: Moment) -> bool:
    """Return whether encoding a process's part of ``p`` alone gives the same codes as encoding all of ``p``."""
    parts = parts_by_rows(p)
    if parts == 0 or moment.granularity == "tensor" or moment.rounding == "stochastic":
        return False
    return p.ndim > 1 if moment.granularity == "row" else p.numel() // parts % moment.block == 0


@contextmanager
def opened(
    codings: dict[str, Coding], state: dict[str, Tensor], names: Iterable[str], p: Tensor, stream: tuple[int, int, int]
) -> Iterator[dict[str, Tensor]]:
    """Yield the moments ``names`` of ``p`` in float32; on leaving, encode the coded ones into ``state`` again."""
    moments = {name: decoded(codings[name], state, name, p) if name in codings else state[name] for name in names}
    yield moments
    for name in moments.keys() & codings.keys():
        for part, t in codings[name].encode(local(moments[name]), _stream_of(name, stream, p.device)).items():
            local(state[name + part]).copy_(t)


def decoded(coding: Coding, state: Mapping[str, Tensor], name: str, p: Tensor) -> Tensor:
    """Return the moment ``name`` of ``p`` decoded to float32, sharded as its codes are."""
    parts = {part: local(state[name + part]) for part in ("", SCALE, POWER) if name + part in state}
    if not is_sharded(state[name]):
        return coding.decode(parts, p.shape)
    return from_part(p, coding.decode(parts, local(p).shape))


def _stream_of(name: str, stream: tuple[int, int, int], device: torch.device) -> Tensor:
    seed, tensor, step = stream
    return torch.tensor([seed, tensor + STREAMS[name], step]).to(device, non_blocking=True)


# --- for the loops ------------------------------------------------------------------------------------


def takes(coding: Coding) -> bool:
    """Whether the C++ loops take these codes: float formats with a zero and at most 8 bits, tables that end at 1.

    Other tables, and stochastic rounding to a table, take tensor operations.
    """
    moment, book = coding.moment, coding.book
    if not isinstance(book.fmt, FloatFormat):
        return moment.rounding == "nearest" and not moment.expand and _table(book) is not None
    return book.fmt.bits <= 8 and book.fmt.has_zero and book.smallest >= 2.0**-100


def measures(coding: Coding) -> bool:
    """Whether the loops need an extra pass to find the scales: a chunk is not a whole number of blocks."""
    return coding.moment.granularity != "block" or CHUNK % coding.moment.block != 0


def packed(name: str, coding: Coding) -> Tensor:
    """Return the coding of the moment ``name`` for the C++ loops, 1-d float32: header, code values, table.

    The table holds other types bit by bit: the uint32 entries of a map, see `_table`, or with ``expand`` the float64
    ``log2(|value| / largest)`` of each code.
    """
    moment, book, fmt = coding.moment, coding.book, coding.book.fmt
    mapped = not isinstance(fmt, FloatFormat)
    lowest, entry, table = (mapped and _table(book)) or (0, 0, np.zeros(0, np.uint32))
    fields = {
        "mapped": mapped, "bits": book.fmt.bits, "sign_code": book.sign_code, "negative_zero": fmt.has_negative_zero,
        "mantissa_bits": getattr(fmt, "mantissa_bits", 0), "bias": getattr(fmt, "bias", 0),
        "root": moment.root, "stochastic": moment.rounding == "stochastic", "power_of_two": moment.scale == "E8M0",
        "block": {"tensor": TENSOR, "row": ROW}.get(moment.granularity, moment.block),
        "stream": STREAMS[name] >> 29, "lowest": lowest >> 23, "entry": entry,
        "entries": len(table) // 2, "largest": book.largest, "max": float(book.values[-1]),
        "spacing": book.smallest,
    }  # fmt: skip
    size = 1 << book.fmt.bits
    numbers = np.zeros(HEADER + size, np.float32)
    numbers[: len(FIELDS)] = [fields[field] for field in FIELDS]
    numbers[HEADER:] = book.code_values
    if moment.expand:
        with np.errstate(divide="ignore"):
            table = np.log2(np.abs(book.code_values.astype(np.float64)) / book.largest)
    return torch.from_numpy(np.concatenate([numbers, table.view(np.float32)]))


@cache
def _table(book: Codebook) -> tuple[int, int, np.ndarray] | None:
    """Return the table that rounds to a table's codes by an addition: lowest magnitude, lower bits, entries.

    None if the largest magnitude is not 1, or values are closer together than such a table can tell.

    The first is 2^-24 as float32 bits. Numbers of one interval share all but their ``lower bits``, a count from 9 to
    17. An interval has at most one threshold. Intervals reach up to 1; the intervals of negative numbers follow. An
    entry is ``code << lower bits`` plus a carry, so that adding the lower bits of a number beyond the threshold gives
    the next code. The lower bits of negative numbers are inverted.
    """
    if book.fmt.bits > 8 or np.abs(book.values).max() != 1 or (np.abs(book.thresholds) < 2.0**-24).any():
        return None
    lowest, one = (int(np.float32(x).view(np.uint32)) for x in (2.0**-24, 1.0))
    for entry in range(17, 8, -1):
        starts = np.arange(lowest, one + 1, 1 << entry, dtype=np.uint32)
        ends = starts + np.uint32((1 << entry) - 1)
        ends[-1] = one
        low = np.concatenate([starts.view(np.float32), -ends.view(np.float32)])
        high = np.concatenate([ends.view(np.float32), -starts.view(np.float32)])
        codes, last = (np.searchsorted(book.thresholds, x, side="right") for x in (low, high))
        if (last - codes).max() <= 1:
            crossed, size = last > codes, 1 << entry
            limits = book.thresholds[np.minimum(codes, len(book.thresholds) - 1)].view(np.uint32) & (size - 1)
            carry = np.where(np.arange(len(codes)) < len(starts), size - limits, limits + 1)
            return lowest, entry, ((codes << entry) + np.where(crossed, carry, 0)).astype(np.uint32)
    return None
