"""What quantization does to each layer's weight gradient, cause by cause: weights, inputs and incoming gradients.

The gradient of one batch at a run's weights is taken five times, in float32 but for the rounding of what is
quantized: with nothing quantized, with the weights, the inputs or the incoming gradients of all layers alone, and with
all three. The differences from the first are the noise of each cause and of all together. Rounding to bfloat16 on the
way, which an unquantized bf16 run has too, is in none of them. The loss is scaled so that incoming gradients are as
large as in a step: what powers of two, and scales remembered from steps, do to them depends on it.

Noise that is the same in every batch is bias, and training follows it; what differs from batch to batch averages out
over steps. The batch is cut into parts to tell them apart.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from altgrad.config import Cell
from altgrad.config.recipe import ROLES, Recipe
from altgrad.diagnostics.rebuilt import plain_model
from altgrad.model import GPT, QuantizedLinear, embedded_weights, linear_layers, quantize_model, unquantize_model
from altgrad.model.from_cell import recipe_of

PARTS = 16  # of the batch, to tell bias from scatter


class GradientNoise(NamedTuple):
    """Squared Frobenius norms of a layer's weight gradient and of the noise in it.

    ``causes`` has the noise of each role that is quantized, by itself; ``together`` is that of all at once, and
    ``along`` the inner product of the gradient with it. Of ``together``, ``bias`` is what batches have in common,
    ``scatter`` what those of training's size have not; NaN from one sequence.
    """

    signal: float
    causes: dict[str, float]
    together: float
    along: float
    bias: float = math.nan
    scatter: float = math.nan


def gradient_noises(
    cell: Cell, saved: Mapping[str, Tensor], tokens: Path, most: int, *, apart: bool = True
) -> dict[str, GradientNoise]:
    """Return the noise of each linear layer but those whose weight is an embedding's, by name.

    Args:
        cell: resolved.
        saved: its parameters and buffers at some step, as ``model.safetensors`` names them.
        tokens: the folder of the token files.
        most: validation tokens; at least one sequence is taken.
        apart: whether to tell bias and scatter apart, which takes as long as the rest.

    Empty where nothing is quantized, and where torchao quantizes, whose products have no parts to leave out.
    """
    recipe = recipe_of(cell)
    model, inputs, targets = plain_model(cell, saved, tokens, most)
    recipes = recipe.match(linear_layers(model)).values()
    roles = [role for role in ROLES if any(_quantized(layer, role) for layer in recipes)]
    if not roles or any(layer.torchao for layer in recipes):
        return {}
    sequences = cell.train.batch * cell.train.grad_accumulation
    each = cell.train.loss_scale / sequences
    found = noises(model, recipe, roles, saved, inputs, targets, each)
    if not apart:
        return found
    parts = bias_and_scatter(model, only(recipe, roles), saved, inputs, targets, sequences, each)
    return {name: noise._replace(bias=parts[name][0], scatter=parts[name][1]) for name, noise in found.items()}


def noises(
    model: GPT, recipe: Recipe, roles: Collection[str], saved: Mapping[str, Tensor], inputs: Tensor, targets: Tensor,
    each: float | None = None,
) -> dict[str, GradientNoise]:  # fmt: skip
    """Return the noise by cause of an unquantized ``model``'s gradients on ``inputs`` and ``targets`` (n, length).

    ``each`` is the weight of a sequence's mean loss in the loss of a step, by default 1 / n.
    """
    exact = _gradients(model, inputs, targets, each)
    by_cause = {role: _noise(model, only(recipe, [role]), saved, inputs, targets, exact, each) for role in roles}
    together = _noise(model, only(recipe, roles), saved, inputs, targets, exact, each)
    powers = {role: {name: _squares(t) for name, t in found.items()} for role, found in by_cause.items()}
    return {
        name: GradientNoise(
            _squares(grad),
            {role: powers[role][name] for role in roles if powers[role][name]},
            _squares(together[name]),
            along=(grad.double() * together[name]).sum().item(),
        )
        for name, grad in exact.items()
    }


def bias_and_scatter(
    model: GPT, recipe: Recipe, saved: Mapping[str, Tensor], inputs: Tensor, targets: Tensor, sequences: int,
    each: float | None = None,
) -> dict[str, tuple[float, float]]:  # fmt: skip
    """Return by layer the squared norm of the noise's mean over batches, and the mean squared distance from it.

    The batch (n, length) is cut into `PARTS` or fewer, each quantized by itself; their noises are taken for independent
    draws. With m their mean and s² the squared distance from it, over K - 1, the squared norm of the true mean is
    estimated without bias by ||m||² - s² / K, and 0 where that is below. The distance is that of batches of
    ``sequences``, as if it fell with their number. ``each`` is that of `noises`. NaN where there are fewer than two
    sequences.
    """
    count = min(PARTS, len(inputs))
    parts = zip(inputs.tensor_split(count), targets.tensor_split(count), strict=True)
    total: dict[str, Tensor] = {}
    squares: dict[str, float] = {}
    for x, y in parts:
        for name, noise in _noise(model, recipe, saved, x, y, _gradients(model, x, y, each), each).items():
            total[name] = total.get(name, 0) + noise
            squares[name] = squares.get(name, 0.0) + _squares(noise)
    found = {}
    for name, t in total.items():
        mean = _squares(t / count)
        spread = max(squares[name] - count * mean, 0.0) / (count - 1) if count > 1 else math.nan
        bias = max(mean - spread / count, 0.0) if count > 1 else math.nan
        found[name] = bias, spread * (len(inputs) / count) / sequences
    return found


def only(recipe: Recipe, roles: Collection[str]) -> Recipe:
    """Return ``recipe`` with no tensor quantized but those of ``roles``, and sums in float32."""
    changes = dict.fromkeys(set(ROLES) - set(roles)) | {"accumulate": "float32", "backend": "emulated"}
    return Recipe(rules=tuple(rule.but(**changes) for rule in recipe.rules))


def _noise(
    model: GPT, recipe: Recipe, saved: Mapping[str, Tensor], inputs: Tensor, targets: Tensor, exact: dict[str, Tensor],
    each: float | None,
) -> dict[str, Tensor]:  # fmt: skip
    """Return the difference, float64, that quantizing as ``recipe`` says makes to each gradient."""
    quantize_model(model, recipe)
    for name, layer in linear_layers(model).items():
        for role, quantizer in layer.quantizers.items() if isinstance(layer, QuantizedLinear) else ():
            history = saved.get(f"{name}.quantizers.{role}.history")
            if history is not None:  # of a scale that is remembered or held
                quantizer.register_buffer("history", history.float())
    noisy = _gradients(model.eval(), inputs, targets, each)
    unquantize_model(model)
    return {name: noisy[name].double() - grad.double() for name, grad in exact.items()}


def _gradients(model: GPT, inputs: Tensor, targets: Tensor, each: float | None) -> dict[str, Tensor]:
    """Return the gradients of the mean loss, taken through one in which a sequence has the weight ``each``."""
    factor = 1.0 if each is None else each * len(inputs)
    embedded = embedded_weights(model)
    weights: dict[str, nn.Parameter] = {
        name: layer.weight for name, layer in linear_layers(model).items() if layer.weight not in embedded
    }
    found = torch.autograd.grad(model(inputs, targets) * factor, list(weights.values()))
    return {name: grad / factor for name, grad in zip(weights, found, strict=True)}


def _quantized(layer: object, role: str) -> bool:
    tensor = getattr(layer, role)
    return tensor is not None and not tensor.virtual


def _squares(t: Tensor) -> float:
    return t.double().square().sum().item()
