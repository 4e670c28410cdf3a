"""README's figure shows what the runs cost. Oracle: means over the rows of `runs.csv`, bits counted by hand."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pandas as pd
import pytest

from altgrad.reporting.study.answers import answered
from altgrad.reporting.study.front import GAP, Cost, apart, bits_per_element, costs, draw_costs
from altgrad.reporting.study.questions import read_questions
from altgrad.reporting.study.runs import Runs

ROOT = Path(__file__).parents[3]
STUDY = ROOT / "reports/study"
FIGURES = [STUDY / f"figures/costs{ending}.svg" for ending in ("", "-dark")]


@pytest.fixture(scope="module")
def shown() -> list[Cost]:
    runs = Runs.read(STUDY / "results")
    return costs([answer for question in read_questions(STUDY) for answer in answered(question, runs)], runs)


def test_every_cost_is_the_mean_difference_of_rows_and_of_the_most_seeds(shown):
    rows = pd.read_csv(STUDY / "results/runs.csv")
    rows = rows[(rows.optimizer == "adamw") & (rows.purpose == "test")]
    rows = rows[(rows.lr_scale == 1) & (rows.parameters == 168256)]
    assert len({(cost.format, cost.tokens) for cost in shown}) == len(shown) >= 22
    for cost in shown:
        found = []
        for _, own in rows[rows.tokens == cost.tokens].groupby("experiment"):
            losses = own.pivot_table("val_loss", "seed", "format")
            for reference in {"bf16", f"virtual.{cost.format}"} & set(losses):
                found += [(losses[name] - losses[reference]).dropna() for name in losses if name == cost.format]
        same = [one for one in found if abs(one.mean() - cost.mean) < 1e-9]
        assert cost.seeds == max(map(len, found)) == max(map(len, same)), cost


def test_bits_have_their_part_of_a_blocks_scale():
    found = {name: bits_per_element(name) for name in ("E1M1", "E2M1", "E4M3", "MXFP8", "MXFP4", "NVFP4")}
    assert found == {"E1M1": 3, "E2M1": 4, "E4M3": 8, "MXFP8": 8 + 8 / 32, "MXFP4": 4 + 8 / 32, "NVFP4": 4 + 8 / 16}


@pytest.mark.parametrize("figure", FIGURES, ids=lambda path: path.stem)
def test_the_committed_figures_name_every_format_for_each_length(figure, shown):
    words = re.findall(r">([^<>\n]+)</text>", figure.read_text())
    names = sorted(cost.format for cost in shown)
    assert sorted(word for word in words if word in names) == names
    assert {f"after {cost.tokens / 1e6:.1f} M tokens" for cost in shown} <= set(words)
    assert f"figures/{figure.name}" in (ROOT / "README.md").read_text()


def test_a_cost_that_is_not_significant_is_hollow_and_one_below_the_axis_is_drawn(tmp_path):
    filled = []
    for significant in (True, False):
        draw_costs([Cost("E4M3", 8, 204800, -0.02, 5, significant)], tmp_path)
        assert {path.name for path in tmp_path.iterdir()} >= {"costs.svg", "costs-dark.svg"}
        filled.append((tmp_path / "costs-dark.svg").read_text().count("fill: #56b4e9; stroke"))
    assert filled[0] == filled[1] + 1


def test_labels_of_a_column_are_apart_and_stay_in_order():
    assert apart([0.0, 5 * GAP]) == [0.0, 5 * GAP]
    moved = apart([0.0, 0.0, 0.01, 5.0])
    gaps = [high - low for low, high in itertools.pairwise(moved)]
    assert all(gap >= 0.999 * GAP for gap in gaps) and sum(moved[:3]) == pytest.approx(0.01)
