"""Numbers and lists as text. One place, so that a number looks the same wherever the report shows it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeGuard

from altgrad.reporting.decision_rule import IDENTICAL, LEVEL
from altgrad.reporting.statistics import Difference

NONE = "–"
MINUS = "−"


def shown(value: float | None) -> TypeGuard[float]:
    """Whether there is a number to show."""
    return value is not None and math.isfinite(value)


def as_json(value: float | None, digits: int = 12) -> float | None:
    """Return a JSON number, or null for none; twelve digits hide what summation order leaves in the last."""
    return float(f"{value:.{digits}g}") + 0.0 if shown(value) else None


def number(value: float | None, digits: int) -> str:
    """Return ``value`` with this many decimals, a dash for none."""
    return f"{value:.{digits}f}".replace("-", MINUS) if shown(value) else NONE


def signed(value: float | None, digits: int) -> str:
    """Return ``value`` with its sign and this many decimals; zero after rounding has no sign."""
    if not shown(value):
        return NONE
    text = f"{value:+.{digits}f}"
    return text[1:] if float(text) == 0 else text.replace("-", MINUS)


def change(difference: Difference | None) -> str:
    """Return a mean difference with its sign; in words where it is none in every seed, a dash where it is not known."""
    if difference is None:
        return NONE
    return IDENTICAL if difference.is_zero else signed(difference.mean, 4)


def significant(value: float | None, digits: int = 3) -> str:
    """Return ``value`` with this many significant digits, in scientific form when very large or small."""
    return f"{value:.{digits}g}".replace("-", MINUS) if shown(value) else NONE


def whole(value: float | None) -> str:
    """Return a count with thin spaces between thousands."""
    return f"{int(value):,}".replace(",", "\u202f") if shown(value) else NONE


def interval(difference: Difference | None, digits: int = 4) -> str:
    """Return the 95 % interval of a difference by itself as ``[low, high]``; a dash where there is none."""
    if difference is None or not shown(half := difference.half_width):
        return NONE
    low, high = difference.mean - half, difference.mean + half
    return f"[{signed(low, digits)}, {signed(high, digits)}]"


def p_value(p: float | None) -> str:
    """Return a p-value with two significant digits, or as many as show its side of 5 %; ``< 0.0001`` below that."""
    if not shown(p):
        return NONE
    texts = (f"{p:.{digits}g}" for digits in range(2, 6))
    told = next((text for text in texts if float(text) != LEVEL), f"{p:.2g}")
    return "< 0.0001" if p < 1e-4 else told if p < 0.995 else "1"


def plural(count: int, noun: str) -> str:
    """Return ``1 seed`` or ``2 seeds``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def joined(names: Sequence[str]) -> str:
    """Return ``a, b and c``."""
    names = list(names)
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1] if names else ""
