"""A linear layer's quantized counterpart and its plain one, on the same parameters and with the same hooks."""

from __future__ import annotations

from torch import nn

from altgrad.config.recipe import LayerRecipe
from altgrad.model.layers import is_transposed
from altgrad.model.quantized.linear import QuantizedLinear, weight_and_bias

#: Where a module keeps what others have hung on its calls.
HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip


def quantized_layer(layer: nn.Module, recipe: LayerRecipe) -> nn.Module:
    """Return a layer on the parameters of ``layer`` that is quantized by ``recipe``."""
    if recipe.torchao is None:
        return _with_hooks_of(layer, QuantizedLinear.from_linear(layer, recipe, transposed=is_transposed(layer)))
    from altgrad.model.torchao import torchao_linear  # which imports torchao

    assert isinstance(layer, nn.Linear)  # as `matched_layers` has seen to
    return _with_hooks_of(layer, torchao_linear(layer, recipe))


def _with_hooks_of(layer: nn.Module, quantized: nn.Module) -> nn.Module:
    """Return ``quantized`` with the hooks on calls of ``layer``, ahead of its own.

    The two share them, so that a hook's handle removes it from both.
    """
    for name in HOOKS:
        kept = getattr(layer, name)
        kept.update(getattr(quantized, name))
        setattr(quantized, name, kept)
    quantized._is_full_backward_hook = layer._is_full_backward_hook
    return quantized


def plain_layer(layer: QuantizedLinear | nn.Linear) -> nn.Module:
    """Return an unquantized layer on the parameters of ``layer``."""
    if isinstance(layer, QuantizedLinear) and layer.replaced:
        plain = layer.replaced[0]
    else:
        made = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        plain = _with_hooks_of(layer, made)
    plain.train(layer.training)
    for name, parameter in zip(("weight", "bias"), weight_and_bias(layer), strict=True):
        plain.register_parameter(name, parameter)
    return plain
