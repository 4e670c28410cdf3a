"""What quantization does to a layer's weight gradient, and how the gradient correlates with the quantization grid.

Metrics on one fixed batch compare the gradient of the quantized path with float32's and with the weights' stiffness.
They also count units whose gradient is zero. Metrics on `diagnose.noise_tokens` compare the size of the gradient with
its quantization noise, and split the noise by the tensor that causes it.

Chmiel et al. 2025 (arXiv 2505.19115) find that quantized training becomes less effective once the norm of the gradient
falls below about sqrt(3) times the norm of its quantization noise. They mean the expected gradient. The gradient of a
batch, measured here, is larger by the noise of the batch. So a ratio above sqrt(3) is necessary, not sufficient.

**Noise by its cause** (`gradient_noises`). The gradient of one batch at a run's weights is computed five times, in
float32 apart from the quantization: with nothing quantized, with only the weights, only the inputs or only the incoming
gradients of all layers, and with all three. The differences from the unquantized gradient are the noise of each cause
and of all together. The rounding to bfloat16 is left out, because an unquantized bf16 run has it too. The loss is
scaled so that incoming gradients are as large as in a step, since power-of-two scales and remembered scales depend on
their size.

Noise that is the same in every batch is bias, and training follows it. Noise that differs from batch to batch averages
out over steps. The batch is cut into parts to tell the two apart.
"""

import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from altgrad.config import Cell
from altgrad.config.recipe import ROLES, Recipe
from altgrad.diagnostics.analysis import (
    GEOMETRY,
    GRADIENTS,
    Analysis,
    GradientNoise,
    LayerView,
    cosine,
    needed,
    ratio_db,
    shuffled,
    spearman,
)
from altgrad.diagnostics.saved import plain_model, restore_histories
from altgrad.metrics import Limit, mean
from altgrad.model import GPT, embedded_weights, linear_layers, quantize_model, unquantize_model
from altgrad.model.from_cell import recipe_of

PARTS = 16  # of the batch, to tell bias from scatter
WITH_STIFFNESS = (*GEOMETRY, "grad_quantized")


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
        restore_histories(self.model, self.saved)
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


# --- metrics ---------------------------------------------------------------------------------------


def grad_snr_db(view: LayerView) -> float | None:
    """Return the SNR in dB of the quantized gradient; ``None`` if it equals float32's or float32's is zero."""
    exact = needed(view.grad_float)
    return ratio_db(exact, needed(view.grad_quantized).double() - exact.double())


def grad_cosine(view: LayerView) -> float | None:
    """Return the cosine of the quantized and the float32 gradient; ``None`` when one of them is zero."""
    return cosine(needed(view.grad_quantized), needed(view.grad_float))


def gradient_to_noise(view: LayerView) -> float | None:
    """Return the norm of the gradient over that of its noise; ``None`` where quantization changes nothing."""
    noise = needed(view.noise)
    return math.sqrt(noise.signal / noise.together) if noise.together else None


def cosine_exact(view: LayerView) -> float | None:
    """Return the cosine of the gradients with and without noise; ``None`` where they are equal or one is zero."""
    noise = needed(view.noise)
    quantized = noise.signal + 2 * noise.along + noise.together  # squared norm of the gradient with its noise
    if not noise.together or not noise.signal or quantized <= 0:
        return None
    return (noise.signal + noise.along) / math.sqrt(noise.signal * quantized)


def noise_additivity(view: LayerView) -> float | None:
    """Return the noise power of all roles together over the sum of each alone; ``None`` where that sum is zero."""
    noise = needed(view.noise)
    alone = sum(noise.causes.values())
    return noise.together / alone if alone else None


def noise_bias(view: LayerView) -> float | None:
    """Return the bias as a share of bias + scatter; ``None`` without noise, or where bias was not measured."""
    noise = needed(view.noise)
    power = noise.bias + noise.scatter
    return noise.bias / power if power > 0 else None  # None for NaN too: bias and scatter were not measured


def _share(role: str) -> Callable[[LayerView], float | None]:
    def compute(view: LayerView) -> float | None:
        causes = needed(view.noise).causes
        alone = sum(causes.values())
        return causes.get(role, 0.0) / alone if alone else None

    compute.__name__ = f"noise_from_{role}"
    return compute


def gradient_stiffness_rho(view: LayerView) -> float | None:
    """Return the rank correlation of the gradient's size and the stiffness; ``None`` where either is constant."""
    return spearman(needed(view.grad_quantized).abs(), view.stiffness)


def descent_share(view: LayerView) -> float | None:
    """Return the loss descent of a step along -S g over that of a step of equal length along -g, to first order.

    To first order a step d changes the loss by <g, d>. For d = -r g/|g| that is -r |g|, for d = -r S g/|S g| it is
    -r <g, S g>/|S g|; their ratio <g, S g>/(|g| |S g|) is the cosine of the two directions, 1 for a constant S.
    ``None`` for a gradient of zero.
    """
    grad = needed(view.grad_quantized)
    return cosine(grad, view.stiffness * grad)


def descent_share_shuffled(view: LayerView) -> float | None:
    """Return :func:`descent_share` with S shuffled over the weights, its control. ``None`` for a zero gradient."""
    grad = needed(view.grad_quantized)
    return cosine(grad, shuffled(view.stiffness) * grad)


def dead_unit_frac(view: LayerView) -> float:
    """Return the share of output units (rows of the weight) whose gradient is zero throughout."""
    return (needed(view.grad_quantized) == 0).all(dim=1).double().mean().item()


ANALYSES = (
    Analysis(grad_snr_db, GRADIENTS),
    Analysis(grad_cosine, GRADIENTS),
    Analysis(gradient_to_noise, ("noise",)),
    Analysis(cosine_exact, ("noise",)),
    *(Analysis(_share(role), ("noise",)) for role in ROLES),
    Analysis.own(
        noise_additivity, ("noise",), "ratio",
        "Power of the gradient's quantization noise with all tensors quantized, over the sum of the powers with "
        "one kind alone: 1 where the three add up like independent errors.",
        offline="weight_grad", summary=mean, title="noise of all over the sum of each",
    ),
    Analysis.own(
        noise_bias, ("noise",), "share of noise power",
        "Share of the gradient's quantization noise that every batch has, so that it does not average out over "
        "steps: the squared norm of the noise's mean over batches, as a share of that plus the mean squared "
        "distance from it of batches of training's size. Estimated from 16 parts of `diagnose.noise_tokens`.",
        offline="weight_grad", summary=mean, title="share of the noise that is bias",
    ),
    Analysis.own(
        gradient_stiffness_rho, WITH_STIFFNESS, "rank correlation",
        "Spearman's correlation of |ĝ| and S over a layer's weights, ĝ the weight gradient through the quantized "
        "path on one fixed batch and S the stiffness: 0 where the gradient does not know of the quantization grid.",
        offline="weight_grad", summary=mean, title="size of the gradient with S, rank correlation",
    ),
    Analysis.own(
        descent_share, WITH_STIFFNESS, "ratio",
        "First-order descent of the loss along S·ĝ over that along ĝ, by steps of equal length: "
        "⟨ĝ, S·ĝ⟩ / (‖ĝ‖ ‖S·ĝ‖).",
        offline="weight_grad", summary=mean, title="descent along S·g over that along g",
    ),
    Analysis.own(
        descent_share_shuffled, WITH_STIFFNESS, "ratio",
        "The same with S shuffled among the weights of its layer: the control.",
        offline="weight_grad", summary=mean, title="the same, S shuffled",
    ),
    Analysis.own(
        dead_unit_frac, ("grad_quantized",), "share of units",
        "Share of a layer's output units whose row of the weight gradient, through the quantized path on one fixed "
        "batch, is zero throughout.",
        offline="weight_grad", summary=mean, limit=Limit(above=True, value=0.2), title="dead units",
    ),
)  # fmt: skip
