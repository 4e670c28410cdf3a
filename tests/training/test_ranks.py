"""A cell that several processes train is the cell of one: the same gradients of a step, and losses of a run."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from altgrad.common.files import read_json
from altgrad.config import Cell, UserError
from altgrad.config.recipe import Recipe, Rule
from altgrad.model import GPT, GPTConfig, quantize_model
from altgrad.optim.sharded import gather_full
from altgrad.training import ranks, train_cell
from altgrad.training.trainer import Trainer
from tests.model.fully_sharded import CODED
from tests.processes import together
from tests.training.conftest import interruption, make_cell, outputs, resumed

COUNT = 3  # by which nothing divides exactly
TENSORS = {
    "one scale": {"format": "E4M3"},
    "remembered": {"format": "E4M3", "scaling": "delayed"},
    "the first": {"format": "E4M3", "scaling": "static"},
    "rows": {"format": "E3M4", "granularity": "row"},
    "blocks": {"format": "E4M3", "granularity": "block", "scale": "E8M0"},
    "two levels": {"format": "E2M1", "granularity": "block", "block": 16, "scale": "E4M3"},
    "by chance": {"format": "E4M3", "rounding": "stochastic"},
    "rows by chance": {"format": "E4M3", "granularity": "row", "rounding": "stochastic"},
}


def model_of(name: str, shared: bool = False) -> tuple[GPT, Tensor, Tensor]:
    """Return a quantized model, and a batch."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=64, layers=2, heads=2, width=32, context=32))
    tensor = TENSORS[name]
    rule = Rule(layers="*", weight="E4M3", input=tensor, grad=tensor, accumulate="float32")
    quantize_model(model, Recipe(rules=(rule,)), sync_amax=shared)
    tokens = torch.randint(64, (2 * COUNT, 33))
    return model, tokens[:, :-1], tokens[:, 1:]


def after_two_steps(name: str, mine: ranks.Ranks) -> dict[str, Tensor]:
    """Return the gradients of the second of two steps that change no weight, and the buffers after it."""
    model, inputs, targets = model_of(name, shared=mine.count > 1)
    mine.shard(model)
    for _ in range(2):
        model.zero_grad()
        (mine.loss(model, mine.share(inputs), mine.share(targets), last=True) / mine.count).backward()
    found = {name: gather_full(p.grad) for name, p in model.named_parameters()}
    return found | {name: buffer.clone() for name, buffer in model.named_buffers() if "history" in name}


def work(rank: int, meeting: Path, out: Path) -> None:
    torch.set_num_threads(1)
    with ranks.connected(meeting, rank, COUNT, torch.device("cpu")) as mine:
        found = {name: after_two_steps(name, mine) for name in TENSORS}
        if mine.first:
            torch.save(found, out)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp("shared")
    together(work, COUNT, folder, folder / "meeting", folder / "found", loads="tests.training.test_ranks")
    return torch.load(folder / "found")


@pytest.mark.parametrize("name", TENSORS)
def test_shares_have_the_scales_and_numbers_of_the_whole(shared, name):
    """Only the order of sums differs, so gradients agree to float32's digits; with scales of their own, to 1 %."""
    whole = after_two_steps(name, ranks.Ranks())
    assert shared[name].keys() == whole.keys()
    for tensor, expected in whole.items():
        torch.testing.assert_close(shared[name][tensor], expected, rtol=1e-4, atol=1e-6 * expected.abs().max().item())


# --- runs ------------------------------------------------------------------------------------------


def cell_of(devices: int, arm: dict[str, object] | None = None, **train: object) -> Cell:
    made = json.loads(make_cell(compute="float32", arm=arm, **train).to_json())
    rules = [rule | {"accumulate": "float32"} for rule in made["rules"]]
    model, train = made["model"] | {"dropout": 0.0}, made["train"] | {"devices": devices}
    return Cell.model_validate(made | {"rules": rules, "model": model, "train": train})


def trained(cell: Cell, tokens: Path, root: Path) -> dict[str, object]:
    train_cell(cell, tokens, root / "out", root)
    return read_json(root / "out" / "metrics.json")


@pytest.mark.slow
def test_a_compiled_cell_of_two_processes_ends_where_one_does(tokens, tmp_path):
    one, two = (trained(cell_of(n, compile="on"), tokens, tmp_path / str(n)) for n in (1, 2))
    assert two["val_loss"] == pytest.approx(one["val_loss"], abs=2e-4)


def test_a_run_moves_from_two_processes_to_one_and_back(tokens, tmp_path, monkeypatch):
    """One of two is killed after step 5, one alone is stopped after step 7, two end it: an undisturbed run's loss."""
    undisturbed = trained(cell_of(1), tokens, tmp_path / "undisturbed")
    started: list[int] = []
    popen, update = ranks.subprocess.Popen, Trainer.update

    def noted(*given: object, **options: object) -> object:
        process = popen(*given, **options)
        started.append(process.pid)
        return process

    def disturbed(self: Trainer, at: int) -> None:
        update(self, at)
        if at == 5:
            os.kill(started[0], signal.SIGKILL)

    said = "ended with status -9; run the same command again"
    with monkeypatch.context() as patch, pytest.raises(UserError, match=said):
        patch.setattr(ranks.subprocess, "Popen", noted)
        patch.setattr(Trainer, "update", disturbed)
        trained(cell_of(2), tokens, tmp_path / "moved")
    with interruption(monkeypatch, 7):
        trained(cell_of(1), tokens, tmp_path / "moved")
    moved = trained(cell_of(2), tokens, tmp_path / "moved")
    assert moved["outcome"] == "completed"
    assert moved["val_loss"] == pytest.approx(undisturbed["val_loss"], abs=2e-4)
    assert read_json(tmp_path / "moved" / "out" / "timing.json")["resumed"] == 2
    with open(tmp_path / "moved" / "out" / "history.csv") as history:
        assert [int(line.split(",")[0]) for line in history.readlines()[1:]] == [0, 2, 4, 6, 8, 10, 12]


SCALED = {"lr": 1e-2, "stiffness": "ulp", "match_rms": True}
IN_CODES = {"lr": 1e-2, "weights": "quantized", "rounding": "stochastic", "state": CODED}


@pytest.mark.parametrize("arm", [pytest.param(SCALED, marks=pytest.mark.long), IN_CODES])
def test_two_processes_leave_what_one_does_and_the_same_bits_after_a_stop(tokens, tmp_path, monkeypatch, arm):
    """Files, their tensors and the rows of one; of the first step, whose weights are the same, the same to the bit."""
    left, rows, tensors = {}, {}, {}
    for devices in (1, 2):
        root = tmp_path / str(devices)
        trained(cell_of(devices, arm), tokens, root)
        left[devices] = outputs(root / "out")
        table = pq.read_table(root / "out" / "monitors.parquet").to_pylist()
        rows[devices] = {tuple(row[key] for key in ("step", "layer", "role", "metric")): row["value"] for row in table}
        files = [root / "out" / "model.safetensors", root / "out" / "probes.safetensors"]
        files += sorted((root / "scratch").rglob("step-*.safetensors"))
        tensors[devices] = {(f.name, name): (t.shape, t.dtype) for f in files for name, t in load_file(f).items()}
    assert left[1].keys() == left[2].keys() and tensors[1] == tensors[2]
    assert rows[1].keys() == rows[2].keys()
    seen = [key for key in rows[1] if key[0] == 1 and key[2] not in ("weight_grad", "update")]
    assert seen and all(rows[1][key] == rows[2][key] for key in seen)
    for key, value in rows[1].items():
        if key[0] == 1 and key[2] == "weight_grad":
            assert rows[2][key] == pytest.approx(value, rel=1e-4, abs=1e-7)
    assert resumed(cell_of(2, arm), tokens, tmp_path / "stopped", monkeypatch) == left[2]
