"""Builds the optimizer of an arm for a model's parameters."""

import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from altgrad.config.arms import Arm
from altgrad.formats import get_format
from altgrad.model import embedded_weights, linear_layers, quantizable_layers
from altgrad.model.layers import adapter_weights, scales_along
from altgrad.optim.optimizer import ArmOptimizer
from altgrad.optim.weight_grid import WeightGrid, weight_grids

UNREAD = get_format("E4M3")  # placeholder in the grids of an arm that needs no format


def build_optimizer(
    model: nn.Module, arm: Arm, grids: Mapping[nn.Parameter, WeightGrid] | None = None, **options: Any
) -> ArmOptimizer:
    """Return the optimizer of ``arm`` for ``model``.

    An arm that needs no format acts on the weights of all linear layers, except weights shared with an embedding.
    Any other arm acts on the weights in ``grids``. If ``grids`` is empty, the optimizer warns and uses the arm's plain
    form (AdamW or SGD). A tied parameter is updated once. The weights of experts are moved by AdamW and SGD alone.

    Args:
        model: the model, after `quantize_model`.
        arm: the optimizer settings.
        grids: the quantization grid of each quantized parameter of ``model``; default: `weight_grids` of the model.
        options: keyword arguments of `ArmOptimizer`.

    Raises:
        ValueError: ``grids`` has weights of another model, for example of the original that ``model`` was copied from;
            or the arm moves matrices in a step of its own, and the model trains a parameter that holds one per expert.
    """
    layers = quantizable_layers(model)
    stacked = [name for name, layer in layers.items() if layer.weight.ndim > 2 and layer.weight.requires_grad]
    if arm.has_own_step and stacked:
        raise ValueError(
            f"{stacked[0]} holds a matrix for each expert, which this arm cannot move one by one: take base adamw or "
            "sgd with master weights and without a stiffness, or freeze the experts"
        )
    if grids is None or (arm.has_own_step and not arm.needs_format):
        grids = weights_of(model, arm)
        if arm.has_own_step and not any(p.requires_grad for p in grids):
            lacks = "quantized weight; quantize_model comes first" if arm.needs_format else "linear layer to train"
            warnings.warn(f"the arm is its plain form, {arm.plain_form.base}: the model has no {lacks}", stacklevel=2)
    if foreign := grids.keys() - set(model.parameters()):
        raise ValueError(f"grids are of {len(foreign)} weights that this model has not; take weight_grids of it itself")
    parameters = [p for p in model.parameters() if p.requires_grad]
    weights = {p: grids[p] for p in parameters if p in grids}
    others = [p for p in parameters if p not in weights]
    linear = {layer.weight for layer in layers.values()} - embedded_weights(model)
    linear |= adapter_weights(model)
    names = {p: name for name, p in model.named_parameters()}
    return ArmOptimizer(weights, others, arm, linear=[p for p in others if p in linear], names=names, **options)


def weights_of(model: nn.Module, arm: Arm) -> dict[nn.Parameter, WeightGrid]:
    """Return the weights that ``arm`` moves differently from its plain form, and their grids, in layer order.

    If ``arm`` needs no format, the grids have a placeholder format. If no weight is moved differently, return ``{}``.
    """
    if not arm.has_own_step:
        return {}
    if arm.needs_format:
        return weight_grids(model, on_grid=arm.weights == "quantized")
    embedded = embedded_weights(model)
    return {
        layer.weight: WeightGrid(UNREAD, scales_along(layer), device=layer.weight.device)
        for layer in linear_layers(model).values() if layer.weight not in embedded
    }  # fmt: skip
