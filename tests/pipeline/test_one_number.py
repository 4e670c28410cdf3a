"""A number has one source: whoever shows it shows the same.

The report, DVC's commands, the page of `make watch` and a tracker, of one finished study.
"""

from __future__ import annotations

import json

import pandas as pd
import pytest

from altgrad.common.files import read_json
from altgrad.config.tasks import HISTORY
from altgrad.watch import track
from altgrad.watch.events import Events
from tests.pipeline.conftest import CELLS, Project


def _numbers(found: object) -> list[float]:
    """Return every number in nested JSON."""
    if isinstance(found, dict | list):
        inner = found.values() if isinstance(found, dict) else found
        return [number for value in inner for number in _numbers(value)]
    return [found] if isinstance(found, float) else []


def test_everything_that_shows_a_number_shows_the_same(project: Project, monkeypatch):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, (base, other) = project.folder, CELLS
    own = {key: read_json(folder / "data/runs" / key / "metrics.json")["val_loss"] for key in CELLS}
    gap = own[other] - own[base]

    reported = read_json(folder / "reports/summary.json")
    assert reported["val_loss"]["E4M3"]["adamw"] == pytest.approx(own[other], rel=1e-11)
    assert reported["delta_format"]["E4M3"]["adamw"] == pytest.approx(gap, abs=1e-11)
    text, page = ((folder / "reports" / name).read_text() for name in ("REPORT.md", "index.html"))
    assert f"{own[other]:.4f}" in text and f"{own[other]:.4f}" in page

    compared = read_json(folder / "reports/metrics.json")
    assert compared["loss"] == {"bf16": round(own[base], 4)}
    assert compared["Δ"] == {"E4M3": round(gap, 4)}
    metrics = json.loads(project.run("dvc", "metrics", "show", "--json").stdout)
    assert _numbers(metrics) == _numbers(compared)
    shown = json.loads(project.run("dvc", "exp", "show", "--json", "--no-pager").stdout)
    assert set(_numbers(compared)) <= set(_numbers(shown))

    plotted = pd.read_csv(folder / "reports/plots/results.csv").set_index("format")["primary"]
    assert plotted["E4M3"] == pytest.approx(own[other], rel=1e-6)
    curve = pd.read_csv(folder / "reports/plots/validation.csv")
    last = curve[curve["format"] == "E4M3"].iloc[-1]
    assert last["primary"] == pytest.approx(own[other], rel=1e-6)
    assert last["delta_to_baseline"] == pytest.approx(gap, abs=1e-6)

    watched = Events(folder).after("", 0)["events"]
    cells = {number: values for kind, number, *rest in watched if kind == "cell" for values in rest}
    assert [cells[i]["final"] for i in range(2)] == [own[base], own[other]]
    (standing,) = (rest[0] for kind, *rest in watched if kind == "standing")
    assert standing[1]["loss"] == own[other] and standing[1]["difference"] == pytest.approx(gap, abs=1e-15)

    project.set("tracking", ["tensorboard"])
    monkeypatch.chdir(folder)
    for _ in range(2):  # the second time there is nothing new
        track.main([])
    for key in CELLS:
        (logged,) = (folder / "scratch/tracking/tensorboard").glob(f"{key}-*")
        events = EventAccumulator(str(logged))
        events.Reload()
        history = pd.read_csv(folder / "data/runs" / key / "history.csv")
        for name in HISTORY[1:]:
            found = [(event.step, event.value) for event in events.Scalars(name)]
            wanted = history[["step", name]].dropna()
            assert [step for step, _ in found] == list(wanted["step"])
            assert [value for _, value in found] == pytest.approx(list(wanted[name]), rel=1e-6)  # it keeps float32
        assert events.Scalars("final/val_loss")[0].value == pytest.approx(own[key], rel=1e-6)
