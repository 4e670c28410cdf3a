"""The processes that train one cell together: each has a share of every micro-batch, and a part of each weight.

Data-parallel training by torch's FSDP2, `fully_shard` (Zhao et al. 2023, arXiv:2304.11277). DEVICES.md says what equals
a run of one process, and what process 0, the stage itself, does alone. `altgrad.model.quantized.data_parallel` has the
scales of a shared batch, `altgrad.optim.sharded` the steps. Weights are gathered before the loss and released after its
last backward pass, so the compiled graph in between is that of a single process, without any code of FSDP2.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from altgrad.common.errors import UserError
from altgrad.config import Cell
from altgrad.model.quantized.data_parallel import rows_not_shared

Seen = TypeVar("Seen")
MEETING, CELL = "meeting", "cell.json"  # files of the scratch folder: where processes meet, and their cell
FURTHER = """
from altgrad.common.errors import run_stage
from altgrad.training.run import train_beside
run_stage(train_beside)
"""
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"  # the processes are on one machine
ENDED_WITHIN = 10.0  # seconds in which a process that failed ends


class Ranks:
    """This process's number ``rank`` among the ``count`` that `connected` joined; by default it is the only one."""

    def __init__(self, rank: int = 0, count: int = 1) -> None:
        self.rank, self.count = rank, count
        self._sharded: Any = None  # the module that FSDP2 has hooks on

    @property
    def first(self) -> bool:
        """Whether this process records what happens."""
        return self.rank == 0

    def share(self, t: Tensor) -> Tensor:
        """Return this process's rows of ``t``; the number of rows of ``t`` is a multiple of `count`."""
        length = len(t) // self.count
        return t[self.rank * length : (self.rank + 1) * length]

    def shard(self, model: nn.Module) -> None:
        """Shard ``model``: this process keeps a part of each weight; `loss` and `gathered` gather whole weights."""
        if self.count == 1:
            return
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(next(model.parameters()).device.type, (self.count,))
        self._sharded = fully_shard(_Loss(model), mesh=mesh)
        # Gradients are summed: the loss is a share of the mean already.
        self._sharded.set_gradient_divide_factor(1.0)
        self._sharded.set_force_sum_reduction_for_comms(True)

    def loss(self, loss_of: Callable[..., Tensor], *inputs: Tensor, last: bool) -> Tensor:
        """Return ``loss_of(*inputs)``, the loss of this process's share of a micro-batch; see `share`.

        Gradients are summed over the processes in the backward pass of the ``last`` micro-batch only.
        """
        if self._sharded is None:
            return loss_of(*inputs)
        self._sharded.set_requires_gradient_sync(last)
        self._sharded.set_reshard_after_backward(last)
        found: Tensor = self._sharded(loss_of, *inputs)
        return found

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Inside, this process has whole weights. All processes must enter together."""
        if self._sharded is None:
            yield
            return
        self._sharded.unshard()
        try:
            yield
        finally:
            self._sharded.reshard()

    def alone(self, model: nn.Module, look: Callable[[], Seen]) -> Seen | None:
        """Call ``look`` in the first process, on whole weights and batches, and return its result; else ``None``."""
        if self.count == 1:
            return look()
        with self.gathered(), rows_not_shared(model):
            return look() if self.first else None

    def sum(self, t: Tensor) -> Tensor:
        """Return ``t``, overwritten by its sum over all processes."""
        if self.count > 1:
            dist.all_reduce(t)
        return t

    def any(self, number: int) -> int:
        """Return the largest ``number`` of all processes."""
        if self.count == 1:
            return number
        largest = torch.tensor([number])
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return int(largest)

    def require_same(self, step: int) -> None:
        """Raise ``RuntimeError`` unless each process has resumed after the same ``step``."""
        if self.any(step) != -self.any(-step):
            raise RuntimeError("the processes of this cell resumed from different checkpoints")


class _Loss(nn.Module):
    """A model whose weights FSDP2 gathers before `forward` calls ``loss_of``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, loss_of: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        return loss_of(*inputs)


@contextmanager
def connected(meeting: Path, rank: int, count: int, device: torch.device) -> Iterator[Ranks]:
    """Join the other processes through the file ``meeting``. If ``device`` is a GPU, each process uses its own GPU."""
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", LOOPBACK)
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"file://{meeting.resolve()}", rank=rank, world_size=count)
    try:
        yield Ranks(rank, count)
    finally:
        dist.destroy_process_group()


@contextmanager
def started(cell: Cell, tokens: Path, scratch: Path, root: Path, device: torch.device) -> Iterator[Ranks]:
    """Start ``cell.train.devices - 1`` further processes, and yield the `Ranks` of this one, the first.

    They end with this process, however it ends. Raises :class:`UserError` if one of them ends before it.
    """
    count = cell.train.devices
    if count == 1:
        yield Ranks()
        return
    meeting = scratch / MEETING
    meeting.unlink(missing_ok=True)
    (scratch / CELL).write_text(cell.to_json(), encoding="utf-8")
    command = [sys.executable, "-c", FURTHER, str(scratch), str(tokens), str(root)]
    others = [
        subprocess.Popen([*command, str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for rank in range(1, count)
    ]
    try:
        # At the meeting this process would wait for one that has ended.
        if not all(other.stdout and other.stdout.readline() for other in others):
            raise RuntimeError("a process ended before it met the others")
        with connected(meeting, 0, count, device) as ranks:
            yield ranks
    except RuntimeError as error:
        ended = _first_ended(others)
        if ended is None:
            raise
        raise UserError(
            f"{cell.key}: process {ended + 1} of the {count - 1} beside the first that train it ended with status "
            f"{others[ended].returncode}; run the same command again: it goes on from the last checkpoint"
        ) from error
    finally:
        for other in others:
            other.communicate()  # which closes its input, and so ends it
        meeting.unlink(missing_ok=True)


def _first_ended(others: list[subprocess.Popen[bytes]]) -> int | None:
    """Return the index of the first process that has failed or fails within `ENDED_WITHIN`, ``None`` without one."""
    for number, other in enumerate(others):
        with suppress(subprocess.TimeoutExpired):
            if other.wait(ENDED_WITHIN):
                return number
    return None
