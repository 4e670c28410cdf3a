"""The noise in each layer's weight gradient, by its cause: quantized weights, inputs or incoming gradients.

The gradient of one batch at a run's weights is taken five times, in float32 beside the quantization: with nothing
quantized, with only the weights, only the inputs or only the incoming gradients of all layers, and with all three. The
differences from the first are the noise of each cause and of all together. None includes the rounding to bfloat16,
which an unquantized bf16 run has too. The loss is scaled so that incoming gradients are as large as in a step, since
powers of two and remembered scales depend on their size.

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
    """Squared Frobenius norms of a layer's weight gradient, ``signal``, and of the noise in it.

    ``causes`` has the noise of each quantized role alone. ``together`` is the noise of all roles at once, and ``along``
    the inner product of the gradient with it. ``bias`` is the part of ``together`` that all batches share, ``scatter``
    the part that differs between batches of training's size; both are NaN from one sequence.
    """

    signal: float
    causes: dict[str, float]
    together: float
    along: float
    bias: float = math.nan
    scatter: float = math.nan


class Batch(NamedTuple):
    """A batch (n, length) on which gradients of an unquantized ``model`` are taken.

    ``saved`` has the amax histories of the run's quantizers. ``each`` is the weight of a sequence's mean loss in the
    loss of a step, by default 1 / n.
    """

    model: GPT
    saved: Mapping[str, Tensor]
    inputs: Tensor
    targets: Tensor
    each: float | None = None

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the mean loss by layer, taken through the loss that a step scales."""
        factor = 1.0 if self.each is None else self.each * len(self.inputs)
        embedded = embedded_weights(self.model)
        weights: dict[str, nn.Parameter] = {
            name: layer.weight for name, layer in linear_layers(self.model).items() if layer.weight not in embedded
        }
        grads = torch.autograd.grad(self.model(self.inputs, self.targets) * factor, list(weights.values()))
        return {name: grad / factor for name, grad in zip(weights, grads, strict=True)}

    def noise(self, recipe: Recipe, exact: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the float64 difference that quantizing by ``recipe`` makes to each of the ``exact`` gradients."""
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
    """Return the noise of each linear layer whose weight is not an embedding's, by name.

    Args:
        cell: resolved.
        saved: its parameters and buffers at some step, as ``model.safetensors`` names them.
        tokens: the folder of the token files.
        most: validation tokens; at least one sequence is taken.
        apart: whether to tell bias and scatter apart, which takes as long as the rest.

    Empty where nothing is quantized, and where torchao quantizes, whose products cannot be quantized in part.
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
    """Return the noise of the gradients on ``batch`` by layer, of each role alone and of all together."""
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
    """Return by layer the squared norm of the noise's mean over batches, and the mean squared distance from it.

    The batch is cut into `PARTS` or fewer, each quantized by itself; their noises count as independent draws. With m
    their mean and s² the squared distance from it, over K - 1, the squared norm of the true mean is estimated without
    bias by ||m||² - s² / K, and by 0 where that is negative. The distance is that of batches of ``sequences``, as if it
    fell with their number. NaN for fewer than two sequences.
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
    """Return ``recipe`` with only the tensors of ``roles`` quantized, and sums in float32."""
    changes = dict.fromkeys(set(ROLES) - set(roles)) | {"accumulate": "float32", "backend": "emulated"}
    return Recipe(rules=tuple(rule.but(**changes) for rule in recipe.rules))


def _quantized(layer: object, role: str) -> bool:
    tensor = getattr(layer, role)
    return tensor is not None and not tensor.virtual


def _squares(t: Tensor) -> float:
    return t.double().square().sum().item()
