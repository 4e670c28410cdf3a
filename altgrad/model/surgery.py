"""Turning the linear layers of any ``nn.Module`` into quantized ones."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor, nn

from altgrad.config.recipe import LayerRecipe, Recipe, TensorRecipe
from altgrad.formats import Format
from altgrad.model.quantized.linear import QuantizedLinear
from altgrad.model.quantized.weights import WeightsTogether

Model = TypeVar("Model", bound=nn.Module)

TORCHAO_DIVISOR = 16  # of a layer's dimensions: what torch._scaled_mm, and so FP8 hardware, asks for


def linear_layers(model: nn.Module) -> dict[str, nn.Linear | QuantizedLinear]:
    """Return the linear layers of ``model`` by their dotted name, in the order of its modules.

    Those that torchao computes are among them: its class is one of ``nn.Linear``.
    """
    kinds = (nn.Linear, QuantizedLinear)
    return {name: module for name, module in model.named_modules() if isinstance(module, kinds)}


def embedded_weights(model: nn.Module) -> set[nn.Parameter]:
    """Return the weights of the embeddings.

    What a linear layer shares with one of them is looked up unquantized and gets most of its gradient there.
    """
    return {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}


def layer_recipe(layer: nn.Module) -> LayerRecipe | None:
    """Return how a layer that :func:`quantize_model` made is quantized, ``None`` for any other layer."""
    return getattr(layer, "recipe", None)


def virtual_weight(layer: nn.Module) -> TensorRecipe | None:
    """Return the format whose grid the optimizer of a layer's weight is to see, where no product sees it."""
    return getattr(layer, "virtual_weight", None)


def matched_layers(model: nn.Module, recipe: Recipe) -> dict[str, LayerRecipe]:
    """Return the recipe of each layer of ``model`` that ``recipe`` quantizes or makes virtual, by its dotted name.

    Raises ``ValueError`` when a pattern matches no layer, for a torchao layer of a size that torchao's
    products cannot take (they are refused on every device, so that a cell means the same on each), and when the
    installed torchao quantizes otherwise than its recipe says.
    """
    layers = linear_layers(model)
    matched = recipe.match(layers)
    for name, found in matched.items():
        rows, columns = layers[name].weight.shape
        if found.torchao is not None and (rows % TORCHAO_DIVISOR or columns % TORCHAO_DIVISOR):
            raise ValueError(
                f"layer {name} is {rows} x {columns}, and torchao's recipes need both to be divisible by "
                f"{TORCHAO_DIVISOR}; leave the layer out of the torchao rule or change its size"
            )
    if any(found.torchao is not None for found in matched.values()):
        from altgrad.model.torchao import require_as_stated  # which imports torchao

        for found in matched.values():
            require_as_stated(found)
    return matched


def quantize_model(model: Model, recipe: Recipe) -> Model:
    """Replace the linear layers that ``recipe`` matches, in place, and return ``model``.

    Parameters are shared with the layers that are replaced, so weights, ties between them (an
    embedding and a head) and optimizers that already hold them stay valid. Embeddings, norms and
    every other module are left alone, and so is a layer whose weight is virtual, but for a note that
    :func:`virtual_weight` returns. A torchao layer is made for the device that it is on (see
    :func:`altgrad.model.torchao.torchao_linear`). Raises ``ValueError`` as :func:`matched_layers`
    does, and when the model is already quantized.
    """
    layers = linear_layers(model)
    done = [name for name, layer in layers.items() if layer_recipe(layer) or virtual_weight(layer)]
    if done:
        raise ValueError(f"the model is already quantized (layer {done[0]}); quantize a fresh one")
    for name, found in matched_layers(model, recipe).items():
        if not name:
            raise ValueError("the model is itself a linear layer; put it in a module to quantize it")
        if found.virtual_weight:
            layers[name].virtual_weight = found.virtual_weight
            continue
        parent, _, child = name.rpartition(".")
        quantized = _quantized(layers[name], found)
        setattr(model.get_submodule(parent), child, quantized.train(layers[name].training))
    _share_constants(model)
    model.weights_together = WeightsTogether(model)
    return model


def unquantize_model(model: Model) -> Model:
    """Undo :func:`quantize_model`, in place, with plain layers on the same parameters; return ``model``."""
    for name, layer in linear_layers(model).items():
        if layer_recipe(layer) is not None:
            linear = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
            linear.weight, linear.bias = layer.weight, layer.bias
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, linear)
        elif virtual_weight(layer):
            del layer.virtual_weight
    if hasattr(model, "weights_together"):
        model.weights_together.stop()
    return model


def _share_constants(model: nn.Module) -> None:
    """Let quantizers of one role and format have the same constants, which a compiled graph then takes in once."""
    shared: dict[tuple[str, Format], Tensor] = {}
    for layer in model.modules():
        if isinstance(layer, QuantizedLinear):
            for role, quantizer in layer.quantizers.items():
                quantizer.constants = shared.setdefault((role, quantizer.recipe.format), quantizer.constants)


def _quantized(layer: nn.Linear, recipe: LayerRecipe) -> nn.Module:
    if recipe.torchao is None:
        return QuantizedLinear.from_linear(layer, recipe)
    from altgrad.model.torchao import torchao_linear  # which imports torchao

    return torchao_linear(layer, recipe)
