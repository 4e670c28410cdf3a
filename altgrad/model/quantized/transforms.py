"""The quantized product under `torch.func`: ``grad``, ``vjp``, ``jacrev`` and ``vmap``, over samples or over models.

A training step has `QuantizedMatmul`, whose operands are made outside of it, of several layers at once and in place.
Under a transform tensors are wrapped, one level for each transform, and only a Function's own rules see what is inside:
so here all is done in one, from the tensors themselves, with the same arithmetic. Its backward pass is a Function too,
since ``vmap(grad(loss))`` calls it with a batch.

A batch goes one by one, as a loop over the samples would: each has the scales of its own amax, and the bits of the
loop. That is exact, and no faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from altgrad.model.quantized.matmul import MatmulSettings, gradients, product, saved
from altgrad.model.quantized.operand import Operand
from altgrad.model.quantized.quantizer import Scaling, Source
from altgrad.numerics import rotate_rows

if TYPE_CHECKING:
    from altgrad.model.quantized.linear import QuantizedLinear


def transformed() -> bool:
    """Whether `torch.func` transforms what runs now."""
    return torch._C._are_functorch_transforms_active()


def transformed_product(layer: QuantizedLinear, x: Tensor, matrix: Tensor, settings: MatmulSettings) -> Tensor:
    """Return the product of ``x`` (n, in_features) and a weight, for any transform of `torch.func` but ``jvp``.

    Raises:
        NotImplementedError: a tensor whose quantizer changes while training: a transform is a function of its
            arguments. In one graph of `torch.compile`. Later: forward mode, and a derivative of the derivative.
    """
    if torch.compiler.is_compiling():
        # Where a graph may break, the compiler calls this function again, in eager mode.
        raise NotImplementedError("torch.compile cannot trace torch.func through quantized layers; call it uncompiled")
    for role in layer.quantizers if layer.training else ():
        quantizer = layer.quantizer(role)
        if quantizer is not None and quantizer.changes:
            what = "rounding: stochastic" if quantizer.stream is not None else f"scaling: {quantizer.recipe.scaling}"
            raise NotImplementedError(
                f"torch.func has no {what} while training, which {role} has and which changes with every call; take "
                "rounding: nearest with scaling: dynamic, or call model.eval()"
            )
    autocast = torch.is_autocast_enabled(x.device.type)
    sources = [t for role in ("input", "weight", "grad") for t in layer.source(role)[:2]]
    y: Tensor = _Product.apply(x, matrix, settings, autocast, *sources)
    return y


class _Product(torch.autograd.Function):
    """``x @ weight.T`` for ``x`` (n, k) and ``weight`` (m, k); then constants and history of input, weight and grad."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, settings: MatmulSettings, autocast: bool, *sources: Tensor | None) -> Tensor:
        of_x, of_weight, _ = _sources(sources)
        a = Operand.of(x, settings.input, of_x, 1, settings.operand_dtype)
        b = Operand.of(weight, settings.weight, of_weight, 1, settings.operand_dtype)
        return product(a, b.t(), settings.output_dtype, settings.accumulate_fp32, autocast)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, ctx.settings, ctx.autocast, *sources = inputs
        ctx.save_for_backward(x, weight, *sources)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needed = tuple(ctx.needs_input_grad[:2])
        found = iter(_Gradients.apply(grad, *ctx.saved_tensors, ctx.settings, ctx.autocast, *needed))
        dx, dw = (next(found) if needs else None for needs in needed)
        return dx, dw, *(None,) * 8

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Tensor, int]:
        return torch.stack(_one_by_one(_Product.apply, info.batch_size, in_dims, arguments)), 0

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        raise NotImplementedError(
            "a quantized product has no forward mode (torch.func.jvp, jacfwd, hessian); take reverse mode, "
            "torch.func.vjp or jacrev"
        )


class _Gradients(torch.autograd.Function):
    """The backward products: the gradients of ``x`` and of ``weight``, each if it is asked for."""

    @staticmethod
    def forward(grad: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        *sources, settings, autocast, of_input, of_the_weight = rest
        of_x, of_weight, of_grad = _sources(sources)
        needed = (of_input, of_the_weight)
        own = rotate_rows(x) if settings.hadamard else x
        a = saved(own, _backward_operand(own, settings.input, of_x, settings), settings.input, settings, of_input=True)
        b = saved(weight, _backward_operand(weight, settings.weight, of_weight, settings), settings.weight, settings)
        found = gradients(grad, a, b, of_grad, settings, (x.dtype, weight.dtype), autocast, needed)
        return tuple(t for t in found if t is not None)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        raise NotImplementedError(
            "the gradient of a quantized product is rounded and has none of its own; take second derivatives of "
            "unquantize_model(model), or differences of gradients"
        )

    jvp = backward

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        each = _one_by_one(_Gradients.apply, info.batch_size, in_dims, arguments)
        found = tuple(map(torch.stack, zip(*each, strict=True)))
        return found, (0,) * len(found)


def _sources(tensors: Sequence[Tensor | None]) -> list[Source]:
    return [Source(*tensors[i : i + 2]) for i in (0, 2, 4)]


def _backward_operand(t: Tensor, scaling: Scaling | None, source: Source, settings: MatmulSettings) -> Operand:
    """Return that of the backward product, which sums over rows, with one scale for the tensor that of both."""
    return Operand.of(t, scaling, source, 1 if scaling is None or scaling.once else 0, settings.operand_dtype)


def _one_by_one(
    apply: Callable[..., Any], size: int, in_dims: Sequence[int | None], arguments: Sequence[Any]
) -> list[Any]:
    """Return what ``apply`` makes of each of a batch: of ``arguments``, the slices along those ``in_dims`` name."""
    pairs = list(zip(arguments, in_dims, strict=True))
    return [apply(*(a if dim is None else a.select(dim, i) for a, dim in pairs)) for i in range(size)]
