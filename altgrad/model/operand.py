"""A factor of a quantized product, as the products take it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from altgrad.model.quantizer import Scaling
from altgrad.numerics import quantize_operand


class Operand(NamedTuple):
    """A factor of a product: its values, and the scale (0-d, or one per row or column) that the result is divided by.

    ``amax`` (0-d) is that of the tensor, where it has one scale.
    """

    values: Tensor
    scale: Tensor | None = None
    amax: Tensor | None = None

    @classmethod
    def of(
        cls, t: Tensor, scaling: Scaling | None, constants: Tensor | None, remembered: Tensor | None, dim: int,
        dtype: torch.dtype, *, overwrite: bool = False,
    ) -> Operand:  # fmt: skip
        """Return the 2-d ``t`` on its format's grid, for a product that sums over ``dim``; without a format, cast."""
        if scaling is None:
            return cls(t.detach().to(dtype))
        options = {"dim": dim, "dtype": dtype, "overwrite": overwrite, **scaling.options}
        found = cls(*quantize_operand(t.detach(), constants, remembered, **options))
        return found if scaling.float8 is None else found._replace(values=found.values.to(scaling.float8))

    def t(self) -> Operand:
        """Return the transposed operand."""
        scale = self.scale if self.scale is None or self.scale.ndim == 0 else self.scale.t()
        return Operand(self.values.t(), scale, self.amax)
