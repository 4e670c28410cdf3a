"""The quantization grid that a weight is put on in each forward pass, or lies on all the time.

A weight with *virtual* geometry has one too: its arm sees the quantization grid, and no product does. Such a weight is
float32, or lies on a quantization grid of the same shape that is so much finer that it does not bind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from altgrad.formats import Format
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

# A weight times its scale is a value of the format but for rounding, and codes are cut off, not rounded: with a little
# more, less than a spacing of a byte's codes, it is never below the value.
ABOVE = 1 + 2.0**-12


def _nothing() -> None:
    return None


@dataclass(frozen=True, eq=False)
class WeightGrid:
    """A weight's format, and how its scale is found.

    Attributes:
        format: the weight's format, whose rungs and stiffness its arm sees.
        options: ``granularity``, ``block``, ``scale_format`` and ``scale_rounding`` of `operand_scale`, and ``dim``
            for a weight that is stored as (in, out).
        remembered: returns the amax (0-d float32) that sets the scale, None where it is the weight's own of the moment.
        held: that amax as a buffer of one element, set by an optimizer that keeps its weights there; else None.
        device: of the weight.
        refinement: steps of the quantization grid that the weight lies on, per rung of the format; a power of two,
            above 1 for an unquantized control alone.
    """

    format: Format
    options: dict[str, Any] = field(default_factory=dict)
    remembered: Callable[[], Tensor | None] = _nothing
    held: Tensor | None = None
    device: torch.device | None = None
    refinement: int = 1
    constants: Tensor = field(init=False)  # what the weight lies on, from `refined_constants`

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
        """Return the width of the format's rung at each weight, in the weight's own unit: float32."""
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
        """Return codes, for memory, of a weight that lies on the grid: its shape; the scale is that of a buffer."""
        if self.has_bytes:
            return encode_operand(weight * (self._buffered() * ABOVE), self.constants)
        return self.encode(weight)

    def from_stored(self, codes: Tensor) -> Tensor:
        """Return the weight that `to_stored` took, float32, bit for bit."""
        if self.has_bytes:
            return decode_operand(codes, self.constants, torch.float32).div_(self._buffered())
        return self.decode(codes, self._no_weight())

    @property
    def has_bytes(self) -> bool:
        """Whether `to_stored` has `encode_operand`'s codes, which the CPU's loops step."""
        return self.refinement == 1 and self.format.bits <= 8

    def _buffered(self) -> Tensor:
        return self.scale(self._no_weight())

    def _no_weight(self) -> Tensor:
        return torch.ones(1, 1, dtype=torch.float32, device=self.device)
