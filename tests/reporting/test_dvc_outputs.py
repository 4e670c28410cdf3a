"""What DVC shows: plots and metrics.

Oracles: dvc_render fills a template, vl-convert compiles it; the losses that were put in; DVC's own table of metrics.
"""

from __future__ import annotations

import csv
import dataclasses
import html
import json
import re
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import vl_convert
from dvc.commands.experiments.show import show_experiments
from dvc.repo.experiments.serialize import ExpState, SerializableExp
from dvc.repo.experiments.show import tabulate
from dvc.ui import ui
from dvc_render.vega import VegaRenderer
from rich.console import Console

from altgrad.common.files import read_yaml
from altgrad.config.tasks import TITLES
from altgrad.reporting.compare import compare
from altgrad.reporting.dvc_outputs import PLOTS, VEGA_LITE, metrics, write_outputs, write_vega
from altgrad.reporting.figures import LOOKS
from altgrad.reporting.load import IDENTITY, PrimaryMetric, Study
from tests.reporting.made_losses import ADAMW, STIFF, study_of, with_formats
from tests.reporting.synthetic_project import read, write_project

ROOT = Path(__file__).parents[2]
TEMPLATES = ROOT / ".dvc/plots"
DECLARED = {name: plot for entry in read_yaml(ROOT / "dvc.yaml")["plots"] for name, plot in entry.items()}
DELTA = "Difference to the baseline"
LONGEST = max(TITLES, key=lambda name: len(TITLES[name]))
PHONE = 390 - 2 * 24  # pixels: a telephone's page within its margins


def written(study: Study, folder: Path) -> Path:
    """Write what DVC shows of a study; return the folder of plots."""
    write_outputs(study, compare(study), 0, folder)
    return folder / "plots"


@pytest.fixture(scope="module")
def tables(study, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(study, tmp_path_factory.mktemp("plots"))


def drawn(folder: Path, plot: str, revisions: dict[str, str | None]) -> str:
    """Return the SVG that DVC would show: the table's rows as strings, for each revision those of one format or all."""
    given = DECLARED[plot]
    ((table, x),), ((_, y),) = given["x"].items(), given["y"].items()
    with open(folder / Path(table).name, encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    points = [
        row | {"rev": revision}
        for revision, only in revisions.items()
        for row in rows
        if only is None or row["format"] == only
    ]
    filled = VegaRenderer(
        points, plot, template=given["template"], template_dir=str(TEMPLATES), x=x, y=y, title=given["title"],
        anchors_y_definitions=[{"filename": table, "field": y}],
        **{name: given[name] for name in ("x_label", "y_label") if name in given},
    ).get_filled_template()  # fmt: skip
    return vl_convert.vegalite_to_svg(json.dumps(filled), vl_version=VEGA_LITE)


@pytest.mark.parametrize("plot", DECLARED)
def test_a_template_draws_all_formats_of_one_revision(plot: str, tables: Path) -> None:
    svg = drawn(tables, plot, {"workspace": None})
    for expected in ("E4M3", "E7M0"):
        assert expected in svg
    assert "NaN" not in svg and "undefined" not in svg
    assert points_of(svg), "a frame without marks"


def texts(svg: str) -> list[str]:
    return [html.unescape(text) for text in re.findall(r"<text[^>]*>([^<]*)</text>", svg)]


def classified(study: Study, name: str) -> Study:
    """Return the study with this metric of classifiers in place of its loss."""
    history = study.history.assign(**{f"val_{name}": 1 / study.history["val_loss"]})
    cells = study.cells.assign(**{f"{split}_{name}": 1 / study.cells["val_loss"] for split in ("val", "test")})
    return dataclasses.replace(study, history=history, cells=cells, primary=PrimaryMetric.of({"primary": name}))


@pytest.mark.parametrize(("task", "during", "final", "unit"), [
    ("language", "validation loss", "validation loss", " (nats per token)"),
    *((name, f"validation {TITLES[name]}", f"test {TITLES[name]}", "") for name in ("micro_f1", LONGEST)),
])  # fmt: skip
def test_titles_and_axes_name_the_task_at_hand_and_are_short(
    task: str, during: str, final: str, unit: str, tmp_path: Path
) -> None:
    optimizers = ["adamw", "spacing_scaled", "spacing_shuffled"]
    write_project(tmp_path, ["bf16", "E4M3", "E5M2", "E3M4", "E1M6"], optimizers, steps=60, blocks=2)
    study = read(tmp_path)
    tables = written(study if task == "language" else classified(study, task), tmp_path)
    losses = "training loss (nats per token)" if task == "language" else "training loss (nats per label)"
    wanted = {
        "Training loss": ["Training loss: thin each seed, thick their mean", losses],
        DELTA: [f"Δ {during}, paired by seed", f"Δ {during}{unit}", "E4M3 − bf16"],
        "Evaluations": [f"During training: {during}", f"{during}{unit}"],
        "Final values": [f"Final {final}: seeds and mean", f"{final}{unit}"],
        "Final values by format and optimizer": [f"Final {final} by format and optimizer"],
    }  # fmt: skip
    for plot in DECLARED if task == "language" else wanted:
        svg = drawn(tables, plot, {"workspace": None})
        found = texts(svg)
        assert set(wanted.get(plot, [DECLARED[plot]["title"]])) <= set(found)
        assert max(map(len, found)) <= 60
        assert "{" not in "".join(found) and "undefined" not in svg
        assert float(re.search(r'width="([\d.]+)"', svg)[1]) <= PHONE


@pytest.mark.parametrize(("task", "best"), [("language", min), ("micro_f1", max)])
def test_the_map_shows_the_better_of_two_rates(task: str, best: Callable, tmp_path: Path) -> None:
    write_project(tmp_path, ["bf16", "E4M3"], seeds=(0,), lr_scales=(1, 2), steps=60, blocks=1)
    study = read(tmp_path) if task == "language" else classified(read(tmp_path), task)
    tables = written(study, tmp_path)
    values = pd.read_csv(tables / "results.csv").groupby("format")["primary"].agg(best)
    shown = texts(drawn(tables, "Final values by format and optimizer", {"workspace": None}))
    assert {f"{value:.4f}" for value in values} == {text for text in shown if re.fullmatch(r"\d\.\d{4}", text)}


@pytest.mark.parametrize("plot", DECLARED)
def test_a_template_draws_one_format_of_each_of_two_revisions(plot: str, tables: Path) -> None:
    svg = drawn(tables, plot, {"one": "E4M3", "two": "E3M4"})
    for expected in ("E4M3", "E3M4", "one", "two"):
        assert expected in svg
    assert "E7M0" not in svg
    assert points_of(svg), "a frame without marks"


def without_baseline(tables: Path, folder: Path, differences: dict[str, float]) -> Path:
    """Write a table of two formats that have no baseline, the loss of E3M4 above E4M3's by ``differences`` by seed."""
    columns = [*IDENTITY, "outcome", "step", "primary", "delta_to_baseline"]
    rows = [
        (name, "adamw", seed, 1, "completed", step, 3 + step / 100 + difference * (name == "E3M4"), None)
        for name in ("E4M3", "E3M4")
        for seed, difference in differences.items()
        for step in (10, 20)
    ]
    pd.DataFrame(rows, columns=columns).to_csv(folder / "validation.csv", index=False)
    return folder


def points_of(svg: str) -> set[str]:
    """Return the y values that the tooltips of a picture's marks tell."""
    return set(re.findall(r"value: ([−\d][^;\"]*)", svg))


def test_revisions_are_compared_with_the_baseline_or_else_with_each_other(tables: Path, tmp_path: Path) -> None:
    svg = drawn(tables, DELTA, {"one": "E4M3", "two": "E3M4"})
    assert points_of(svg) and "E3M4 − E4M3" not in svg, "there is a baseline"
    folder = without_baseline(tables, tmp_path, {"0": 0.25, "1": 0.75})
    svg = drawn(folder, DELTA, {"one": "E4M3", "two": "E3M4"})
    assert "E3M4 − E4M3" in svg
    assert {round(float(value.replace("−", "-")), 6) for value in points_of(svg)} >= {0.25, 0.75, 0.5}
    svg = drawn(folder, DELTA, {"workspace": None})
    assert not points_of(svg) and " − " not in svg, "one revision has no difference"


@pytest.mark.parametrize("template", ["curves", "finals"])
def test_templates_have_the_colours_of_the_figures(template: str) -> None:
    text = (TEMPLATES / f"{template}.json").read_text()
    found = dict(re.findall(r"(\w+): '(#[0-9A-Fa-f]{6})'", text))
    assert found == {name: look.color for name, look in LOOKS.items()}


def test_tables_name_the_cell_first_and_hold_text_or_finite_numbers(tables: Path) -> None:
    for name in PLOTS:
        with open(tables / f"{name}.csv", encoding="utf-8") as file:
            rows = list(csv.reader(file))
        assert rows[0][:4] == IDENTITY and len(rows) > 10
        assert not {"nan", "inf", "None"} & {value for row in rows for value in row}


def test_differences_are_those_of_the_same_seed_and_step(tables: Path) -> None:
    table = pd.read_csv(tables / "validation.csv")
    last = table[table["step"] == table["step"].max()].set_index(["format", "seed"])
    expected = last.loc[("E4M3", 1), "primary"] - last.loc[("bf16", 1), "primary"]
    assert last.loc[("E4M3", 1), "delta_to_baseline"] == pytest.approx(expected, abs=2e-6)
    assert (table.loc[table["format"] == "bf16", "delta_to_baseline"] == 0).all()


def test_layers_hold_the_mean_of_the_second_half(study, tables: Path) -> None:
    table = pd.read_csv(tables / "layers.csv").set_index(["format", "seed", "layer", "role"])
    rows = study.monitors
    rows = rows[
        (rows["format"] == "E3M4") & (rows["seed"] == 1) & (rows["layer"] == "head") & (rows["role"] == "weight")
    ]
    rows = rows[(rows["metric"] == "sqnr_db") & (rows["step"] >= rows["step"].max() / 2)]
    assert table.loc[("E3M4", 1, "head", "weight"), "sqnr_db"] == pytest.approx(rows["value"].mean(), rel=1e-6)


def test_vega_is_one_script_that_leaks_no_names_and_closes_no_tag(tmp_path: Path) -> None:
    script = write_vega(tmp_path).read_text()
    assert script.startswith("(function") and script.endswith("})();\n")
    assert "</script" not in script.lower()
    for name in ("vegaEmbed", "vegaLite", "vega"):
        assert f"window.{name}=" in script
    page = (TEMPLATES / "offline.html").read_text()
    assert all(page.count(mark) == 1 for mark in ("{plot_divs}", "{scripts}", "{refresh_tag}", 'vega.js"'))
    assert "vega.js" in (TEMPLATES / ".gitignore").read_text()


# --- metrics.json, which DVC shows ------------------------------------------------------------------

SHUFFLED = {"base": "adamw", "stiffness": "permuted"}
ARMS = {"adamw": ADAMW, "muon": {"base": "muon"}, "spacing_scaled": STIFF, "spacing_shuffled": SHUFFLED}


def random_metrics(formats: list[str], optimizers: list[str], seeds: int = 5) -> tuple[dict, dict]:
    """Return metrics.json of a grid with random losses, and the losses by (entry, optimizer)."""
    random = np.random.default_rng(0)
    losses = {(entry, arm): random.normal(3.5, 0.1, seeds).tolist() for entry in formats for arm in optimizers}
    study = with_formats(study_of(losses, {arm: ARMS[arm] for arm in optimizers}))
    return metrics(study, compare(study)), losses


@pytest.fixture(scope="module")
def default() -> tuple[dict, dict]:
    grid = read_yaml(Path(__file__).parents[2] / "params.yaml")["grid"]
    return random_metrics(grid["formats"], grid["optimizers"])


def to_four(number: float) -> object:
    return pytest.approx(number, abs=5.01e-5)


def leaves(found: dict) -> list[object]:
    return [leaf for value in found.values() for leaf in (leaves(value) if isinstance(value, dict) else [value])]


def test_each_number_is_what_the_losses_make_it(default) -> None:
    found, losses = default
    numbers = leaves(found)
    assert 8 <= len(numbers) <= 12 and all(isinstance(number, int | float) for number in numbers)
    means = {run: np.mean(values) for run, values in losses.items()}
    entries = {entry for entry, _ in losses}
    formats = [entry for entry in entries if entry != "bf16" and not entry.startswith("virtual.")]
    assert found["runs"] == sum(map(len, losses.values())) and found["diverged"] == found["missing"] == 0
    assert found["loss"] == {"bf16": to_four(means["bf16", "adamw"])}
    assert found["Δ"] == {
        entry: to_four(means[entry, "adamw"] - means["bf16", "adamw"]) for entry in formats
    }  # fmt: skip

    def gain(entry: str) -> float:
        return means[entry, "spacing_scaled"] - means[entry, "adamw"]

    assert found["ΔΔ"] == {
        entry: to_four(gain(entry) - gain(f"virtual.{entry}"))
        for entry in formats if f"virtual.{entry}" in entries
    }  # fmt: skip


@pytest.mark.parametrize(("optimizers", "arm"), [
    (["adamw", "muon", "spacing_scaled"], "spacing_scaled"), (["adamw", "spacing_shuffled", "muon"], "muon"),
], ids=["of two, the one that follows the spacing", "no control"])  # fmt: skip
def test_the_effect_is_of_the_headline_optimizer(optimizers: list[str], arm: str) -> None:
    found, losses = random_metrics(["bf16", "E4M3", "virtual.E4M3"], optimizers)
    means = {run: np.mean(values) for run, values in losses.items()}
    gain = {entry: means[entry, arm] - means[entry, "adamw"] for entry in ("E4M3", "virtual.E4M3")}
    assert found["ΔΔ"] == {"E4M3": to_four(gain["E4M3"] - gain["virtual.E4M3"])}


def test_without_a_baseline_every_format_has_its_loss() -> None:
    found, losses = random_metrics(["E4M3", "E3M4"], ["adamw"])
    assert found == {
        "runs": 10, "diverged": 0, "missing": 0,
        "loss": {entry: to_four(np.mean(losses[entry, "adamw"])) for entry in ("E4M3", "E3M4")},
    }  # fmt: skip


def test_what_no_run_says_is_null_and_counted(tmp_path: Path) -> None:
    lost = {"diverged": {"E4M3-adamw-0-1": 40}, "missing": ("E4M3-adamw-1-1",)}
    write_project(tmp_path, ["bf16", "E4M3"], steps=60, blocks=1, **lost)
    study = read(tmp_path)
    found = metrics(study, compare(study))
    assert (found["runs"], found["diverged"], found["missing"], found["Δ"]) == (4, 1, 1, {"E4M3": None})


@pytest.mark.parametrize("pair", [("E3M4", "E5M2"), ("E4M3", "E1M6")], ids=" ".join)
def test_two_experiments_beside_the_default_run_fit_in_120_columns(
    pair: tuple[str, str], default, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"main": default[0]} | {
        f"├── 0123456 [{name}]": random_metrics(["bf16", name], ["adamw"])[0] for name in pair
    }
    states = [
        ExpState(rev="a" * 40, name=name, data=SerializableExp("a" * 40, metrics={"metrics.json": {"data": numbers}}))
        for name, numbers in found.items()
    ]  # fmt: skip
    monkeypatch.setattr(ui, "_enabled", True)
    monkeypatch.setattr(ui, "rich_console", Console(width=120, file=StringIO()))
    table, headers = tabulate(states, precision=5)
    show_experiments(table, headers, drop=[".*/", "Created"], pager=False, only_changed=True)
    shown = ui.rich_console.file.getvalue()
    assert "…" not in shown and max(map(len, shown.splitlines())) <= 120
    assert {str(number) for name in ("Δ", "ΔΔ") for number in default[0][name].values()} <= set(shown.split())
