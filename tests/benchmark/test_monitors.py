"""What watching a run costs: what is measured is a step that is watched beside one that is not.

Oracles: trainers that count, and take as long as they are told.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import torch

from altgrad.benchmark import monitors
from altgrad.benchmark.tables import monitors_table
from altgrad.config import load_params
from altgrad.config.schema import GROUPS, Train

PROJECT = Path(__file__).parents[2]


class Clock:
    """Seconds that pass as trainers say."""

    def __init__(self) -> None:
        self.now = 0.0

    def trainer(self, setting: str) -> SimpleNamespace:
        """Return one whose steps take 10 s, and 25 s where they are watched."""

        def update(step: int) -> None:
            self.now += 25.0 if monitors.SETTINGS[setting].due(step) else 10.0

        return SimpleNamespace(update=update, device=torch.device("cpu"))


def test_the_share_is_what_watching_adds_over_the_steps_between(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(monitors.time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(monitors, "_trainers", lambda *_: [(name, clock.trainer(name)) for name in monitors.SETTINGS])
    found = monitors.measure(load_params(PROJECT / "params.yaml"), "pico", ["E4M3"], 4, torch.device("cpu"))
    shares = {row["name"]: row["share"] for row in found}
    assert shares == {"E4M3, off": 0.0, "E4M3, default": 1.5 / 50, "E4M3, everything": 1.5 / 10}
    assert [row["every"] for row in found] == [None, 50, 10]
    assert all(row["step_ms"] == 10_000 and row["rounds"] == 4 for row in found) and json.dumps(found)
    shown = monitors_table({"monitors": found}).rows
    assert [row[1] for row in shown] == ["–", "50", "10"] and shown[-1][-1] == "15.0 % (15.0 to 15.0)"


def test_everything_is_every_group_as_often_as_a_row_is_logged():
    off, default, everything = monitors.SETTINGS.values()
    assert off.groups == [] and default == type(default)() and everything.groups == GROUPS
    assert everything.every == Train.model_fields["log_every"].default


def test_a_cell_is_measured_in_the_size_that_is_trained(monkeypatch):
    """Uncompiled here, which changes no more than the times."""
    made = []
    make = monitors.make_trainer
    monkeypatch.setattr(monitors, "make_trainer", lambda *given: made.append(make(*given[:-1], False)) or made[-1])
    params = load_params(PROJECT / "params.yaml")
    off, default, everything = monitors.measure(params, "pico", ["E4M3"], 2, torch.device("cpu"))
    assert off["step_ms"] > 0 and everything["watched_ms"] > everything["step_ms"] and default["share"] > 0
    assert [trainer.cell.monitor for trainer in made] == list(monitors.SETTINGS.values())
    assert all(trainer.model.config.width == params.models["pico"].width for trainer in made)
