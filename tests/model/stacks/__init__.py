"""What other people's training code does to a quantized model, with every kind of recipe: the cells of STACKS.md.

A stack is a function of a recipe and of how the model runs, ``eager`` or ``compiled``. It trains a little and compares
with an oracle, to the bit unless it says otherwise: the same without the stack, or torch's own layers where the answer
is a kind of result and not a number. It returns where that holds, and raises what the layers say where they refuse.
What several processes do is in `OF_PROCESSES`, of what tests/model/fully_sharded.py found. The page is the product of
stacks, recipes and ways: `cells` has no other, and a cell that the page lacks fails its test.
``python -m tests.model.stacks`` writes the page.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.model import fully_sharded
from tests.model.stacks import moves, uses
from tests.model.stacks.setup import RECIPES, Run
from tests.model.stacks.setup import WAYS as WAYS

PAGE = Path(__file__).parents[3] / "altgrad/model/STACKS.md"
WORKS, REFUSED = "works", "refused"
REFUSALS = (NotImplementedError, RuntimeError, ValueError, torch._dynamo.exc.Unsupported)

Stack = Callable[[str, Run], None]
STACKS: tuple[Stack, ...] = (
    moves.meta, moves.copies, moves.average, moves.scaler, moves.plain_checkpoint,
    moves.written_by_a_hook, moves.parametrized, moves.functional, moves.offloaded, moves.shared,
    moves.stepped_in_backward, moves.stepped_too_early,
    uses.overflowing, uses.infinite, uses.penalised, uses.hessian, uses.forces, uses.accumulated, uses.twice_backward,
    uses.offloaded_activations, uses.forward_mode,
    moves.per_sample, moves.recomputed, moves.recomputed_reentrant, moves.nested,
    uses.autocast_off_inside, uses.dynamic, uses.shaped, uses.empty, uses.inference, uses.frozen,
    uses.lora, uses.saved_head, uses.copied_with_optimizer,
)  # fmt: skip
#: Stacks that compile or trace a model themselves.
TRACED: tuple[Callable[[str], None], ...] = (
    moves.compiled, moves.recomputed_in_a_graph, moves.exported,
)  # fmt: skip
OF_PROCESSES: dict[str, str] = {
    "DistributedDataParallel, `sync_amax=True` (losses within 2e-6)": "ddp",
    "FSDP2's `fully_shard`, `sync_amax=True` (losses within 2e-6)": "trained",
    "The same with `gather_codes=True` (losses and weights to the bit as without)": "gathered",
    "DCP: saved by two processes, loaded by two and by four": "saved",
    "`ColwiseParallel`, `RowwiseParallel`": "parallel",
    "`FullyShardedDataParallel` (FSDP1)": "flattened",
    "Random numbers of DistributedDataParallel without `sync_amax`: a stream for each process": "drawn",
}
HOW = {
    "nested": "one checkpoint around the layers",
    "recomputed_in_a_graph": "without `fullgraph`: the checkpoint then runs in eager mode",
    "per_sample": "`model.eval()`, or a recipe that remembers nothing",
    "penalised": "uncompiled, as for torch's own layers; dynamic scaling for the gradient",
    "hessian": "uncompiled, as for torch's own layers; dynamic scaling for the gradient",
    "forward_mode": "reverse mode",
    "twice_backward": "uncompiled, or dynamic scaling",
    "gathered": "`fully_shard` without `gather_codes`",
    "parallel": "`fully_shard`",
    "flattened": "`fully_shard`",
}
#: Parts of the sentences in which something is refused: ours, and torch's where it refuses its own layers too.
SENTENCES = (
    "use one checkpoint", "cannot repeat", "torch.func has no",
    "take scaling: dynamic for grad",
    "torch.compile with aot_autograd does not currently support double backward",
    "does not implement the jvp function", "forward mode AD", "modified by an inplace operation",
)  # fmt: skip


def cell_of(stack: Callable[..., None], recipe: str, *run: Run) -> str:
    """Return `WORKS`, or `REFUSED` if that is in one of the `SENTENCES`; raises for anything else."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            stack(recipe, *run)
        except REFUSALS as error:
            if any(words in str(error) for words in SENTENCES):
                return REFUSED
            raise
        finally:
            torch._dynamo.reset()
    return WORKS


def joined(cells: dict[str, str]) -> str:
    """Return what the page says of one stack and recipe, whose cells have their way's name."""
    if len(set(cells.values())) == 1:
        return next(iter(cells.values()))
    return "; ".join(f"{way} {cell}" for way, cell in cells.items())


def cell_of_processes(found: dict[int, dict[str, Any]], what: str, recipe: str) -> str:
    """Return the same of what processes found, by the tolerance that the page states."""
    if what == "parallel":
        said = found[4]["parallel"][recipe]
        assert len(said) == 2 and all("nn.Linear" in sentence for sentence in said)
        return REFUSED
    if what == "flattened":
        assert "torch.distributed.fsdp.fully_shard" in found[4][what][recipe]
        return REFUSED
    if what == "drawn":
        outputs, weights = found[4][what][recipe]
        drawn = RECIPES[recipe].get("rounding") == "stochastic"
        assert all(torch.equal(weights[0], w) for w in weights)  # which all processes have alike
        for i, j in itertools.combinations(range(4), 2):
            assert torch.equal(outputs[i], outputs[j]) != drawn
            if drawn:  # independent errors: no more alike than 4096 pairs of independent numbers are
                a, b = (t - sum(outputs) / 4 for t in (outputs[i], outputs[j]))
                assert torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1] < 0
        return WORKS
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
