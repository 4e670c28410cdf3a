"""A factor of a quantized product, as the products take it."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from altgrad.model.quantized.data_parallel import whole_history
from altgrad.model.quantized.quantizer import Scaling, Source
from altgrad.numerics import decode_operand, encode_operand, quantize_operands, rotate_rows
from altgrad.numerics.operand import Packed, signs_on

CODES = torch.uint8  # no operand's own dtype, but of packed ones


class Operand(NamedTuple):
    """A factor of a product: its values, and the scale that the result is divided by: 0-d, or one per row or column.

    ``constants`` are its format, ``None`` if it was only cast. ``kept``, for a gated gradient: where it passes.
    ``blocks``, of packed values: the codes of their blocks' scales.
    """

    values: Tensor
    scale: Tensor | None = None
    constants: Tensor | None = None
    kept: Tensor | None = None
    blocks: Tensor | None = None

    @classmethod
    def of(
        cls, t: Tensor, scaling: Scaling | None, source: Source, dim: int, dtype: torch.dtype, *,
        learns: str = "nothing", overwrite: bool = False, in_memory: bool = False, rotate: bool = False,
    ) -> Operand:  # fmt: skip
        """Return the 2-d ``t`` on its quantization grid, to be summed over ``dim``; without a scaling, cast.

        ``in_memory`` and ``rotate`` as in `quantize_operands`.
        """
        t, constants, history, stream = t.detach(), *source
        if scaling is None:
            return cls((rotate_rows(t) if rotate else t).to(dtype))
        assert constants is not None
        options = {"dim": dim, "dtype": scaling.hardware or dtype, **scaling.options}
        method, first = scaling.method, 0
        if scaling.ranks > 1:
            if rotate:
                t, rotate, overwrite = rotate_rows(t), False, True
            history, method, learns = whole_history(t, scaling, history, dim, learns), "most-recent", "nothing"
            first = dist.get_rank() * t.numel() if stream is not None else 0
        histories, streams = ([] if found is None else [found] for found in (history, stream))
        (found,) = quantize_operands(
            [t], [constants], histories, streams, method=method, learns=learns, first=first, overwrite=overwrite,
            in_memory=in_memory, rotate=rotate, **options,
        )  # fmt: skip
        return cls(found.values, found.scale, constants, blocks=found.blocks if isinstance(found, Packed) else None)

    def t(self) -> Operand:
        """Return the transposed operand."""
        scale = self.scale if self.scale is None or self.scale.ndim == 0 else self.scale.t()
        return Operand(self.values.t(), scale, blocks=None if self.blocks is None else self.blocks.t())

    def encoded(self) -> Operand:
        """Return the operand with codes, of a byte each, for its values; they have one scale."""
        if self.values.dtype == CODES:
            return self
        assert self.constants is not None
        return self._replace(values=encode_operand(self.values, self.constants))

    def decoded(self, dtype: torch.dtype) -> Operand:
        """Return the operand, with its values in ``dtype``, that `encoded` returned this of; else itself."""
        if self.values.dtype != CODES or self.blocks is not None:
            return self
        assert self.constants is not None
        return self._replace(values=decode_operand(self.values, self.constants, dtype))


class Operands(NamedTuple):
    """A tensor's operands in the forward product, and in the backward one, which sums over its other dimension."""

    forward: Operand
    backward: Operand


def dequantized(operand: Operand, rotated: int | None = None) -> Tensor:
    """Return what an ``operand`` stands for, its values over its scale, float32 (n, k).

    ``rotated``: the rows that there were before `rotate_rows`, which is undone.

    Raises:
        NotImplementedError: its blocks have codes, for FP8 and FP4 units.
    """
    scale = operand.scale
    if operand.blocks is not None or (scale is not None and scale.ndim > 0 and 1 not in scale.shape):
        raise NotImplementedError(
            "blocks as codes have no second derivative (create_graph=True); take backend: emulated"
        )
    found = operand.values.float() if scale is None else operand.values.float() / scale
    if rotated is None:
        return found
    signs = signs_on(found.device)
    turned = rotate_rows(found, torch.ones_like(signs)).unflatten(0, (-1, len(signs))) * signs.unsqueeze(-1)
    return turned.flatten(0, 1)[:rotated]
