"""What code around quantized layers does with them by itself, and what it has to be told.

torch's encoder layers evaluate by one operator that reads the weights of their layers, past what those layers compute.
transformers resizes a head that is an ``nn.Linear``, into a new ``nn.Linear``.
"""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from altgrad.model.counterparts import plain_layer, quantized_layer
from altgrad.model.layers import layer_recipe, virtual_weight
from altgrad.model.quantized.linear import QuantizedLinear

#: The attribute of each class that switches its fast path off, and the value that does. An encoder's own makes nested
#: tensors, which the fast path of its layers alone takes.
FAST_PATHS: dict[type[nn.Module], tuple[str, Any]] = {
    nn.TransformerEncoderLayer: ("activation_relu_or_gelu", 0), nn.TransformerEncoder: ("use_nested_tensor", False),
}  # fmt: skip
BEFORE, RESIZE = "fast_path_of_plain_layers", "resize_token_embeddings"


def settle(model: nn.Module) -> None:
    """Tell the modules of ``model`` that layers in them are quantized now."""
    for module in model.modules():
        for kind, (name, off) in FAST_PATHS.items():
            if isinstance(module, kind) and hasattr(module, name) and _has_quantized(module):
                vars(module).setdefault(BEFORE, getattr(module, name))
                setattr(module, name, off)
        if hasattr(type(module), RESIZE) and _head_of(module) is not None:
            setattr(module, RESIZE, ResizeTokenEmbeddings(module))


def unsettle(model: nn.Module) -> None:
    """Undo `settle`."""
    for module in model.modules():
        for kind, (name, _) in FAST_PATHS.items():
            if isinstance(module, kind) and BEFORE in vars(module):
                setattr(module, name, vars(module).pop(BEFORE))
        if isinstance(vars(module).get(RESIZE), ResizeTokenEmbeddings):
            delattr(module, RESIZE)


class ResizeTokenEmbeddings:
    """``resize_token_embeddings`` of a model of transformers, whose head stays as quantized as it is."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Resize by the method of the model's class, with a plain head in place of the quantized one meanwhile."""
        head, method = _head_of(self.model), getattr(type(self.model), RESIZE)
        if head is None:
            return method(self.model, *arguments, **options)
        self.model.set_output_embeddings(plain_layer(head) if layer_recipe(head) else head)
        try:
            return method(self.model, *arguments, **options)
        finally:
            self.model.set_output_embeddings(_resized(head, self.model.get_output_embeddings()))


def _resized(head: Any, plain: Any) -> nn.Module:
    """Return ``head`` with the parameters of ``plain``, which may be those that it has."""
    recipe = layer_recipe(head)
    if recipe is None:
        plain.virtual_weight = virtual_weight(head)
        return cast("nn.Module", plain)
    if isinstance(head, QuantizedLinear):
        if plain not in head.replaced:
            head.weight, head.bias, head.replaced = plain.weight, plain.bias, ()
        return head
    return quantized_layer(plain, recipe).train(head.training)


def _has_quantized(module: nn.Module) -> bool:
    return any(layer_recipe(child) is not None for child in module.modules())


def _head_of(model: Any) -> Any:
    """Return the output embeddings of a model of transformers if they were quantized, else ``None``."""
    head = model.get_output_embeddings()
    known = isinstance(head, nn.Linear | QuantizedLinear)
    return head if known and (layer_recipe(head) or virtual_weight(head)) else None
