"""The quantized product by FP8 hardware: ``torch._scaled_mm`` on E4M3 and E5M2.

The operands are those of the emulated product, so that a cast to an 8-bit dtype is exact, and so are the
products of two values; what differs is the order of the sum, and that the two scales are multiplied and
applied in float32, unusual ones but for a power of two (`unscaling`). On CPU torch emulates the operator,
slowly, which is enough to test against.

The operator wants its first factor stored by rows, the second by columns, and every dimension divisible
by 16: factors are laid out so, and padded with zeros, which add nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from altgrad.model.quantized.operand import Operand
from altgrad.model.quantized.unscaling import factor_and_rest, multiplied

DIVISOR = 16


def native_product(a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
    """Return ``a @ b / (scale_a scale_b)``; the values of ``a`` (n, k) and ``b`` (k, m) are float8.

    Scales are one each, and the result is in ``dtype``; or (n, 1) and (1, m), with which torch gives bfloat16 alone.
    """
    assert a.scale is not None and b.scale is not None
    rows, columns = a.values.shape[0], b.values.shape[1]
    left, right = _padded(a.values), _padded(b.values.t()).t()
    (factor_a, rest_a), (factor_b, rest_b) = factor_and_rest(a.scale), factor_and_rest(b.scale)
    # What is divided by unusual scales afterwards needs the range of float32 until then.
    wide = dtype if dtype == torch.bfloat16 else torch.float32
    y = torch._scaled_mm(
        left,
        right,
        scale_a=_filled_up(factor_a, left.shape[0], 0),
        scale_b=_filled_up(factor_b, right.shape[1], 1),
        out_dtype=wide if a.scale.ndim == 0 else torch.bfloat16,
    )
    return multiplied(y[:rows, :columns], [], [rest_a, rest_b])


def _padded(t: Tensor) -> Tensor:
    """Return ``t`` stored by rows, both dimensions filled up with zeros to a multiple of 16."""
    below, beside = (-size % DIVISOR for size in t.shape)
    if below or beside:
        # As bytes, since torch pads no float8; the byte 0 is the value 0.
        return pad(t.view(torch.uint8), (0, beside, 0, below)).view(t.dtype)
    return t.contiguous()


def _filled_up(factor: Tensor, length: int, dim: int) -> Tensor:
    if factor.ndim == 0:
        return factor
    missing = length - factor.shape[dim]
    return pad(factor, (0, 0, 0, missing) if dim == 0 else (0, missing)).contiguous()
