"""A product of scaled operands is divided by their scales: at any scales, with a finite result wherever that is one.

The result is multiplied by the reciprocals of the scales one after the other, and what is between may leave float32
though the end lies inside: after a row of 1e35, before a column of 1e-35. So the reciprocal of an unusual scale is
taken apart into a power of two with half its exponent, the ``rest``, and a ``factor``. All factors come first, and then
the product of the rests: it goes half of the way from ``y`` to the result, and then the other half. A power of two that
comes later changes no bit but of what would have left the range, or of a result below 2^-126, rounded once more there.

A reciprocal in 2^-62..2^62 is a factor itself, with 1 for its rest: that and half of any exponent leave a sum between
2^-62 and 2^62 inside. In eager mode on a CPU, where it can be looked up, this spares the rests.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from altgrad.numerics.compile_utils import materialized
from altgrad.numerics.rounding import power_of_two
from altgrad.numerics.scaling import floor_log2


def unscaled(y: Tensor, scales: Sequence[Tensor | None]) -> Tensor:
    """Return ``y / (s_1 s_2)``, which may overwrite ``y``.

    Args:
        y: float32 (n, m).
        scales: of its two factors, positive float32: 0-d, or (n, 1) and (1, m); ``None`` for 1.
    """
    # Two scales of tensors are multiplied by each other first, in float64, which holds their product.
    single = [scale.double() for scale in scales if scale is not None and scale.ndim == 0]
    several = [scale for scale in scales if scale is not None and scale.ndim > 0]
    common = [single[0] if len(single) == 1 else single[0] * single[1]] if single else []
    split = [factor_and_rest(scale) for scale in several + common]
    return multiplied(y, [factor for factor, _ in split], [rest for _, rest in split])


def factor_and_rest(scale: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return float32 f and r, of the shape of ``scale``, with ``f r = 1 / scale``; ``None`` for an r of 1."""
    exact = scale.double().reciprocal()
    if _known_as_usual(scale):
        return exact.float(), None
    # Literals: a float of the module would be a symbol in dynamic graphs, which torch 2.13 cannot take into a Function.
    unusual = (exact < 2.0**-62) | (exact > 2.0**62)
    rest = torch.where(unusual, power_of_two(floor_log2(exact) >> 1), 1.0)
    return materialized((exact / rest).float()), materialized(rest.float())


def multiplied(y: Tensor, factors: Sequence[Tensor], rests: Sequence[Tensor | None]) -> Tensor:
    """Return ``y`` times the factors in turn, and times the product of the rests; it may overwrite ``y``."""
    if rest := [rest for rest in rests if rest is not None]:
        factors = [*factors, rest[0] if len(rest) == 1 else rest[0] * rest[1]]
    if not factors:
        return y
    if not torch.compiler.is_compiling():
        for factor in factors:
            y.mul_(factor)
        return y
    # In a shape that hides it from the compiler's rewriting of softmax. Inductor makes of softmax(y * factor) the
    # softmax of y and multiplies later (its mul_softmax_pattern), to save what overflows in float16. In float32 that
    # takes 20 of the 27 ms of a head's loss on CPU, and rounds elsewhere than eager mode does.
    hidden = y.unsqueeze(0)
    for factor in factors:
        hidden = hidden * factor
    return hidden.squeeze(0)


def _known_as_usual(scale: Tensor) -> bool:
    """Whether looking at the values costs nothing and all are usual."""
    if torch.compiler.is_compiling() or scale.device.type != "cpu" or type(scale) is not Tensor:
        return False
    if scale.numel() == 0:
        return True
    low, high = (scale, scale) if scale.ndim == 0 else scale.aminmax()
    return low.item() >= 2.0**-62 and high.item() <= 2.0**62
