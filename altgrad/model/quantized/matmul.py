"""The quantized matrix product: three GEMMs on operands whose values are exactly representable in 8-bit formats.

    y  = (x_q @ w_q^T) / (s_x s_w)
    dx = (g_q @ w_q)   / (s_g s_w)
    dw = (g_q^T @ x_q) / (s_g s_x)

with ``t_q = round_to_grid(t * s_t)``. bfloat16 holds every value of every format of at most 8 bits, and float32 holds
the product of any two. So a bf16 GEMM with float32 accumulation on the *unscaled* operands ``t_q`` is the arithmetic of
an 8-bit tensor core, at bf16 speed. The scales are applied to the result, in float32. An operand that contains its
scale would be rounded to bf16 (2e-3 relative, as large as the effects under study).

Where the scales stand:

- one per tensor or per row: applied to the result. An operand's scales go along the dimension that the product does not
  sum over, so the backward products have operands of their own.
- one per block of the sum: inside of the operands. Powers of two are exact there, unless the format's smallest value,
  once scaled, falls below 2^-133, bfloat16's smallest: for an amax up to 2^-103 in E5M2, up to 2^-57 in E7M0.
- two levels, as in NVFP4: the block scales inside of the operands, the tensor's scale applied to the result. The
  operands' dtype holds every product of a value and a block scale.

torch 2.13 on a CPU has no bf16 GEMM that returns float32. There ``accumulate="bf16"`` rounds each sum to bf16 before
the scales are applied. The error is 2^-8 relative in ``dw``, as for an unquantized bf16 layer on a CPU, and in ``y``
and ``dx`` unless the scales are powers of two. On CUDA, with ``accumulate="float32"``, and on a CPU without bf16
instructions, where operands are float32, sums stay in float32 until they are scaled.

Compiled and eager code give the same bits, for both dtypes of operands, with and without autocast: they call the same
GEMMs and round elementwise operations alike. Operands of the two dtypes have the same values, but their sums differ.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from altgrad.model.quantized.native import native_product
from altgrad.model.quantized.operand import Operand, Operands, apply_scales, dequantized
from altgrad.model.quantized.quantizer import OperandState, ScaleSpec
from altgrad.numerics.compile_utils import converted
from altgrad.numerics.ms_eden import ms_eden_pair
from altgrad.numerics.operand import owned
from altgrad.numerics.operand_definition import FLOAT8
from altgrad.numerics.rounding import overflows


@dataclass(frozen=True)
class MatmulSettings:
    """The static settings of one layer's products; see :class:`altgrad.config.recipe.LayerRecipe`.

    operand_dtype: bfloat16 if it holds every value of the operands' formats exactly and is fast, else float32.
    gradient: the straight-through estimator, as in `LayerRecipe`.
    save: ``operands`` or ``codes``: how tensors with one scale are saved for the backward pass.
    hadamard: number of tokens that are rotated together for the weight's gradient, 0 for no rotation. Rotating both
        operands does not change the sum. It spreads a token's outlier over 16, which costs the others less precision.
    ms_eden: whether MS-EDEN quantizes the gradient and the forward product's operands anew for the backward products.
    input, weight, grad: how the tensor is scaled, ``None`` if it is not quantized.
    grad_learns: which amax the gradient's history keeps, as ``learns`` of `quantize_operand`.
    """

    operand_dtype: torch.dtype
    output_dtype: torch.dtype
    accumulate_fp32: bool
    gradient: str
    save: str
    hadamard: int
    ms_eden: bool
    input: ScaleSpec | None
    weight: ScaleSpec | None
    grad: ScaleSpec | None
    grad_learns: str


class QuantizedMatmul(torch.autograd.Function):
    """``x @ weight.T`` for ``x`` (n, k) and ``weight`` (m, k), computed from their operands ``input`` and ``weight_q``.

    Both may be batches of matrices of the same shape before n and m.

    The gradient through the rounding is one of three straight-through estimators of Yin et al. 2019
    (arXiv:1903.05662). It is the derivative of the identity, of the clipped ReLU (here 0 beyond both ends of the
    format), or of the ReLU (1 where the input is positive, else 0). The ReLU is for inputs alone, since a negative
    weight would never learn. ``grad`` is the state that quantizes the incoming gradient, ``edge`` the `Edge` of ``x``.
    `torch.compile` and autograd need ``x`` and ``weight`` as arguments, and accept other tensors in tuples.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, edge: Tensor | None, settings: MatmulSettings, input: Operands,
        weight_q: Operands, grad: OperandState,
    ) -> Tensor:  # fmt: skip
        ctx.settings, ctx.dtypes, ctx.edge = settings, (x.dtype, weight.dtype), edge
        ctx.autocast = torch.is_autocast_enabled(x.device.type)
        if any(ctx.needs_input_grad):
            x_q, w_q = (pair.forward if settings.ms_eden else pair.backward for pair in (input, weight_q))
            x_saved = saved(x, x_q, settings.input, settings, of_input=True)
            # Saving the weight serves second derivatives, and makes an update before the backward pass an error.
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
    """The backward products, as a Function that ``create_graph=True`` differentiates once more.

    The derivative is the straight-through estimator's: a rounded tensor counts as the tensor plus a constant.

        dx = g_q w_q, dw = g_q^T x_q, and for the gradients u of dx and v of dw
        dL/dg = u w_q^T + x_q v^T, dL/dx = g_q v, dL/dw = g_q^T u

    Operands are divided by their scales, products are in float32, and u and v are not quantized.
    """

    @staticmethod
    def compute(
        grad: Tensor, edge: Tensor | None, weight: Tensor, settings: MatmulSettings,
        dtypes: tuple[torch.dtype, torch.dtype], autocast: bool, needed: tuple[bool, ...], *operands: Tensor | None,
    ) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
        """Return the gradients of x and of the weight, ``None`` where not ``needed``."""
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
        needed = ctx.needs_input_grad[:3]
        pairs = zip((of_grad, of_x, of_weight), (grad.dtype, *ctx.dtypes), needed, strict=True)
        dg, dx, dw = (t.to(dtype) if t is not None and needs else None for t, dtype, needs in pairs)
        return dg, dx, dw, *(None,) * (len(ctx.needs_input_grad) - 3)


def _split(tensors: Sequence[Tensor | None]) -> tuple[Operand, Operand, OperandState]:
    n = len(Operand._fields)
    return Operand(*tensors[:n]), Operand(*tensors[n : 2 * n]), OperandState(*tensors[2 * n :])  # type: ignore[arg-type]


class Edge(torch.autograd.Function):
    """A tensor in the shape of ``x`` that takes the memory of one number and passes its gradient on to ``x``.

    Through it the backward pass of the backward pass reaches an input that is not saved.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return x.new_zeros(()).expand(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
        return grad


def _second_derivatives(
    grad: Tensor, u: Tensor | None, v: Tensor | None, x: Operand, weight: Operand, state: OperandState,
    settings: MatmulSettings,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return dL/dg, dL/dx and dL/dw as in `_Gradients`, in float32; ``None`` stands for zero."""
    if settings.ms_eden and state.stream is not None:
        raise NotImplementedError(
            "MS-EDEN rotates what it rounds, and its gradients have no derivative of their own (create_graph=True); "
            "take another rounding of grad, or call model.eval()"
        )
    if state.history is not None:
        raise NotImplementedError(
            "a gradient with delayed or static scaling has the scale of earlier first derivatives, which those of a "
            "second derivative (create_graph=True) do not fit; take scaling: dynamic for grad"
        )
    rows, columns = _grad_operands(grad, state, settings, for_weight=True)
    count, turns = len(grad), settings.hadamard > 0
    x_q, g_columns = (dequantized(t.decoded(settings.operand_dtype), count if turns else None) for t in (x, columns))
    w_q, g_rows = (dequantized(t.decoded(settings.operand_dtype)) for t in (weight, rows))
    of_grad = of_x = of_weight = None
    if u is not None:
        u = x.gated(u.float())
        of_grad, of_weight = u @ w_q.mT, weight.gated(g_rows.mT @ u)
    if v is not None:
        v = weight.gated(v.float())
        of_grad, of_x = x_q @ v.mT if of_grad is None else of_grad + x_q @ v.mT, x.gated(g_columns @ v)
    return of_grad, of_x, of_weight


def gradients(
    grad: Tensor, x: Operand, weight: Operand, state: OperandState, settings: MatmulSettings,
    dtypes: tuple[torch.dtype, torch.dtype], autocast: bool, needed: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of ``x`` (n, k) and ``weight`` (m, k) in their ``dtypes``; ``None`` where not ``needed``.

    ``grad`` (n, m) is the gradient of the product, and ``state`` quantizes it. `saved` made ``x`` and ``weight``.
    """
    x_q, weight_q = x.decoded(settings.operand_dtype), weight.decoded(settings.operand_dtype)
    if settings.ms_eden and state.stream is not None:
        pairs = _rounded_anew(grad, x_q, weight_q, state, settings, needed)
    else:
        rows, columns = _grad_operands(grad, state, settings, needed[1])
        pairs = [(rows, weight_q), (columns.t(), x_q)]
    fp32 = settings.accumulate_fp32
    dx, dw = (
        operand.gated(product(*pair, dtype, fp32, autocast)) if asked else None
        for operand, pair, dtype, asked in zip((x, weight), pairs, dtypes, needed, strict=True)
    )
    return dx, dw


def saved(
    t: Tensor, operand: Operand, scaling: ScaleSpec | None, settings: MatmulSettings, *, of_input: bool = False
) -> Operand:  # fmt: skip
    """Return the ``operand`` of ``t`` as it is saved: as codes if so set, with the mask of a gated gradient."""
    if scaling is not None and settings.gradient == "relu" and of_input:
        operand = operand._replace(kept=t > 0)
    if scaling is None or not scaling.per_tensor:
        return operand  # row and block scales fit the tensor's own amax: only their rounding clamps values
    assert operand.scale is not None and operand.constants is not None
    if settings.gradient == "clipped":
        operand = operand._replace(kept=~overflows(t.float() * operand.scale, operand.constants))
    return operand.encoded() if settings.save == "codes" else operand


def _rounded_anew(
    grad: Tensor, x: Operand, weight: Operand, state: OperandState, settings: MatmulSettings, needed: Sequence[bool]
) -> list[tuple[Operand, Operand]]:
    """Return the two factors of each backward product, rounded by MS-EDEN (`numerics.ms_eden`) where ``needed``."""
    assert settings.grad is not None and state.constants is not None and state.stream is not None
    block, dtype = settings.grad.options["block"], settings.operand_dtype
    pairs = []
    for i, (left, right) in enumerate(((grad.t(), weight), (grad, x))):
        if not needed[i]:
            pairs.append((right, right))  # a placeholder that no caller multiplies
            continue
        options: dict[str, Any] = {"block": block, "dtype": dtype, "over": right.scale}
        a, b = ms_eden_pair(left.detach(), right.values, state.constants, state.stream, i, **options)
        pairs.append((Operand(*a).t(), Operand(*b)))
    return pairs


def _grad_operands(
    grad: Tensor, state: OperandState, settings: MatmulSettings, for_weight: bool
) -> tuple[Operand, Operand]:
    """Return ``grad`` (n, m) quantized for the product that sums over its columns, and for the one over its rows.

    Without ``for_weight`` the second operand is the first one.
    """
    grad, free = owned(grad)
    scaling, dtype, learns = settings.grad, settings.operand_dtype, settings.grad_learns
    rotates = settings.hadamard > 0
    used_twice = for_weight and (rotates or (scaling is not None and not scaling.once))
    rows = Operand.of(grad, scaling, state, 1, dtype, learns=learns, overwrite=free and not used_twice)
    if not used_twice:
        return rows, rows
    return rows, Operand.of(grad, scaling, state, 0, dtype, overwrite=free, rotate=rotates)


def product(a: Operand, b: Operand, dtype: torch.dtype, fp32: bool, autocast: bool) -> Tensor:
    """Return ``a @ b / (scale_a scale_b)`` in ``dtype``.

    Autocast is switched off where it would change the products: float32 products, on a CPU also native ones, and
    bfloat16 products under float16 autocast, whose range is too small. ``autocast`` says whether it was on in the
    forward pass. ``torch.compile`` traces the backward pass under the same autocast, eager mode runs it without.
    """
    device_type, native = a.values.device.type, a.values.dtype in FLOAT8.values() or a.blocks is not None
    cast = fp32 or a.values.dtype != torch.bfloat16 or torch.get_autocast_dtype(device_type) != torch.bfloat16
    switched = cast and (autocast or torch.is_autocast_enabled(device_type))
    # Around the sum alone: where tracing begins anew inside, as `materialized` has it, torch 2.13 does not switch
    # autocast on again for the other products of the graph.
    no_autocast = torch.autocast(device_type, enabled=False) if switched else nullcontext()
    y = native_product(a, b, dtype, no_autocast) if native else _emulated_product(a, b, dtype, fp32, no_autocast)
    return converted(y, dtype)


def _emulated_product(
    a: Operand, b: Operand, dtype: torch.dtype, fp32: bool, no_autocast: AbstractContextManager[Any]
) -> Tensor:
    """Return ``a @ b / (scale_a scale_b)`` as float32 or ``dtype``; ``fp32`` keeps the sum in float32 throughout."""
    with no_autocast:
        if a.values.dtype == torch.float32:
            y = a.values @ b.values
        elif a.values.is_cuda and a.values.ndim == 2:
            y = torch.mm(a.values, b.values, out_dtype=torch.float32)
        elif a.values.is_cuda:
            batches = a.values.flatten(0, -3), b.values.flatten(0, -3)
            y = torch.bmm(*batches, out_dtype=torch.float32).unflatten(0, a.values.shape[:-2])
        elif fp32:
            y = a.values.float() @ b.values.float()
        else:
            y = a.values @ b.values
    return apply_scales(y if y.dtype == dtype else y.float(), (a.scale, b.scale))
