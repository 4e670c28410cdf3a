"""Runs whose recipe changes. Oracles: the run that nobody disturbed, and runs that keep one recipe, step by step."""

from __future__ import annotations

import io
import json
from typing import Any

import pandas as pd
import pytest
import torch

from altgrad.config import Cell
from altgrad.diagnostics.saved import SavedRun
from altgrad.optim.checks import check_cells
from altgrad.training import train_cell
from altgrad.training.monitor import Measurement, TensorMonitor
from altgrad.training.outcome import Switches
from altgrad.training.trainer import Trainer
from tests.training.conftest import VOCABULARY, make_cell, resumed, trained

DELAYED = {"format": "E5M2", "scaling": "delayed"}
STOCHASTIC = {"format": "E5M2", "rounding": "stochastic"}
WIDE = [{"layers": "*", "weight": "E5M2", "input": DELAYED, "grad": STOCHASTIC}]
STEP = 7  # the first in the second recipe, of runs that change after half of their 12 steps


def changing(*schedule: dict[str, Any], of: Cell | None = None, **settings: Any) -> Cell:
    """Return a cell that goes through ``schedule``: to the rules of WIDE by the name E5M2, or to none."""
    cell = of or make_cell(scaling="delayed", **settings)
    switches = [{"recipe": "E5M2", "rules": WIDE} | switch for switch in schedule]
    return Cell.model_validate(cell.model_dump() | {"schedule": switches})


def scheduled() -> Cell:
    """Return a cell with one recipe after the other, with histories that go on and streams that begin."""
    return changing({"after": 0.5}, {"after": 0.75, "recipe": "bf16", "rules": []})


STIFF = {"lr": 1e-2, "stiffness": "ulp"}


def stiff() -> Cell:
    return changing({"after": 0.5}, arm=STIFF)


def test_until_the_change_it_is_the_run_that_keeps_its_recipe_and_no_longer(tokens, tmp_path):
    changed = trained(scheduled(), tokens, tmp_path / "changed")
    found = pd.read_csv(io.BytesIO(changed["history.csv"]))
    kept = pd.read_csv(io.BytesIO(trained(make_cell(scaling="delayed"), tokens, tmp_path)["history.csv"]))
    assert list(kept) == list(found)[:-1] and list(found)[-1] == "recipe"
    assert found["step"].tolist() == [0, 2, 4, 6, 7, 8, 10, 12]  # a change logs its step
    assert found["recipe"].tolist() == ["E4M3"] * 4 + ["E5M2"] * 2 + ["bf16"] * 2
    same = kept["step"] <= STEP - 1
    pd.testing.assert_frame_equal(found[:4].drop(columns="recipe"), kept[same])
    assert found.iloc[-1]["val_loss"] != kept.iloc[-1]["val_loss"]
    made = json.loads(changed["metrics.json"])["switches"]
    assert made == [
        {"step": 7, "recipe": "E5M2", "place": 1, "why": "after"},
        {"step": 10, "recipe": "bf16", "place": 2, "why": "after"},
    ]


def test_a_change_keeps_weights_state_and_histories_and_draws_new_numbers(tokens, tmp_path, monkeypatch):
    """And what looks at the run looks at the recipe that is on."""
    seen, cell = [], scheduled()
    change = Trainer._requantize

    def watched(trainer: Trainer) -> None:
        layer = trainer.model.blocks[0].mlp.up
        before = [p.detach().clone() for p in trainer.model.parameters()]
        state = [t.clone() for s in trainer.optimizer.state.values() for t in s.values()]
        history = layer.quantizer("input").history.clone()
        change(trainer)
        assert all(map(torch.equal, before, trainer.model.parameters()))
        assert all(map(torch.equal, state, [t for s in trainer.optimizer.state.values() for t in s.values()]))
        now = trainer.model.blocks[0].mlp.up
        assert trainer.monitor.layers["blocks.0.mlp.up"] is now and now.weight is layer.weight
        if trainer.switches.place == 1:
            assert torch.equal(now.quantizer("input").history, history) and history.count_nonzero() > 1
            assert now.quantizer("weight").recipe.format.name == "E5M2"
            streams = [m.stream.tolist() for m in trainer.model.modules() if getattr(m, "stream", None) is not None]
            assert len({number for _, number, _ in streams}) == 5
        else:
            assert isinstance(now, torch.nn.Linear) and not trainer.updates.grids
        seen.append(trainer.switches.place)

    monkeypatch.setattr(Trainer, "_requantize", watched)
    train_cell(cell, tokens, tmp_path / "out", tmp_path)
    assert seen == [1, 2]
    with SavedRun(cell, tmp_path / "out") as run:
        views = list(run.views("blocks.0.mlp.up"))
    assert {v.step: v.grid and v.grid.format.name for v in views} == {0: "E4M3", 6: "E4M3", 12: None}
    assert run.cell.rules == [] and run.cell_at(STEP).rules == cell.schedule[0].rules


WHEN = [{"overflow": 0.3}, {"spike": 1.5}, {"nonfinite": True}]


@pytest.mark.parametrize("when", WHEN, ids=lambda when: next(iter(when)))
def test_what_happens_changes_the_recipe_and_a_run_that_resumes_too(tokens, tmp_path, monkeypatch, when):
    """The fault is one of step 5, as a run in E4M3 sees it; what it is in does not matter."""
    why = next(iter(when))
    observe, gradients, update = TensorMonitor.observe, Trainer._gradients, Trainer.update

    def overflowing(self: TensorMonitor, step: int, *rest: Any) -> list[Measurement]:
        return [
            *observe(self, step, *rest),
            Measurement(step, "head", "input", "overflow_frac", 0.31 if step == 5 else 0.29),
        ]

    def failing(self: Trainer, step: int) -> tuple[float, torch.Tensor, float]:
        loss, norm, known = gradients(self, step)
        fails = step == 5 and self.switches.place == 0
        return (float("nan") if fails else loss), norm, known

    def rising(self: Trainer, step: int) -> None:
        self.tracker.smoothed = 1.8 * self.tracker.minimum if step == 5 else self.tracker.smoothed
        update(self, step)

    if why == "overflow":
        monkeypatch.setattr(TensorMonitor, "observe", overflowing)
    elif why == "nonfinite":
        monkeypatch.setattr(Trainer, "_gradients", failing)
    else:
        monkeypatch.setattr(Trainer, "update", rising)
    cell = changing({"when": when}, {"when": when, "recipe": "bf16", "rules": []}, {"after": 0.75, "recipe": "E4M3"})
    once = trained(cell, tokens, tmp_path / "once")
    made = json.loads(once["metrics.json"])
    assert [(s["step"], s["recipe"], s["why"]) for s in made["switches"]] == [(5, "E5M2", why), (10, "E4M3", "after")]
    assert made["outcome"] == "completed" and made["steps"] == 12
    assert resumed(cell, tokens, tmp_path / "resumed", monkeypatch, 4 if why == "spike" else 5) == once


def test_a_failure_that_the_last_recipe_does_not_mend_is_a_divergence(tokens, tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "_gradients", lambda self, step: (float("inf"), torch.tensor(1.0), 1.0))
    found = json.loads(trained(changing({"when": {"nonfinite": True}}), tokens, tmp_path)["metrics.json"])
    assert (found["outcome"], found["outcome_step"], len(found["switches"])) == ("diverged", 1, 1)


def test_a_run_goes_forward_only_and_each_spike_is_one_of_the_recipe_that_is_on():
    spike, bf16 = {"spike": 2.0}, {"recipe": "bf16", "rules": []}
    switches = Switches(changing({"when": spike}, {"after": 0.5}, {"when": spike} | bf16, {"when": {"overflow": 0.1}}))
    losses = {2: 1.0, 3: 2.0, 4: 2.1, 5: 2.1, 6: 4.1, 7: 4.1, 8: 8.3, 9: 9.9}
    assert [step for step, loss in losses.items() if switches.before(step, loss)] == [4, 7, 8]
    assert [s["place"] for s in switches.made] == [1, 2, 3]
    assert not switches.when(9, nonfinite=True) and not switches.when(9, overflow=0.1)
    assert switches.when(9, overflow=0.11)
    assert not switches.when(10, overflow=1.0)


def test_an_arm_sees_the_spacing_of_the_format_that_is_on(tokens, tmp_path, monkeypatch):
    check_cells([stiff()], VOCABULARY, "bf16")
    formats, update = [], Trainer.update
    monkeypatch.setattr(Trainer, "update", lambda self, step: (
        update(self, step), formats.append({grid.format.name for grid in self.optimizer.grids.values()})))  # fmt: skip
    trained(stiff(), tokens, tmp_path)
    assert formats == [{"E4M3"}] * 6 + [{"E5M2"}] * 6
