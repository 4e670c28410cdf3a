"""What a step costs whose operands are only copied: the floor under every operator that quantizes them.

The graph is that of a quantized step, with an operator in each place that reads its tensor once and writes it once
in the operands' dtype, without amax, scale or rounding. What lies between this and bf16 is the price of operators of
their own; what lies between this and a quantized step is that of the quantization.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from unittest.mock import patch

import torch
from torch import Tensor

from altgrad.model import operand
from altgrad.numerics.operand import Quantized

torch.library.define("altgrad_benchmark::copy_operand", "(Tensor x, ScalarType dtype) -> Tensor")


@torch.library.impl("altgrad_benchmark::copy_operand", "CompositeExplicitAutograd")
def _copy(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype, copy=True)


@torch.library.register_fake("altgrad_benchmark::copy_operand")
def _(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


def _copied(
    x: Tensor, constants: Tensor, remembered: Tensor | None = None, *, dtype: torch.dtype = torch.bfloat16, **_: object
) -> Quantized:
    one = constants.new_ones(())
    return Quantized(torch.ops.altgrad_benchmark.copy_operand(x, dtype), one, one)


def operands_copied() -> AbstractContextManager[object]:
    """Copy operands inside the block instead of quantizing them, in graphs that are compiled in such a block."""
    return patch.object(operand, "quantize_operand", _copied)
