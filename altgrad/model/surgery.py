"""``quantize_model``, ``unquantize_model`` and ``requantize_model``, for any ``nn.Module``.

Code of two libraries works around quantized layers, and is adapted here. In evaluation, torch's encoder layers call one
operator that reads their layers' weights and skips the layers. transformers resizes a head that is an ``nn.Linear``
into a new ``nn.Linear``.
"""

import warnings
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from altgrad.config.recipe import LayerRecipe, Recipe
from altgrad.formats import Format
from altgrad.model.account import account
from altgrad.model.experts import (
    ExpertWeight,
    QuantizedExperts,
    quantizable_layers,
    quantized_experts,
    require_of_experts,
    router_weights,
)
from altgrad.model.interface import adopt, give_back, interface_products, product_names
from altgrad.model.layers import (
    attention_products,
    is_transposed,
    layer_recipe,
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
from altgrad.model.quantized.linear import QuantizedLinear, QuantizedModule
from altgrad.model.quantized.quantizer import Quantizer
from altgrad.model.torchao import require_as_stated

Model = TypeVar("Model", bound=nn.Module)

TORCHAO_DIVISOR = 16  # of a layer's dimensions: torch._scaled_mm and FP8 hardware need it
EVERY_LAYER = "*"  # the pattern of all layers
MOST_STREAMS = 1 << 20  # the most random streams of a model
FIRST_STREAM = 1 << 31  # number of the first quantizer's random stream; optimizers number their streams from 0
MOST = 0.5  # the largest share of the weights in products that a recipe with ``*`` may leave out
#: Class with a fast path -> the attribute that switches the path off, and the value that does. An encoder's path makes
#: nested tensors, which only the fast path of its layers accepts.
FAST_PATHS: dict[type[nn.Module], tuple[str, Any]] = {
    nn.TransformerEncoderLayer: ("activation_relu_or_gelu", 0), nn.TransformerEncoder: ("use_nested_tensor", False),
}  # fmt: skip
BEFORE, RESIZE = "fast_path_of_plain_layers", "resize_token_embeddings"


def matched_layers(model: nn.Module, recipe: Recipe) -> dict[str, LayerRecipe]:
    """Return dotted name -> recipe, for each layer or product that ``recipe`` quantizes or makes virtual in ``model``.

    Raises ``TypeError`` if ``recipe`` is no `Recipe`, and ``ValueError``

    - if a pattern matches no layer and no product of attention, or a product that a model computes in its own way;
    - if ``*`` leaves out most of the weights in products or meets PEFT's adapters;
    - if a layer's weight is split over processes already;
    - if torchao cannot take a layer: a ``Conv1D``, or a size not divisible by 16, on every device alike;
    - if a rule has torchao, the native backend or a virtual weight for the weights of experts;
    - if the installed torchao quantizes differently from its recipe.
    """
    if not isinstance(recipe, Recipe):
        raise TypeError(f"expected a Recipe, such as Recipe.uniform('E4M3'), got {recipe!r}")
    layers, routers = quantizable_layers(model), router_weights(model)
    if any(rule.layers == EVERY_LAYER and rule.layer.quantizes for rule in recipe.rules):
        _require_no_adapters(model)
        _require_most(model)
    of_routers = {name for name, layer in layers.items() if layer.weight in routers}
    matched = recipe.match(layers, product_names(model, recipe, layers), of_routers)
    for name, spec in matched.items():
        if name not in layers:
            continue
        if is_sharded(layers[name].weight):
            raise ValueError(
                f"the weight of layer {name} is split over processes already: quantize the model first, and shard it "
                "then by fully_shard"
            )
        if isinstance(layers[name], ExpertWeight):
            require_of_experts(name, spec)
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
    """Replace the linear layers and the experts that ``recipe`` matches, in place, and return ``model``.

    Attention's products are replaced alike if a rule names them, ``blocks.*.attn.scores`` or in transformers
    ``model.layers.*.self_attn.scores`` (see ATTENTION.md). A transformers model then has the attention implementation
    ``altgrad`` in all its layers.

    Parameters, their ties (an embedding and a head), optimizers that hold them, and hooks on the layers' calls stay
    valid. A layer at several places in the model is replaced at each. Other modules do not change. A layer with a
    virtual weight is only marked, for :func:`virtual_weight`. A torchao layer is made for the device of its weight (see
    :func:`altgrad.model.torchao.torchao_linear`).

    Args:
        seed: seed of stochastic rounding (``rounding: stochastic``), below 2^32. Every tensor of every layer has its
            own random numbers. Inputs and gradients have different random numbers in each process.
        sync_amax: set it if processes share each batch in equal parts, by DistributedDataParallel or fully_shard.
            Inputs and gradients then have the scales of the whole batch, at one message per tensor. Quantize first,
            then shard.
        gather_codes: make fully_shard gather weights as codes, a byte per element, and their scales. Products have the
            same bits. A process keeps its part of the master weights, and of a whole weight only the codes. A weight
            that another module reads too, such as an embedding, is gathered as it is.
        verbose: print the :func:`altgrad.model.account` of the model.

    Warns if the pattern ``*`` leaves out weights in modules whose products are not known. Raises ``ValueError`` as
    :func:`matched_layers` does, and if the model is already quantized.
    """
    layers = quantizable_layers(model)
    done = [name for name, layer in layers.items() if layer_recipe(layer) or virtual_weight(layer)]
    done += [name for name, product in attention_products(model).items() if layer_recipe(product)]
    if done:
        raise ValueError(f"the model is already quantized (layer {done[0]}); quantize a fresh one")
    if sync_amax and not dist.is_initialized():
        raise ValueError("sync_amax needs torch.distributed.init_process_group before the model is quantized")
    replaced: dict[nn.Module, nn.Module] = {}
    of_experts: dict[nn.Module, dict[str, LayerRecipe]] = {}
    matched = matched_layers(model, recipe)
    if not interface_products(model).keys().isdisjoint(matched):
        adopt(model)
    for name, spec in matched.items():
        if name not in layers:
            if sync_amax and any(t is not None and t.granularity == "head" for t in spec.tensors().values()):
                raise ValueError(f"sync_amax has no scales of heads, which {name} has; take granularity tensor")
            product = model.get_submodule(name)
            device = next(model.get_submodule(name.rpartition(".")[0]).parameters()).device
            replaced[product] = quantized_layer(product, spec).train(product.training).to(device)
            continue
        if not name:
            raise ValueError("the model is itself a linear layer; put it in a module to quantize it")
        if isinstance(layers[name], ExpertWeight):
            if sync_amax or gather_codes:
                raise ValueError(
                    f"{'sync_amax' if sync_amax else 'gather_codes'} is for linear layers, and {name} has the weights "
                    "of experts, which get other tokens in each process; leave it out"
                )
            of_experts.setdefault(layers[name].experts, {})[layers[name].name] = spec
            continue
        if gather_codes:
            require_codes_suffice(name, spec)
        if sync_amax and spec.grad is not None and spec.grad.rounding == "MS-EDEN":
            raise ValueError("sync_amax has no MS-EDEN, whose scales are of what one process sees; leave sync_amax out")
        if spec.virtual_weight:
            layers[name].virtual_weight = spec.virtual_weight
        else:
            replaced[layers[name]] = quantized_layer(layers[name], spec).train(layers[name].training)
    replaced |= {experts: quantized_experts(experts, recipes) for experts, recipes in of_experts.items()}
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
    for layer in quantizable_layers(model).values():
        if isinstance(layer, ExpertWeight):
            if isinstance(layer.experts, QuantizedExperts):
                replaced[layer.experts] = layer.experts.unquantized()
        elif layer_recipe(layer) is not None:
            if isinstance(layer.weight, ByCodes):
                torch.utils.swap_tensors(layer.weight, nn.Parameter(layer.weight.master))
            replaced[layer] = plain_layer(layer)
        elif virtual_weight(layer):
            del layer.virtual_weight
    replaced |= {p: plain_layer(cast("Any", p)) for p in attention_products(model).values() if layer_recipe(p)}
    _replace(model, replaced)
    give_back(model)
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
    """Quantize ``model``, quantized already or plain, by ``recipe`` from now on, in place; return ``model``.

    Parameters do not change. A tensor keeps its amax history if the new recipe has a history of the same kind and
    length; other histories begin anew. ``change`` (below 2^11) counts the changes of this model, so that stochastic
    rounding never draws the same numbers twice. If it raises ``ValueError``, as `matched_layers` does, the model stays
    as it was.
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
    """Give every quantizer its own random stream under ``seed``, with numbers from ``first`` up.

    ``name_of`` gets a quantizer's name in ``model``. Quantizers for which it returns one name share a stream.
    """
    numbers: dict[str, int] = {}
    for name, quantizer in _quantizers(model).items():
        quantizer.count_from(seed, numbers.setdefault(name_of(name), first + len(numbers)))


def _quantizers(model: nn.Module) -> dict[str, Quantizer]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Quantizer)}


def _gather_codes(model: nn.Module) -> None:
    """Make `fully_shard` gather a weight as codes if only quantized layers with one recipe read the weight."""
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
    """Raise ``ValueError`` for a PEFT model: its adapters would be quantized too, and its layers have other names."""
    if any(type(module).__module__.startswith("peft.") for module in model.modules()):
        raise ValueError(
            f"the pattern {EVERY_LAYER!r} would quantize PEFT's adapters too; call quantize_model of "
            "altgrad.integrations.peft, which leaves them and takes the model's own names"
        )


def _require_most(model: nn.Module) -> None:
    """Raise ``ValueError`` if more than `MOST` of the weights in products are in unknown modules; warn if some are."""
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
    """Put ``replaced[module]`` at every place of each such module in ``model``."""
    for parent in list(model.modules()):  # named_children() would skip a module's second name
        for child, module in list(parent._modules.items()):
            if module in replaced:
                setattr(parent, child, replaced[module])


def _share_constants(model: nn.Module) -> None:
    """Make quantizers with the same role, format and kind of scale share one constants tensor, for compiled graphs."""
    shared: dict[tuple[str, Format, str], Tensor] = {}
    for layer in model.modules():
        if isinstance(layer, QuantizedModule):
            for role, module in layer.quantizers.items():
                quantizer = cast("Quantizer", module)
                alike = role, quantizer.recipe.format, quantizer.recipe.scale
                quantizer.constants = shared.setdefault(alike, quantizer.constants)


# --- code around quantized layers -------------------------------------------------------------------------------------


def _adapt_surroundings(model: nn.Module) -> None:
    """Switch off torch's fast paths around quantized layers; keep transformers' heads quantized when resized."""
    for module in model.modules():
        for kind, (name, off) in FAST_PATHS.items():
            if isinstance(module, kind) and hasattr(module, name) and any(map(layer_recipe, module.modules())):
                vars(module).setdefault(BEFORE, getattr(module, name))
                setattr(module, name, off)
        if hasattr(type(module), RESIZE) and _quantized_head(module) is not None:
            setattr(module, RESIZE, ResizeTokenEmbeddings(module))


class ResizeTokenEmbeddings:
    """A replacement of a transformers model's ``resize_token_embeddings`` that leaves the model's head quantized."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Call the method of the model's class, with a plain head in place of the quantized head during the call."""
        head, method = _quantized_head(self.model), getattr(type(self.model), RESIZE)
        if head is None:
            return method(self.model, *arguments, **options)
        self.model.set_output_embeddings(plain_layer(head) if layer_recipe(head) else head)
        try:
            return method(self.model, *arguments, **options)
        finally:
            self.model.set_output_embeddings(_resized(head, self.model.get_output_embeddings()))


def _resized(head: Any, plain: Any) -> nn.Module:
    """Return a head quantized or virtual like ``head``, with the parameters of the plain layer ``plain``."""
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
    """Return the head of a transformers model if it is quantized or has a virtual weight, else ``None``."""
    head = model.get_output_embeddings()
    known = isinstance(head, nn.Linear | QuantizedLinear)
    return head if known and (layer_recipe(head) or virtual_weight(head)) else None
