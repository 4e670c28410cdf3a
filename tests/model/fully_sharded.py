"""What the processes of tests/model/test_fully_shard.py do together."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from altgrad.model import Recipe, quantize_model
from altgrad.model.hardware import SWITCH
from altgrad.model.quantized.operand import Operand
from altgrad.optim import Arm, ArmOptimizer, build_optimizer, weight_grids
from tests.optim.arms import ARMS, arm_named
from tests.processes import together

RECIPES: dict[str, dict[str, Any]] = {
    "tensor": {},
    "row": {"granularity": "row"},
    "block": {"granularity": "block", "scale": "E8M0"},
    "two-level": {"granularity": "block", "scale": "E4M3", "block": 16},
    "delayed": {"scaling": "delayed"},
    "stochastic": {"rounding": "stochastic"},
    "native": {"backend": "native"},
    "codes": {"save": "codes"},
}
# In float32: a product that a CPU rounds to bfloat16 is not the sum of what processes have of it.
PRODUCTS = {SWITCH: "off"}
STEPS, ROWS = 4, 128  # so that no block of rows is in two processes


def model_of(recipe: str, *, sync: bool = False, codes: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    # Of sizes that are whole vectors in each process: torch rounds AdamW otherwise in what is left over.
    plain = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    made = Recipe.uniform("E4M3", grad="E5M2", **RECIPES[recipe])
    return quantize_model(plain, made, sync_amax=sync, gather_codes=codes)


def sharded(model: nn.Sequential) -> nn.Sequential:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[2], model[4]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def batch(number: int) -> Tensor:
    return torch.randn(ROWS, 32, generator=torch.Generator().manual_seed(number))


def whole(t: Any) -> Tensor:
    return (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone()


def trained(model: nn.Module, rank: int = 0, count: int = 1) -> dict[str, Any]:
    """Return losses, first gradients and last weights of some steps of AdamW on shares of the batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, gradients = [], []
    for number in range(STEPS):
        rows = batch(number).chunk(count)[rank]
        loss = model(rows).square().sum() / ROWS
        (loss * count).backward()  # FSDP2 takes the mean over processes
        gradients.append([whole(p.grad) for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        if count > 1:
            dist.all_reduce(total)
        losses.append(total.item())
    state = {name: whole(t) for name, t in model.state_dict().items()}
    return {"losses": losses, "gradients": gradients[0], "state": state}


def refusal(attempt: Callable[[], object]) -> str:
    """Return the sentence that refuses an attempt."""
    try:
        attempt()
    except (ValueError, RuntimeError, NotImplementedError) as error:
        return str(error)
    return "nothing"


def optimizer_of(model: nn.Module, arm: Arm) -> ArmOptimizer:
    return build_optimizer(model, arm, weight_grids(model, on_grid=arm.weights == "quantized"), seed=3)


def stepped(
    model: nn.Module, arm: Arm, first: int = 0, steps: int = STEPS, at: Any = None, optimizer: Any = None
) -> dict[str, Any]:
    """Return weights and optimizer after steps on given gradients, which are sharded as the parameters are."""
    optimizer = optimizer or optimizer_of(model, arm)
    if at is not None:
        at(model, optimizer)
    for number in range(first, steps):
        generator = torch.Generator().manual_seed(number)
        for p in model.parameters():
            g = 0.01 * torch.randn(p.shape, generator=generator)
            spread = hasattr(p, "device_mesh")
            p.grad = distribute_tensor(g, p.device_mesh, p.placements) if spread else g  # type: ignore[attr-defined]
        optimizer.step()
    weights = {name: whole(p) for name, p in model.named_parameters()}
    return {"weights": weights, "optimizer": optimizer}


CODED = {"m": "E4M3", "v": {"format": "UE4M4", "rounding": "stochastic"}, "least": 0}


def arm_of(name: str) -> Arm:
    state = {"m": {"format": "E4M3", "block": 128}, "v": {"format": "UE4M4", "granularity": "row"}}
    made = {
        "plain": lambda: Arm(lr=0.01), "rung, state": lambda: arm_named("rung", state=state),
        "spacing_scaled, state": lambda: arm_named("spacing_scaled", state=state),
        "spacing_unmatched, whole state": lambda: arm_named("spacing_unmatched", state=CODED),
    }  # fmt: skip
    return made[name]() if name in made else arm_named(name)


def main(folder: Path, rank: int, count: int) -> None:
    """Do all of it and have the first process save what came of it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / f'meeting{count}'}", rank=rank, world_size=count)
    kinds = ("trained", "gathered", "ddp", "stepped", "saved", "parallel", "flattened", "drawn")
    found: dict[str, Any] = {kind: {} for kind in kinds}
    for recipe in RECIPES:
        found["trained"][recipe] = trained(sharded(model_of(recipe, sync=True)), rank, count)
        found["saved"][recipe] = saved(folder / recipe, recipe, count)
        if count == 4:  # what the page of stacks alone asks for
            model = nn.parallel.DistributedDataParallel(model_of(recipe, sync=True))
            found["ddp"][recipe] = trained(model, rank, count)
            try:
                found["gathered"][recipe] = trained(sharded(model_of(recipe, sync=True, codes=True)), rank, count)
            except ValueError as error:
                found["gathered"][recipe] = str(error)
            found["parallel"][recipe] = parallel(recipe)
            found["flattened"][recipe] = flattened(recipe)
            found["drawn"][recipe] = drawn(recipe)
    for name in STEPPED if count == 4 else EVERY_DAY:
        found["stepped"][name] = stepped(sharded(model_of("tensor")), arm_of(name))["weights"]
    found["replaced"] = {name: replaced(name) for name in REPLACED}
    found["skipped"] = skipped(rank)
    found["refused"] = refused()
    if rank == 0:
        torch.save(found, folder / f"found{count}")
    dist.barrier()
    dist.destroy_process_group()


#: Whose weights lie in memory as codes.
REFUSED = {"eco_3_bytes": "one process", "rung_3_bytes": "one process"}
OTHERS = ("plain", "rung, state", "spacing_scaled, state", "spacing_unmatched, whole state")
STEPPED = [*OTHERS, *(name for name in ARMS if name not in REFUSED)]
#: Each way of stepping a part: torch's, by element, of the whole tensor, and weights on their quantization grid.
WAYS = ("plain", "spacing_unmatched", "spacing_scaled", "muon", "adamw_sr_weights", "eco", "rung")
EVERY_DAY = list(dict.fromkeys([*OTHERS, *WAYS]))  # what two processes step; four step every arm
REPLACED = ("adamw", "adamw_e4m3_state", "spacing_unmatched", "spacing_scaled", "adamw_sr_weights")


def replaced(name: str) -> dict[str, Tensor]:
    """Put shards in the place of the parameters that an optimizer has, as Accelerate does."""
    model = model_of("tensor")
    optimizer = optimizer_of(model, arm_of(name))
    names = {p: key for key, p in model.named_parameters()}
    shards = dict(sharded(model).named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [shards[names[p]] for p in group["params"]]
    weights = stepped(model, arm_of(name), optimizer=optimizer)["weights"]
    assert all(group["param_names"] for group in optimizer.state_dict()["param_groups"])
    return weights


def skipped(rank: int) -> tuple[int, bool]:
    """One process has a gradient that is not finite: none may step."""
    model = sharded(model_of("tensor"))
    optimizer = build_optimizer(model, arm_of("plain"))
    before = {name: whole(p) for name, p in model.named_parameters()}
    model(batch(0)).sum().backward()
    for p in model.parameters():
        if rank == 1:
            p.grad.to_local().fill_(torch.inf)  # type: ignore[union-attr]
    optimizer.step(norm=torch.inf)
    return optimizer.skipped, all(torch.equal(whole(p), before[name]) for name, p in model.named_parameters())


RESUMED = "spacing_scaled, state"


def saved(folder: Path, recipe: str, count: int) -> dict[str, Tensor]:
    """Two processes save after half of the steps; as many as there are load it, and take the other half."""
    model = sharded(model_of(recipe))
    if count == 2:
        optimizer = stepped(model, arm_of(RESUMED), steps=STEPS // 2)["optimizer"]
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / "checkpoint")

    def load(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        weights, state = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder / "checkpoint")
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)

    again = sharded(model_of(recipe))
    return stepped(again, arm_of(RESUMED), first=STEPS // 2, at=load)["weights"]


def parallel(recipe: str) -> list[str]:
    """Return the refusals of tensor parallelism of quantized layers."""
    mesh, styles = init_device_mesh("cpu", (dist.get_world_size(),)), (ColwiseParallel(), RowwiseParallel())
    return [refusal(lambda style=style: parallelize_module(model_of(recipe), mesh, {"0": style})) for style in styles]


def flattened(recipe: str) -> str:
    """Return the refusal of FSDP1."""
    return refusal(lambda: FullyShardedDataParallel(model_of(recipe), device_id=torch.device("cpu")))


def drawn(recipe: str) -> tuple[list[Tensor], list[Tensor]]:
    """Return each process's inputs and weights as one layer's product takes them, of the same rows and weights."""
    model = nn.parallel.DistributedDataParallel(model_of(recipe))
    model(batch(0)).sum().backward()
    layer = model.module[0]
    settings = layer.settings(torch.float32)
    weight = layer.weight_operands(layer.weight, settings, layer.operand_state("weight")).forward.values.float()
    spec, state = settings.input, layer.operand_state("input")
    rows = Operand.of(batch(0), spec, state, 1, torch.float32).values.float()
    found = []
    for t in (rows, weight):
        each = [torch.empty_like(t) for _ in range(dist.get_world_size())]
        dist.all_gather(each, t.contiguous())
        found.append(each)
    return found[0], found[1]


def refused() -> dict[str, str]:
    """Return the refusals by name."""
    mesh, recipe = init_device_mesh("cpu", (dist.get_world_size(),)), Recipe.uniform("E3M4")
    split: dict[str, Callable[[nn.Module], nn.Module]] = {
        "fully_shard": lambda model: fully_shard(model, mesh=mesh),
        "tensor parallel": lambda model: parallelize_module(model, mesh, {"0": ColwiseParallel()}),
    }
    said = {
        f"{name}, then quantized": refusal(lambda by=by: quantize_model(by(nn.Sequential(nn.Linear(32, 64))), recipe))
        for name, by in split.items()
    }
    return said | {name: refusal(partial(stepped, sharded(model_of("tensor")), arm_of(name))) for name in REFUSED}


def _start(rank: int, program: str, folder: Path, count: int) -> None:
    os.environ |= PRODUCTS | {"GLOO_SOCKET_IFNAME": "lo"}
    importlib.import_module(program).main(folder, rank, count)


def run(
    folder: Path, program: str = "tests.model.fully_sharded", counts: tuple[int, ...] = (2, 4)
) -> dict[int, dict[Any, Any]]:
    """Return what so many processes found together, by their number."""
    results = {}
    for count in counts:
        together(_start, count, folder, program, folder, count, loads="tests.model.gathering")
        results[count] = torch.load(folder / f"found{count}", weights_only=False)
    return results


class Processes(dict[int, dict[Any, Any]]):
    """What `run` returns, found when it is asked for; four go on from what two have saved."""

    def __init__(self, *arguments: Any) -> None:
        self._arguments = arguments
        self._failed: dict[int, RuntimeError] = {}

    def __missing__(self, count: int) -> dict[Any, Any]:
        if count in self._failed:  # those who met in this folder have left, and others would wait for them there
            raise self._failed[count]
        if count > 2:
            self[2]
        try:
            self.update(run(*self._arguments, counts=(count,)))
        except RuntimeError as error:
            self._failed[count] = error
            raise
        return self[count]
