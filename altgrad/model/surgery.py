"""Turning the linear layers of any ``nn.Module`` into quantized ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from altgrad.config.recipe import LayerRecipe, Recipe
from altgrad.formats import Format
from altgrad.model.account import account
from altgrad.model.around import settle, unsettle
from altgrad.model.counterparts import plain_layer, quantized_layer
from altgrad.model.layers import is_transposed, layer_recipe, linear_layers, virtual_weight
from altgrad.model.quantized.data_parallel import is_sharded, share_rows
from altgrad.model.quantized.gathered import ByCodes, require_gatherable_again
from altgrad.model.quantized.linear import QuantizedLinear
from altgrad.model.quantized.quantizer import Quantizer

Model = TypeVar("Model", bound=nn.Module)

TORCHAO_DIVISOR = 16  # of a layer's dimensions: what torch._scaled_mm, and so FP8 hardware, asks for
EVERY_LAYER = "*"  # the pattern that claims all of a model
MOST_STREAMS = 1 << 20  # of a model
FIRST_STREAM = 1 << 31  # of an operand's random numbers: optimizers number a model's parameters, from 0
BYTE = 8  # bits
MOST = 0.5  # of the weights that take part in products


def matched_layers(model: nn.Module, recipe: Recipe) -> dict[str, LayerRecipe]:
    """Return the recipe of each layer of ``model`` that ``recipe`` quantizes or makes virtual, by its dotted name.

    Raises ``TypeError`` for what is no recipe, ``ValueError`` when a pattern matches no layer, when ``*`` leaves out
    most of the weights that take part in products, for a layer that torchao cannot take (a ``Conv1D``, or one of a size
    that its products cannot have; they are refused on every device, so that a cell means the same on each), and when
    the installed torchao quantizes otherwise than its recipe says.
    """
    if not isinstance(recipe, Recipe):
        raise TypeError(f"expected a Recipe, such as Recipe.uniform('E4M3'), got {recipe!r}")
    layers = linear_layers(model)
    if any(rule.layers == EVERY_LAYER and rule.layer.quantizes for rule in recipe.rules):
        _require_no_adapters(model)
        _require_most(model)
    matched = recipe.match(layers)
    for name, found in matched.items():
        if is_sharded(layers[name].weight):
            raise ValueError(
                f"the weight of layer {name} is split over processes already: quantize the model first, and shard it "
                "then by fully_shard"
            )
        if found.torchao is None:
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
    if any(found.torchao is not None for found in matched.values()):
        from altgrad.model.torchao import require_as_stated  # which imports torchao

        for found in matched.values():
            require_as_stated(found)
    return matched


def quantize_model(
    model: Model, recipe: Recipe, *, seed: int = 0, sync_amax: bool = False, gather_codes: bool = False,
    verbose: bool = False,
) -> Model:
    """Replace the linear layers that ``recipe`` matches, in place, and return ``model``.

    Parameters are shared with the layers that are replaced, so weights, ties between them (an embedding and a head) and
    optimizers that already hold them stay valid; so do hooks on their calls. A layer that has several places in the
    model is replaced in each. Embeddings, norms and every other module are left alone, and so is a layer whose weight
    is virtual, but for a note that :func:`virtual_weight` returns. A torchao layer is made for the device that it is on
    (see :func:`altgrad.model.torchao.torchao_linear`).

    ``seed`` (below 2^32) fixes stochastic rounding, where the recipe says ``rounding: stochastic``; every tensor
    of every layer has random numbers of its own, and an input or a gradient others in each process.

    ``sync_amax`` is for processes that share a batch, by DistributedDataParallel or fully_shard, each with equally many
    of its rows: scales of inputs and gradients are then those of the whole batch, as one process would have them, which
    takes a message per tensor. Shard a model after it is quantized.

    ``gather_codes`` has fully_shard gather weights as codes, a byte per element, and their scales. Products have the
    bits that they have without it; a process has its part of the master weights as ever, and of a whole weight its
    codes alone. What other modules read too, as an embedding does a head's weight, is gathered as it is.

    :func:`altgrad.model.account` returns what was quantized, what was left and why; ``verbose`` prints it. Where
    the pattern ``*`` leaves out weights of modules whose products are not known, a warning names them. Raises
    ``ValueError`` as :func:`matched_layers` does, and when the model is already quantized.
    """
    layers = linear_layers(model)
    done = [name for name, layer in layers.items() if layer_recipe(layer) or virtual_weight(layer)]
    if done:
        raise ValueError(f"the model is already quantized (layer {done[0]}); quantize a fresh one")
    if sync_amax and not dist.is_initialized():
        raise ValueError("sync_amax needs torch.distributed.init_process_group before the model is quantized")
    replaced: dict[nn.Module, nn.Module] = {}
    for name, found in matched_layers(model, recipe).items():
        if not name:
            raise ValueError("the model is itself a linear layer; put it in a module to quantize it")
        if gather_codes:
            _require_gatherable(name, found)
        if sync_amax and found.grad is not None and found.grad.rounding == "MS-EDEN":
            raise ValueError("sync_amax has no MS-EDEN, whose scales are of what one process sees; leave sync_amax out")
        if found.virtual_weight:
            layers[name].virtual_weight = found.virtual_weight
        else:
            replaced[layers[name]] = quantized_layer(layers[name], found).train(layers[name].training)
    _replace(model, replaced)
    _share_constants(model)
    set_streams(model, seed)
    if sync_amax:
        share_rows(model, dist.get_world_size())
    if gather_codes:
        _gather_codes(model)
    settle(model)
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
    unsettle(model)
    for key, hook in list(model._forward_pre_hooks.items()):
        if hook is require_gatherable_again:
            del model._forward_pre_hooks[key]
    return model


def requantize_model(model: Model, recipe: Recipe, *, seed: int = 0, change: int = 1) -> Model:
    """Quantize ``model`` by another recipe from now on, in place, and return it; it may be plain before or after.

    Parameters stay what they are. The amax history of a tensor goes on where its new recipe scales it by one of the
    same kind and length, since an amax is the tensor's whatever the format; else its scale begins anew. ``change``
    (below 2^11) counts the changes of this model, so that stochastic rounding draws no number again that a tensor had
    before. Raises ``ValueError`` as `matched_layers` does, with the model as it was.
    """
    matched_layers(model, recipe)
    before = _quantizers(model)
    quantize_model(unquantize_model(model), recipe)
    set_streams(model, seed, FIRST_STREAM + change * MOST_STREAMS)
    for name, quantizer in _quantizers(model).items():
        if name in before:
            quantizer.go_on_from(before[name])
    return model


def _quantizers(model: nn.Module) -> dict[str, Quantizer]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Quantizer)}


def _require_gatherable(name: str, recipe: LayerRecipe) -> None:
    """Raise ``ValueError`` for a layer whose products need more of its weight than codes and one scale."""
    weight, why = recipe.weight, None
    if recipe.torchao is not None:
        why = "torchao gathers the weights of its layers by a config of its own"
    elif weight is None:
        return
    elif weight.granularity != "tensor":
        why = f"granularity {weight.granularity} has several scales, and codes come with one; take granularity tensor"
    elif weight.scaling != "dynamic":
        why = f"scaling {weight.scaling} takes up an amax that codes do not tell; take scaling dynamic"
    elif weight.rounding == "stochastic":
        why = "codes gathered again for the backward product would be drawn anew; take rounding nearest"
    elif recipe.gradient == "clipped":
        why = "codes do not tell which weights were clipped; take gradient straight-through"
    elif weight.format.bits > BYTE:
        why = f"{weight.format.name} has more than {BYTE} bits"
    if why is not None:
        raise ValueError(f"gather_codes cannot gather the weight of layer {name}: {why}, or leave gather_codes out")


def _gather_codes(model: nn.Module) -> None:
    """Have `fully_shard` gather as codes the weights that quantized layers of one recipe alone read."""
    model.register_forward_pre_hook(require_gatherable_again)
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
    """Raise ``ValueError`` for a model of PEFT's, whose adapters would be quantized too, and layers by other names."""
    if any(type(module).__module__.startswith("peft.") for module in model.modules()):
        raise ValueError(
            f"the pattern {EVERY_LAYER!r} would quantize PEFT's adapters too; call quantize_model of "
            "altgrad.integrations.peft, which leaves them and takes the model's own names"
        )


def _require_most(model: nn.Module) -> None:
    """Raise ``ValueError`` if most of the weights in products are in modules that are not known; warn of some."""
    found = account(model)
    if not found.unknown:
        return
    names = list(found.unknown)
    shown = ", ".join(f"{name} ({found.unknown[name]})" for name in names[:3])
    shown += f" and {len(names) - 3} more" if len(names) > 3 else ""
    share = f"{found.shares['unknown']:.1%} of the weights in products are in modules that no recipe reaches: {shown}"
    if found.shares["unknown"] > MOST:
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
    """Let quantizers of one role, with one format and one of scales, have the same constants.

    A compiled graph then takes them in once.
    """
    shared: dict[tuple[str, Format, str], Tensor] = {}
    for layer in model.modules():
        if isinstance(layer, QuantizedLinear):
            for role in layer.quantizers:
                quantizer = layer.quantizer(role)
                assert quantizer is not None
                alike = role, quantizer.recipe.format, quantizer.recipe.scale
                quantizer.constants = shared.setdefault(alike, quantizer.constants)


def set_streams(
    model: nn.Module, seed: int, first: int = FIRST_STREAM, *, own: Callable[[str], str] = str
) -> None:
    """Give every quantizer random numbers of its own; quantizers with one ``own`` name, copies, have the same."""
    numbers: dict[str, int] = {}
    for name, quantizer in _quantizers(model).items():
        quantizer.count_from(seed, numbers.setdefault(own(name), first + len(numbers)))
