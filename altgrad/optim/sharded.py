"""Parameters that several processes have parts of, as FSDP2 (`torch.distributed.fsdp.fully_shard`) leaves them.

They are DTensors. What treats each element by itself steps the part at hand; what looks at the whole tensor gathers it,
steps it in each process alike, and keeps the part. Either way the bits are those of one process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from altgrad.config.arms import BASES, Arm
from altgrad.model.quantized.data_parallel import is_sharded, master_of
from altgrad.optim.weight_grid import WeightGrid

ELEMENTWISE = (None, "ulp", "smooth", "range")  # stiffness that looks at one weight and the tensor's scale


def local(t: Any) -> Tensor:
    """Return this process's part of ``t``, which shares its memory; ``t`` itself where it is whole."""
    return master_of(t.to_local()) if is_sharded(t) else t


def parts(ts: list[Any], sharded: bool) -> list[Tensor]:
    """Return this process's part of each; ``sharded``: whether there may be other than whole ones."""
    return list(map(local, ts)) if sharded else ts


def whole(t: Any) -> Tensor:
    """Return all of ``t``, gathered from all processes."""
    return t.full_tensor() if is_sharded(t) else t


def split_as(like: Any, t: Any) -> Any:
    """Return ``t``, which all processes have whole, in parts as ``like`` is; ``t`` itself if ``like`` is whole."""
    if not is_sharded(like) or is_sharded(t):
        return t
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(t.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def whole_together(ts: Sequence[Any], dtype: torch.dtype) -> list[Tensor]:
    """Return all of each of ``ts``, of one shape and sharded alike, in ``dtype``; gathered by one message."""
    from torch.distributed.tensor import DTensor

    like, parts = ts[0], torch.stack([local(t).to(dtype) for t in ts], -1)
    whole = torch.empty(*like.shape, len(ts), device="meta")
    spread = DTensor.from_local(
        parts, like.device_mesh, like.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return [t.contiguous() for t in spread.full_tensor().unbind(-1)]


def keep_part(kept: Any, t: Tensor) -> None:
    """Write ``t``, which all processes have whole, into ``kept``, or this process's part of it."""
    local(kept).copy_(local(split_as(kept, t)))


def joined(p: Any, part: Tensor) -> Tensor:
    """Return ``part``, of a tensor that is split as evenly as ``p`` is by its rows, as this process's part of it."""
    if not is_sharded(p):
        return part
    from torch.distributed.tensor import DTensor

    shape = torch.Size((part.shape[0] * parts_by_rows(p), *part.shape[1:]))
    stride = part.stride()  # of all but the first dimension, and so of all
    found: Tensor = DTensor.from_local(part, p.device_mesh, p.placements, run_check=False, shape=shape, stride=stride)
    return found


def parts_by_rows(p: Any) -> int:
    """Return how many parts ``p`` is in, all of as many of its rows; 0 if it is split otherwise."""
    sizes = [size for size, place in zip(p.device_mesh.shape, p.placements, strict=True) if not place.is_replicate()]
    by_rows = all(place.is_replicate() or place.is_shard(0) for place in p.placements)
    count = math.prod(sizes)
    return count if by_rows and p.shape[0] % count == 0 else 0


def largest(t: Tensor) -> Tensor:
    """Return the largest magnitude (0-d float32) of all of ``t``."""
    part = local(t).detach().abs()
    found = part.amax().float() if part.numel() else part.new_zeros((), dtype=torch.float32)
    return _reduced(found, t, dist.ReduceOp.MAX)


def all_finite(gradients: list[Tensor], sharded: bool) -> bool:
    """Return whether ``gradients`` are finite, in every process that has parts of them.

    Told by their sums, which are read once at the speed of memory; finite numbers may still have an infinite one.
    """
    own = parts(gradients, sharded)
    finite = bool(torch.stack([g.sum(dtype=torch.float32) for g in own]).isfinite().all())
    finite = finite or all(bool(g.isfinite().all()) for g in own)
    for g in gradients if sharded else ():
        if is_sharded(g):  # whose mesh has all processes that the others have
            return bool(_reduced(torch.tensor(int(finite), device=local(g).device), g, dist.ReduceOp.MIN))
    return finite


def is_elementwise(arm: Arm, grid: WeightGrid) -> bool:
    """Return whether a step of ``arm`` needs of a weight's other elements the amax of its scale alone."""
    return (
        arm.stiffness in ELEMENTWISE and arm.normalise != "rms" and not arm.match_rms and arm.weights == "master"
        and BASES[arm.base].direction != "orthogonal" and grid.options.get("granularity", "tensor") == "tensor"
    )  # fmt: skip


def _reduced(t: Tensor, like: Any, op: dist.ReduceOp.RedOpType) -> Tensor:
    if is_sharded(like):
        for dimension in range(like.device_mesh.ndim):
            dist.all_reduce(t, op=op, group=like.device_mesh.get_group(dimension))
    return t
