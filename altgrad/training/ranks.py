"""The processes that train one cell together: each has a share of every micro-batch, and all have the whole model.

Data-parallel training by torch's `DistributedDataParallel` (Li et al. 2020, arXiv:2006.15704). It is to be the run of
one process: gradients are summed over the shares of the batch, scales are those of the whole batch
(`altgrad.model.quantized.data_parallel`), and every process does the same update, so that their weights stay equal to
the bit, which is checked at each checkpoint. What differs from one process is where sums are rounded.

Process 0 is the stage itself. It alone records, writes checkpoints and is told to stop; what it looks at between
steps it looks at by itself, on the whole batch. A checkpoint knows nothing of how many there were.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from altgrad.config import Cell, UserError
from altgrad.config.files import write_text
from altgrad.model.quantized.data_parallel import share_rows, whole_rows

MEETING, CELL = "meeting", "cell.json"  # files of a scratch folder, for the processes to find each other and the cell
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"  # nothing of a cell leaves its machine
ENDED_WITHIN = 10.0  # seconds in which a process that failed is gone


class Ranks:
    """This process among ``count``, as number ``rank``, after `joined`; by itself without arguments."""

    def __init__(self, rank: int = 0, count: int = 1) -> None:
        self.rank, self.count = rank, count
        self._loss_of: Callable[..., Tensor] | None = None
        self._parallel: DistributedDataParallel | None = None  # which is `_loss_of` then

    @property
    def first(self) -> bool:
        """Whether this process records what happens."""
        return self.rank == 0

    def share(self, t: Tensor) -> Tensor:
        """Return this process's rows of ``t``, whose number is a multiple of `count`."""
        length = len(t) // self.count
        return t[self.rank * length : (self.rank + 1) * length]

    def share_batches(self, model: nn.Module) -> None:
        """Have the quantized layers of ``model`` scale what they are called with as the whole batch."""
        if self.count > 1:
            share_rows(model, self.count)

    def train(self, model: nn.Module, loss_of: Callable[..., Tensor]) -> None:
        """Have `loss` be ``loss_of``, the loss of ``model``, its gradients summed over the shares of all processes."""
        self._loss_of = loss_of
        if self.count == 1:
            return
        torch._dynamo.config.optimize_ddp = False  # a graph for each bucket would round elsewhere than the whole one
        self._loss_of = self._parallel = DistributedDataParallel(_Loss(model, loss_of), forward_sync_buffers=False)
        # torch takes no annotations that are texts, as those of `_summed` are.
        self._parallel.register_comm_hook(None, lambda state, bucket: _summed(bucket))

    def loss(self, *inputs: Tensor) -> Tensor:
        """Return the loss of a share of a micro-batch, as `train` says."""
        assert self._loss_of is not None
        return self._loss_of(*inputs)

    def sync(self, *, last: bool) -> AbstractContextManager[None]:
        """Return where a micro-batch is run: only the ``last`` one's backward pass waits for the other processes."""
        return nullcontext() if last or self._parallel is None else self._parallel.no_sync()

    def leave(self) -> None:
        """Part from the other processes."""
        self._loss_of = self._parallel = None  # which waits for them when it is freed, for ever once they are gone
        gc.collect()
        dist.destroy_process_group()

    def sum(self, t: Tensor) -> Tensor:
        """Return the sum of ``t`` over all processes, in each the same; may be ``t`` itself."""
        if self.count > 1:
            dist.all_reduce(t)
        return t

    def any(self, number: int) -> int:
        """Return the largest of what the processes say."""
        return number if self.count == 1 else int(_reduced(torch.tensor([number]), dist.ReduceOp.MAX))

    def alone(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return where this process may run ``model`` without the others, on a whole batch."""
        return nullcontext() if self.count == 1 else whole_rows(model)

    def require_equal(self, model: nn.Module, otherwise: str) -> None:
        """Raise ``RuntimeError``, that they have ``otherwise``, unless each process has the same weights to the bit."""
        if self.count == 1:
            return
        found = torch.stack([p.detach().view(torch.int32).sum(dtype=torch.int64) for p in model.parameters()]).cpu()
        largest, least = _reduced(found, dist.ReduceOp.MAX), _reduced(found, dist.ReduceOp.MIN)
        if not torch.equal(largest, least):
            names = [name for name, _ in model.named_parameters()]
            first = names[int((largest != least).nonzero()[0])]
            raise RuntimeError(f"the processes of this cell have {otherwise}: {first}")


class _Loss(nn.Module):
    """A model whose forward pass is ``loss_of``, which may be compiled: what `DistributedDataParallel` takes."""

    def __init__(self, model: nn.Module, loss_of: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model = model
        self.loss_of = (loss_of,)  # in a tuple, so that it is no second part of this module

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.loss_of[0](*inputs)


def _summed(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Sum a bucket of gradients. The loss is a share of the mean already, so that nothing is left to divide."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def _reduced(t: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
    t = t.clone()
    dist.all_reduce(t, op=op)
    return t


@contextmanager
def joined(meeting: Path, rank: int, count: int, device: torch.device) -> Iterator[Ranks]:
    """Meet the other processes by the file ``meeting``; each has a GPU of its own if ``device`` is one."""
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", LOOPBACK)
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"file://{meeting.resolve()}", rank=rank, world_size=count)
    ranks = Ranks(rank, count)
    try:
        yield ranks
    finally:
        ranks.leave()


@contextmanager
def started(cell: Cell, tokens: Path, scratch: Path, root: Path, device: torch.device) -> Iterator[Ranks]:
    """Start the other processes that ``cell`` is trained by, if any, and be the first.

    They end with this one, however it ends. Raises :class:`UserError` when one of them ends before it.
    """
    count = cell.train.devices
    if count == 1:
        yield Ranks()
        return
    meeting = scratch / MEETING
    meeting.unlink(missing_ok=True)
    write_text(scratch / CELL, cell.to_json())
    command = [sys.executable, "-m", "altgrad.training.replica", str(scratch), str(tokens), str(root)]
    others = [
        subprocess.Popen([*command, str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for rank in range(1, count)
    ]
    try:
        # One that has ended would be waited for at the meeting.
        if not all(other.stdout and other.stdout.readline() for other in others):
            raise RuntimeError("a process ended before it met the others")
        with joined(meeting, 0, count, device) as ranks:
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
    """Return the number of the first process that has failed, or fails now, counted from 0."""
    for number, other in enumerate(others):
        with suppress(subprocess.TimeoutExpired):
            if other.wait(ENDED_WITHIN):
                return number
    return None
