"""``quantize_model``, ``unquantize_model`` and ``requantize_model``, for any ``nn.Module``.

Two libraries have code around layers that must know of quantized ones. torch's encoder layers evaluate by one operator
that reads their layers' weights, past what those layers compute. transformers resizes a head that is an ``nn.Linear``,
into a new ``nn.Linear``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from altgrad.config.recipe import LayerRecipe, Recipe
from altgrad.formats import Format
from altgrad.model.account import account
from altgrad.model.layers import (
    is_transposed,
    layer_recipe,
    linear_layers,
    plain_layer,
    quantized_layer,
    virtual_weight,
)
from altgrad.model.quantized.data_parallel import (
    ByCodes,
    is_sharded,
    require_codes_suffice,
    require_resharding,
    share_rows,
)
from altgrad.model.quantized.linear import QuantizedLinear
from altgrad.model.quantized.quantizer import Quantizer
from altgrad.model.torchao import require_as_stated

Model = TypeVar("Model", bound=nn.Module)

TORCHAO_DIVISOR = 16  # of a layer's dimensions: torch._scaled_mm and FP8 hardware need it
EVERY_LAYER = "*"  # the pattern of all layers
MOST_STREAMS = 1 << 20  # of a model
FIRST_STREAM = 1 << 31  # of an operand's random numbers: optimizers number a model's parameters, from 0
MOST = 0.5  # of the weights that take part in products
#: Each class with a fast path: the attribute that switches it off, and the value that does. An encoder's own path makes
#: nested tensors, which only the fast path of its layers takes.
FAST_PATHS: dict[type[nn.Module], tuple[str, Any]] = {
    nn.TransformerEncoderLayer: ("activation_relu_or_gelu", 0), nn.TransformerEncoder: ("use_nested_tensor", False),
}  # fmt: skip
BEFORE, RESIZE = "fast_path_of_plain_layers", "resize_token_embeddings"


def matched_layers(model: nn.Module, recipe: Recipe) -> dict[str, LayerRecipe]:
    """Return the recipe of each layer of ``model`` that ``recipe`` quantizes or makes virtual, by dotted name.

    Raises ``TypeError`` if ``recipe`` is none, and ``ValueError``

    - when a pattern matches no layer, or ``*`` leaves out most of the weights that take part in products;
    - for a layer that torchao cannot take, a ``Conv1D`` or one of a size that its products do not have, on every device
      alike, so that a cell means the same on each;
    - when the installed torchao quantizes in another way than its recipe says.
    """
    if not isinstance(recipe, Recipe):
        raise TypeError(f"expected a Recipe, such as Recipe.uniform('E4M3'), got {recipe!r}")
    layers = linear_layers(model)
    if any(rule.layers == EVERY_LAYER and rule.layer.quantizes for rule in recipe.rules):
        _require_no_adapters(model)
        _require_most(model)
    matched = recipe.match(layers)
    for name, spec in matched.items():
        if is_sharded(layers[name].weight):
            raise ValueError(
                f"the weight of layer {name} is split over processes already: quantize the model first, and shard it "
                "then by fully_shard"
            )
        if spec.torchao is None:
            continue
        if is_transposed(layers[name]):
            kind = type(layers[name]).__name__
            raise ValueError(f"layer {name} is a {kind}, which torchao does not take; leave it out of the torchao rule")
        rows, columns = layers[name].weight.shape
        if rows % TORCHAO_DIVISOR or columns % TORCHAO_DIVISOR:
            raise ValueError(
                f"layer {name} is {rows} x {columns}, and torchao's recipes need both to be divisible by "
                f"{TORCHAO_DIVISOR}; leave the layer out of the torchao rule or change its size"
            )
    for spec in matched.values():
        require_as_stated(spec)
    return matched


def quantize_model(
    model: Model, recipe: Recipe, *, seed: int = 0, sync_amax: bool = False, gather_codes: bool = False,
    verbose: bool = False,
) -> Model:  # fmt: skip
    """Replace the linear layers that ``recipe`` matches, in place, and return ``model``.

    Parameters, their ties (an embedding and a head), optimizers that hold them, and hooks on the layers' calls stay
    valid. A layer that has several places in the model is replaced in each. Other modules do not change. A layer with a
    virtual weight is only marked, for :func:`virtual_weight`. A torchao layer is made for the device that it is on (see
    :func:`altgrad.model.torchao.torchao_linear`).

    Args:
        seed: below 2^32, of stochastic rounding (``rounding: stochastic``). Every tensor of every layer has random
            numbers of its own; those of inputs and gradients differ between processes.
        sync_amax: for processes that share a batch in equal parts, by DistributedDataParallel or fully_shard. Inputs
            and gradients have the scales of the whole batch, for one message per tensor. Quantize first, shard then.
        gather_codes: have fully_shard gather weights as codes, a byte per element, and their scales. Products have the
            same bits. A process keeps its part of the master weights, and only codes of a whole weight. A weight that
            another module reads too, such as an embedding, is gathered as it is.
        verbose: print the :func:`altgrad.model.account` of the model.

    Warns of weights that the pattern ``*`` leaves out, in modules whose products are not known. Raises ``ValueError``
    as :func:`matched_layers` does, and when the model is already quantized.
    """
    layers = linear_layers(model)
    done = [name for name, layer in layers.items() if layer_recipe(layer) or virtual_weight(layer)]
    if done:
        raise ValueError(f"the model is already quantized (layer {done[0]}); quantize a fresh one")
    if sync_amax and not dist.is_initialized():
        raise ValueError("sync_amax needs torch.distributed.init_process_group before the model is quantized")
    replaced: dict[nn.Module, nn.Module] = {}
    for name, spec in matched_layers(model, recipe).items():
        if not name:
            raise ValueError("the model is itself a linear layer; put it in a module to quantize it")
        if gather_codes:
            require_codes_suffice(name, spec)
        if sync_amax and spec.grad is not None and spec.grad.rounding == "MS-EDEN":
            raise ValueError("sync_amax has no MS-EDEN, whose scales are of what one process sees; leave sync_amax out")
        if spec.virtual_weight:
            layers[name].virtual_weight = spec.virtual_weight
        else:
            replaced[layers[name]] = quantized_layer(layers[name], spec).train(layers[name].training)
    _replace(model, replaced)
    _share_constants(model)
    set_streams(model, seed)
    if sync_amax:
        share_rows(model, dist.get_world_size())
    if gather_codes:
        _gather_codes(model)
    _adapt_surroundings(model)
    if verbose:
        print(account(model))
    return model


def unquantize_model(model: Model) -> Model:
    """Undo :func:`quantize_model`, in place, with plain layers on the same parameters; return ``model``."""
    replaced: dict[nn.Module, nn.Module] = {}
    for layer in linear_layers(model).values():
        if layer_recipe(layer) is not None:
            if isinstance(layer.weight, ByCodes):
                torch.utils.swap_tensors(layer.weight, nn.Parameter(layer.weight.master))
            replaced[layer] = plain_layer(layer)
        elif virtual_weight(layer):
            del layer.virtual_weight
    _replace(model, replaced)
    for module in model.modules():  # undo `_adapt_surroundings`
        for kind, (name, _) in FAST_PATHS.items():
            if isinstance(module, kind) and BEFORE in vars(module):
                setattr(module, name, vars(module).pop(BEFORE))
        if isinstance(vars(module).get(RESIZE), ResizeTokenEmbeddings):
            delattr(module, RESIZE)
    for key, hook in list(model._forward_pre_hooks.items()):
        if hook is require_resharding:
            del model._forward_pre_hooks[key]
    return model


def requantize_model(model: Model, recipe: Recipe, *, seed: int = 0, change: int = 1) -> Model:
    """Quantize ``model``, which may be plain, by another recipe from now on, in place; return it.

    Parameters do not change. A tensor whose new recipe scales it by a history of the same kind and length keeps its
    history, since an amax does not depend on the format; other scales begin anew. ``change`` (below 2^11) counts the
    changes of this model, so that stochastic rounding never draws the same numbers twice. Raises ``ValueError`` as
    `matched_layers` does, with the model as it was.
    """
    matched_layers(model, recipe)
    before = _quantizers(model)
    quantize_model(unquantize_model(model), recipe)
    set_streams(model, seed, FIRST_STREAM + change * MOST_STREAMS)
    for name, quantizer in _quantizers(model).items():
        if name in before:
            quantizer.go_on_from(before[name])
    return model


def set_streams(
    model: nn.Module, seed: int, first: int = FIRST_STREAM, *, name_of: Callable[[str], str] = str
) -> None:  # fmt: skip
    """Give every quantizer random numbers of its own; those with the same ``name_of`` their name share them."""
    numbers: dict[str, int] = {}
    for name, quantizer in _quantizers(model).items():
        quantizer.count_from(seed, numbers.setdefault(name_of(name), first + len(numbers)))


def _quantizers(model: nn.Module) -> dict[str, Quantizer]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Quantizer)}


def _gather_codes(model: nn.Module) -> None:
    """Have `fully_shard` gather as codes the weights that only quantized layers of one recipe read."""
    model.register_forward_pre_hook(require_resharding)
    readers: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                readers.setdefault(parameter, []).append(module)
    for parameter, modules in readers.items():
        layers = [m for m in modules if isinstance(m, QuantizedLinear) and m.weight is parameter]
        recipes = [layer.recipe.weight for layer in layers]
        if len(layers) == len(modules) and recipes[0] is not None and recipes.count(recipes[0]) == len(recipes):
            torch.utils.swap_tensors(parameter, nn.Parameter(ByCodes(parameter.detach())))


def _require_no_adapters(model: nn.Module) -> None:
    """Raise ``ValueError`` for a model of PEFT, whose adapters would be quantized too, and layers by other names."""
    if any(type(module).__module__.startswith("peft.") for module in model.modules()):
        raise ValueError(
            f"the pattern {EVERY_LAYER!r} would quantize PEFT's adapters too; call quantize_model of "
            "altgrad.integrations.peft, which leaves them and takes the model's own names"
        )


def _require_most(model: nn.Module) -> None:
    """Raise ``ValueError`` if most of the weights in products are in unknown modules; warn if some are."""
    found = account(model)
    unknown, shares = found.unknown, found.shares
    if not unknown:
        return
    names = list(unknown)
    shown = ", ".join(f"{name} ({unknown[name]})" for name in names[:3])
    shown += f" and {len(names) - 3} more" if len(names) > 3 else ""
    share = f"{shares['unknown']:.1%} of the weights in products are in modules that no recipe reaches: {shown}"
    if shares["unknown"] > MOST:
        raise ValueError(
            f"{share}; a model quantized by the pattern {EVERY_LAYER!r} would be so in name only: make them nn.Linear, "
            "teach altgrad/model/layers.py their kind, or name the layers that you mean instead"
        )
    warnings.warn(f"{share}; they stay as they are", stacklevel=4)


def _replace(model: nn.Module, replaced: dict[nn.Module, nn.Module]) -> None:
    """Put each module's replacement into every place that it has in ``model``."""
    for parent in list(model.modules()):  # named_children() would skip a module's second name
        for child, module in list(parent._modules.items()):
            if module in replaced:
                setattr(parent, child, replaced[module])


def _share_constants(model: nn.Module) -> None:
    """Let quantizers of one role, format and kind of scale share one constants tensor, which a graph reads once."""
    shared: dict[tuple[str, Format, str], Tensor] = {}
    for layer in model.modules():
        if isinstance(layer, QuantizedLinear):
            for role, module in layer.quantizers.items():
                quantizer = cast("Quantizer", module)
                alike = role, quantizer.recipe.format, quantizer.recipe.scale
                quantizer.constants = shared.setdefault(alike, quantizer.constants)


# --- code around quantized layers -------------------------------------------------------------------------------------


def _adapt_surroundings(model: nn.Module) -> None:
    """Switch off fast paths around quantized layers, and resize quantized heads of transformers as heads."""
    for module in model.modules():
        for kind, (name, off) in FAST_PATHS.items():
            if isinstance(module, kind) and hasattr(module, name) and any(map(layer_recipe, module.modules())):
                vars(module).setdefault(BEFORE, getattr(module, name))
                setattr(module, name, off)
        if hasattr(type(module), RESIZE) and _quantized_head(module) is not None:
            setattr(module, RESIZE, ResizeTokenEmbeddings(module))


class ResizeTokenEmbeddings:
    """``resize_token_embeddings`` of a model of transformers that leaves its head quantized."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Resize by the method of the model's class, with a plain head in place of the quantized one meanwhile."""
        head, method = _quantized_head(self.model), getattr(type(self.model), RESIZE)
        if head is None:
            return method(self.model, *arguments, **options)
        self.model.set_output_embeddings(plain_layer(head) if layer_recipe(head) else head)
        try:
            return method(self.model, *arguments, **options)
        finally:
            self.model.set_output_embeddings(_resized(head, self.model.get_output_embeddings()))


def _resized(head: Any, plain: Any) -> nn.Module:
    """Return ``head`` with the parameters of ``plain``, which may be its own."""
    recipe = layer_recipe(head)
    if recipe is None:
        plain.virtual_weight = virtual_weight(head)
        return cast("nn.Module", plain)
    if isinstance(head, QuantizedLinear):
        if plain not in head.replaced:
            head.weight, head.bias, head.replaced = plain.weight, plain.bias, ()
        return head
    return quantized_layer(plain, recipe).train(head.training)


def _quantized_head(model: Any) -> Any:
    """Return the output embeddings of a model of transformers if they are quantized or virtual, else ``None``."""
    head = model.get_output_embeddings()
    known = isinstance(head, nn.Linear | QuantizedLinear)
    return head if known and (layer_recipe(head) or virtual_weight(head)) else None
