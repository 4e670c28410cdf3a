"""Linear layers: which modules count as one, their quantized and plain forms, and their adapters.

A layer is known if its whole work is one product of its input with one weight, plus a bias: ``nn.Linear``, and the
``Conv1D`` of Hugging Face's transformers, which stores its weight transposed. A subclass or instance of ``nn.Linear``
with another ``forward`` does more work, and a quantized layer in its place would not do that work.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from altgrad.config.models import Lora
from altgrad.config.recipe import LayerRecipe, TensorRecipe
from altgrad.model.quantized.attention import Product, QuantizedProduct
from altgrad.model.quantized.linear import QuantizedLinear, weight_and_bias
from altgrad.model.quantized.quantizer import Quantizer
from altgrad.model.torchao import torchao_linear

#: Layers that compute ``x @ weight + bias`` with ``weight`` (in, out): the name of the class, and that of the attribute
#: with the size of its output. They are known by these names, so that other libraries need not be installed.
TRANSPOSED = {"Conv1D": "nf"}
#: The attributes in which a module keeps hooks on its calls.
HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip
ADAPTER = "lora"  # the name of a layer's adapter among its modules


def _is_stored_transposed(module: nn.Module) -> bool:
    """Return whether the class of ``module`` is in `TRANSPOSED` and its weight has the shape (in, out)."""
    weight = getattr(module, "weight", None)
    outputs = getattr(module, TRANSPOSED.get(type(module).__name__, ""), None)
    return isinstance(weight, Tensor) and weight.ndim == 2 and weight.shape[1] == outputs


def has_own_forward(module: nn.Module) -> bool:
    """Return whether ``module`` is an unquantized ``nn.Linear`` with a ``forward`` of its own."""
    if not isinstance(module, nn.Linear) or layer_recipe(module) is not None:
        return False
    return "forward" in vars(module) or type(module).forward is not nn.Linear.forward


def is_linear(module: nn.Module) -> bool:
    """Return whether ``module`` is a linear layer that a recipe can address, quantized already or not.

    The ``out_proj`` of ``nn.MultiheadAttention`` does not count: the attention reads its weight and never calls it.
    """
    if isinstance(module, NonDynamicallyQuantizableLinear) or has_own_forward(module):
        return False
    return isinstance(module, nn.Linear | QuantizedLinear) or _is_stored_transposed(module)


def is_transposed(layer: nn.Module) -> bool:
    """Return whether a linear layer's weight is stored as (in, out)."""
    return layer.transposed if isinstance(layer, QuantizedLinear) else _is_stored_transposed(layer)


def scales_along(layer: nn.Module) -> dict[str, Any]:
    """Return the option of `operand_scale` for the stored weight: ``{"dim": 0}`` if stored as (in, out), else none.

    ``dim`` is the dimension that the product sums over.
    """
    return {"dim": 0} if is_transposed(layer) else {}


def matrix_of(layer: Any) -> Tensor:
    """Return the weight of a linear layer as (out, in): a transposed view if the layer stores it as (in, out)."""
    weight: Tensor = layer.weight
    return weight.t() if is_transposed(layer) else weight


def linear_layers(model: nn.Module) -> dict[str, Any]:
    """Return dotted name -> linear layer of ``model``, plain, quantized or torchao's, in the order of its modules.

    A layer at several places in the model is listed once, under its first name.
    """
    return {name: module for name, module in model.named_modules() if is_linear(module)}


def attention_products(model: nn.Module) -> dict[str, nn.Module]:
    """Return dotted name -> product of attention in ``model``, plain or quantized, in the order of its modules."""
    return {name: m for name, m in model.named_modules() if isinstance(m, Product | QuantizedProduct)}


def embedded_weights(model: nn.Module) -> set[nn.Parameter]:
    """Return the weights of the embeddings in ``model``.

    A linear layer may share one of them. The lookup is not quantized, and most of the weight's gradient comes from it.
    """
    return {cast("nn.Parameter", module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}


# --- quantized layers -------------------------------------------------------------------------------------------------


def layer_recipe(layer: nn.Module) -> LayerRecipe | None:
    """Return the recipe of a layer that ``quantize_model`` quantized, ``None`` for any other layer."""
    return getattr(layer, "recipe", None)


def quantizer_of(layer: nn.Module, role: str) -> Quantizer | None:
    """Return the quantizer of ``role`` in a layer, ``None`` if not quantized; for a torchao layer a new, equal one."""
    if isinstance(layer, QuantizedLinear):
        return layer.quantizer(role)
    spec = getattr(layer_recipe(layer), role, None)  # torchao's layers do not show their quantizers
    return None if spec is None else Quantizer(spec).to(layer.get_parameter("weight").device)


def virtual_weight(layer: nn.Module) -> TensorRecipe | None:
    """Return the recipe of a layer's virtual weight, which only its optimizer sees; ``None`` for any other layer."""
    return getattr(layer, "virtual_weight", None)


def quantized_layer(layer: nn.Module, recipe: LayerRecipe) -> nn.Module:
    """Return ``layer``, or product of attention, quantized by ``recipe``, with its parameters and hooks."""
    if isinstance(layer, Product):
        return with_hooks_of(layer, QuantizedProduct(recipe, layer.left_amax))
    if recipe.torchao is None:
        return with_hooks_of(layer, QuantizedLinear.from_linear(layer, recipe, transposed=is_transposed(layer)))
    assert isinstance(layer, nn.Linear)  # `matched_layers` refuses others
    return with_hooks_of(layer, torchao_linear(layer, recipe))


def plain_layer(layer: QuantizedLinear | QuantizedProduct | nn.Linear) -> nn.Module:
    """Return an unquantized layer or product that shares the parameters and the hooks of ``layer``."""
    if isinstance(layer, QuantizedProduct):
        return with_hooks_of(layer, Product(layer.left_amax).train(layer.training))
    if isinstance(layer, QuantizedLinear) and layer.replaced:
        plain = layer.replaced[0]
    else:
        fresh = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        plain = with_hooks_of(layer, fresh)
    plain.train(layer.training)
    for name, parameter in zip(("weight", "bias"), weight_and_bias(layer), strict=True):
        plain.register_parameter(name, parameter)
    return plain


def with_hooks_of(layer: nn.Module, replacement: nn.Module) -> nn.Module:
    """Put the hooks on calls of ``layer`` ahead of the hooks of ``replacement``; return ``replacement``.

    Both share the dictionaries of hooks, so a hook's handle removes the hook from both.
    """
    for name in HOOKS:
        hooks = getattr(layer, name)
        hooks.update(getattr(replacement, name))
        setattr(replacement, name, hooks)
    replacement._is_full_backward_hook = layer._is_full_backward_hook
    return replacement


# --- adapters ---------------------------------------------------------------------------------------------------------


class Adapter(nn.Module):
    """LoRA's A (rank, in) and B (out, rank) for one layer, whose output gains ``alpha / rank * (x A^T) B^T``.

    Hu et al. 2021 (arXiv:2106.09685): A is Gaussian and B zero, so that a model begins as it was. The layer's own
    weight is frozen, and quantized by its recipe as in training; its float32 values stay in memory. The added term is
    cast to the dtype of the layer's output.
    """

    def __init__(self, outputs: int, inputs: int, lora: Lora, device: torch.device) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(lora.rank, inputs).mul_(1 / lora.rank).to(device))  # as PEFT draws it
        self.b = nn.Parameter(torch.zeros(outputs, lora.rank, device=device))
        self.scale = lora.alpha / lora.rank

    def add(self, layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        """Return ``output`` (..., out) of ``layer`` plus the adapter's term for ``inputs``, one tensor (..., in)."""
        return output + (self.scale * F.linear(F.linear(inputs[0], self.a), self.b)).to(output.dtype)


def attach(layer: nn.Module, adapter: Adapter) -> None:
    """Make ``layer`` add the output of ``adapter`` to its own output from now on."""
    setattr(layer, ADAPTER, adapter)
    layer.register_forward_hook(adapter.add)


def adapter_of(layer: nn.Module) -> Adapter | None:
    """Return the adapter of a layer, ``None`` if it has none."""
    return cast("Adapter | None", layer._modules.get(ADAPTER))


def add_adapters(model: nn.Module, lora: Lora) -> None:
    """Freeze a quantized `GPT`, except a classifier's head, and attach an adapter to each linear layer of its blocks.

    Dettmers et al. 2023 (arXiv:2305.14314, QLoRA) adapt the same layers. torch's global generator draws A.
    """
    gpt = cast("Any", model)
    for name, parameter in gpt.named_parameters():
        parameter.requires_grad_(bool(gpt.config.labels) and name == "head.weight")
    for layer in list(gpt.blocks.modules()):
        if isinstance(layer, nn.Linear | QuantizedLinear):
            attach(layer, Adapter(layer.out_features, layer.in_features, lora, layer.weight.device))


def adapter_weights(model: nn.Module) -> set[Any]:
    """Return the parameters A and B of all adapters in ``model``."""
    return {p for module in model.modules() if isinstance(module, Adapter) for p in module.parameters()}
