"""The weights that an arm acts on, and their quantization grids, which what is recorded about updates needs too.

In an unquantized control a weight has the quantization grid of a format that no product quantizes it to. Its optimizer
sees the same rungs, scales and stiffness as in the format. A weight that lives on its quantization grid is on one 256
times finer: what an arm gains there owes nothing to the format's rounding. Products in bf16 round such a weight as they
round a float32 one, to 8 significant bits.
"""

from __future__ import annotations

from functools import partial
from operator import getitem
from typing import Any

import torch
from torch import nn

from altgrad.config.arms import Arm
from altgrad.formats import get_format
from altgrad.model import QuantizedLinear, TensorRecipe, embedded_weights, linear_layers, virtual_weight
from altgrad.model.layers import quantizer_of, scales_along
from altgrad.model.quantized.quantizer import ScaleSpec
from altgrad.optim.loading import HELD
from altgrad.optim.weight_grid import WeightGrid

UNREAD = get_format("E4M3")  # of weights whose arm needs no format
REFINEMENT = 256  # finer for weights whose format is virtual: 8 more bits, so that 8-bit formats take 16


def weight_grids(model: nn.Module, *, on_grid: bool) -> dict[nn.Parameter, WeightGrid]:
    """Return the quantization grid of each weight that has one, virtual ones too, in the order of the layers.

    A weight that an embedding shares is left out. With ``on_grid`` weights live there: the layers take their scales
    from what is returned, whose amax the optimizer sets from then on; raises ``ValueError`` for a layer that cannot.
    """
    embedded = embedded_weights(model)
    grids = {}
    for name, layer in linear_layers(model).items():
        quantizer, virtual = quantizer_of(layer, "weight"), virtual_weight(layer)
        if layer.weight in embedded:
            continue
        along = scales_along(layer)
        if virtual is not None:
            grids[layer.weight] = _virtual_grid(name, layer, virtual, along, on_grid)
        if quantizer is None:
            continue
        if on_grid and not isinstance(layer, QuantizedLinear):
            raise ValueError(
                f"layer {name} is quantized by torchao, which cannot keep weights on their quantization grid"
            )
        grids[layer.weight] = WeightGrid(
            quantizer.recipe.format, quantizer.scaling.options | along, held=quantizer.hold() if on_grid else None,
            remembered=quantizer.remembered_amax, device=layer.weight.device,
        )  # fmt: skip
    return grids


def weights_of(model: nn.Module, arm: Arm) -> dict[nn.Parameter, WeightGrid]:
    """Return the weights that ``arm`` moves unlike its plain form, in the order of the layers.

    An arm that needs a format acts on the weights that have one, whose quantization grids come with them as from
    `weight_grids`. Any other acts on the weights of all linear layers, but for those that an embedding shares, and
    reads nothing of the grid that comes with them.
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


def _virtual_grid(
    name: str, layer: nn.Linear, virtual: TensorRecipe, along: dict[str, Any], on_grid: bool
) -> WeightGrid:  # fmt: skip
    fmt, device = virtual.format, layer.weight.device
    options = ScaleSpec.of(virtual, native=False).options | along
    if not on_grid:
        return WeightGrid(fmt, options, device=device)
    if virtual.granularity != "tensor":
        raise ValueError(
            "weights on the quantization grid hold one scale that their optimizer sets; use granularity: tensor"
        )
    held = torch.zeros(1, dtype=torch.float32, device=device)
    layer.register_buffer(HELD, held, persistent=False)
    try:
        first: Any = partial(getitem, held, 0)  # which is copied and pickled with its buffer
        return WeightGrid(fmt, options, remembered=first, held=held, device=device, refinement=REFINEMENT)
    except ValueError as error:
        raise ValueError(
            f"layer {name}: {fmt.name} has no quantization grid {REFINEMENT} times finer, for its virtual weights "
            f"({error}); take a format of at most 8 bits, or an arm with weights: master"
        ) from None
