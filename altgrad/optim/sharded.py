"""Parameters sharded over processes: the DTensors of FSDP2 (`torch.distributed.fsdp.fully_shard`).

An elementwise step uses only the local part. A step that needs the whole tensor gathers the tensor, computes the same
in each process, and keeps the local part. Either way the results are bitwise those of one process.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from altgrad.config.arms import BASES, Arm
from altgrad.model.quantized.data_parallel import is_sharded, master_of
from altgrad.optim.weight_grid import WeightGrid

ELEMENTWISE = (None, "ulp", "smooth", "range")  # stiffness that needs only the weight itself and the scale


def local(t: Any) -> Tensor:
    """Return this process's part of ``t``, a view; ``t`` itself if ``t`` is not sharded."""
    return master_of(t.to_local()) if is_sharded(t) else t


def parts(ts: list[Any], sharded: bool) -> list[Tensor]:
    """Return this process's part of each tensor; ``ts`` itself if ``sharded`` is false."""
    return list(map(local, ts)) if sharded else ts


def gather_full(t: Any) -> Tensor:
    """Return the whole of ``t``, gathered from all processes; ``t`` itself if ``t`` is not sharded."""
    return t.full_tensor() if is_sharded(t) else t


def gather_full_together(ts: Sequence[Any], dtype: torch.dtype) -> list[Tensor]:
    """Return the whole of each tensor in ``dtype``, gathered in one message. All have one shape and sharding."""
    stacked = torch.stack([local(t).to(dtype) for t in ts], -1)
    full = torch.empty(*ts[0].shape, len(ts), device="meta")
    return [t.contiguous() for t in _distributed(ts[0], stacked, full.shape, full.stride()).full_tensor().unbind(-1)]


@contextmanager
def gathered(
    p: Any, g: Any, state: Mapping[str, Any], dtype: torch.dtype
) -> Iterator[tuple[Tensor, Tensor, dict[str, Tensor]]]:
    """Yield the whole of a sharded weight, its gradient and its state; then store this process's part of each.

    Weight and gradient are in ``dtype``. State that is not sharded is yielded unchanged.
    """
    sharded = {name: t for name, t in state.items() if is_sharded(t)}
    alike = [name for name, t in sharded.items() if (t.shape, t.dtype) == (p.shape, dtype)]
    w, g, *moments = gather_full_together([p, g, *(sharded[name] for name in alike)], dtype)
    full = {name: gather_full(t) for name, t in state.items() if name not in alike}
    full.update(zip(alike, moments, strict=True))
    yield w, g, full
    for part, t in ((p, w), *((sharded[name], full[name]) for name in sharded)):
        keep_part(part, t)


def split_as(like: Any, t: Any) -> Any:
    """Return ``t``, which every process has in full, sharded as ``like`` is; ``t`` itself if ``like`` is not."""
    if not is_sharded(like) or is_sharded(t):
        return t
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(t.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def keep_part(kept: Any, t: Tensor) -> None:
    """Copy ``t``, which every process has in full, into ``kept``; if ``kept`` is sharded, only the local part."""
    local(kept).copy_(local(split_as(kept, t)))


def from_part(p: Any, part: Tensor) -> Any:
    """Return the tensor whose local part is ``part``, sharded by rows like ``p``; ``part`` if ``p`` is not sharded."""
    if not is_sharded(p):
        return part
    shape = torch.Size((part.shape[0] * parts_by_rows(p), *part.shape[1:]))
    return _distributed(p, part, shape, part.stride())  # strides of all but the first dimension are those of the whole


def parts_by_rows(p: Any) -> int:
    """Return the number of parts of ``p`` if it is split by rows into equal parts, else 0."""
    sizes = [size for size, place in zip(p.device_mesh.shape, p.placements, strict=True) if not place.is_replicate()]
    by_rows = all(place.is_replicate() or place.is_shard(0) for place in p.placements)
    count = math.prod(sizes)
    return count if by_rows and p.shape[0] % count == 0 else 0


def largest(t: Tensor) -> Tensor:
    """Return the largest magnitude of ``t`` over all processes, 0-d float32."""
    part = local(t).detach().abs()
    amax = part.amax().float() if part.numel() else part.new_zeros((), dtype=torch.float32)
    return _reduced(amax, t, dist.ReduceOp.MAX)


def all_finite(gradients: list[Tensor], sharded: bool) -> bool:
    """Return whether ``gradients`` are finite in every process.

    Sums are checked first, at memory bandwidth. Finite numbers may have an infinite sum: then each element is checked.
    """
    local_gradients = parts(gradients, sharded)
    finite = bool(torch.stack([g.sum(dtype=torch.float32) for g in local_gradients]).isfinite().all())
    finite = finite or all(bool(g.isfinite().all()) for g in local_gradients)
    for g in gradients if sharded else ():
        if is_sharded(g):  # its mesh has all processes that the meshes of the others have
            return bool(_reduced(torch.tensor(int(finite), device=local(g).device), g, dist.ReduceOp.MIN))
    return finite


def is_elementwise(arm: Arm, grid: WeightGrid) -> bool:
    """Return whether ``arm`` steps each element from that element and the tensor's amax alone."""
    return (
        arm.stiffness in ELEMENTWISE and arm.normalise != "rms" and not arm.match_rms and arm.weights == "master"
        and BASES[arm.base].direction != "orthogonal" and grid.options.get("granularity", "tensor") == "tensor"
    )  # fmt: skip


def _distributed(like: Any, part: Tensor, shape: torch.Size, stride: tuple[int, ...]) -> Any:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(part, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride)


def _reduced(t: Tensor, like: Any, op: dist.ReduceOp.RedOpType) -> Tensor:
    if is_sharded(like):
        for dimension in range(like.device_mesh.ndim):
            dist.all_reduce(t, op=op, group=like.device_mesh.get_group(dimension))
    return t
