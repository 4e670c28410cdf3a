"""Floating-point formats: ExMy.

A format is a sign, ``E`` exponent bits and ``M`` mantissa bits, an exponent bias, and a rule for the meaning of its top
codes. Those five facts are the fields of `FloatFormat`. Range, spacing, values and codes follow from them and are
derived here, exactly: every number below is a small integer times a power of two, which float64 holds.

Exponent field 0 holds the subnormals, ``m / 2^M * 2^emin`` with ``emin = 1 - bias``; a field ``e >= 1`` holds
``(1 + m / 2^M) * 2^(e - bias)``. Three corner cases of that definition:

- ``E = 0`` has no exponent field, so every value is subnormal: the values are uniform. The bias is 1 by convention,
  which puts ``emin`` at 0 and the values at ``m / 2^M``, below one.
- ``M = 0`` has no subnormals: a magnitude is zero or a power of two.
- An unsigned format has no negative numbers, and one more bit for exponent or mantissa. Without mantissa it is a scale
  format (OCP E8M0) and has no zero: field 0 is an ordinary exponent and ``emin = -bias``.

``specials`` names the five rules for the top codes that hardware and standards use:

========  =============================================================  ==========================
specials  meaning                                                        used by
========  =============================================================  ==========================
finite    every code is a number                                         OCP E2M1, E2M3, E3M2
fn        the all-ones magnitude is NaN                                  OCP E4M3, E8M0
ieee      the top exponent is infinity (mantissa 0) and NaN              OCP E5M2, FP16, BF16
fnuz      only "negative zero" is NaN; bias one higher than IEEE's       E4M3FNUZ, P3109 finite
p3109     as fnuz, and the top code of either sign is infinity           P3109 extended
========  =============================================================  ==========================

IEEE P3109 has an extended and a finite domain. The finite one codes its values as ``fnuz`` does, bias included.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from altgrad.formats.format import MAX_BITS, Format, read_only, to_nearest

SPECIALS = ("finite", "fn", "ieee", "fnuz", "p3109")
FLOAT32_MANTISSA = 23
# The lowest binade in which 2^-24 of a value is a normal float32, which no rounding mode flushes to zero.
_LOWEST_EXPONENT = -102


def default_bias(exponent_bits: int, specials: str) -> int:
    """Return the exponent bias that the standards give to a format of this kind.

    It is ``2^(E-1) - 1``, and 1 at E = 0: see the module's docstring. For ``fnuz`` and ``p3109`` it is
    ``floor(2^(E-1))``.
    """
    half = 1 << exponent_bits >> 1
    if specials in ("fnuz", "p3109"):
        return half
    return half - 1 if exponent_bits else 1


@dataclass(frozen=True)
class FloatFormat(Format):
    """A floating-point format of at most 16 bits. Numbers are rounded to nearest, ties to the even code.

    Args:
        name: name in reports and messages.
        exponent_bits: E, at least 0.
        mantissa_bits: M, at least 0.
        bias: exponent bias; None takes `default_bias`.
        specials: meaning of the top codes, one of `SPECIALS`.
        signed: False for a format without negative numbers (finite or fn), and without zero if M = 0.
        scale_to: what a scale brings a tensor to: see `scale_target_of`.

    Raises:
        ValueError: a field is invalid; the message begins with the field's name.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int = None  # type: ignore[assignment] # __post_init__ puts the default there
    specials: str = "finite"
    signed: bool = True
    scale_to: float | str = "max"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"name: expected a non-empty string, got {self.name!r}")
        for field in ("exponent_bits", "mantissa_bits", "bias"):
            value = getattr(self, field)
            if (field, value) == ("bias", None):
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise ValueError(f"{field}: expected an integer, got {value!r}")
            if field != "bias" and value < 0:
                raise ValueError(f"{field}: expected 0 or more, got {value}")
        if self.specials not in SPECIALS:
            raise ValueError(f"specials: expected one of {', '.join(SPECIALS)}, got {self.specials!r}")
        if not isinstance(self.signed, bool):
            raise ValueError(f"signed: expected True or False, got {self.signed!r}")
        if self.bits > MAX_BITS:
            raise ValueError(f"exponent_bits: {self.name} takes {self.bits} bits, at most {MAX_BITS} are supported")
        if self.bias is None:
            object.__setattr__(self, "bias", default_bias(self.exponent_bits, self.specials))
        if not self.signed and self.specials not in ("finite", "fn"):
            raise ValueError(f"signed: the unsigned {self.name} needs specials finite or fn")
        if self.specials == "ieee" and 0 in (self.exponent_bits, self.mantissa_bits):
            raise ValueError(f"specials: {self.name} needs exponent and mantissa bits to code Inf and NaN as ieee does")
        if self.max_code < 1:
            raise ValueError(f"mantissa_bits: {self.name} would have no number but zero")
        highest = self.emin + max((self.max_code + 1 >> self.mantissa_bits) - self.has_zero, 0)
        if self.emin - self.mantissa_bits < -1022 or highest > 1023:
            raise ValueError(f"bias: {self.bias} takes {self.name} beyond the range of float64")

    def __str__(self) -> str:
        sign, kind = "" if self.signed else "unsigned, ", f"bias {self.bias}, {self.specials}, max {self.max:g}"
        return f"{self.name} ({sign}{self.exponent_bits} exponent bits, {self.mantissa_bits} mantissa bits, {kind})"

    # -- the layout of a code ---------------------------------------------------------------------

    @property
    def bits(self) -> int:  # type: ignore[override] # a field of tables
        """Width of a code."""
        return int(self.signed) + self.exponent_bits + self.mantissa_bits

    @property
    def sign_code(self) -> int:
        """The sign bit of a code; 0 for an unsigned format."""
        return 1 << (self.bits - 1) if self.signed else 0

    @property
    def max_code(self) -> int:
        """Code of the largest finite value. Codes 0 to max_code are the magnitudes in order."""
        if self.specials == "ieee":
            return ((1 << self.exponent_bits) - 1 << self.mantissa_bits) - 1
        return (1 << (self.exponent_bits + self.mantissa_bits)) - 1 - (self.specials in ("fn", "p3109"))

    @property
    def inf_code(self) -> int | None:  # type: ignore[override] # a field of tables
        """Code of +Inf, or None where the format has none."""
        return self.max_code + 1 if self.specials in ("ieee", "p3109") else None

    @property
    def nan_code(self) -> int | None:  # type: ignore[override] # a field of tables
        """Code of the (quiet, positive) NaN, or None where every code is a number."""
        if self.specials == "finite":
            return None
        if self.specials in ("fnuz", "p3109"):
            return self.sign_code
        return self.max_code + 1 | (1 << self.mantissa_bits >> 1 if self.specials == "ieee" else 0)

    @property
    def has_zero(self) -> bool:
        return self.signed or self.mantissa_bits > 0

    @property
    def has_negative_zero(self) -> bool:  # type: ignore[override] # a field of tables
        return self.signed and self.specials in ("finite", "fn", "ieee")

    # -- range and spacing ------------------------------------------------------------------------

    @property
    def emin(self) -> int:
        """Exponent of the lowest binade; below ``2^emin`` the spacing no longer shrinks."""
        return 1 - self.bias if self.has_zero else -self.bias

    @property
    def min_normal(self) -> float | None:
        """Smallest normal value; None where every value is subnormal."""
        return 2.0**self.emin if self.max >= 2.0**self.emin else None

    @property
    def min_subnormal(self) -> float | None:  # type: ignore[override] # tables have none
        """Smallest positive subnormal value; None where M = 0 leaves no subnormals but zero."""
        return self.smallest if self.mantissa_bits > 0 else None

    @property
    def half_step(self) -> float | None:  # type: ignore[override] # tables have none
        """Largest relative rounding error of a normal value, 2^-(M+1); None where nothing is normal."""
        return None if self.min_normal is None else 2.0 ** -(self.mantissa_bits + 1)

    def spacing(self, x: float | np.ndarray) -> np.ndarray:
        """Return ``2^(max(floor(log2 |x|), emin) - M)``; beyond the range, that of the top binade."""
        significand, exponent = np.frexp(np.minimum(np.abs(x), self.max))
        binade = np.where(significand == 0, self.emin, np.maximum(exponent - 1, self.emin))
        return np.asarray(np.ldexp(1.0, binade - self.mantissa_bits))

    # -- all values and all codes -----------------------------------------------------------------

    @cached_property
    def extended(self) -> tuple[np.ndarray, np.ndarray]:
        codes = np.arange(self.max_code + 2)
        field, mantissa = np.divmod(codes, 1 << self.mantissa_bits)
        exponent = self.emin + np.maximum(field - self.has_zero, 0)
        implicit = (field > 0) | (not self.has_zero)
        values = np.ldexp(1.0 * (mantissa + (implicit << self.mantissa_bits)), exponent - self.mantissa_bits)
        if self.signed:
            codes, values = np.concatenate([codes[:0:-1], codes]), np.concatenate([-values[:0:-1], values])
        return read_only(values), to_nearest(values, codes)

    @property
    def values(self) -> np.ndarray:
        return self.extended[0][int(self.signed) : -1]

    @property
    def thresholds(self) -> np.ndarray:
        return self.extended[1][int(self.signed) : -1]

    @property
    def magnitudes(self) -> np.ndarray:
        """The value of each code 0..max_code, ascending: float64, shape (max_code + 1,), read-only."""
        return self.values[-self.max_code - 1 :]

    @property
    def value_codes(self) -> np.ndarray:
        codes = np.arange(self.max_code + 1)
        return np.concatenate([self.sign_code + codes[:0:-1], codes]) if self.signed else codes

    # -- which arithmetic can carry it ------------------------------------------------------------

    def fits(self, precision: int, lowest: int, highest: int, *, scales: Format | None = None) -> bool:
        significant = min(self.mantissa_bits + 1, self.max_code.bit_length())
        smallest, largest = self.emin - self.mantissa_bits, self.max
        if scales is not None:
            assert isinstance(scales, FloatFormat)
            more = min(scales.mantissa_bits + 1, scales.max_code.bit_length())
            significant += more - (1 in (significant, more))  # a power of two takes no bit
            smallest += scales.emin - scales.mantissa_bits
            largest *= scales.scale_target
        return significant <= precision and smallest >= lowest and math.frexp(largest)[1] - 1 <= highest

    @property
    def rounds_in_float32(self) -> bool:
        """Whether the format is signed and well inside float32.

        Its normal values must begin at 2^-102 or above, and 2^25 spacings of its top binade must not overflow. Every
        signed format with at most 7 exponent bits and the usual bias meets this.
        """
        top_spacing = self.emax - self.mantissa_bits
        return self.signed and self.emin >= _LOWEST_EXPONENT and top_spacing + FLOAT32_MANTISSA + 2 <= 127
