"""Turning the linear layers of any ``nn.Module`` into quantized ones."""

from __future__ import annotations

from torch import nn

from altgrad.model.linear import QuantizedLinear
from altgrad.model.recipe import Recipe


def linear_layers(model: nn.Module) -> dict[str, nn.Linear | QuantizedLinear]:
    """Return the linear layers of ``model`` by their dotted name, in the order of its modules."""
    kinds = (nn.Linear, QuantizedLinear)
    return {name: module for name, module in model.named_modules() if isinstance(module, kinds)}


def quantize_model(model: nn.Module, recipe: Recipe) -> nn.Module:
    """Replace the linear layers that ``recipe`` matches, in place, and return ``model``.

    Parameters are shared with the layers that are replaced, so weights, ties between them (an
    embedding and a head) and optimizers that already hold them stay valid. Embeddings, norms and
    every other module are left alone. Raises ``ValueError`` when a pattern matches no layer, and
    when the model is already quantized.
    """
    layers = linear_layers(model)
    done = [name for name, layer in layers.items() if isinstance(layer, QuantizedLinear)]
    if done:
        raise ValueError(f"the model is already quantized (layer {done[0]}); quantize a fresh one")
    for name, layer_recipe in recipe.match(layers).items():
        if not name:
            raise ValueError("the model is itself a linear layer; put it in a module to quantize it")
        parent, _, child = name.rpartition(".")
        quantized = QuantizedLinear.from_linear(layers[name], layer_recipe)
        setattr(model.get_submodule(parent), child, quantized.train(layers[name].training))
    return model
