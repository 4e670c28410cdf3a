"""A format's card: its range and spacing, derived from the defining fields that a resolved cell carries.

``altgrad.numerics.Format`` is the authority on formats; importing it would bring torch into a report
that only reads files. The few closed forms needed here are derived again from the same five fields,
and a test holds them equal to the authority's for every registered format.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Card:
    """A floating-point format as ``(exponent_bits, mantissa_bits, bias, specials, signed)``."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    specials: str
    signed: bool = True

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Card:
        """Return the card of an entry of a resolved cell's ``formats``."""
        return cls(**{name: fields[name] for name in cls.__dataclass_fields__ if name in fields})

    @property
    def bits(self) -> int:
        """Width of a code."""
        return int(self.signed) + self.exponent_bits + self.mantissa_bits

    @property
    def emin(self) -> int:
        """Exponent of the lowest binade; below ``2^emin`` the spacing no longer shrinks."""
        return 1 - self.bias if self.signed else -self.bias

    @property
    def max_code(self) -> int:
        """Code of the largest finite magnitude; codes 0..max_code are the magnitudes in order."""
        if self.specials == "ieee":
            return (((1 << self.exponent_bits) - 1) << self.mantissa_bits) - 1
        return (1 << (self.exponent_bits + self.mantissa_bits)) - 1 - (self.specials in ("fn", "p3109"))

    def magnitude(self, code: int) -> float:
        """The value of magnitude code ``0..max_code``."""
        field, mantissa = divmod(code, 1 << self.mantissa_bits)
        normal = field > 0 or not self.signed
        exponent = self.emin + max(field - int(self.signed), 0)
        return math.ldexp(mantissa + (int(normal) << self.mantissa_bits), exponent - self.mantissa_bits)

    @property
    def max(self) -> float:
        """Largest finite value."""
        return self.magnitude(self.max_code)

    @property
    def scale_target(self) -> float:
        """The value on which scaling puts a tensor's largest element: the largest, but at most 2^16."""
        return min(self.max, 2.0**16)

    @property
    def smallest(self) -> float:
        """Smallest positive value."""
        return self.magnitude(1 if self.signed else 0)

    @property
    def min_normal(self) -> float | None:
        """Smallest normal value; None where every value is subnormal."""
        return 2.0**self.emin if self.max >= 2.0**self.emin else None

    @property
    def min_subnormal(self) -> float | None:
        """Smallest positive subnormal value; None where M = 0 leaves none."""
        return self.smallest if self.mantissa_bits > 0 else None

    @property
    def distinct_values(self) -> int:
        """Number of distinct finite values, zero counted once."""
        return 2 * self.max_code + 1 if self.signed else self.max_code + 1

    @property
    def binades(self) -> float:
        """Dynamic range in binades: log2 of the largest over the smallest positive value."""
        return math.log2(self.max / self.smallest)

    @property
    def half_step(self) -> float | None:
        """Largest relative rounding error of a normal value, 2^-(M+1); None where nothing is normal."""
        return None if self.min_normal is None else 2.0 ** -(self.mantissa_bits + 1)


SPECIALS_IN_WORDS = {
    "finite": "every code is a number",
    "fn": "all-ones magnitude is NaN",
    "ieee": "top exponent is Inf and NaN",
    "fnuz": "only 0x80 is NaN, no −0",
    "p3109": "0x80 is NaN, top code is ±Inf",
}
