"""What the processes of tests/model/test_gather_codes.py do together.

Each case trains twice, with weights gathered as they are and as codes, and returns what must be the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import TorchDispatchMode

from altgrad.model import Recipe, quantize_model
from tests.model.fully_sharded import WAYS, arm_of, optimizer_of, refusal, stepped, whole
from tests.model.stacks.moves import Checkpointed

FORMATS = ("E4M3", "E5M2", "E3M4", "E7M0", "E2M1", "E2M3", "E4M3FNUZ")
ROWS, WIDTH = 64, 32
Made = list[Any]


class Transposed(nn.Module):
    """As transformers' Conv1D stores its weight."""

    def __init__(self, inputs: int, nf: int) -> None:
        super().__init__()
        self.nf, self.weight, self.bias = nf, nn.Parameter(torch.randn(inputs, nf) / 8), nn.Parameter(torch.zeros(nf))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


Transposed.__name__ = "Conv1D"


class Tied(nn.Module):
    """A head whose weight is an embedding's, and a layer between."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.middle = nn.Embedding(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Any:
        return self.head(self.middle(self.embedding(x.argmax(1))))


def layers(*sizes: int) -> nn.Sequential:
    torch.manual_seed(0)
    made: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        made += [nn.Linear(inputs, outputs), nn.GELU()]
    return nn.Sequential(*made[:-1])


def shard(model: Any, by: Any = None, **options: Any) -> Any:
    options = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),)), **options}
    for layer in model.children() if by is None else by:
        if list(layer.parameters()):
            fully_shard(layer, **options)
    return fully_shard(model, **options)


def quantized(codes: bool, model: Any = None, recipe: Recipe | None = None) -> Any:
    model = layers(WIDTH, 64, 64, WIDTH) if model is None else model
    recipe = recipe or Recipe.uniform("E4M3", grad="E5M2")
    return quantize_model(model, recipe, sync_amax=True, gather_codes=codes)


def batch(number: int) -> Tensor:
    rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number))
    return rows.chunk(dist.get_world_size())[dist.get_rank()]


def train(model: Any, optimizer: Any = None, steps: int = 3, clip: float | None = None, passes: int = 1) -> Made:
    """Return losses, gradients and last weights."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    found: Made = []
    for number in range(steps):
        for i in range(passes):
            if passes > 1:
                model.set_requires_gradient_sync(i == passes - 1)
            loss = model(batch(passes * number + i)).float().square().mean()
            loss.backward()
            found.append(loss.detach().clone())
        if clip is not None:
            found.append(whole(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        found += [whole(p.grad) for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return found + [whole(p) for p in model.parameters()]


def uneven(codes: bool) -> Made:
    """Parts of several sizes, and processes without any, loaded before the first forward pass."""
    model = shard(quantized(codes, layers(WIDTH, 5, 3, 2)))
    model.load_state_dict({name: 0.5 * t for name, t in model.state_dict().items()})
    return train(model)


def made_on_meta(codes: bool) -> Made:
    with torch.device("meta"):
        model = quantized(codes)
    shard(model).to_empty(device="cpu")
    with torch.no_grad():
        for p in model.parameters():
            torch.nn.init.constant_(p, 0.25)
            p[0].fill_(1.1)
    return train(model)


def alone(codes: bool) -> Made:
    """A layer is called by itself after its weight was changed, so that the model knows no scale for it."""
    model = shard(quantized(codes))
    found = train(model, steps=1)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3)
    y = model[0](batch(0))
    y.square().mean().backward()
    model.unshard()  # of all layers
    model.reshard()
    with torch.no_grad():
        return [*found, y.detach(), whole(model[0].weight.grad), model.eval()(batch(0))]


def not_a_number(codes: bool) -> Made:
    """The first process alone sees what is not finite."""
    found: Made = []
    for value in (torch.nan, torch.inf):
        model = shard(quantized(codes))
        with torch.no_grad():
            part = model[4].weight.to_local()  # no layer after it spreads a NaN
            if dist.get_rank() == 0:
                getattr(part, "master", part)[0, 0] = value
            found.append(model(batch(0)))
    return found


def compiled_layers(codes: bool) -> Made:
    """Graphs between which FSDP2 gathers, as torch would have it; the backend rounds as eager mode does."""
    torch._dynamo.reset()
    model = quantized(codes)
    blocks = [nn.Sequential(*part) for part in (list(model)[:3], list(model)[3:])]
    for block in blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    return train(shard(nn.Sequential(*blocks)))


def compiled_whole(codes: bool) -> Made:
    torch._dynamo.reset()
    model = shard(quantized(codes))
    model.compile(backend="aot_eager")
    return train(model)


def refused() -> dict[str, str]:
    """Return the refusals of ways to shard that codes do not go with."""
    ways: dict[str, dict[str, Any]] = {
        "placement": {"shard_placement_fn": lambda p: Shard(p.ndim - 1)},
        "part of the processes": {"reshard_after_forward": 2},
    }
    return {name: refusal(lambda way=way: train(shard(quantized(True), **way))) for name, way in ways.items()}


def of_arm(name: str, codes: bool) -> Made:
    model, arm = quantized(codes), arm_of(name)
    optimizer = optimizer_of(model, arm)
    names = {p: key for key, p in model.named_parameters()}
    shards = dict(shard(model).named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [shards[names[p]] for p in group["params"]]
    return train(model, optimizer) if arm.weights == "master" else train(model, optimizer_of(model, arm))


def resumed(folder: Path, codes: bool) -> Made:
    """What is saved with codes goes on without, and the other way round."""
    model, name = shard(quantized(codes)), "spacing_scaled"
    weights, state = get_state_dict(model, stepped(model, arm_of(name), steps=2)["optimizer"])
    place = folder / f"{dist.get_world_size()}-{codes}"
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=place)
    other = shard(quantized(not codes))
    optimizer = optimizer_of(other, arm_of(name))
    weights, state = get_state_dict(other, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=place)
    set_state_dict(other, optimizer, model_state_dict=weights, optim_state_dict=state)
    return [sorted(weights), *train(other, optimizer)]


class Carried(TorchDispatchMode):
    """Bytes that this process sends, by the kind of collective."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::").strip("_")
            sent = args[1] if "base" in name else args[0]
            self.bytes[name] += sum(t.nbytes for t in (sent if isinstance(sent, list | tuple) else [sent]))
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))


def carried(codes: bool, **options: Any) -> dict[str, Any]:
    """Return what one forward and backward pass sends, of weights without biases and unshared scales."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
    model = shard(quantize_model(model, Recipe.uniform("E4M3", grad="E5M2"), gather_codes=codes), **options)
    x = torch.randn(16, 64)
    model(x).square().mean().backward()  # which sets FSDP2 up
    with Carried() as seen:
        model(x).square().mean().backward()
    masters = {str(p.dtype) for p in model.parameters()}
    return {"bytes": dict(seen.bytes), "calls": dict(seen.calls), "masters": masters}


Case = Callable[[bool], Made]


def settings(**options: Any) -> Case:
    """Train with other settings of the recipe."""
    format = options.pop("format", "E4M3")
    return lambda codes: train(shard(quantized(codes, recipe=Recipe.uniform(format, grad="E5M2", **options))))


def sharding(by: Any = None, **options: Any) -> Case:
    """Train with other options of `fully_shard`."""
    return lambda codes: train(shard(quantized(codes), by=by, **options))


def mixed(reduced: torch.dtype) -> Case:
    return sharding(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduced))


def model_of(make: Callable[[], Any], names: Sequence[str] = ("0", "2")) -> Case:
    """Train another model, of which the layers with ``names`` are sharded by themselves."""

    def case(codes: bool) -> Made:
        torch.manual_seed(0)
        model = quantized(codes, make())
        return train(shard(model, by=[model.get_submodule(name) for name in names]))

    return case


def replicated(codes: bool) -> Made:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    return train(shard(quantized(codes), mesh=mesh))


def autocast(codes: bool) -> Made:
    with torch.autocast("cpu", torch.bfloat16):
        return train(shard(quantized(codes)))


def checkpointed(codes: bool) -> Made:
    return train(shard(nn.Sequential(*(Checkpointed(layer, False) for layer in quantized(codes)))))


CASES: dict[str, Case] = {
    **{name: settings(format=name) for name in FORMATS},
    **{f"{key} {value}": settings(**{key: value}) for key, value in
       {"save": "codes", "backend": "native", "accumulate": "float32", "scale": "E8M0"}.items()},
    "kept unsharded": sharding(reshard_after_forward=False), "in one group": sharding(by=[]),
    "mixed": mixed(torch.float32), "reduced in bfloat16": mixed(torch.bfloat16),
    "accumulated": lambda codes: train(shard(quantized(codes)), passes=2),
    "clipped norm": lambda codes: train(shard(quantized(codes)), clip=0.01),
    "transposed": model_of(lambda: nn.Sequential(Transposed(WIDTH, 64), nn.GELU(), Transposed(64, WIDTH))),
    "of an embedding": model_of(Tied, ["middle"]),
    **{case.__name__: case for case in (autocast, checkpointed, uneven, made_on_meta, replicated, alone, not_a_number)},
    **{f"arm {name}": partial(of_arm, name) for name in WAYS},
}  # fmt: skip
# What four processes find alone: more formats, settings and arms of a kind that is there.
OF_FOUR = {"E5M2", "E3M4", "E7M0", "E2M3", "accumulate float32", "scale E8M0", "replicated", "reduced in bfloat16",
           "arm spacing_unmatched", "arm spacing_scaled", "arm eco", "arm rung"}  # fmt: skip
OF_TWO = [name for name in CASES if name not in OF_FOUR]
COMPILED = {case.__name__: case for case in (compiled_layers, compiled_whole)}  # of four, since it takes its time


def main(folder: Path, rank: int, count: int) -> None:
    """Do all of it and have the first process save what came of it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / f'meeting{count}'}", rank=rank, world_size=count)
    found: dict[str, Any] = {}
    cases = CASES | COMPILED if count == 4 else {name: CASES[name] for name in OF_TWO}
    cases["resumed"] = partial(resumed, folder)
    for name, case in cases.items():
        found[name] = [case(codes) for codes in (False, True)]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for name, options in {"float32": {}, "bfloat16": {"mp_policy": policy}}.items():
        found[f"carried {name}"] = [carried(codes, **options) for codes in (False, True)]
    found["refused"] = refused() if count == 4 else {}  # of two, two are all
    if rank == 0:
        torch.save(found, folder / f"found{count}")
    dist.barrier()
    dist.destroy_process_group()
