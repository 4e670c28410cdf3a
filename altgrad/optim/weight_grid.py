"""The grid that a quantized weight is put on in each forward pass, or lies on all the time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from altgrad.numerics import Format, decode, encode, format_constants, operand_scale, round_to_grid


def _nothing() -> None:
    return None


@dataclass(frozen=True, eq=False)
class WeightGrid:
    """A weight's format, and how its scale is found.

    Attributes:
        format: the weight's format.
        options: ``granularity``, ``block`` and ``scale_dtype`` of `operand_scale`.
        remembered: returns the amax (0-d float32) that sets the scale, None where it is the weight's own of the moment.
        held: that amax as a buffer of one element, which an optimizer with weights on the grid sets; None elsewhere.
        device: of the weight.
    """

    format: Format
    options: dict[str, Any] = field(default_factory=dict)
    remembered: Callable[[], Tensor | None] = _nothing
    held: Tensor | None = None
    device: torch.device | None = None
    constants: Tensor = field(init=False)  # the format, from `format_constants`

    def __post_init__(self) -> None:
        object.__setattr__(self, "constants", format_constants(self.format, self.device))

    def scale(self, weight: Tensor) -> Tensor:
        """Return what the forward product multiplies ``weight`` (out, in) with: float32, broadcastable."""
        return operand_scale(weight, self.constants, self.remembered(), **self.options)

    def on_grid(self, weight: Tensor) -> Tensor:
        """Return the nearest weights on the grid, float32."""
        scale = self.scale(weight)
        return round_to_grid(weight * scale, self.constants) / scale

    def encode(self, weight: Tensor) -> Tensor:
        """Return the code of each weight: uint8 for formats of at most 8 bits, the shape of ``weight``."""
        return encode(weight.detach() * self.scale(weight), self.format)

    def decode(self, codes: Tensor, weight: Tensor) -> Tensor:
        """Return the weights that `encode` took, bit for bit; the scale is that of a buffer, not of ``weight``."""
        return decode(codes, self.format) / self.scale(weight)
