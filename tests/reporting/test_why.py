"""Each explanation is told by what the data hold, those that failed too. Oracles: made losses and diagnoses, SciPy."""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict

import numpy as np
import pandas as pd
import pytest
from scipy.stats import spearmanr

from altgrad.formats import get_format
from altgrad.reporting.compare import compare
from altgrad.reporting.document import Bullets
from altgrad.reporting.load import IDENTITY, Study
from altgrad.reporting.nearness import ALONG, PLAIN, SHUFFLED, nearness
from altgrad.reporting.why import permutation_p, why
from tests.reporting.made_losses import ADAMW, STIFF, study_of

ARMS = {"adamw": ADAMW, "stiff": STIFF | {"lr": 0.004}, "shuffled": ADAMW | {"stiffness": "permuted", "lr": 0.004}}
ENTRIES = ("bf16", "E3M4", "virtual.E3M4", "E1M6")


def made(gains: dict[tuple[str, str], float], seeds: int = 6) -> Study:
    """Return a study in which AdamW ends at 3.5 and an arm lower by its gain, give or take 0.001."""
    random = np.random.default_rng(1)
    losses = {
        (entry, arm): 3.5 - gains.get((entry, arm), 0.0) + 0.001 * random.standard_normal(seeds)
        for entry, arm in itertools.product(ENTRIES, ARMS)
    }
    study = study_of(losses, ARMS)
    for key, cell in study.resolved.items():
        name = key.split("-")[0].removeprefix("virtual.")
        cell["formats"] = {name: asdict(get_format(name))} if name != "bf16" else {}
    return study


def diagnosed(study: Study, along: dict[str, float], shuffled: float = 0.2, plain: float = 0.3) -> Study:
    """Give the cells of AdamW cosines with the natural gradient, S·g's by entry."""
    random = np.random.default_rng(2)
    rows = [
        [*(cell[name] for name in IDENTITY), metric, value + 0.001 * random.standard_normal()]
        for cell in study.cells.reset_index().to_dict("records")
        if cell["format"] in along and cell["optimizer"] == "adamw"
        for metric, value in ((ALONG, along[cell["format"]]), (SHUFFLED, shuffled), (PLAIN, plain))
    ]
    study.__dict__["summary"] = pd.DataFrame(rows, columns=[*IDENTITY, "metric", "value"])
    return study


def lines(study: Study) -> list[str]:
    return [item for block in why(study, compare(study)) if isinstance(block, Bullets) for item in block.items]


ALL = {("E3M4", "stiff"): 0.1, ("virtual.E3M4", "stiff"): 0.1, ("E3M4", "shuffled"): 0.04, ("E1M6", "stiff"): 0.03}


def test_the_largest_gain_is_taken_apart_by_its_controls() -> None:
    (line,) = lines(made(ALL))
    assert line.startswith("`stiff` in **E3M4**, the largest gain (+0.1")
    assert "own quantization grid: no part that is told apart from nothing" in line
    assert "Which weight has which spacing makes a part (+0.06" in line and "beyond `shuffled`" in line
    assert "Its learning rate alone, in E1M6" in line and "+0.03" in line


@pytest.mark.parametrize(("lent", "word"), [(0.02, "adds to it"), (0.2, "takes from it")])
def test_a_part_of_the_formats_own_is_told_by_its_sign(lent: float, word: str) -> None:
    (line,) = lines(made(ALL | {("virtual.E3M4", "stiff"): lent}))
    assert f"own quantization grid {word} ({'+' if lent < 0.1 else '−'}0." in line


def test_a_shuffle_that_gains_as_much_leaves_nothing_to_the_place() -> None:
    (line,) = lines(made(ALL | {("E3M4", "shuffled"): 0.1}))
    assert "Which weight has which spacing: no part that is told apart" in line


def test_without_a_gain_that_can_be_claimed_there_is_nothing_to_take_apart() -> None:
    assert lines(made({})) == []


def test_a_format_whose_geometry_is_the_losss_is_named_and_others_are_not() -> None:
    study = diagnosed(made({}), {"E3M4": 0.25, "E1M6": 0.3, "virtual.E3M4": 0.25})
    (found,) = nearness(study, compare(study))  # values lie evenly in E1M6; nothing is quantized in the twin
    assert (found.entry, found.told) == ("E3M4", 1)
    assert found.differences.mean() == pytest.approx(0.05, abs=0.002)
    (line,) = lines(study)
    assert "resembles the format's in E3M4" in line and "the gradient itself is nearer than either" in line


@pytest.mark.parametrize(("along", "told"), [(0.2, 0), (0.15, -1)])
def test_a_geometry_no_nearer_than_chance_is_said_to_be_none(along: float, told: int) -> None:
    study = diagnosed(made({}), {"E3M4": along}, plain=0.1)
    (found,) = nearness(study, compare(study))
    assert found.told == told
    (line,) = lines(study)
    assert "is not the format's, as far as this shows" in line and "nearer than either" not in line
    assert ("told apart in E3M4" in line) == (told != 0)


def test_one_seed_tells_nothing_of_the_losss_geometry() -> None:
    study = diagnosed(made({}, seeds=1), {"E3M4": 0.4})
    assert lines(study) == []


def test_the_chance_of_an_order_is_counted_out() -> None:
    assert permutation_p(np.arange(4.0), np.arange(4.0)) == pytest.approx(2 / math.factorial(4))
    x, y = np.array([1.0, 2, 3, 4, 5, 6]), np.array([2.0, 1, 4, 3, 6, 6])

    def rho(order: tuple[float, ...]) -> float:
        return abs(spearmanr(x, order).statistic)

    reached = [rho(order) >= rho(tuple(y)) - 1e-12 for order in itertools.permutations(y)]
    assert permutation_p(x, y) == pytest.approx(np.mean(reached))


@pytest.mark.parametrize(("ratio", "below", "bias"), [(6.0, "none", None), (1.5, "E3M4", 0.3)])
def test_the_gradient_over_its_noise_is_told_with_its_main_source_and_the_line(ratio, below, bias) -> None:
    study = made({})
    random = np.random.default_rng(3)
    values = {"gradient_to_noise": ratio, "noise_from_weight": 0.7, "noise_from_input": 0.1, "noise_from_grad": 0.2}
    values |= {} if bias is None else {"noise_bias": bias}
    rows = [
        [*(cell[name] for name in IDENTITY), metric, value + 0.001 * random.standard_normal()]
        for cell in study.cells.reset_index().to_dict("records")
        if cell["format"] == "E3M4" and cell["optimizer"] == "adamw"
        for metric, value in values.items()
    ]
    study.__dict__["summary"] = pd.DataFrame(rows, columns=[*IDENTITY, "metric", "value"])
    (line,) = lines(study)
    source = "from weights 70 %" + (", bias 30 %" if bias else "")
    assert f"E3M4 {ratio:.1f} ({source})" in line and line.endswith(f"2505.19115): {below}.")


def of_adamw(study) -> list[list]:
    """Return what identifies the cells of AdamW in two formats."""
    cells = study.cells[study.cells["format"].isin(["E3M4", "E1M6"]) & (study.cells["optimizer"] == "adamw")]
    return cells[IDENTITY].values.tolist()


def test_a_gradient_that_was_once_below_its_noise_is_named_and_its_course_told() -> None:
    study = made({})
    identities = of_adamw(study)
    ratios = {"E3M4": {0: 1.2, 100: 5.0, 200: 8.0}, "E1M6": {0: 9.0, 100: 7.0, 200: 6.0}}
    ends = [[*cell, "gradient_to_noise", ratios[cell[0]][200]] for cell in identities]
    ends += [[*cell, "noise_from_weight", 1.0] for cell in identities]
    course = [[*cell, "gradient_to_noise", step, x] for cell in identities for step, x in ratios[cell[0]].items()]
    study.__dict__["summary"] = pd.DataFrame(ends, columns=[*IDENTITY, "metric", "value"])
    study.__dict__["course"] = pd.DataFrame(course, columns=[*IDENTITY, "metric", "step", "value"])
    (line,) = lines(study)
    assert "After 0, 100 and 200 steps: E3M4 1.2 → 5.0 → 8.0, E1M6 9.0 → 7.0 → 6.0." in line
    assert line.endswith("2505.19115): E3M4.")


def test_formats_that_diverged_hide_nobodys_course_and_what_nobody_measured_is_not_told() -> None:
    """E1M6 diverged after 100 steps with every seed: it has no course, and E3M4's is whole."""
    study = made({})
    identities = of_adamw(study)
    diverged = (study.cells["format"] == "E1M6") & (study.cells["optimizer"] == "adamw")
    study.cells.loc[diverged, ["status", "val_loss"]] = ["diverged", float("nan")]
    ratios = {"E3M4": {0: 9.0, 100: 5.0, 200: 1.2}, "E1M6": {0: 9.0, 100: 7.0}}
    ends = [[*cell, "gradient_to_noise", list(ratios[cell[0]].values())[-1]] for cell in identities]
    ends += [[*cell, "noise_from_weight", 1.0] for cell in identities]
    course = [[*cell, "gradient_to_noise", step, x] for cell in identities for step, x in ratios[cell[0]].items()]
    study.__dict__["summary"] = pd.DataFrame(ends, columns=[*IDENTITY, "metric", "value"])
    study.__dict__["course"] = pd.DataFrame(course, columns=[*IDENTITY, "metric", "step", "value"])
    (line,) = [line for line in lines(study) if "quantization noise" in line]
    assert "After 0, 100 and 200 steps: E3M4 9.0 → 5.0 → 1.2." in line
    assert line.endswith("2505.19115): E3M4.")
    study.__dict__["summary"]["value"] = float("nan")
    assert not [line for line in lines(study) if "quantization noise" in line]
