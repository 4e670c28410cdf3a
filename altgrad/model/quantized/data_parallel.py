"""A tensor whose rows several processes share: its scales, and its random numbers, are those of the whole.

In data-parallel training each process has some of a batch's tokens. An amax of its own would give it a scale of its
own, and the cell would not be the one that a single process trains. So the largest magnitudes are reduced over ranks
wherever a scale is for more than a token: that of a tensor, those of its columns, and the upper one of two levels.
Blocks along a product's sum lie within one process's tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from altgrad.formats import SCALE_FORMATS
from altgrad.numerics import amax, amax_from_history
from altgrad.numerics.compile_utils import materialized
from altgrad.numerics.operand_definition import learn
from altgrad.numerics.scaling import scaling_amax

if TYPE_CHECKING:
    from altgrad.model.quantized.quantizer import Quantizer, Scaling

SHARED_ROLES = ("input", "grad")  # a weight is the same in every process


def is_sharded(t: Tensor) -> bool:
    """Return whether ``t`` is a DTensor, of which this process may have a part alone."""
    return hasattr(t, "device_mesh")


@torch.library.custom_op("altgrad::max_over_ranks", mutates_args=())
def max_over_ranks(x: Tensor) -> Tensor:
    """Return the largest of each element over all processes, in each of them; infinity where one has a NaN."""
    found = x.nan_to_num(nan=torch.inf, posinf=torch.inf)  # of NaN a reduction makes anything
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found


@max_over_ranks.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def share_rows(model: nn.Module, ranks: int) -> None:
    """Have the quantized layers of ``model`` take what they are called with for a share of one batch."""
    for quantizer in _of_shared(model):
        quantizer.scaling = replace(quantizer.scaling, ranks=ranks)


@contextmanager
def whole_rows(model: nn.Module) -> Iterator[None]:
    """Have them take it for the whole batch meanwhile, as a process by itself does."""
    before = [(quantizer, quantizer.scaling) for quantizer in _of_shared(model)]
    share_rows(model, 1)
    try:
        yield
    finally:
        for quantizer, scaling in before:
            quantizer.scaling = scaling


def whole_history(t: Tensor, scaling: Scaling, history: Tensor | None, dim: int, learns: str) -> Tensor | None:
    """Return an amax history of one step that sets the scales of this share ``t`` (n, k) to those of the whole tensor.

    ``None`` where they are of its own tokens alone. ``history`` is that of earlier steps, which ``learns`` as in
    `quantize_operands`.
    """
    granularity = scaling.options["granularity"]
    in_groups = granularity in ("block", "tile")
    two_level = in_groups and scaling.options["scale_format"] not in SCALE_FORMATS
    if (granularity == "row" and dim == 1) or (in_groups and not two_level):
        return None
    largest = max_over_ranks(amax(materialized(t), "row" if granularity == "row" else "tensor", dim=dim))
    if history is None:
        return largest.unsqueeze(0)
    remembered = amax_from_history(history, scaling.method)
    learn(history, largest, learns)
    return scaling_amax(remembered, largest).unsqueeze(0)


def _of_shared(model: nn.Module) -> list[Quantizer]:
    of_each = [getattr(module, "quantizers", {}) for module in model.modules()]
    return [quantizers[role] for quantizers in of_each for role in SHARED_ROLES if role in quantizers]
