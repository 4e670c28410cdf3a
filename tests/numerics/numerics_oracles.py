"""What the numerics tests trust, and the inputs and comparisons they share.

Oracles: gfloat (a reference implementation by members of the P3109 group), the fraction arithmetic of
altgrad.numerics.reference, ml_dtypes and torch's casts. The functions here translate between us.
"""

from __future__ import annotations

import gfloat
import torch
from gfloat import FormatInfo, RoundMode
from gfloat.types import Domain
from torch import Tensor

from altgrad.formats import FloatFormat, Format, format_names, get_format
from altgrad.formats.tables import TABLES
from altgrad.numerics import ROUNDING_MODES

# Beyond the registered ones: ties by exponent parity with either bias, the widest mantissa and exponent,
# formats too wide for the kernel, values beyond float32, and one without sign that has a zero.
EXTRA_NAMES = ("E1M0", "E4M0FNUZ", "E0M15", "E1M14", "E8M3IEEE", "E8M6FNUZ", "E9M6", "UE4M4")
FORMATS = [fmt for name in (*format_names(), *EXTRA_NAMES) if isinstance(fmt := get_format(name), FloatFormat)]
TABLES_IN_FLOAT32 = [fmt for name in TABLES if (fmt := get_format(name)).rounds_in_float32]
KERNEL_FORMATS = [fmt for fmt in FORMATS if fmt.rounds_in_float32]
EIGHT_BIT_SPLITS = [get_format(f"E{e}M{7 - e}") for e in range(8)]
DETERMINISTIC_MODES = tuple(mode for mode in ROUNDING_MODES if mode != "stochastic")

GFLOAT_MODES = {  # None: gfloat has no such mode, and fractions alone are its oracle
    "nearest-even": RoundMode.TiesToEven,
    "nearest-away": RoundMode.TiesToAway,
    "toward-zero": RoundMode.TowardZero,
    "up": RoundMode.TowardPositive,
    "down": RoundMode.TowardNegative,
    "stochastic": RoundMode.StochasticFast,
}


def name_of(fmt: object) -> str | None:
    """Test id of a format."""
    return fmt.name if isinstance(fmt, Format) else None


def gfloat_format(fmt: Format) -> FormatInfo:
    """Our format in gfloat's terms."""
    high_nans = {"fn": 1, "ieee": 2**fmt.mantissa_bits - 1}
    return FormatInfo(
        fmt.name,
        k=fmt.bits,
        precision=fmt.mantissa_bits + 1,
        bias=fmt.bias,
        is_signed=fmt.signed,
        domain=Domain.Extended if fmt.has_inf else Domain.Finite,
        has_nz=fmt.has_negative_zero,
        num_high_nans=high_nans.get(fmt.specials, 0),
        has_subnormals=fmt.signed or fmt.mantissa_bits > 0,
        is_twos_complement=False,
    )


def gfloat_round(x: Tensor, fmt: Format, rounding: str = "nearest-even", **random: object) -> Tensor:
    """gfloat's saturating rounding, in float64. It cannot carry NaN through formats without one."""
    finite_or_inf = torch.where(x.isnan(), 0.0, x.double()).numpy()
    rounded = gfloat.round_ndarray(gfloat_format(fmt), finite_or_inf, GFLOAT_MODES[rounding], sat=True, **random)
    return torch.where(x.isnan(), torch.nan, torch.from_numpy(rounded))


def every_bfloat16() -> Tensor:
    """All 2^16 bfloat16 patterns, as float32."""
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()


def random_patterns(count: int, seed: int = 0) -> Tensor:
    """Float32 numbers of uniformly random bits: every binade, subnormals, infinities and NaNs."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, (count,), generator=generator).int().view(torch.float32)


def identical(a: Tensor, b: Tensor) -> Tensor:
    """Element by element: the same number, -0 and 0 told apart, any NaN equal to any NaN."""
    a, b = a.double(), b.double()
    return (a.view(torch.int64) == b.view(torch.int64)) | (a.isnan() & b.isnan())


def assert_identical(actual: Tensor, expected: Tensor, inputs: Tensor) -> None:
    """Fail with the first few inputs on which the two differ."""
    wrong = ~identical(actual, expected)
    lines = [
        f"{x.item()!r}: {a.item()!r}, expected {e.item()!r}"
        for x, a, e in zip(inputs[wrong][:5], actual[wrong][:5], expected[wrong][:5], strict=True)
    ]
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} differ:\n" + "\n".join(lines)


def spread(shape: tuple[int, ...], seed: int = 0, binades: float = 4.0) -> Tensor:
    """Return numbers of some ``binades``, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * (binades * torch.randn(shape, generator=generator)).exp2()
    return torch.where(torch.rand(shape, generator=generator) < 0.05, 0.0, x)


def unusual(x: Tensor, kind: str) -> Tensor:
    """Return ``x`` with what the name says."""
    x = x.clone()
    if kind in ("inf", "nan"):
        x.view(-1)[x.numel() // 2] = float(kind)
    return {"tiny": x * 1e-38, "huge": x * 1e30, "zero": torch.zeros_like(x)}.get(kind, x)


def same(a: Tensor, b: Tensor) -> bool:
    """Whether dtype, shape, values, signs of zero and places of NaN agree."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    a, b = a.float(), b.float()
    numbers = ~a.isnan()
    bits = torch.equal(a[numbers].view(torch.int32), b[numbers].view(torch.int32))
    return torch.equal(a.isnan(), b.isnan()) and bits
