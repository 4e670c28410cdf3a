"""What Python and the loops in C++ both have to know, said once: C++ definitions made of Python's names and numbers.

`kernels` writes them into ``definitions.h`` when it builds a source. Each lives in a namespace, in which ``kLr`` stands
for ``LR`` or ``"lr"``.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType

from altgrad.numerics import constants, random


def enumeration(scope: str, names: Iterable[str]) -> str:
    """Return ``names`` as an enumeration, numbered in their order from 0."""
    return f"namespace altgrad::{scope} {{\nenum Name : int {{ {', '.join(_constant(name) for name in names)} }};\n}}\n"


def numbers(scope: str, values: dict[str, int | float]) -> str:
    """Return ``values`` as constants: whole numbers of 32 bits without sign, others as float, exactly."""
    lines = [
        f"constexpr float {_constant(name)} = {value.hex()}f;"
        if isinstance(value, float)
        else f"constexpr unsigned {_constant(name)} = {value}u;"
        for name, value in values.items()
    ]
    return "\n".join([f"namespace altgrad::{scope} {{", *lines, "}\n"])


def of_module(scope: str, module: ModuleType, names: str) -> str:
    """Return the constants of ``module`` that have these names, separated by spaces."""
    return numbers(scope, {name: getattr(module, name) for name in names.split()})


def _constant(name: str) -> str:
    return "k" + "".join(part.capitalize() for part in name.split("_"))


NUMERICS = "".join([
    "#pragma once\n",
    of_module("packed", constants, "MAX ULPS SPACING ROOT ZERO TARGET SIZE"),
    enumeration("learns", constants.LEARNS),
    enumeration("scale_rule", (*constants.SCALE_RULES, "two_level", "four_over_six")),  # the last: TWO_LEVEL and on
    of_module("codes", constants, "NAN_CODE"),
    of_module("philox", random, "BITS LANES ROUNDS"),
    numbers("philox", {f"multiplier{i}": value for i, value in enumerate(random.MULTIPLIERS)}),
    numbers("philox", {f"weyl{i}": value for i, value in enumerate(random.WEYL)}),
])  # fmt: skip
