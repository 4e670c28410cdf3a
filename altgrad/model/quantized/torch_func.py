"""The quantized product under `torch.func`: ``grad``, ``vjp``, ``jacrev`` and ``vmap``, over samples or over models.

A training step uses `QuantizedMatmul`, whose operands are quantized before it is called. A transform wraps tensors, one
level per transform, and only a Function's own rules can read them. So here one Function quantizes and multiplies, with
the same arithmetic. Its backward pass is a Function too, since ``vmap(grad(loss))`` batches it.

A batch is computed one sample at a time, with the bits and the speed of a loop. Each sample's own amax sets its scales.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from altgrad.model.quantized.matmul import MatmulSettings, gradients, product, saved
from altgrad.model.quantized.operand import Operand
from altgrad.model.quantized.quantizer import OperandState, OperandStates, Quantizer, ScaleSpec
from altgrad.numerics import rotate_rows


def is_transformed() -> bool:
    """Return whether the code runs inside a transform of `torch.func`."""
    return torch._C._are_functorch_transforms_active()


def require_transformable(quantizers: dict[str, Quantizer], training: bool) -> None:
    """Raise ``NotImplementedError`` in a compiled graph, and if training changes the state of a quantizer.

    A transformed function may depend on its arguments alone.
    """
    if torch.compiler.is_compiling():
        # Where a graph may break, the compiler calls this function again, in eager mode.
        raise NotImplementedError("torch.compile cannot trace torch.func through quantized layers; call it uncompiled")
    for role, quantizer in quantizers.items() if training else ():
        if quantizer.changes:
            what = "rounding: stochastic" if quantizer.stream is not None else f"scaling: {quantizer.recipe.scaling}"
            raise NotImplementedError(
                f"torch.func has no {what} while training, which {role} has and which changes with every call; take "
                "rounding: nearest with scaling: dynamic, or call model.eval()"
            )


def transformed_product(x: Tensor, matrix: Tensor, settings: MatmulSettings, states: OperandStates) -> Tensor:
    """Return ``x @ matrix.T`` for ``x`` (n, in_features) and a weight, in any transform of `torch.func` but ``jvp``.

    Forward mode and a derivative of the derivative raise ``NotImplementedError`` when they are computed.
    """
    autocast = torch.is_autocast_enabled(x.device.type)
    y: Tensor = _Product.apply(x, matrix, settings, autocast, *(t for state in states for t in state[:2]))
    return y


class _Product(torch.autograd.Function):
    """``x @ weight.T`` for ``x`` (n, k) and ``weight`` (m, k).

    ``states``: constants and history of input, of weight and of grad, six arguments.
    """

    @staticmethod
    def forward(x: Tensor, weight: Tensor, settings: MatmulSettings, autocast: bool, *states: Tensor | None) -> Tensor:
        of_x, of_weight, _ = _operand_states(states)
        a = Operand.of(x, settings.input, of_x, 1, settings.operand_dtype)
        b = Operand.of(weight, settings.weight, of_weight, 1, settings.operand_dtype)
        return product(a, b.t(), settings.output_dtype, settings.accumulate_fp32, autocast)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, ctx.settings, ctx.autocast, *states = inputs
        ctx.save_for_backward(x, weight, *states)

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
    """The backward products: a tuple of the gradients of ``x`` and of ``weight``, without those not asked for."""

    @staticmethod
    def forward(grad: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        *states, settings, autocast, of_input, of_the_weight = rest
        of_x, of_weight, of_grad = _operand_states(states)
        turned = rotate_rows(x) if settings.hadamard else x
        a = _along_rows(turned, settings.input, of_x, settings)
        b = _along_rows(weight, settings.weight, of_weight, settings)
        a, b = saved(turned, a, settings.input, settings, of_input=True), saved(weight, b, settings.weight, settings)
        dtypes, needed = (x.dtype, weight.dtype), (of_input, of_the_weight)
        found = gradients(grad, a, b, of_grad, settings, dtypes, autocast, needed)
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
        stacked = tuple(map(torch.stack, zip(*each, strict=True)))
        return stacked, (0,) * len(stacked)


def _operand_states(tensors: Sequence[Tensor | None]) -> list[OperandState]:
    return [OperandState(*tensors[i : i + 2]) for i in (0, 2, 4)]


def _along_rows(t: Tensor, scaling: ScaleSpec | None, state: OperandState, settings: MatmulSettings) -> Operand:
    """Return ``t`` quantized for a backward product, which sums over rows; or as in the forward product if equal."""
    return Operand.of(t, scaling, state, 1 if scaling is None or scaling.once else 0, settings.operand_dtype)


def _one_by_one(
    apply: Callable[..., Any], size: int, in_dims: Sequence[int | None], arguments: Sequence[Any]
) -> list[Any]:
    """Return the result of ``apply`` for each of ``size`` samples; ``in_dims`` has each argument's batch dimension."""
    pairs = list(zip(arguments, in_dims, strict=True))
    return [apply(*(a if dim is None else a.select(dim, i) for a, dim in pairs)) for i in range(size)]
