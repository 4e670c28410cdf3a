"""The transformer, the quantized linear layer, and recipes that say which layer is quantized how."""

from altgrad.config.recipe import LayerRecipe, Recipe, Rule, TensorRecipe
from altgrad.model.account import Account, account
from altgrad.model.experts import quantizable_layers
from altgrad.model.gpt import GPT, GPTConfig
from altgrad.model.layers import embedded_weights, layer_recipe, linear_layers, matrix_of, virtual_weight
from altgrad.model.published import load_published, save_published
from altgrad.model.quantized.linear import QuantizedLinear
from altgrad.model.surgery import matched_layers, quantize_model, requantize_model, unquantize_model

__all__ = [
    "GPT",
    "Account",
    "GPTConfig",
    "LayerRecipe",
    "QuantizedLinear",
    "Recipe",
    "Rule",
    "TensorRecipe",
    "account",
    "embedded_weights",
    "layer_recipe",
    "linear_layers",
    "load_published",
    "matched_layers",
    "matrix_of",
    "quantizable_layers",
    "quantize_model",
    "requantize_model",
    "save_published",
    "unquantize_model",
    "virtual_weight",
]  # fmt: skip
