"""Which modules are linear layers, and what was done to them.

A layer is known if its whole work is one product of its input with one weight, plus a bias: ``nn.Linear``, and the
``Conv1D`` of Hugging Face's transformers, which is one whose weight is stored transposed. One whose ``forward`` is not
that of ``nn.Linear``, a subclass's or its own, does something else, which a quantized layer in its place would lose.
This is the one place that knows them.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from altgrad.config.recipe import LayerRecipe, TensorRecipe
from altgrad.model.quantized.linear import QuantizedLinear
from altgrad.model.quantized.quantizer import Quantizer

#: Layers that compute ``x @ weight + bias`` with ``weight`` (in, out): the name of the class, and that of the attribute
#: with the size of its output. Told by these, so that no library of others need be installed.
TRANSPOSED = {"Conv1D": "nf"}


def _is_stored_transposed(module: nn.Module) -> bool:
    """Return whether ``module`` is one of `TRANSPOSED`."""
    weight = getattr(module, "weight", None)
    outputs = getattr(module, TRANSPOSED.get(type(module).__name__, ""), None)
    return isinstance(weight, Tensor) and weight.ndim == 2 and weight.shape[1] == outputs


def has_own_forward(module: nn.Module) -> bool:
    """Return whether ``module`` is an ``nn.Linear`` that nobody quantized and that computes something else."""
    if not isinstance(module, nn.Linear) or layer_recipe(module) is not None:
        return False
    return "forward" in vars(module) or type(module).forward is not nn.Linear.forward


def is_linear(module: nn.Module) -> bool:
    """Return whether ``module`` is a linear layer that a recipe can address, quantized already or not.

    The one inside ``nn.MultiheadAttention`` is none: it is never called, its weight is read by the module around it.
    """
    if isinstance(module, NonDynamicallyQuantizableLinear) or has_own_forward(module):
        return False
    return isinstance(module, nn.Linear | QuantizedLinear) or _is_stored_transposed(module)


def is_transposed(layer: nn.Module) -> bool:
    """Return whether a linear layer's weight is stored as (in, out)."""
    return layer.transposed if isinstance(layer, QuantizedLinear) else _is_stored_transposed(layer)


def scales_along(layer: nn.Module) -> dict[str, Any]:
    """Return the option of `operand_scale` for the weight as it is stored: scales go along the product's sum."""
    return {"dim": 0} if is_transposed(layer) else {}


def matrix_of(layer: Any) -> Tensor:
    """Return the weight of a linear layer as (out, in), a view where it is stored otherwise."""
    weight: Tensor = layer.weight
    return weight.t() if is_transposed(layer) else weight


def linear_layers(model: nn.Module) -> dict[str, Any]:
    """Return the linear layers of ``model`` by their dotted name, in the order of its modules.

    Those that torchao computes are among them: its class is one of ``nn.Linear``. A layer that has several places
    in the model is there once, under its first name.
    """
    return {name: module for name, module in model.named_modules() if is_linear(module)}


def embedded_weights(model: nn.Module) -> set[nn.Parameter]:
    """Return the weights of the embeddings.

    What a linear layer shares with one of them is looked up unquantized and gets most of its gradient there.
    """
    return {cast("nn.Parameter", module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}


def layer_recipe(layer: nn.Module) -> LayerRecipe | None:
    """Return how a layer that ``quantize_model`` made is quantized, ``None`` for any other layer."""
    return getattr(layer, "recipe", None)


def quantizer_of(layer: nn.Module, role: str) -> Quantizer | None:
    """Return what quantizes ``role`` in a layer, or does the same as what does; None where nothing is quantized."""
    if isinstance(layer, QuantizedLinear):
        return layer.quantizer(role)
    spec = getattr(layer_recipe(layer), role, None)  # of torchao, which quantizes by itself and shows nothing
    return None if spec is None else Quantizer(spec).to(layer.get_parameter("weight").device)


def virtual_weight(layer: nn.Module) -> TensorRecipe | None:
    """Return the format whose quantization grid the optimizer of a layer's weight sees, where no product does."""
    return getattr(layer, "virtual_weight", None)
