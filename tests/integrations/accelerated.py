"""What two processes of tests/integrations/test_accelerate.py do together under FSDP2."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from altgrad.optim import Arm
from tests.model.fully_sharded import batch, model_of, optimizer_of, whole


def trained(accelerator: Any, codes: bool | None) -> dict[str, Any]:
    """Return losses and weights of some steps, of one process if ``codes`` is None."""
    model: Any = model_of("tensor", sync=codes is not None, codes=bool(codes))
    optimizer: Any = optimizer_of(model, Arm(lr=1e-2, stiffness="ulp"))
    if codes is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
        assert isinstance(model, FSDPModule)
    losses = []
    for number in range(3):
        rows = batch(number)
        loss = model(rows if codes is None else rows.chunk(dist.get_world_size())[dist.get_rank()]).square().mean()
        optimizer.zero_grad()
        loss.backward() if codes is None else accelerator.backward(loss)
        optimizer.step()
        losses.append((loss if codes is None else accelerator.reduce(loss.detach(), "mean")).item())
    return {"losses": losses, "weights": [whole(p) for p in model.parameters()]}


def main(folder: Path, rank: int, count: int) -> None:
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin

    torch.set_num_threads(1)
    of_rank = dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    of_rank |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(count))
    os.environ |= of_rank | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "ACCELERATE_USE_CPU": "true"}
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=count)
    found = {}
    for codes in (False, True):
        accelerator = Accelerator(cpu=True)
        # Accelerate 1.15 takes a plugin for FSDP on GPUs alone. On CPUs it leaves the type at MULTI_CPU and would take
        # DistributedDataParallel, without a word. What the type leads to does not ask for a GPU.
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=100, cpu_ram_efficient_loading=False
        )
        found[codes] = trained(accelerator, codes)
        accelerator.state._reset_state(True)
    if rank == 0:
        torch.save(found, folder / f"found{count}")
    dist.barrier()
    dist.destroy_process_group()
