"""The page's events: whoever reads them all knows what the project knows, in answers of bounded size."""

from __future__ import annotations

import json
import shutil

import pytest

from altgrad.reporting.compare import compare
from altgrad.reporting.dvc_outputs import numbers
from altgrad.reporting.markdown import NONE, signed
from altgrad.reporting.tables import results_table
from altgrad.watch import Project, events
from altgrad.watch.events import Events, standing
from tests.reporting.made_losses import texts
from tests.reporting.synthetic_project import add_model, read, write_project


@pytest.fixture(autouse=True)
def _at_every_question(monkeypatch):
    monkeypatch.setattr(events, "EVERY", 0.0)


class Page:
    """What the page's script makes of the events."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self.list, self.next = "", 0
        self.cells: list[dict] = []
        self.rows: list[list] = []
        self.standing: list[dict] = []
        self.sizes: list[int] = []

    def ask(self) -> bool:
        answer = self._events.after(self.list, self.next)
        self.sizes.append(len(json.dumps(answer)))
        if answer["list"] != self.list:
            self.cells, self.rows, self.standing = [], [], []
        self.list, self.next = answer["list"], answer["next"]
        for kind, *values in answer["events"]:
            if kind == "grid":
                self.cells = [{"key": cell[0]} for cell in values[0]["cells"]]
                self.rows = [[] for _ in self.cells]
            elif kind == "rows":
                number, again, rows = values
                self.rows[number] = ([] if again else self.rows[number]) + rows
            elif kind == "cell":
                self.cells[values[0]] |= values[1]
            elif kind == "standing":
                self.standing = values[0]
        return answer["more"]


def test_a_page_that_begins_late_or_comes_back_knows_what_one_from_the_beginning_knows(play, monkeypatch):
    monkeypatch.setattr(events, "AT_ONCE", 300)
    game = play(seeds=(0,))
    source = Events(game.root)
    early = Page(source)
    first = game.keys[0]
    for step in (10, 20, 30):
        game.train(first, step)
        early.ask()
    game.resume(first, 20)
    early.ask()
    for key in game.keys:
        game.finish(key)
        game.diagnose(key)
    while early.ask():
        pass
    late, restarted = Page(source), Page(Events(game.root))
    restarted.list, restarted.next = early.list, early.next  # the server was started anew
    for page in (late, restarted):
        while page.ask():
            pass
        assert (page.cells, page.standing) == (early.cells, early.standing)
        for i, key in enumerate(game.keys):
            assert [row[0] for row in page.rows[i]] == [row[0] for row in early.rows[i]]
            assert [row[2] for row in page.rows[i]] == [row[4] for row in game.history(key)]
    assert all(size < 1500 for size in early.sizes[1:]), "events are a few hundred bytes each"


def test_another_grid_is_another_list(play):
    game = play(seeds=(0,))
    page = Page(Events(game.root))
    page.ask()
    before = page.list
    index = game.root / "data/grid/index.json"
    index.write_text(index.read_text().replace(f'"{game.keys[0]}",', ""))
    page.ask()
    assert page.list != before and [cell["key"] for cell in page.cells] == game.keys[1:]


def test_long_runs_are_thinned_and_keep_every_evaluation(play):
    game = play(formats=["bf16"], seeds=(0,), steps=6000)
    page = Page(Events(game.root))
    game.finish(game.keys[0])
    while page.ask():
        pass
    history = game.history(game.keys[0])
    assert len(history) == 601
    assert 100 <= len(page.rows[0]) <= 100 + sum(row[4] is not None for row in history) + 1
    assert [row[2] for row in page.rows[0] if row[2] is not None] == [row[4] for row in history if row[4] is not None]


def test_five_hundred_cells_stay_below_100_kb_an_answer(tmp_path):
    """A page asks once a second."""
    formats = ["bf16", "E4M3", "E5M2", "E3M4", "E1M6"]
    arms = ["adamw", "spacing_unmatched", "rung", "muon", "riemann_adam"]
    data, index = tmp_path / "data", tmp_path / "data/grid/index.json"
    keys = write_project(tmp_path, formats, arms, (0,), steps=60, blocks=1, diagnosed=False)
    for key in keys[:]:
        for seed in range(1, 20):  # written once for all seeds, to take less time
            keys.append(other := key.replace("-0-", f"-{seed}-"))
            shutil.copytree(data / "runs" / key, data / "runs" / other)
            for name in ("grid/{}.json", "runs/{}/metrics.json"):
                made = json.loads((data / name.format(key)).read_text()) | {"key": other, "seed": seed}
                (data / name.format(other)).write_text(json.dumps(made))
    index.write_text(json.dumps(json.loads(index.read_text()) | {"cells": keys}))
    page = Page(Events(tmp_path))
    while page.ask():
        pass
    assert len(page.cells) == 500 and {cell["state"] for cell in page.cells} == {"trained"}
    assert max(page.sizes) < 100_000


def test_a_further_model_has_rows_of_its_own_beside_its_own_baseline(tmp_path):
    write_project(tmp_path, ["bf16", "E4M3"], ["adamw"], (0, 1), steps=60, blocks=1)
    add_model(tmp_path, "gpt-50m", 1000, 2000, lambda cell: 2.0 + 0.5 * (cell["format"] == "E4M3") + cell["seed"])
    project = Project(tmp_path)
    project.look()
    first, further = (
        {row["format"]: row for row in standing(project.cells.values(), project.baseline, project.compared)
         if row["arm"] == arm} for arm in ("adamw", "adamw (gpt-50m)")
    )  # fmt: skip
    alone = [cell for cell in project.cells.values() if "model_name" not in cell.settings]
    assert list(first.values()) == standing(alone, project.baseline, project.compared)
    assert further["E4M3"]["loss"] == 3.0 and further["E4M3"]["difference"] == 0.5 and further["bf16"]["loss"] == 2.5
    page = Page(Events(tmp_path))
    page.ask()
    assert {row["arm"] for row in page.standing} == {"adamw", "adamw (gpt-50m)"}


@pytest.mark.parametrize(
    "grid",
    [
        {"formats": ["bf16", "E4M3", "E5M2"], "optimizers": ["adamw", "spacing_unmatched"], "seeds": (0, 1, 2)},
        {"formats": ["bf16", "E4M3"], "lr_scales": (0.5, 1, 2), "seeds": (0, 1)},
        {"formats": ["E4M3", "E5M2"], "seeds": (0, 1)},  # without its baseline
        {"formats": ["bf16", "E4M3"], "lr_scales": (1, 2), "seeds": (0, 1, 2), "missing": ("E4M3-adamw-0-1",),
         "diverged": {"E4M3-adamw-1-2": 30, "bf16-adamw-2-1": 40}},
    ],
    ids=["arms", "rates", "no baseline", "holes"],
)  # fmt: skip
def test_the_comparison_so_far_is_that_of_the_report(grid, tmp_path):
    write_project(tmp_path, steps=60, blocks=1, **grid)
    study = read(tmp_path)
    reported = numbers(study, compare(study), 0)
    project = Project(tmp_path)
    project.look()
    rows = standing(project.cells.values(), project.baseline, project.compared)
    table = results_table(study, compare(study))
    heads = [column.head for column in table.columns]
    intervals = {tuple(row[:2]): row[heads.index("95 % CI")] for row in texts(table) if "95 % CI" in heads}
    assert len(rows) == sum(loss is not None for arms in reported["val_loss"].values() for loss in arms.values())
    for row in rows:
        assert row["loss"] == pytest.approx(reported["val_loss"][row["format"]][row["arm"]], abs=1e-11)
        gap = reported["delta_format"][row["format"]][row["arm"]]
        assert (row["difference"] is None) == (gap is None)
        if gap is not None:
            assert row["difference"] == pytest.approx(gap, abs=1e-11)
            ends = NONE if row["low"] is None else f"[{signed(row['low'], 4)}, {signed(row['high'], 4)}]"
            assert intervals[f"**{row['format']}**", row["arm"]] == ends
