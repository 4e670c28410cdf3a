"""The quantized matrix product: three GEMMs on operands that lie exactly on 8-bit quantization grids.

    y  = (x_q @ w_q^T) / (s_x s_w)
    dx = (g_q @ w_q)   / (s_g s_w)
    dw = (g_q^T @ x_q) / (s_g s_x)

with ``t_q = round_to_grid(t * s_t)``. Every value of every format of at most 8 bits is exact in
bfloat16, and the product of two is exact in float32, so a bf16 GEMM with float32 accumulation on
the *unscaled* operands ``t_q`` is the arithmetic of an 8-bit tensor core, at bf16 speed. The scales
are applied to the result, in float32: a scale folded into an operand before its bf16 cast would
round it again (2e-3 relative, as large as the effects under study).

With a scale per row, each operand of each product has one per index that the product does not sum over, so
that they too apply to the result; the backward products sum over other indices than the forward one, and
have operands of their own, made when the tensor is at hand. With a scale per block of the sum, the scales
stay in the operands. Powers of two do so exactly, unless a format's smallest value, so scaled, falls
below the smallest bfloat16, 2^-133: from an amax of 2^-103 down in E5M2, of 2^-57 down in E7M0. Of two-level scales, as
in NVFP4, those of the blocks do so exactly, in an operand whose dtype holds every product of a value and a scale, and
the tensor's one applies to the result.

One difference from hardware remains where no bf16 GEMM with float32 output exists (torch 2.13 on
CPU): there ``accumulate="bf16"`` rounds each sum to bf16 before the scale is applied. ``y`` and ``dx``
so carry one more bf16 rounding (relative 2^-8) unless the scales are powers of two, and ``dw`` carries
one where hardware keeps float32, as the gradient of an unquantized bf16 layer does on CPU. On CUDA,
with ``accumulate="float32"``, and on a CPU without bf16 instructions, where operands are float32, the sum stays in
float32 until it is scaled.

Compiled and eager give the same bits, with either kind of operands and under autocast or not: they call the same GEMMs,
and round elementwise operations alike. Operands of the two kinds have the same values, but their sums differ.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from altgrad.model.quantized.native import native_product
from altgrad.model.quantized.operand import Operand
from altgrad.model.quantized.quantizer import FLOAT8, Scaling
from altgrad.numerics import decode_operand, encode_operand
from altgrad.numerics.operand import owned
from altgrad.numerics.operand_definition import materialized
from altgrad.numerics.rounding import overflows
from altgrad.numerics.tracing import converted


@dataclass(frozen=True)
class MatmulSettings:
    """Static choices of one layer's product; see :class:`altgrad.config.recipe.LayerRecipe`.

    ``operand_dtype``: bfloat16 when it holds every operand's format exactly and is fast, else float32.
    ``save``: what the backward pass is left with of tensors with one scale, ``operands`` or ``codes``.
    ``input``, ``weight``, ``grad``: how the tensor is scaled, ``None`` if it is not quantized.
    ``grad_learns``: what the gradient's history keeps, as in `quantize_operands`.
    """

    operand_dtype: torch.dtype
    output_dtype: torch.dtype
    accumulate_fp32: bool
    clipped: bool
    save: str
    input: Scaling | None
    weight: Scaling | None
    grad: Scaling | None
    grad_learns: str


def _product(a: Operand, b: Operand, dtype: torch.dtype, fp32: bool, autocast: bool) -> Tensor:
    """Return ``a @ b / (scale_a scale_b)`` in ``dtype``.

    Autocast would send float32 products through bfloat16, and so the native product on CPU, which torch makes of one:
    it is switched off for these. ``autocast`` says whether it was on in the forward pass: ``torch.compile`` traces the
    backward pass under it too, where eager mode runs it outside.
    """
    device_type, native = a.values.device.type, a.values.dtype in FLOAT8.values()
    as_given: AbstractContextManager[Any] = nullcontext()
    if (native or fp32 or a.values.dtype == torch.float32) and (autocast or torch.is_autocast_enabled(device_type)):
        as_given = torch.autocast(device_type, enabled=False)
    with as_given:
        y = native_product(a, b, dtype) if native else _emulated_product(a, b, fp32)
    return converted(y, dtype)


def _emulated_product(a: Operand, b: Operand, fp32: bool) -> Tensor:
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
            y = _times(y, materialized(scale.reciprocal()))
    return y if common is None else _times(y, materialized(common.reciprocal().float()))


def _times(y: Tensor, factor: Tensor) -> Tensor:
    """Return ``y * factor``, for ``y`` (n, k), in a shape that hides it from the compiler's rewriting of softmax.

    Inductor makes of ``softmax(y * factor)`` the softmax of ``y`` and multiplies later (its ``mul_softmax_pattern``),
    to save what overflows in float16. In float32 that takes 20 of the 27 ms of a head's loss on CPU, and rounds
    elsewhere than eager mode does.
    """
    return (y.unsqueeze(0) * factor).squeeze(0)


def _unclamped(t: Tensor, scale: Tensor, constants: Tensor) -> Tensor:
    """Return where ``t`` lies within its format's range, for the clipped straight-through estimator."""
    return ~overflows(t.float() * scale, constants)


class Given(NamedTuple):
    """What the products read besides ``x`` (n, k) and ``weight`` (m, k); autograd wants each tensor by itself.

    ``x_q`` and ``weight_q`` are the values of their operands in the forward product, ``weight_back`` those of the
    weight in the backward one, ``None`` if they are the same, each with its scale if it has one. ``constants`` are a
    tensor's format, ``None`` for one that is not quantized. ``grad_history`` holds the amax that sets the incoming
    gradient's scale; its own does where that is ``None`` or has seen none. The streams are of what is rounded by
    chance, here and in the backward pass; where a tensor has another operand there, both draw the same numbers.
    """

    x_q: Tensor
    x_scale: Tensor | None
    x_constants: Tensor | None
    weight_q: Tensor
    weight_scale: Tensor | None
    weight_back: Tensor | None
    weight_back_scale: Tensor | None
    weight_constants: Tensor | None
    grad_constants: Tensor | None
    grad_history: Tensor | None
    x_stream: Tensor | None
    grad_stream: Tensor | None


class Saved(NamedTuple):
    """What the backward pass needs: its operands, perhaps as codes, and where ``x`` and the weight were clamped."""

    x: Tensor | None
    x_scale: Tensor | None
    x_constants: Tensor | None
    x_kept: Tensor | None
    weight: Tensor | None
    weight_scale: Tensor | None
    weight_constants: Tensor | None
    weight_kept: Tensor | None
    grad_constants: Tensor | None
    grad_history: Tensor | None
    grad_stream: Tensor | None


class QuantizedMatmul(torch.autograd.Function):
    """``x @ weight.T`` through the quantized GEMMs; the tensors are those of `Given`, in its order.

    The gradient through the rounding is the straight-through estimator.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, settings: MatmulSettings, *tensors: Tensor | None) -> Tensor:
        given = Given(*tensors)
        x_q, weight_q = Operand(given.x_q, given.x_scale), Operand(given.weight_q, given.weight_scale)
        ctx.settings, ctx.dtypes = settings, (x.dtype, weight.dtype)
        ctx.autocast = torch.is_autocast_enabled(x.device.type)
        ctx.save_for_backward(*_saved(x, weight, given, settings, backward=any(ctx.needs_input_grad)))
        return _product(x_q, weight_q.t(), settings.output_dtype, settings.accumulate_fp32, ctx.autocast)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved, settings = Saved(*ctx.saved_tensors), ctx.settings
        grad_rows, grad_columns = _grad_operands(grad, saved, settings)
        x_q = _restored(saved.x, saved.x_scale, saved.x_constants, settings.input, settings)
        weight_q = _restored(saved.weight, saved.weight_scale, saved.weight_constants, settings.weight, settings)
        dx = dw = None  # what no caller asks for
        if ctx.needs_input_grad[0]:
            dx = _product(grad_rows, weight_q, ctx.dtypes[0], settings.accumulate_fp32, ctx.autocast)
        if ctx.needs_input_grad[1]:
            dw = _product(grad_columns.t(), x_q, ctx.dtypes[1], settings.accumulate_fp32, ctx.autocast)
        if dx is not None and saved.x_kept is not None:
            dx = dx * saved.x_kept
        if dw is not None and saved.weight_kept is not None:
            dw = dw * saved.weight_kept
        return dx, dw, None, *(None for _ in Given._fields)


def _saved(x: Tensor, weight: Tensor, given: Given, settings: MatmulSettings, *, backward: bool) -> Saved:
    """Return what the backward pass needs, if there is one: operands for products that sum over the other dimension."""
    x_kept = weight_kept = None
    if settings.clipped:  # row and block scales are those of the tensor at hand, and clamp what their rounding does
        if _has_one_scale(settings.input):
            x_kept = _unclamped(x, given.x_scale, given.x_constants)
        if _has_one_scale(settings.weight):
            weight_kept = _unclamped(weight, given.weight_scale, given.weight_constants)
    x_q = weight_q = Operand(None)
    if backward:
        x_q, weight_q = Operand(given.x_q, given.x_scale), Operand(given.weight_q, given.weight_scale)
        if settings.input is not None and not settings.input.per_tensor:
            t, free = owned(x)
            x_q = Operand.of(
                t, settings.input, given.x_constants, None, 0, settings.operand_dtype,
                stream=given.x_stream, overwrite=free,
            )  # fmt: skip
        if given.weight_back is not None:
            weight_q = Operand(given.weight_back, given.weight_back_scale)
        x_q = _kept(x_q, given.x_constants, settings.input, settings)
        weight_q = _kept(weight_q, given.weight_constants, settings.weight, settings)
    return Saved(
        x_q.values, x_q.scale, given.x_constants, x_kept, weight_q.values, weight_q.scale, given.weight_constants,
        weight_kept, given.grad_constants, given.grad_history, given.grad_stream,
    )  # fmt: skip


def _grad_operands(grad: Tensor, saved: Saved, settings: MatmulSettings) -> tuple[Operand, Operand]:
    """Return the incoming gradient (n, m) for the product that sums over its columns, and over its rows."""
    grad, free = owned(grad)
    used_twice = settings.grad is not None and not settings.grad.per_tensor
    rows = columns = Operand.of(
        grad, settings.grad, saved.grad_constants, saved.grad_history, 1, settings.operand_dtype,
        stream=saved.grad_stream, learns=settings.grad_learns, overwrite=free and not used_twice,
    )  # fmt: skip
    if used_twice:
        columns = Operand.of(
            grad, settings.grad, saved.grad_constants, None, 0, settings.operand_dtype,
            stream=saved.grad_stream, overwrite=free,
        )  # fmt: skip
    return rows, columns


def _has_one_scale(scaling: Scaling | None) -> bool:
    return scaling is not None and scaling.per_tensor


def _kept(operand: Operand, constants: Tensor | None, scaling: Scaling | None, settings: MatmulSettings) -> Operand:
    """Return what is kept of a backward product's operand: its values perhaps as codes."""
    if _as_codes(scaling, settings):
        return operand._replace(values=encode_operand(operand.values, constants))
    return operand


def _as_codes(scaling: Scaling | None, settings: MatmulSettings) -> bool:
    return settings.save == "codes" and _has_one_scale(scaling)


def _restored(
    saved: Tensor, scale: Tensor | None, constants: Tensor | None, scaling: Scaling | None, settings: MatmulSettings
) -> Operand:
    """Return the operand, for a product that sums over dimension 0, of which `_kept` returned this."""
    values = decode_operand(saved, constants, settings.operand_dtype) if _as_codes(scaling, settings) else saved
    return Operand(values, scale)
