"""The noise in each layer's weight gradient, by its cause: quantized weights, inputs or incoming gradients.

The gradient of one batch at a run's weights is computed five times, in float32 apart from the quantization: with
nothing quantized, with only the weights, only the inputs or only the incoming gradients of all layers, and with all
three. The differences from the unquantized gradient are the noise of each cause and of all together. The rounding to
bfloat16 is left out, because an unquantized bf16 run has it too. The loss is scaled so that incoming gradients are as
large as in a step, since power-of-two scales and remembered scales depend on their size.

Noise that is the same in every batch is bias, and training follows it. Noise that differs from batch to batch averages
out over steps. The batch is cut into parts to tell the two apart.
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
    """Squared Frobenius norms of a layer's weight gradient (``signal``) and of its quantization noise.

    ``causes`` has the noise with one role quantized alone, by role. ``together`` is the noise with all roles quantized,
    and ``along`` the inner product of the gradient with that noise. ``bias`` is the part of ``together`` that all
    batches share, ``scatter`` the part that differs between batches of training's size. Both are NaN if not measured.
    """

    signal: float
    causes: dict[str, float]
    together: float
    along: float
    bias: float = math.nan
    scatter: float = math.nan


class Batch(NamedTuple):
    """A batch (n, length) on which gradients of an unquantized ``model`` are taken.

    ``saved`` has the amax histories of the run's quantizers. ``each`` is the factor of one sequence's mean loss in the
    scaled loss of a training step; ``None`` means 1 / n.
    """

    model: GPT
    saved: Mapping[str, Tensor]
    inputs: Tensor
    targets: Tensor
    each: float | None = None

    def gradients(self) -> dict[str, Tensor]:
        """Return the weight gradients of the mean loss, by layer; the backward pass runs at a training step's scale."""
        factor = 1.0 if self.each is None else self.each * len(self.inputs)
        embedded = embedded_weights(self.model)
        weights: dict[str, nn.Parameter] = {
            name: layer.weight for name, layer in linear_layers(self.model).items() if layer.weight not in embedded
        }
        grads = torch.autograd.grad(self.model(self.inputs, self.targets) * factor, list(weights.values()))
        return {name: grad / factor for name, grad in zip(weights, grads, strict=True)}

    def noise(self, recipe: Recipe, exact: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the gradients of the model quantized by ``recipe`` minus the ``exact`` ones, float64, by layer."""
        quantize_model(self.model, recipe)
        for name, layer in linear_layers(self.model).items():
            for role, quantizer in layer.quantizers.items() if isinstance(layer, QuantizedLinear) else ():
                history = self.saved.get(f"{name}.quantizers.{role}.history")
                if history is not None:  # of a scale that is remembered or held
                    quantizer.register_buffer("history", history.float())
        self.model.eval()
        noisy = self.gradients()
        unquantize_model(self.model)
        return {name: noisy[name].double() - grad.double() for name, grad in exact.items()}


def gradient_noises(
    cell: Cell, saved: Mapping[str, Tensor], tokens: Path, most: int, *, apart: bool = True
) -> dict[str, GradientNoise]:
    """Return the noise of each linear layer whose weight is not an embedding's, by layer name.

    Args:
        cell: the resolved cell of the run.
        saved: the run's parameters and buffers at one step, by their names in ``model.safetensors``.
        tokens: the folder of the token files.
        most: the largest number of validation tokens; at least one sequence is used.
        apart: whether to measure ``bias`` and ``scatter`` too, which takes as long as the rest.

    The result is empty if nothing is quantized, or if torchao quantizes: its products cannot be quantized in part.
    """
    recipe = recipe_of(cell)
    model, inputs, targets = plain_model(cell, saved, tokens, most)
    recipes = recipe.match(linear_layers(model)).values()
    roles = [role for role in ROLES if any(_quantized(layer, role) for layer in recipes)]
    if not roles or any(layer.torchao for layer in recipes):
        return {}
    sequences = cell.train.batch * cell.train.grad_accumulation
    batch = Batch(model, saved, inputs, targets, cell.train.loss_scale / sequences)
    found = noises(batch, recipe, roles)
    if not apart:
        return found
    parts = bias_and_scatter(batch, only(recipe, roles), sequences)
    return {name: noise._replace(bias=parts[name][0], scatter=parts[name][1]) for name, noise in found.items()}


def noises(batch: Batch, recipe: Recipe, roles: Collection[str]) -> dict[str, GradientNoise]:
    """Return the gradient noise on ``batch`` by layer, with each of ``roles`` quantized alone and all together."""
    exact = batch.gradients()
    by_role = {role: batch.noise(only(recipe, [role]), exact) for role in roles}
    together = batch.noise(only(recipe, roles), exact)
    powers = {role: {name: _squares(t) for name, t in noise.items()} for role, noise in by_role.items()}
    return {
        name: GradientNoise(
            _squares(grad),
            {role: powers[role][name] for role in roles if powers[role][name]},
            _squares(together[name]),
            along=(grad.double() * together[name]).sum().item(),
        )
        for name, grad in exact.items()
    }


def bias_and_scatter(batch: Batch, recipe: Recipe, sequences: int) -> dict[str, tuple[float, float]]:
    """Return ``(bias, scatter)`` by layer: the squared norm of the mean noise, and the mean squared distance from it.

    The batch is cut into K = `PARTS` parts or fewer, each quantized by itself; their noises count as independent draws.
    Let m be the mean of the noises, and s² their summed squared distances from m over K - 1. The bias is estimated by
    ||m||² - s² / K, or 0 where that is negative. The scatter is s², rescaled to batches of ``sequences`` as if it fell
    in proportion to their number. Both are NaN for fewer than two sequences.
    """
    count = min(PARTS, len(batch.inputs))
    total: dict[str, Tensor] = {}
    squares: dict[str, float] = {}
    for x, y in zip(batch.inputs.tensor_split(count), batch.targets.tensor_split(count), strict=True):
        part = batch._replace(inputs=x, targets=y)
        for name, noise in part.noise(recipe, part.gradients()).items():
            total[name] = total.get(name, 0) + noise
            squares[name] = squares.get(name, 0.0) + _squares(noise)
    found = {}
    for name, t in total.items():
        mean = _squares(t / count)
        spread = max(squares[name] - count * mean, 0.0) / (count - 1) if count > 1 else math.nan
        bias = max(mean - spread / count, 0.0) if count > 1 else math.nan
        found[name] = bias, spread * (len(batch.inputs) / count) / sequences
    return found


def only(recipe: Recipe, roles: Collection[str]) -> Recipe:
    """Return ``recipe`` with only the tensors of ``roles`` quantized, and products summed in float32."""
    changes = dict.fromkeys(set(ROLES) - set(roles)) | {"accumulate": "float32", "backend": "emulated"}
    return Recipe(rules=tuple(rule.but(**changes) for rule in recipe.rules))


def _quantized(layer: object, role: str) -> bool:
    tensor = getattr(layer, role)
    return tensor is not None and not tensor.virtual


def _squares(t: Tensor) -> float:
    return t.double().square().sum().item()
