"""The quantized matrix product: three GEMMs on operands that lie exactly on 8-bit grids.

    y  = (x_q @ w_q^T) / (s_x s_w)
    dx = (g_q @ w_q)   / (s_g s_w)
    dw = (g_q^T @ x_q) / (s_g s_x)

with ``t_q = round_to_grid(t * s_t)``. Every value of every format of at most 8 bits is exact in
bfloat16, and the product of two is exact in float32, so a bf16 GEMM with float32 accumulation on
the *unscaled* operands ``t_q`` is the arithmetic of an 8-bit tensor core, at bf16 speed. The scales
are applied to the result, in float32: a scale folded into an operand before its bf16 cast would
round it again (2e-3 relative, as large as the effects under study).

One difference from hardware remains where no bf16 GEMM with float32 output exists (torch 2.13 on
CPU): there ``accumulate="bf16"`` rounds each sum to bf16 before the scale is applied. ``y`` and ``dx``
so carry one more bf16 rounding (relative 2^-9) unless the scales are powers of two, and ``dw`` carries
one where hardware keeps float32, as the gradient of an unquantized bf16 layer does on CPU. On CUDA,
and with ``accumulate="fp32"``, the sum stays in float32 until it is scaled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from altgrad.model.quantizer import amax_of, overflows, scale_for
from altgrad.numerics import round_to_grid


@dataclass(frozen=True)
class MatmulSettings:
    """Static choices of one layer's product; see :class:`altgrad.model.recipe.LayerRecipe`.

    ``operand_dtype``: bfloat16 when it holds every operand's format exactly, else float32.
    """

    operand_dtype: torch.dtype
    output_dtype: torch.dtype
    accumulate_fp32: bool
    clipped: bool
    grad_scale_dtype: str


def _product(a: Tensor, b: Tensor, scale_a: Tensor | None, scale_b: Tensor | None, fp32: bool) -> Tensor:
    """Return ``a @ b / (scale_a scale_b)`` as float32; ``fp32`` keeps the sum in float32 throughout."""
    if a.dtype == torch.float32:
        y = a @ b
    elif a.is_cuda:
        y = torch.mm(a, b, out_dtype=torch.float32)
    elif fp32:
        y = a.float() @ b.float()
    else:
        y = (a @ b).float()
    # The scales' product can leave float32's range when both tensors are tiny; float64 holds it.
    divisor = None
    for scale in (scale_a, scale_b):
        if scale is not None:
            divisor = scale.double() if divisor is None else divisor * scale.double()
    return y if divisor is None else y * divisor.reciprocal().float()


def _operand(t: Tensor, scale: Tensor | None, constants: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return ``t`` on its format's grid, unscaled, in ``dtype``; without a format only cast."""
    if scale is None:
        return t.to(dtype)
    return round_to_grid(t.float() * scale, constants).to(dtype)


def _unclamped(t: Tensor, scale: Tensor, constants: Tensor) -> Tensor:
    """Return where ``t`` lies within its format's range, for the clipped straight-through estimator."""
    return ~overflows(t.float() * scale, constants)


class QuantizedMatmul(torch.autograd.Function):
    """``x @ weight.T`` through the quantized GEMMs.

    ``x`` (n, k) and ``weight`` (m, k) are floating tensors; a scale that is ``None`` leaves its
    tensor unquantized. The incoming gradient's scale comes from ``grad_remembered`` (0-d amax) or,
    where that is ``None`` or 0, from its own amax, which ``grad_amax`` (0-d buffer), when given,
    receives. The gradient through the rounding is the straight-through estimator.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        x_scale: Tensor | None,
        weight_scale: Tensor | None,
        x_constants: Tensor | None,
        weight_constants: Tensor | None,
        grad_constants: Tensor | None,
        grad_remembered: Tensor | None,
        grad_amax: Tensor | None,
        settings: MatmulSettings,
    ) -> Tensor:
        x_q = _operand(x, x_scale, x_constants, settings.operand_dtype)
        weight_q = _operand(weight, weight_scale, weight_constants, settings.operand_dtype)
        x_kept = weight_kept = None
        if settings.clipped:
            x_kept = None if x_scale is None else _unclamped(x, x_scale, x_constants)
            weight_kept = None if weight_scale is None else _unclamped(weight, weight_scale, weight_constants)
        ctx.save_for_backward(
            x_q, weight_q, x_scale, weight_scale, grad_constants, grad_remembered, grad_amax, x_kept, weight_kept
        )
        ctx.settings = settings
        ctx.dtypes = x.dtype, weight.dtype
        y = _product(x_q, weight_q.t(), x_scale, weight_scale, settings.accumulate_fp32)
        return y.to(settings.output_dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_q, weight_q, x_scale, weight_scale, grad_constants, grad_remembered, grad_amax, x_kept, weight_kept = (
            ctx.saved_tensors
        )
        settings: MatmulSettings = ctx.settings
        grad_scale = None
        if grad_constants is not None:
            amax = amax_of(grad)
            grad_scale = scale_for(amax, grad_remembered, grad_constants, settings.grad_scale_dtype)
            if grad_amax is not None:
                grad_amax.copy_(amax)
        grad_q = _operand(grad, grad_scale, grad_constants, settings.operand_dtype)
        dx = _product(grad_q, weight_q, grad_scale, weight_scale, settings.accumulate_fp32)
        dw = _product(grad_q.t(), x_q, grad_scale, x_scale, settings.accumulate_fp32)
        if x_kept is not None:
            dx = dx * x_kept
        if weight_kept is not None:
            dw = dw * weight_kept
        return dx.to(ctx.dtypes[0]), dw.to(ctx.dtypes[1]), *(None,) * 8
