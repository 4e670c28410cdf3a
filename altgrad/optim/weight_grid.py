"""The quantization grid of a weight: its format, its scale, and the values that the weight is rounded to.

A forward pass rounds a master weight to its grid. An arm with ``weights: quantized`` keeps the weight there.

In an unquantized control (``virtual.E3M4``) no product uses the format, and the optimizer sees the same code steps,
scales and stiffness as in the format. Stored weights of such a control lie on a grid 256 times finer, so that the
format's rounding adds nothing. Products in bf16 round such a weight as they round a float32 one, to 8 significant bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from operator import getitem
from typing import Any

import torch
from torch import Tensor, nn

from altgrad.formats import Format
from altgrad.model import QuantizedLinear, TensorRecipe, embedded_weights, linear_layers, virtual_weight
from altgrad.model.layers import quantizer_of, scales_along
from altgrad.model.quantized.quantizer import ScaleSpec
from altgrad.numerics import (
    decode,
    decode_operand,
    encode,
    encode_operand,
    grid_spacing,
    operand_scale,
    refined_constants,
    refined_format,
    round_to_grid,
)
from altgrad.numerics.constants import MAX

HELD = "held_amax"  # the name of a held amax, as a layer's buffer and in an optimizer's state
REFINEMENT = 256  # of a control's grid: 8 more bits, so that 8-bit formats take 16
# A weight times its scale is a value of the format up to rounding, and `encode_operand` cuts off. With this factor,
# which adds less than a spacing of a byte's codes, the product is never below the value.
ABOVE = 1 + 2.0**-12


def _nothing() -> None:
    return None


@dataclass(frozen=True, eq=False)
class WeightGrid:
    """A weight's format, and how its scale is found.

    Attributes:
        format: the weight's format, whose code steps and stiffness its arm sees.
        options: ``granularity``, ``block``, ``scale_format`` and ``scale_rounding`` of `operand_scale`, and ``dim``
            for a weight that is stored as (in, out).
        remembered: returns the amax (0-d float32) that sets the scale, or None where it is the weight's current one.
        held: that amax as a buffer of one element, set by an optimizer that keeps weights on the grid; else None.
        device: of the weight.
        refinement: steps of the grid per code step of the format: a power of two, above 1 only in a control.
    """

    format: Format
    options: dict[str, Any] = field(default_factory=dict)
    remembered: Callable[[], Tensor | None] = _nothing
    held: Tensor | None = None
    device: torch.device | None = None
    refinement: int = 1
    constants: Tensor = field(init=False)  # of the grid, from `refined_constants`

    def __post_init__(self) -> None:
        scale_format = self.options.get("scale_format", "float32")
        constants = refined_constants(self.format, self.refinement, self.device, scale_format=scale_format)
        object.__setattr__(self, "constants", constants)

    def scale(self, weight: Tensor) -> Tensor:
        """Return what the forward product multiplies ``weight`` with: float32, broadcastable."""
        return operand_scale(weight, self.constants, self.remembered(), **self.options)

    def on_grid(self, weight: Tensor) -> Tensor:
        """Return the nearest weights on the quantization grid, float32."""
        scale = self.scale(weight)
        return round_to_grid(weight * scale, self.constants) / scale

    def spacing(self, weight: Tensor) -> Tensor:
        """Return the spacing of the format at each weight, in the weight's own unit: float32."""
        scale = self.scale(weight)
        magnitude = torch.minimum((weight * scale).abs(), self.constants[MAX])
        return grid_spacing(magnitude, self.constants) * self.refinement / scale

    def encode(self, weight: Tensor) -> Tensor:
        """Return the code of each weight, its shape: uint8 if a code has at most 8 bits, else int16."""
        return encode(weight.detach() * self.scale(weight), refined_format(self.format, self.refinement))

    def decode(self, codes: Tensor, weight: Tensor) -> Tensor:
        """Return the weights that `encode` took, bit for bit; the scale is that of a buffer, not of ``weight``."""
        return decode(codes, refined_format(self.format, self.refinement)) / self.scale(weight)

    def to_stored(self, weight: Tensor) -> Tensor:
        """Return the codes of a weight on the grid, its shape. The held amax sets the scale."""
        if self.has_bytes:
            return encode_operand(weight * (self.scale(self._no_weight()) * ABOVE), self.constants)
        return self.encode(weight)

    def from_stored(self, codes: Tensor) -> Tensor:
        """Return the weight that `to_stored` took, float32, bit for bit."""
        if self.has_bytes:
            return decode_operand(codes, self.constants, torch.float32).div_(self.scale(self._no_weight()))
        return self.decode(codes, self._no_weight())

    @property
    def has_bytes(self) -> bool:
        """Whether `to_stored` returns the codes of `encode_operand`, which the CPU's loops read."""
        return self.refinement == 1 and self.format.bits <= 8

    def _no_weight(self) -> Tensor:
        return torch.ones(1, 1, dtype=torch.float32, device=self.device)


def weight_grids(model: nn.Module, *, on_grid: bool) -> dict[nn.Parameter, WeightGrid]:
    """Return the quantization grid of each quantized weight of ``model``, in the order of the layers.

    Controls count as quantized. A weight that an embedding shares is left out.

    Args:
        model: after `quantize_model`.
        on_grid: the optimizer keeps weights on their grids. The layers then take their scales from ``held`` of what is
            returned, which the optimizer sets.

    Raises:
        ValueError: ``on_grid``, and a layer cannot keep its weight on a grid.
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
        first: Any = partial(getitem, held, 0)  # a copy or pickle of it takes its buffer along
        return WeightGrid(fmt, options, remembered=first, held=held, device=device, refinement=REFINEMENT)
    except ValueError as error:
        raise ValueError(
            f"layer {name}: {fmt.name} has no quantization grid {REFINEMENT} times finer, for its virtual weights "
            f"({error}); take a format of at most 8 bits, or an arm with weights: master"
        ) from None
