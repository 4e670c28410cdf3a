"""The quantized matrix product: three GEMMs on operands that lie exactly on 8-bit grids.

    y  = (x_q @ w_q^T) / (s_x s_w)
    dx = (g_q @ w_q)   / (s_g s_w)
    dw = (g_q^T @ x_q) / (s_g s_x)

with ``t_q = round_to_grid(t * s_t)``. Every value of every format of at most 8 bits is exact in
bfloat16, and the product of two is exact in float32, so a bf16 GEMM with float32 accumulation on
the *unscaled* operands ``t_q`` is the arithmetic of an 8-bit tensor core, at bf16 speed. The scales
are applied to the result, in float32: a scale folded into an operand before its bf16 cast would
round it again (2e-3 relative, as large as the effects under study).

With a scale per row, each operand of each product has one per index that the product does not sum over, so
that they too apply to the result; the backward products sum over other indices than the forward
one, and quantize their tensors anew. With a scale per block of the sum, the scales are powers of two
and stay in the operands, which is exact unless a format's smallest value, so scaled, falls below the
smallest bfloat16, 2^-133: from an amax of 2^-103 down in E5M2, of 2^-57 down in E7M0.

One difference from hardware remains where no bf16 GEMM with float32 output exists (torch 2.13 on
CPU): there ``accumulate="bf16"`` rounds each sum to bf16 before the scale is applied. ``y`` and ``dx``
so carry one more bf16 rounding (relative 2^-9) unless the scales are powers of two, and ``dw`` carries
one where hardware keeps float32, as the gradient of an unquantized bf16 layer does on CPU. On CUDA,
and with ``accumulate="fp32"``, the sum stays in float32 until it is scaled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from altgrad.model.quantizer import Scaling, amax_of, materialized, overflows, scale_for
from altgrad.numerics import round_to_grid


@dataclass(frozen=True)
class MatmulSettings:
    """Static choices of one layer's product; see :class:`altgrad.model.recipe.LayerRecipe`.

    ``operand_dtype``: bfloat16 when it holds every operand's format exactly, else float32.
    ``input``, ``weight``, ``grad``: how the tensor is scaled, ``None`` if it is not quantized.
    """

    operand_dtype: torch.dtype
    output_dtype: torch.dtype
    accumulate_fp32: bool
    clipped: bool
    input: Scaling | None
    weight: Scaling | None
    grad: Scaling | None


class Operand(NamedTuple):
    """A factor of a product, and the scale (0-d, or one per row or column) that the result is divided by."""

    values: Tensor
    scale: Tensor | None

    def t(self) -> Operand:
        """Return the transposed operand."""
        return Operand(self.values.t(), self.scale if self.scale is None or self.scale.ndim == 0 else self.scale.t())


def _product(a: Operand, b: Operand, fp32: bool) -> Tensor:
    """Return ``a @ b / (scale_a scale_b)`` as float32; ``fp32`` keeps the sum in float32 throughout."""
    if a.values.dtype == torch.float32:
        y = a.values @ b.values
    elif a.values.is_cuda:
        y = torch.mm(a.values, b.values, out_dtype=torch.float32)
    elif fp32:
        y = a.values.float() @ b.values.float()
    else:
        y = (a.values @ b.values).float()
    # The scales' product can leave float32's range when both tensors are tiny; float64 holds it.
    common = None
    for scale in (a.scale, b.scale):
        if scale is not None and scale.ndim == 0:
            common = scale.double() if common is None else common * scale.double()
        elif scale is not None:
            y = y * materialized(scale.reciprocal())
    return y if common is None else y * materialized(common.reciprocal().float())


def _on_grid(t: Tensor, scale: Tensor, constants: Tensor) -> Tensor:
    return round_to_grid(t.float() * scale, constants)


def _operand(
    t: Tensor, scaling: Scaling | None, scale: Tensor | None, constants: Tensor | None, dim: int, dtype: torch.dtype
) -> Operand:
    """Return the 2-d ``t`` on its format's grid, in ``dtype``, for a product that sums over ``dim``.

    ``scale`` is the tensor's own where it has one for all products. Without a format ``t`` is only cast.
    """
    if scaling is None:
        return Operand(t.to(dtype), None)
    if scaling.per_tensor:
        return Operand(_on_grid(t, scale, constants).to(dtype), scale)
    t = materialized(t)
    scale = scaling.fine_scale(t, dim, constants)
    if scaling.granularity == "row":
        return Operand(_on_grid(t, scale, constants).to(dtype), scale)
    return Operand((_on_grid(t, scale, constants) / scale).to(dtype), None)


def _unclamped(t: Tensor, scale: Tensor, constants: Tensor) -> Tensor:
    """Return where ``t`` lies within its format's range, for the clipped straight-through estimator."""
    return ~overflows(t.float() * scale, constants)


class QuantizedMatmul(torch.autograd.Function):
    """``x @ weight.T`` through the quantized GEMMs.

    ``x`` (n, k) and ``weight`` (m, k) are floating tensors; constants that are ``None`` leave their
    tensor unquantized. ``x_scale`` and ``weight_scale`` (0-d) are those of tensors with one scale. The
    incoming gradient's comes from ``grad_remembered`` (0-d amax) or, where that is ``None`` or 0, from its
    own amax, which ``grad_amax`` (0-d buffer), when given, receives. The gradient through the rounding is
    the straight-through estimator.
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
        dtype = settings.operand_dtype
        x_q = _operand(x, settings.input, x_scale, x_constants, 1, dtype)
        weight_q = _operand(weight, settings.weight, weight_scale, weight_constants, 1, dtype)
        x_kept = weight_kept = None
        if settings.clipped:  # row and block scales are those of the tensor at hand, and clamp nothing
            x_kept = None if x_scale is None else _unclamped(x, x_scale, x_constants)
            weight_kept = None if weight_scale is None else _unclamped(weight, weight_scale, weight_constants)
        ctx.save_for_backward(
            x if _is_fine(settings.input) else x_q.values,
            weight if _is_fine(settings.weight) else weight_q.values,
            x_scale, weight_scale, x_constants, weight_constants, grad_constants, grad_remembered, grad_amax,
            x_kept, weight_kept,
        )  # fmt: skip
        ctx.settings = settings
        ctx.dtypes = x.dtype, weight.dtype
        return _product(x_q, weight_q.t(), settings.accumulate_fp32).to(settings.output_dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (
            x, weight, x_scale, weight_scale, x_constants, weight_constants, grad_constants, grad_remembered,
            grad_amax, x_kept, weight_kept,
        ) = ctx.saved_tensors  # fmt: skip
        settings: MatmulSettings = ctx.settings
        dtype = settings.operand_dtype
        grad_scale = None
        if settings.grad is not None and settings.grad.per_tensor:
            largest = amax_of(grad)
            grad_scale = scale_for(largest, grad_remembered, grad_constants, settings.grad.dtype)
            if grad_amax is not None:
                grad_amax.copy_(largest)
        grad_rows = _operand(grad, settings.grad, grad_scale, grad_constants, 1, dtype)
        grad_columns = grad_rows
        if _is_fine(settings.grad):
            grad_columns = _operand(grad, settings.grad, None, grad_constants, 0, dtype)
        x_q, weight_q = Operand(x, x_scale), Operand(weight, weight_scale)
        if _is_fine(settings.input):
            x_q = _operand(x, settings.input, None, x_constants, 0, dtype)
        if _is_fine(settings.weight):
            weight_q = _operand(weight, settings.weight, None, weight_constants, 0, dtype)
        dx = _product(grad_rows, weight_q, settings.accumulate_fp32)
        dw = _product(grad_columns.t(), x_q, settings.accumulate_fp32)
        if x_kept is not None:
            dx = dx * x_kept
        if weight_kept is not None:
            dw = dw * weight_kept
        return dx.to(ctx.dtypes[0]), dw.to(ctx.dtypes[1]), *(None,) * 8


def _is_fine(scaling: Scaling | None) -> bool:
    """Whether a tensor has other scales in the backward products than in the forward one."""
    return scaling is not None and not scaling.per_tensor
