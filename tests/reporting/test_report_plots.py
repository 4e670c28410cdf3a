"""DVC's own plots: tables and templates. Oracles: dvc_render fills a template, vl-convert compiles it."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pandas as pd
import pytest
import vl_convert
from dvc_render.vega import VegaRenderer

from altgrad.reporting.figures.style import LOOKS
from altgrad.reporting.load import IDENTITY
from altgrad.reporting.offline import VEGA_LITE, write_vega
from altgrad.reporting.plots import TABLES, write_plots

TEMPLATES = Path(__file__).parents[2] / ".dvc/plots"
PLOTS = {  # template, table, x, y
    "training": ("curves", "training", "step", "train_loss"),
    "validation": ("curves", "validation", "step", "delta_to_baseline"),
    "results": ("finals", "results", "format", "primary"),
    "precision": ("layers", "layers", "format", "sqnr_db"),
    "heat": ("heat", "results", "format", "primary"),
}


@pytest.fixture(scope="module")
def tables(study, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plots")
    write_plots(study, folder)
    return folder


def drawn(folder: Path, plot: str, revisions: dict[str, str | None]) -> str:
    """Return the SVG that DVC would show: the table's rows as strings, for each revision those of one format or all."""
    template, table, x, y = PLOTS[plot]
    with open(folder / f"{table}.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    points = [
        row | {"rev": revision}
        for revision, only in revisions.items()
        for row in rows
        if only is None or row["format"] == only
    ]
    filled = VegaRenderer(
        points, "plot", template=template, template_dir=str(TEMPLATES), x=x, y=y, x_label="the x", y_label="the y",
        title="the title", anchors_y_definitions=[{"filename": f"{table}.csv", "field": y}],
    ).get_filled_template()  # fmt: skip
    return vl_convert.vegalite_to_svg(json.dumps(filled), vl_version=VEGA_LITE)


@pytest.mark.parametrize("plot", PLOTS)
def test_a_template_draws_all_formats_of_one_revision(plot: str, tables: Path) -> None:
    svg = drawn(tables, plot, {"workspace": None})
    for expected in ("E4M3", "E7M0", "the title", "the y"):
        assert expected in svg
    assert "NaN" not in svg and "undefined" not in svg
    assert points_of(svg), "a frame without marks"


@pytest.mark.parametrize("plot", PLOTS)
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
    return set(re.findall(r"the y: ([^;\"]+)", svg))


def test_two_revisions_without_a_baseline_are_told_by_their_difference(tables: Path, tmp_path: Path) -> None:
    folder = without_baseline(tables, tmp_path, {"0": 0.25, "1": 0.75})
    svg = drawn(folder, "validation", {"one": "E4M3", "two": "E3M4"})
    assert "E3M4 − E4M3" in svg
    assert {round(float(value.replace("−", "-")), 6) for value in points_of(svg)} >= {0.25, 0.75, 0.5}


def test_one_revision_without_a_baseline_has_no_difference(tables: Path, tmp_path: Path) -> None:
    svg = drawn(without_baseline(tables, tmp_path, {"0": 0.25}), "validation", {"workspace": None})
    assert not points_of(svg) and " − " not in svg


def test_a_baseline_goes_before_the_difference_of_revisions(tables: Path) -> None:
    svg = drawn(tables, "validation", {"one": "E4M3", "two": "E3M4"})
    assert points_of(svg) and "E3M4 − E4M3" not in svg


@pytest.mark.parametrize("plot", ["training", "results"])
def test_a_format_has_its_colour_in_every_revision(plot: str, tables: Path) -> None:
    for revisions in ({"workspace": None}, {"one": "E4M3", "two": "E3M4"}):
        svg = drawn(tables, plot, revisions).lower()
        for name in ("E4M3", "E3M4"):
            assert LOOKS[name].color.lower() in svg


@pytest.mark.parametrize("template", ["curves", "finals"])
def test_templates_have_the_colours_of_the_figures(template: str) -> None:
    text = (TEMPLATES / f"{template}.json").read_text()
    found = dict(re.findall(r"(\w+): '(#[0-9A-Fa-f]{6})'", text))
    assert found == {name: look.color for name, look in LOOKS.items()}


def test_tables_name_the_cell_first_and_hold_text_or_finite_numbers(tables: Path) -> None:
    for name in TABLES:
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
