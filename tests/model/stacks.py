"""What other people's training stacks do to a quantized model, with every kind of recipe: the cells of STACKS.md.

Each stack is a function that trains a little and compares with the same without the stack, to the bit unless it says
otherwise. It returns where that holds, and raises what the layers say where they refuse. Of several processes the cells
are in `OF_PROCESSES`, of what tests/model/fully_sharded.py found. ``python -m tests.model.stacks`` writes the page.
"""

from __future__ import annotations

import copy
import os
import pickle
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from altgrad.model import Recipe, quantize_model
from tests.model import fully_sharded

PAGE = Path(__file__).parents[2] / "altgrad/model/STACKS.md"
WORKS, REFUSED = "works", "refused"
RECIPES = fully_sharded.RECIPES | {"native": {"backend": "native"}}
REFUSALS = (NotImplementedError, RuntimeError, ValueError, torch._dynamo.exc.Unsupported)
INPUTS = [torch.randn(32, 64, generator=torch.Generator().manual_seed(i)) for i in range(3)]


def plain(device: str = "cpu") -> nn.Sequential:
    torch.manual_seed(0)
    with torch.device(device):
        return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64))


def quantized(recipe: str, model: nn.Sequential | None = None) -> nn.Sequential:
    model = plain() if model is None else model
    return quantize_model(model, Recipe.uniform("E4M3", grad="E5M2", **RECIPES[recipe]))


def passes(model: Any, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return outputs and weights' gradients of three passes; a bias has a sum, whose order compilers choose."""
    found: list[Tensor] = []
    for x in INPUTS:
        model.zero_grad()
        y = model(x.to(dtype).clone().requires_grad_())
        y.float().square().sum().backward()
        found += [y.detach(), *(p.grad.clone() for p in model.parameters() if p.ndim == 2)]
    return found


def require_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def cast(recipe: str) -> None:
    """`model.to(torch.bfloat16)` after quantizing."""
    require_same(
        passes(quantized(recipe).to(torch.bfloat16), torch.bfloat16),
        passes(quantized(recipe, plain().to(torch.bfloat16)), torch.bfloat16),
    )


def meta(recipe: str) -> None:
    """Made on the meta device, `to_empty`, then loaded."""
    model = quantized(recipe, plain("meta")).to_empty(device="cpu")
    model.load_state_dict(plain().state_dict())
    require_same(passes(model), passes(quantized(recipe)))


def copies(recipe: str) -> None:
    """`copy.deepcopy` and pickle."""
    model = quantized(recipe)
    passes(model)
    made = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    after = passes(model)
    for one in made:
        require_same(passes(one), after)


def average(recipe: str) -> None:
    """`AveragedModel` of `torch.optim.swa_utils`: the mean of two states of the weights."""
    model, expected = quantized(recipe), quantized(recipe)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    averaged.update_parameters(model)
    first = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    averaged.update_parameters(model)
    with torch.no_grad():
        for p, q in zip(expected.parameters(), first, strict=True):
            p.copy_(1.5 * q)
    require_same([p.detach() for p in averaged.module.parameters()], [p.detach() for p in expected.parameters()])
    require_same([averaged.eval()(INPUTS[0])], [expected.eval()(INPUTS[0])])


def scaler(recipe: str) -> None:
    """float16 autocast with `GradScaler`, whose scale is a power of two."""
    ends = []
    for enabled in (True, False):
        model = quantized(recipe)
        optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-10)
        scaling = torch.amp.GradScaler("cpu", init_scale=2.0**4, enabled=enabled)
        for x in INPUTS[:1]:
            with torch.autocast("cpu", torch.float16):
                loss = model(x).float().square().mean()
            scaling.scale(loss).backward()
            scaling.step(optimizer)
            scaling.update()
        ends.append([p.detach() for p in model.parameters()])
    for a, b in zip(*ends, strict=True):  # float16 gradients that are subnormal without the scale
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def plain_checkpoint(recipe: str) -> None:
    """A plain checkpoint, strictly, into every recipe, and what a recipe saves into every other one."""
    model = quantized(recipe)
    model.load_state_dict(plain().state_dict())
    for other in RECIPES:
        quantized(other).load_state_dict(model.state_dict())
    require_same(passes(model), passes(quantized(recipe)))


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


def around_each(recipe: str, reentrant: bool = False) -> nn.Sequential:
    return nn.Sequential(*(Checkpointed(layer, reentrant) for layer in quantized(recipe)))


def recomputed(recipe: str) -> None:
    """Activation checkpointing, `use_reentrant=False`."""
    require_same(passes(around_each(recipe)), passes(quantized(recipe)))


def recomputed_reentrant(recipe: str) -> None:
    """Activation checkpointing, `use_reentrant=True`."""
    require_same(passes(around_each(recipe, True)), passes(quantized(recipe)))


def nested(recipe: str) -> None:
    """A checkpoint inside of another."""
    require_same(passes(Checkpointed(around_each(recipe), False)), passes(quantized(recipe)))


def compiled(recipe: str) -> None:
    """`torch.compile(model, fullgraph=True)`."""
    torch._dynamo.reset()
    require_same(passes(torch.compile(quantized(recipe), fullgraph=True)), passes(quantized(recipe)))


def recomputed_compiled(recipe: str) -> None:
    """`torch.compile` of a model with checkpoints inside, without `fullgraph`."""
    torch._dynamo.reset()
    require_same(passes(torch.compile(around_each(recipe), backend="aot_eager")), passes(quantized(recipe)))


def recomputed_in_a_graph(recipe: str) -> None:
    """The same with `fullgraph=True`."""
    torch._dynamo.reset()
    found = torch.compile(around_each(recipe), backend="aot_eager", fullgraph=True)
    require_same(passes(found), passes(quantized(recipe)))


def per_sample(recipe: str) -> None:
    """Gradients of each sample by `torch.func.vmap(grad(...))`."""
    model = quantized(recipe)
    weights = dict(model.named_parameters())

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        found: Tensor = torch.func.functional_call(model, weights, (x[None],)).square().sum()
        return found

    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, INPUTS[0][:4])
    for i in range(4):
        model.zero_grad()
        model(INPUTS[0][i : i + 1]).square().sum().backward()
        require_same([gradients[name][i] for name in weights], [p.grad for p in weights.values()])  # type: ignore[misc]


def exported(recipe: str) -> None:
    """`torch.export`, of a model in evaluation."""
    model = quantized(recipe).eval()
    program = torch.export.export(model, (INPUTS[0],))
    require_same([program.module()(INPUTS[0])], [model(INPUTS[0])])


def lora(recipe: str) -> None:
    """PEFT's LoRA around quantized layers, whose adapters begin at zero."""
    from peft import LoraConfig, get_peft_model

    from altgrad.integrations.peft import lora_config

    model = get_peft_model(quantized(recipe), lora_config(LoraConfig(target_modules=["0", "2"])))
    expected = quantized(recipe)
    require_same([model(x).detach() for x in INPUTS], [expected(x).detach() for x in INPUTS])
    model(INPUTS[0]).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


STACKS: tuple[Callable[[str], None], ...] = (
    cast, meta, copies, average, scaler, plain_checkpoint, recomputed, recomputed_reentrant, nested, compiled,
    recomputed_compiled, recomputed_in_a_graph, per_sample, exported, lora,
)  # fmt: skip
OF_PROCESSES: dict[str, str] = {
    "DistributedDataParallel, `sync_amax=True` (losses within 2e-6)": "ddp",
    "FSDP2's `fully_shard`, `sync_amax=True` (losses within 2e-6)": "trained",
    "The same with `gather_codes=True` (losses and weights to the bit as without)": "gathered",
    "DCP: saved by two processes, loaded by two and by four": "saved",
    "`ColwiseParallel`, `RowwiseParallel`": "parallel",
}
HOW = {
    "nested": "one checkpoint around the layers",
    "recomputed_in_a_graph": "without `fullgraph`: the checkpoint then runs in eager mode",
    "per_sample": "`model.eval()`, or a recipe that remembers nothing",
    "gathered": "`fully_shard` without `gather_codes`",
    "parallel": "`fully_shard`",
}


def cell_of(stack: Callable[[str], None], recipe: str) -> str:
    """Return `WORKS`, or `REFUSED` if that is in one sentence of ours; raises for anything else."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            stack(recipe)
        except REFUSALS as error:
            if any(word in str(error) for word in ("use one checkpoint", "cannot repeat", "torch.func has no")):
                return REFUSED
            raise
        finally:
            torch._dynamo.reset()
    return WORKS


def cell_of_processes(found: dict[int, dict[str, Any]], what: str, recipe: str) -> str:
    """Return the same of what processes found, by the tolerance that the page states."""
    if what == "parallel":
        said = found[4]["parallel"][recipe]
        assert len(said) == 2 and all("nn.Linear" in sentence for sentence in said)
        return REFUSED
    for count in (4,) if what in ("ddp", "gathered") else (2, 4):
        several = found[count][what][recipe]
        if isinstance(several, str):
            assert "or leave gather_codes out" in several
            return REFUSED
        if what == "gathered":
            as_they_are = found[count]["trained"][recipe]
            assert several["losses"] == as_they_are["losses"]
            assert all(torch.equal(t, as_they_are["state"][name]) for name, t in several["state"].items())
        elif what == "saved":
            arm = fully_sharded.arm_of(fully_sharded.RESUMED)
            weights = fully_sharded.stepped(fully_sharded.model_of(recipe), arm)["weights"]
            assert all(torch.equal(t, weights[name]) for name, t in several.items())
        else:
            one = fully_sharded.trained(fully_sharded.model_of(recipe))
            assert all(abs(a / b - 1) < 2e-6 for a, b in zip(several["losses"], one["losses"], strict=True))
    return WORKS


def page(found: dict[int, dict[str, Any]]) -> str:
    """Return STACKS.md."""
    rows = [(stack.__doc__ or "", stack.__name__, [cell_of(stack, r) for r in RECIPES]) for stack in STACKS]
    for said, what in OF_PROCESSES.items():
        rows.append((said, what, [cell_of_processes(found, what, r) for r in RECIPES]))
    table = [["stack", *RECIPES, "instead"], ["---"] * (len(RECIPES) + 2)]
    for said, what, cells in rows:
        table.append([said.rstrip("."), *cells, HOW.get(what, "") if REFUSED in cells else ""])
    return TEXT + "\n".join("| " + " | ".join(row) + " |" for row in table) + "\n"


TEXT = """# Quantized layers in training stacks

What a stack does to a model of `quantize_model`, by the kind of recipe. **works**: outputs and gradients have the bits
that the model has without the stack, unless the row says how far they are apart. **refused**: one sentence says so,
and the last column what to do instead. Each cell is a test, and `python -m tests.model.stacks` writes this page of what
they find on a CPU.

Hugging Face's Trainer, PEFT, Lightning, torchtitan and Accelerate have
[a page of their own](../integrations/README.md). With FSDP2 quantize the model first and shard it then; optimizers
step the shards to the bit as one process would (`altgrad/optim/sharded.py`). With
`quantize_model(..., gather_codes=True)` it gathers a weight as codes, one byte per element, with four bytes in each
forward pass for the scale, also between and inside of compiled graphs; an integer `reshard_after_forward` and a
`shard_placement_fn` are refused for such weights. A compiled block inside of a checkpoint that is not compiled ends in
torch's `CheckpointError`: compile the model around its checkpoints.

"""

if __name__ == "__main__":
    os.environ |= fully_sharded.PRODUCTS
    with tempfile.TemporaryDirectory() as folder:
        PAGE.write_text(page(fully_sharded.run(Path(folder))), encoding="utf-8")
    print(PAGE, file=sys.stderr)
