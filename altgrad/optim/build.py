"""From the settings of an arm to an optimizer over a model's parameters."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from altgrad.config.arms import Arm
from altgrad.model import embedded_weights, linear_layers
from altgrad.model.layers import adapter_weights
from altgrad.optim.grids import weights_of
from altgrad.optim.optimizer import ArmOptimizer
from altgrad.optim.weight_grid import WeightGrid


def build_optimizer(
    model: nn.Module, arm: Arm, grids: Mapping[nn.Parameter, WeightGrid] | None = None, **options: Any
) -> ArmOptimizer:
    """Return the optimizer of ``arm`` for ``model``.

    An arm that needs no format acts on the weights of all linear layers, but for those that an embedding shares. For
    any other ``grids`` holds the quantized weights that it looks at, with their quantization grids: parameters of
    ``model``; by default those of `weight_grids`. A model without a weight to act on is stepped in the arm's plain
    form, with a warning. A tied parameter is updated once. ``options`` are those of
    `ArmOptimizer`. Raises ``ValueError`` for grids of another model's weights, such as those of the one that this is a
    copy of.
    """
    if grids is None or (arm.has_own_step and not arm.needs_format):
        grids = weights_of(model, arm)
        if arm.has_own_step and not any(p.requires_grad for p in grids):
            lacks = "quantized weight; quantize_model comes first" if arm.needs_format else "linear layer to train"
            warnings.warn(f"the arm is its plain form, {arm.plain_form.base}: the model has no {lacks}", stacklevel=2)
    if foreign := grids.keys() - set(model.parameters()):
        raise ValueError(f"grids are of {len(foreign)} weights that this model has not; take weight_grids of it itself")
    parameters = [p for p in model.parameters() if p.requires_grad]
    weights = {p: grids[p] for p in parameters if p in grids}
    plain = [p for p in parameters if p not in weights]
    linear = {layer.weight for layer in linear_layers(model).values()} - embedded_weights(model)
    linear |= adapter_weights(model)
    names = {p: name for name, p in model.named_parameters()}
    return ArmOptimizer(weights, plain, arm, linear=[p for p in plain if p in linear], names=names, **options)
