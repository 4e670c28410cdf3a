"""A factor of a quantized product, as the products take it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from altgrad.model.quantized.data_parallel import whole_history
from altgrad.model.quantized.quantizer import Scaling, Source
from altgrad.numerics import decode_operand, encode_operand, quantize_operands, rotate_rows
from altgrad.numerics.operand import Packed

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
        learns: str = "nothing", overwrite: bool = False, rotate: bool = False,
    ) -> Operand:  # fmt: skip
        """Return the 2-d ``t`` on its quantization grid, to be summed over ``dim``; without a scaling, cast.

        ``rotate`` as in `quantize_operands`.
        """
        if scaling is None:
            return cls((rotate_rows(t.detach()) if rotate else t.detach()).to(dtype))
        return cls.of_each([t], scaling, [source], dim, dtype, learns=learns, overwrite=overwrite, rotate=rotate)[0]

    @classmethod
    def of_each(
        cls, ts: Sequence[Tensor], scaling: Scaling, sources: Sequence[Source], dim: int, dtype: torch.dtype, *,
        learns: str = "nothing", overwrite: bool = False, in_memory: bool = False, rotate: bool = False,
    ) -> list[Operand]:  # fmt: skip
        """Return the same for tensors that are scaled alike, all at once; ``in_memory`` as in `quantize_operands`."""
        options = {"dim": dim, "dtype": scaling.hardware or dtype, "overwrite": overwrite, **scaling.options}
        ts, method, first = [t.detach() for t in ts], scaling.method, 0
        constants, histories, streams = ([t for t in kind if t is not None] for kind in zip(*sources, strict=True))
        if scaling.ranks > 1:
            if rotate:
                ts, rotate, options["overwrite"] = list(map(rotate_rows, ts)), False, True
            wholes = [whole_history(t, scaling, s.history, dim, learns) for t, s in zip(ts, sources, strict=True)]
            histories, method, learns = [h for h in wholes if h is not None], "most-recent", "nothing"
            first = dist.get_rank() * ts[0].numel() if streams else 0
        found = quantize_operands(
            ts, constants, histories, streams, method=method, learns=learns, first=first, in_memory=in_memory,
            rotate=rotate, **options,
        )  # fmt: skip
        pairs = zip(found, constants, strict=True)
        return [cls(q.values, q.scale, c, blocks=q.blocks if isinstance(q, Packed) else None) for q, c in pairs]

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
