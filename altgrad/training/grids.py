"""The grids of a model's quantized weights, for its optimizer and for what is recorded about their updates."""

from __future__ import annotations

from torch import nn

from altgrad.model import QuantizedLinear, embedded_weights, layer_recipe, linear_layers
from altgrad.model.baselines import torchao_quantizer
from altgrad.model.quantizer import Quantizer
from altgrad.optim import WeightGrid


def quantizer_of(layer: nn.Module, role: str) -> Quantizer | None:
    """Return what quantizes ``role`` in a layer, or does the same as what does; None where nothing is quantized."""
    if isinstance(layer, QuantizedLinear) and role in layer.quantizers:
        return layer.quantizers[role]
    recipe = layer_recipe(layer)
    if recipe is not None and recipe.torchao is not None:  # quantizes by itself, and shows nothing
        return torchao_quantizer(recipe, role, layer.weight.device)
    return None


def weight_grids(model: nn.Module, *, on_grid: bool) -> dict[nn.Parameter, WeightGrid]:
    """Return the grid of every quantized weight, in the order of the layers.

    A weight that an embedding shares is left out. With ``on_grid`` the layers take their scales from the grids, whose
    amax the optimizer sets from then on; raises ``ValueError`` for a layer that cannot.
    """
    embedded = embedded_weights(model)
    grids = {}
    for name, layer in linear_layers(model).items():
        quantizer = quantizer_of(layer, "weight")
        if quantizer is None or layer.weight in embedded:
            continue
        if on_grid and not isinstance(layer, QuantizedLinear):
            raise ValueError(f"layer {name} is quantized by torchao, which cannot keep weights on the grid")
        grids[layer.weight] = WeightGrid(
            quantizer.recipe.format, quantizer.scaling.options, held=quantizer.hold() if on_grid else None,
            remembered=quantizer.remembered_amax, device=layer.weight.device,
        )  # fmt: skip
    return grids
