"""The report's pages: what they say, where their links lead, and what they do in a browser.

Oracles: the files that the study was written as; markdown-it and html.parser; a real browser.
"""

from __future__ import annotations

import html
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote

import pandas as pd
import pytest
from ruamel.yaml import YAML

from altgrad.common.files import read_json
from altgrad.config.cell import Cell
from altgrad.reporting import markdown
from altgrad.reporting.diagnosis_tables import raised
from altgrad.reporting.html import settings, to_cells_page, to_html
from altgrad.reporting.load import IDENTITY
from altgrad.reporting.markdown import Column, Picture, Table, named_runs, words
from altgrad.reporting.report import write_report
from tests.reporting.synthetic_project import read, write_project

DIVERGED, MISSING = "E4M3-stiff-1-1", "E4M3-stiff-0-1"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("project")
    write_project(
        root, ["bf16", "E4M3", "E5M2"], ["adamw", "stiff"], (0, 1, 2), arms={"stiff": {"stiffness": "ulp"}},
        diverged={DIVERGED: 40}, missing=(MISSING,), steps=60, blocks=1, baseline="E5M2",
    )  # fmt: skip
    write_report(root / "data", root / "reports", None)
    return root


def data_of(page: str) -> dict[str, Any]:
    """Return the data in a page."""
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(found)


def test_every_cell_has_the_numbers_of_its_files(project: Path) -> None:
    found = data_of((project / "reports/cells.html").read_text())
    assert sum(len(cell.get("flags", [])) for cell in found["cells"]) == len(raised(read(project))) > 0
    names = [name for name, _, _ in found["metrics"]]
    assert [cell["key"] for cell in found["cells"]] == read_json(project / "data/grid/index.json")["cells"]
    for cell in found["cells"]:
        key, run = cell["key"], project / "data/runs" / cell["key"]
        resolved = read_json(project / "data/grid" / f"{key}.json")
        assert {name: cell[name] for name in IDENTITY} == {name: resolved[name] for name in IDENTITY}
        named = YAML(typ="safe").load(cell["settings"])
        identity = {"key": key, **{name: cell[name] for name in IDENTITY}, "formats": resolved["formats"]}
        assert Cell(**{"rules": [], "monitor": {}} | identity | named) == Cell(**resolved), "defaults are left out"
        if key == MISSING:
            assert cell["reason"] == "not trained" and "results" not in cell
            continue
        metrics = read_json(run / "metrics.json")
        for name in ("val_loss", "val_loss_best", "train_loss"):
            wanted = metrics[name]
            assert cell["results"][name] == (wanted if wanted is None else pytest.approx(wanted, rel=1e-11))
        history = pd.read_csv(run / "history.csv")
        evaluated = history.dropna(subset="val_loss")[["step", "val_loss"]].to_numpy().tolist()
        points = [[row[0], row[2]] for row in cell["curve"] if row[2] is not None]
        assert points == [[step, pytest.approx(loss, rel=1e-5)] for step, loss in evaluated]
        summary = read_json(project / "data/diag" / f"{key}.json")["summary"]
        measured = dict(zip(names, cell["summary"], strict=True))
        for name in names:
            wanted = summary.get(name)
            assert measured[name] == (wanted if wanted is None else pytest.approx(wanted, rel=1e-5))
    assert next(cell for cell in found["cells"] if cell["key"] == DIVERGED)["cause"].startswith(f"{DIVERGED} diverged")


class Visible(HTMLParser):
    """The visible text of a page."""

    text = ""

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_page_shows_every_name_as_text(tmp_path: Path) -> None:
    hostile = "<script>alert(1)</script> a|b [x](y) spacing_unmatched *z* & \"q\" 'p'"
    (tmp_path / "plot.png").write_bytes(b"made up")
    table = Table([words("name"), Column("n")], [[hostile, "[1, 2]"]], hostile)
    blocks = ["# Title", "**Question?**", hostile, "## Part", table, Picture("plot", "what it shows", hostile)]
    text = markdown.to_markdown(blocks)
    reader = Visible()
    reader.feed(page := to_html(text, tmp_path))
    assert reader.text.count(hostile.replace("[x](y)", "x")) == 4 and page.count("<script") == 1
    assert page.count("<td") == 2 and "| [1, 2] |" in text


def test_a_name_that_is_all_of_a_strong_or_code_text_leads_to_its_runs_and_nothing_else_does() -> None:
    links = {"E4M3": "cells.html#?format=E4M3", "a_b": "cells.html#?optimizer=a_b", "E4M3-a_b-0-1": "cells.html#k"}
    for text, linked in {
        "**E4M3** gains": "[**E4M3**](cells.html#?format=E4M3) gains",
        r"by `a_b`, **a\_b**": r"by [`a_b`](cells.html#?optimizer=a_b), [**a\_b**](cells.html#?optimizer=a_b)",
        "**`E4M3-a_b-0-1` ended**": "**[`E4M3-a_b-0-1`](cells.html#k) ended**",
        "E4M3 and `E4M3-a_b-0` and `dvc repro`": "E4M3 and `E4M3-a_b-0` and `dvc repro`",
    }.items():
        assert named_runs(text, links) == linked


@pytest.mark.parametrize(("written", "values", "expected"), [
    (lambda value: markdown.signed(value, 3), [0.01234, -0.01234, 0.0, -1e-9, math.nan, None],
     ["+0.012", "−0.012", "0.000", "0.000", "–", "–"]),
    (lambda value: markdown.number(value, 1), [-1.25, math.inf], ["−1.2", "–"]),
    (markdown.significant, [6.1035e-05, 573.44], ["6.1e−05", "573"]),
    (markdown.integer, [3_360_000, None, 12], ["3\u202f360\u202f000", "–", "12"]),
    (lambda count: markdown.plural(count, "seed"), [1, 2], ["1 seed", "2 seeds"]),
    (markdown.listed, [["a"], "abc", []], ["a", "a, b and c", ""]),
])  # fmt: skip
def test_numbers_and_lists_look_alike_everywhere(written, values: list, expected: list[str]) -> None:
    assert list(map(written, values)) == expected


def test_a_setting_that_is_its_default_and_a_known_format_are_left_out(project: Path) -> None:
    found = data_of((project / "reports/cells.html").read_text())
    said = {cell["key"]: cell["settings"] for cell in found["cells"]}
    assert all("steps: 60" in text and "clip" not in text and "mantissa" not in text for text in said.values())
    assert "stiffness: ulp" in said[DIVERGED] and "stiffness" not in said["E4M3-adamw-1-1"]
    assert "grad: {format: E5M2}" in said[DIVERGED] and "grad" not in said["bf16-adamw-0-1"]
    assert len((project / "reports/cells.html").read_text()) < 10_000 * len(found["cells"]), "5 MB for 500 cells"


def test_a_format_that_its_name_does_not_define_is_a_setting(project: Path) -> None:
    cell = read_json(project / "data/grid" / f"{DIVERGED}.json")
    for name, known in (("mine", False), ("E4M3", False), ("E3M4", True)):
        fields = {"name": name, "exponent_bits": 3, "mantissa_bits": 4, "bias": 3, "specials": "finite", "signed": True}
        named = YAML(typ="safe").load(settings(cell | {"formats": cell["formats"] | {name: fields}}))
        assert named.get("formats") == (None if known else {name: fields})


def test_a_text_with_markup_in_it_ends_no_script(project: Path) -> None:
    study = read(project)
    study.cells.loc[MISSING, "reason"] = "</script><img src=x onerror=alert(1)>"
    page = to_cells_page(study, raised(study), [])
    assert page.count("</script>") == 2 and "<img" not in page
    (missing,) = (cell for cell in data_of(page)["cells"] if cell["key"] == MISSING)
    assert missing["reason"].startswith("</script>")


def test_every_link_to_cells_finds_some(project: Path) -> None:
    """Oracle: the filter, written once more over the grid."""
    study = read(project)
    wanted = set(re.findall(r'href="cells\.html#([^"]*)"', page_of(project)))
    for text in wanted - {""}:
        if not text.startswith("?"):
            assert unquote(text) in study.cells.index
            continue
        asked = parse_qs(html.unescape(text[1:]))
        rows = study.cells
        for name, values in asked.items():
            rows = rows[rows[name].astype(str).isin(values)]
        assert len(rows), text


def page_of(project: Path) -> str:
    return (project / "reports/index.html").read_text()


# --- in a browser --------------------------------------------------------------------------------------


@pytest.fixture
def opened(project: Path, browser: Any):
    """Return what opens a page of the report; there must be no error on it."""
    problems: list[str] = []
    pages = []

    def open_page(name: str) -> Any:
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        pages.append(page)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto((project / "reports").as_uri() + "/" + name)
        return page

    yield open_page
    for page in pages:
        page.close()
    assert problems == []


def column(table: Any, index: int) -> list[float]:
    texts = table.locator(f"tbody tr td:nth-child({index})").all_inner_texts()
    numbers = [re.search(r"-?\d+(\.\d+)?", text.replace("−", "-")) for text in texts]
    return [float(number[0]) if number else math.nan for number in numbers]


def test_tables_sort_by_numbers_with_either_sign_and_back(opened) -> None:
    page = opened("cells.html")
    table = page.locator("table", has=page.locator("#list"))
    before = column(table, 2)
    button = table.locator("th button", has_text="above the baseline")
    button.click()
    known = [value for value in column(table, 2) if value == value]
    assert known == sorted(known) != [value for value in before if value == value] and min(known) < 0
    assert column(table, 2)[len(known) :] == pytest.approx([math.nan] * (len(before) - len(known)), nan_ok=True)
    button.click()
    assert [value for value in column(table, 2) if value == value] == sorted(known, reverse=True)
    button.click()
    assert column(table, 2) == pytest.approx(before, nan_ok=True)


def test_tables_show_the_rows_with_the_words_that_are_asked_for(opened) -> None:
    page = opened("cells.html")
    shown = page.locator("#list tr:visible td:first-child")
    page.locator("h2.all ~ input.filter").fill("e4m3 STIFF")
    assert shown.all_inner_texts() == ["E4M3-stiff-0-1", "E4M3-stiff-1-1", "E4M3-stiff-2-1"]
    page.locator("h2.all ~ input.filter").fill("")
    assert shown.count() == 18


def test_a_cell_is_reached_from_the_report_and_from_another_cell(opened, project: Path) -> None:
    page = opened("index.html")
    page.locator(f'a[href="cells.html#{DIVERGED}"]').first.click()
    page.wait_for_url(f"**/cells.html#{DIVERGED}")
    assert page.locator("#cell h2").inner_text() == DIVERGED
    assert page.locator("#cell svg").count() == 2 and "diverged" in page.locator("#cell > p").inner_text()
    key = "bf16-adamw-2-1"
    page.locator("#list a", has_text=key).click()
    page.locator("#cell h2", has_text=key).wait_for()  # the page hears of a new fragment some time after the click
    assert page.locator("#cell h2").inner_text() == key
    own, base = (
        read_json(project / "data/runs" / name / "metrics.json")["val_loss"] for name in (key, "E5M2-adamw-2-1")
    )
    text = page.locator("#cell").inner_text()
    assert f"{own:.4f}" in text and f"{own - base:+.4f}".replace("-", "−") in text
    page.locator("#list a", has_text=MISSING).click()
    page.locator("#cell h2", has_text=MISSING).wait_for()
    assert "not trained" in page.locator("#cell").inner_text()
    page.goto(page.url.split("#")[0] + "#none-such")
    page.locator("#cell", has_text="none-such").wait_for()
    assert "The grid has no cell none-such." in page.locator("#cell").inner_text()


def test_a_name_in_a_table_leads_to_its_cells(opened, project: Path) -> None:
    page = opened("index.html")
    page.locator("#result-in-detail ~ * td a", has_text=re.compile("^bf16$")).first.click()
    page.wait_for_url("**/cells.html#?format=bf16")
    keys = [f"bf16-{arm}-{seed}-1" for arm in ("adamw", "stiff") for seed in (0, 1, 2)]
    assert page.locator("#list tr:visible td:first-child").all_inner_texts() == keys
    losses = [read_json(project / "data/runs" / key / "metrics.json")["val_loss"] for key in keys]
    text = page.locator("#cell").inner_text()
    assert all(f"{sum(of_arm) / 3:.4f}" in text for of_arm in (losses[:3], losses[3:]))
    assert page.locator("#cell svg polyline").count() == 6
    page.locator("a", has_text="All cells").click()
    page.locator("#all", has_text="All cells").wait_for()
    assert page.locator("#list tr:visible").count() == 18 and page.locator("#cell").inner_text() == ""
    page.goto(page.url.split("#")[0] + "#?format=none-such")
    page.locator("#cell", has_text="The grid").wait_for()
    assert "The grid has no such cell." in page.locator("#cell").inner_text()


@pytest.mark.parametrize("name", ["index.html", "cells.html#E5M2-adamw-2-1", "cells.html#?format=E4M3"])
def test_the_pages_fit_a_phone(name: str, project: Path, browser: Any) -> None:
    page = browser.new_page(viewport={"width": 390, "height": 800})
    page.goto((project / "reports").as_uri() + "/" + name)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    page.close()
