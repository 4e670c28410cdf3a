"""Weights, inputs and incoming gradients of every linear layer of a run, from its rebuilt model and one probe batch.

The forward pass is the run's own, its rounding included; incoming gradients are those of the mean loss before any
rounding.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from torch import Tensor, nn

from altgrad.config import Cell, UserError
from altgrad.diagnostics.rebuilt import RebuiltModel, StraightThroughLinear
from altgrad.diagnostics.saved import SavedRun

TOKENS = 256  # of the probe batch


class Probed(NamedTuple):
    """A layer's tensors, by what a recipe calls them: weight (out, in), input (tokens, in), grad (tokens, out)."""

    weight: Tensor
    input: Tensor
    grad: Tensor

    def loss_change(self, role: str, error: Tensor) -> tuple[float, float]:
        """Return the loss' change of first and of second order (nats per token) if ``error`` is added to a tensor.

        First order is the gradient's product with the error. Second order is half the error's squares weighted by the
        empirical Fisher information's diagonal (LeCun et al. 1989 took the Hessian's), a token being a sample: for a
        weight N sum_t (g_t a_t)^2, g the incoming gradients of the mean loss over N tokens and a the inputs; for an
        input N (dL/da)^2. Both are NaN for ``grad``, of which the loss is no function.
        """
        if role == "grad":
            return float("nan"), float("nan")
        grad, seen, tokens = self.grad.double(), self.input.double(), len(self.grad)
        if role == "weight":
            slope, fisher = grad.T @ seen, tokens * (grad.square().T @ seen.square())
        else:
            slope = grad @ self.weight.double()
            fisher = tokens * slope.square()
        error = error.double()
        return (slope * error).sum().item(), 0.5 * (fisher * error.square()).sum().item()


def probe(cell: Cell, run_dir: Path, tokens: Path, most: int = TOKENS) -> dict[str, Probed]:
    """Return the tensors of each linear layer of a finished run, on at most ``most`` validation tokens.

    Raises :class:`UserError` for a run that is not finished, or whose weights or gradients are not finite.
    """
    with SavedRun(cell, run_dir) as run:
        rebuilt = RebuiltModel.of(cell, run.model(), tokens, most)
    layers = {name: m for name, m in rebuilt.model.named_modules() if isinstance(m, StraightThroughLinear)}
    seen: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def remember(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        output.retain_grad()
        seen[layer] = inputs[0].detach(), output

    hooks = [layer.register_forward_hook(remember) for layer in layers.values()]
    rebuilt.loss().backward()
    for hook in hooks:
        hook.remove()
    found = {}
    for name, layer in layers.items():
        inputs, output = seen[layer]
        assert output.grad is not None  # which a layer that the loss does not depend on would lack
        tensors = (layer.weight.detach(), inputs, output.grad)
        found[name] = Probed(*(t.reshape(-1, t.shape[-1]) for t in tensors))
        if not all(t.isfinite().all() for t in found[name]):
            raise UserError(f"{cell.key}: layer {name} holds values that are not finite, so nothing can be said of it")
    return found
