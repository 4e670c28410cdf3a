"""A factor of a quantized product, as the products take it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from altgrad.model.quantized.data_parallel import whole_history
from altgrad.model.quantized.quantizer import Scaling
from altgrad.numerics import quantize_operands


class Operand(NamedTuple):
    """A factor of a product: its values, and the scale that the result is divided by: 0-d, or one per row or column."""

    values: Tensor | None
    scale: Tensor | None = None

    @classmethod
    def of(
        cls, t: Tensor, scaling: Scaling | None, constants: Tensor | None, history: Tensor | None, dim: int,
        dtype: torch.dtype, *, stream: Tensor | None = None, learns: str = "nothing", overwrite: bool = False,
    ) -> Operand:  # fmt: skip
        """Return the 2-d ``t`` on its quantization grid, to be summed over ``dim``; without a format, cast.

        With a ``stream`` it is rounded by chance.
        """
        if scaling is None:
            return cls(t.detach().to(dtype))
        given = [constants], [] if history is None else [history], [] if stream is None else [stream]
        return cls.of_each([t], scaling, *given, dim, dtype, learns=learns, overwrite=overwrite)[0]

    @classmethod
    def of_each(
        cls, ts: Sequence[Tensor], scaling: Scaling, constants: Sequence[Tensor], histories: Sequence[Tensor],
        streams: Sequence[Tensor], dim: int, dtype: torch.dtype, *, learns: str = "nothing", overwrite: bool = False,
    ) -> list[Operand]:  # fmt: skip
        """Return the same for tensors that are scaled alike, each with its format, history and stream, all at once."""
        options = {"dim": dim, "dtype": dtype, "overwrite": overwrite, **scaling.options}
        ts, method, first = [t.detach() for t in ts], scaling.method, 0
        if scaling.ranks > 1:
            given = histories or [None] * len(ts)
            wholes = [whole_history(t, scaling, h, dim, learns) for t, h in zip(ts, given, strict=True)]
            histories, method, learns = [h for h in wholes if h is not None], "most-recent", "nothing"
            first = dist.get_rank() * ts[0].numel() if streams else 0
        found = quantize_operands(
            ts, constants, histories, streams, method=method, learns=learns, first=first, **options
        )
        return [cls(v if scaling.float8 is None else v.to(scaling.float8), scale) for v, scale in found]

    def t(self) -> Operand:
        """Return the transposed operand."""
        scale = self.scale if self.scale is None or self.scale.ndim == 0 else self.scale.t()
        return Operand(self.values.t(), scale)
