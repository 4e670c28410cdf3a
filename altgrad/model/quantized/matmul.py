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

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from altgrad.model.quantized.native import native_product
from altgrad.model.quantized.operand import Operand, Operands, dequantized
from altgrad.model.quantized.quantizer import Scaling, Source
from altgrad.model.quantized.unscaling import unscaled
from altgrad.numerics.compile_utils import converted
from altgrad.numerics.ms_eden import ms_eden_pair
from altgrad.numerics.operand import owned
from altgrad.numerics.operand_definition import FLOAT8
from altgrad.numerics.rounding import overflows


@dataclass(frozen=True)
class MatmulSettings:
    """Static choices of one layer's product; see :class:`altgrad.config.recipe.LayerRecipe`.

    ``operand_dtype``: bfloat16 when it holds every operand's format exactly and is fast, else float32.
    ``gradient``: through the rounding, as in `LayerRecipe`.
    ``save``: what the backward pass is left with of tensors with one scale, ``operands`` or ``codes``.
    ``hadamard``: tokens that are rotated together for the weight's gradient, or 0. Both operands are rotated alike
    along the sum, which stays what it is; what is large in one token alone is spread over 16 and so costs the others'
    elements less of their precision.
    ``ms_eden``: the backward products round their operands anew, which are those of the forward one and the gradient.
    ``input``, ``weight``, ``grad``: how the tensor is scaled, ``None`` if it is not quantized.
    ``grad_learns``: what the gradient's history keeps, as in `quantize_operands`.
    """

    operand_dtype: torch.dtype
    output_dtype: torch.dtype
    accumulate_fp32: bool
    gradient: str
    save: str
    hadamard: int
    ms_eden: bool
    input: Scaling | None
    weight: Scaling | None
    grad: Scaling | None
    grad_learns: str


class QuantizedMatmul(torch.autograd.Function):
    """``x @ weight.T`` for ``x`` (n, k) and ``weight`` (m, k), by the operands ``input`` and ``weight_q`` made of them.

    The gradient through the rounding is one of the three straight-through estimators that Yin et al. 2019
    (arXiv:1903.05662) compare, the derivative of: the identity; the clipped ReLU, here zero beyond both ends of the
    format; the ReLU, 1 where the input is positive and else 0, which as theirs is for inputs alone, since a negative
    weight would never learn. ``grad`` is what its own operands are made with. `torch.compile` and autograd want ``x``
    and ``weight`` by themselves, and take other tensors in tuples. ``edge`` is `Edge` of ``x``, for second derivatives.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, edge: Tensor | None, settings: MatmulSettings, input: Operands,
        weight_q: Operands, grad: Source,
    ) -> Tensor:  # fmt: skip
        ctx.settings, ctx.dtypes, ctx.edge = settings, (x.dtype, weight.dtype), edge
        ctx.autocast = torch.is_autocast_enabled(x.device.type)
        if any(ctx.needs_input_grad):
            x_q, w_q = (pair.forward if settings.ms_eden else pair.backward for pair in (input, weight_q))
            x_saved = saved(x, x_q, settings.input, settings, of_input=True)
            # The weight itself for a second derivative, and so that an update before the backward pass is an error.
            ctx.save_for_backward(weight, *x_saved, *saved(weight, w_q, settings.weight, settings), *grad)
        y_dtype, fp32 = settings.output_dtype, settings.accumulate_fp32
        return product(input.forward, weight_q.forward.t(), y_dtype, fp32, ctx.autocast)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, *operands = ctx.saved_tensors
        by = _Gradients.apply if torch.is_grad_enabled() else _Gradients.compute
        needed = tuple(ctx.needs_input_grad[:2])
        dx, dw = by(grad, ctx.edge, weight, ctx.settings, ctx.dtypes, ctx.autocast, needed, *operands)
        return dx, dw, None, None, None, None, None


class _Gradients(torch.autograd.Function):
    """The backward products, with a derivative of their own: what ``create_graph=True`` asks for.

    It is that of the straight-through estimator, as if a rounded tensor had been the tensor itself plus a constant:

        dx = g_q w_q, dw = g_q^T x_q, and for the gradients u of dx and v of dw
        dL/dg = u w_q^T + x_q v^T, dL/dx = g_q v, dL/dw = g_q^T u

    with the operands over their scales, products in float32, and u and v not quantized.
    """

    @staticmethod
    def compute(
        grad: Tensor, edge: Tensor | None, weight: Tensor, settings: MatmulSettings,
        dtypes: tuple[torch.dtype, torch.dtype], autocast: bool, needed: tuple[bool, ...], *operands: Tensor | None,
    ) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
        """Return the gradients of x and of the weight."""
        return gradients(grad, *_split(operands), settings, dtypes, autocast, needed)

    @staticmethod
    def forward(
        ctx: Any, grad: Tensor, edge: Tensor | None, weight: Tensor, settings: MatmulSettings, *rest: Any
    ) -> tuple[Tensor | None, Tensor | None]:
        ctx.settings, ctx.dtypes = replace(settings, grad_learns="nothing"), rest[0]
        ctx.save_for_backward(grad, *rest[3:])
        ctx.set_materialize_grads(False)
        return _Gradients.compute(grad, edge, weight, settings, *rest)

    @staticmethod
    def backward(ctx: Any, u: Tensor | None, v: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "a quantized layer has first and second derivatives; for a third take unquantize_model(model)"
            )
        grad, *operands = ctx.saved_tensors
        with torch.autocast(grad.device.type, enabled=False):
            of_grad, of_x, of_weight = _second_derivatives(grad, u, v, *_split(operands), ctx.settings)
        x_dtype, weight_dtype = ctx.dtypes
        found = zip((of_grad, of_x, of_weight), (grad.dtype, x_dtype, weight_dtype), ctx.needs_input_grad, strict=False)
        dg, dx, dw = (t.to(dtype) if t is not None and needs else None for t, dtype, needs in found)
        return dg, dx, dw, *(None,) * (len(ctx.needs_input_grad) - 3)


def _split(tensors: Sequence[Tensor | None]) -> tuple[Operand, Operand, Source]:
    n = len(Operand._fields)
    return Operand(*tensors[:n]), Operand(*tensors[n : 2 * n]), Source(*tensors[2 * n :])  # type: ignore[arg-type]


class Edge(torch.autograd.Function):
    """A tensor of the shape of ``x`` in the memory of one number, to which autograd sends what is meant for ``x``.

    With it the backward pass knows its way to an input that it does not keep.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return x.new_zeros(()).expand(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
        return grad


def _second_derivatives(
    grad: Tensor, u: Tensor | None, v: Tensor | None, x: Operand, weight: Operand, source: Source,
    settings: MatmulSettings,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return dL/dg, dL/dx and dL/dw of `_Gradients`, float32, ``None`` for zero."""
    if settings.ms_eden and source.stream is not None:
        raise NotImplementedError(
            "MS-EDEN rotates what it rounds, and its gradients have no derivative of their own (create_graph=True); "
            "take another rounding of grad, or call model.eval()"
        )
    if source.history is not None:
        raise NotImplementedError(
            "a gradient with delayed or static scaling has the scale of earlier first derivatives, which those of a "
            "second derivative (create_graph=True) do not fit; take scaling: dynamic for grad"
        )
    rows, columns = _grad_operands(grad, source, settings, for_weight=True)
    count, turns = len(grad), settings.hadamard > 0
    x_q, g_columns = (dequantized(t.decoded(settings.operand_dtype), count if turns else None) for t in (x, columns))
    w_q, g_rows = (dequantized(t.decoded(settings.operand_dtype)) for t in (weight, rows))
    u, v = (None if t is None else t.float() if operand.kept is None else t.float() * operand.kept
            for t, operand in ((u, x), (v, weight)))  # fmt: skip
    of_grad = [product for product in (None if u is None else u @ w_q.t(), None if v is None else x_q @ v.t())
               if product is not None]  # fmt: skip
    of_x = None if v is None else g_columns @ v
    of_weight = None if u is None else g_rows.t() @ u
    of_x, of_weight = (t if t is None or operand.kept is None else t * operand.kept
                       for t, operand in ((of_x, x), (of_weight, weight)))  # fmt: skip
    return sum(of_grad[1:], of_grad[0]) if of_grad else None, of_x, of_weight


def gradients(
    grad: Tensor, x: Operand, weight: Operand, source: Source, settings: MatmulSettings,
    dtypes: tuple[torch.dtype, torch.dtype], autocast: bool, needed: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of ``x`` (n, k) and ``weight`` (m, k), in their ``dtypes``, for that of the product (n, m).

    ``x`` and ``weight`` are the operands that `saved` returned, ``source`` what those of ``grad`` are made with; what
    is not ``needed`` is ``None``.
    """
    x_q, weight_q = x.decoded(settings.operand_dtype), weight.decoded(settings.operand_dtype)
    if settings.ms_eden and source.stream is not None:
        pairs = _rounded_anew(grad, x_q, weight_q, source, settings, needed)
    else:
        rows, columns = _grad_operands(grad, source, settings, needed[1])
        pairs = [(rows, weight_q), (columns.t(), x_q)]
    fp32 = settings.accumulate_fp32
    found = [
        product(*pair, dtype, fp32, autocast) if asked else None  # what no caller asks for
        for pair, dtype, asked in zip(pairs, dtypes, needed, strict=False)
    ]
    dx, dw = (
        t if t is None or operand.kept is None else t * operand.kept
        for t, operand in zip(found, (x, weight), strict=True)
    )
    return dx, dw


def saved(
    t: Tensor, operand: Operand, scaling: Scaling | None, settings: MatmulSettings, *, of_input: bool = False
) -> Operand:  # fmt: skip
    """Return what the backward pass needs of ``t``: its operand, perhaps as codes, and where its gradient passes."""
    if scaling is not None and settings.gradient == "relu" and of_input:
        operand = operand._replace(kept=t > 0)
    if scaling is None or not scaling.per_tensor:
        return operand  # row and block scales are those of the tensor at hand, and clamp what their rounding does
    assert operand.scale is not None and operand.constants is not None
    if settings.gradient == "clipped":
        operand = operand._replace(kept=~overflows(t.float() * operand.scale, operand.constants))
    return operand.encoded() if settings.save == "codes" else operand


def _rounded_anew(
    grad: Tensor, x: Operand, weight: Operand, source: Source, settings: MatmulSettings, needed: Sequence[bool]
) -> list[tuple[Operand, Operand]]:
    """Return the factors of both backward products in MS-EDEN's rounding (see `numerics.ms_eden`), as far as needed."""
    assert settings.grad is not None and source.constants is not None and source.stream is not None
    block, dtype = settings.grad.options["block"], settings.operand_dtype
    found = []
    for i, (left, right) in enumerate(((grad.t(), weight), (grad, x))):
        if not needed[i]:
            found.append((right, right))
            continue
        options: dict[str, Any] = {"block": block, "dtype": dtype, "over": right.scale}
        a, b = ms_eden_pair(left.detach(), right.values, source.constants, source.stream, i, **options)
        found.append((Operand(*a).t(), Operand(*b)))
    return found


def _grad_operands(grad: Tensor, source: Source, settings: MatmulSettings, for_weight: bool) -> tuple[Operand, Operand]:
    """Return the incoming gradient (n, m) for the product that sums over its columns, and over its rows.

    The latter is the former unless it is made ``for_weight``.
    """
    grad, free = owned(grad)
    scaling, dtype, learns = settings.grad, settings.operand_dtype, settings.grad_learns
    rotates = settings.hadamard > 0
    used_twice = for_weight and (rotates or (scaling is not None and not scaling.once))
    rows = Operand.of(grad, scaling, source, 1, dtype, learns=learns, overwrite=free and not used_twice)
    if not used_twice:
        return rows, rows
    return rows, Operand.of(grad, scaling, source, 0, dtype, overwrite=free, rotate=rotates)


def product(a: Operand, b: Operand, dtype: torch.dtype, fp32: bool, autocast: bool) -> Tensor:
    """Return ``a @ b / (scale_a scale_b)`` in ``dtype``.

    Autocast would send float32 products through bfloat16, and so the native product on CPU, which torch makes of one,
    and those of bfloat16 through float16, beyond whose range they are: it is switched off for these. ``autocast`` says
    whether it was on in the forward pass: ``torch.compile`` traces the backward pass under it too, where eager mode
    runs it outside.
    """
    device_type, native = a.values.device.type, a.values.dtype in FLOAT8.values() or a.blocks is not None
    cast = fp32 or a.values.dtype != torch.bfloat16 or torch.get_autocast_dtype(device_type) != torch.bfloat16
    switched = cast and (autocast or torch.is_autocast_enabled(device_type))
    # Around the sum alone: where tracing begins anew inside of it, as `materialized` makes it, torch 2.13 forgets to
    # switch autocast on again, and the graph's other products have it.
    as_given = torch.autocast(device_type, enabled=False) if switched else nullcontext()
    y = native_product(a, b, dtype, as_given) if native else _emulated_product(a, b, fp32, as_given)
    return converted(y, dtype)


def _emulated_product(a: Operand, b: Operand, fp32: bool, as_given: AbstractContextManager[Any]) -> Tensor:
    """Return ``a @ b / (scale_a scale_b)`` as float32; ``fp32`` keeps the sum in float32 throughout."""
    with as_given:
        if a.values.dtype == torch.float32:
            y = a.values @ b.values
        elif a.values.is_cuda:
            y = torch.mm(a.values, b.values, out_dtype=torch.float32)
        elif fp32:
            y = a.values.float() @ b.values.float()
        else:
            y = (a.values @ b.values).float()
    return unscaled(y, (a.scale, b.scale))
