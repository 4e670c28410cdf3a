"""The transformer, the quantized linear layer, and recipes that say which layer is quantized how."""

from altgrad.config.recipe import LayerRecipe, Recipe, Rule, TensorRecipe
from altgrad.model.gpt import GPT, GPTConfig
from altgrad.model.quantized.linear import QuantizedLinear
from altgrad.model.surgery import (
    embedded_weights,
    layer_recipe,
    linear_layers,
    matched_layers,
    quantize_model,
    unquantize_model,
    virtual_weight,
)

__all__ = [
    "GPT", "GPTConfig", "LayerRecipe", "QuantizedLinear", "Recipe", "Rule", "TensorRecipe",
    "embedded_weights", "layer_recipe", "linear_layers", "matched_layers", "quantize_model",
    "unquantize_model", "virtual_weight",
]  # fmt: skip
