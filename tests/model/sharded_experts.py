"""What the processes of tests/model/test_mixtures.py do together."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from altgrad.model import quantize_model
from altgrad.optim import Arm, build_optimizer
from tests.model.test_experts import RECIPES
from tests.model.test_mixtures import IDS, model


def steps_are_those_of_one_process(rank: int, folder: Path, way: str) -> None:
    """Step a model in one process and sharded over all, on one batch each, and compare its parameters."""
    os.environ.update(MASTER_ADDR="127.0.0.1")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    alone, sharded = (quantize_model(model("gpt_oss"), RECIPES[way]) for _ in range(2))
    mesh = init_device_mesh("cpu", (2,))
    for layer in sharded.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    for net in (alone, sharded):
        optimizer = build_optimizer(net, Arm(lr=1e-2))
        for _ in range(2):
            optimizer.zero_grad()
            net(input_ids=IDS, labels=IDS).loss.backward()
            optimizer.step()
    whole = {name: p.full_tensor() for name, p in sharded.named_parameters()}
    assert all(torch.equal(p, whole[name]) for name, p in alone.named_parameters())
    with pytest.raises(ValueError, match="sync_amax is for linear layers, and model.layers.0.mlp.experts"):
        quantize_model(model("gpt_oss"), RECIPES["tensor"], sync_amax=True)
    dist.destroy_process_group()
