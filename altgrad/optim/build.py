"""From the settings of an arm to an optimizer over a model's parameters."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from altgrad.config.arms import Arm
from altgrad.model import embedded_weights, linear_layers
from altgrad.model.lora import adapter_weights
from altgrad.optim.grids import weight_grids
from altgrad.optim.optimizer import ArmOptimizer
from altgrad.optim.weight_grid import WeightGrid


def build_optimizer(
    model: nn.Module, arm: Arm, grids: Mapping[nn.Parameter, WeightGrid] | None = None, **options: Any
) -> ArmOptimizer:
    """Return the optimizer of ``arm`` for ``model``.

    ``grids`` holds the quantized weights that the arm looks at, with their quantization grids: parameters of ``model``,
    without those that an embedding shares. They are those of `weight_grids` if none are given, with a warning where the
    model has none, so that the arm is its plain form. A tied parameter is updated once. ``options`` are those of
    `ArmOptimizer`. Raises ``ValueError`` for grids of another model's weights, such as those of the one that this is a
    copy of.
    """
    if grids is None:
        grids = weight_grids(model, on_grid=arm.weights == "quantized") if arm.looks_at_grid else {}
        if arm.looks_at_grid and not grids:
            warnings.warn(
                "this model has no quantized weight that the arm could look at, so it is its plain form; "
                "quantize_model comes first", stacklevel=2,
            )  # fmt: skip
    if foreign := grids.keys() - set(model.parameters()):
        raise ValueError(f"grids are of {len(foreign)} weights that this model has not; take weight_grids of it itself")
    parameters = [p for p in model.parameters() if p.requires_grad]
    weights = {p: grids[p] for p in parameters if p in grids}
    plain = [p for p in parameters if p not in weights]
    linear = {layer.weight for layer in linear_layers(model).values()} - embedded_weights(model)
    linear |= adapter_weights(model)
    names = {p: name for name, p in model.named_parameters()}
    return ArmOptimizer(weights, plain, arm, linear=[p for p in plain if p in linear], names=names, **options)
