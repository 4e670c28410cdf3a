"""The first screen says what the numbers say. Oracle: losses of known differences."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import product

import numpy as np
import pytest
from scipy import stats

from altgrad.formats import get_format
from altgrad.reporting.compare import compare
from altgrad.reporting.dvc_outputs import numbers as all_numbers
from altgrad.reporting.load import Study
from altgrad.reporting.markdown import Table, significant
from altgrad.reporting.summary import (
    QUESTION,
    certainty,
    costs_table,
    gains_table,
    headline,
    lowest_table,
    outliers,
    ranked,
    summary,
    title,
)
from altgrad.reporting.tables import results_table
from tests.reporting.made_losses import ADAMW, STIFF, losses_of, noisy, study_of, texts, with_formats

ARMS = {"adamw": ADAMW, "stiff": STIFF, "shuffled": STIFF | {"stiffness": "permuted"}}
ENTRIES = ("bf16", "E4M3", "E3M4", "virtual.E4M3", "virtual.E3M4")


def made(effects: dict[tuple[str, str], float], entries: tuple[str, ...] = ENTRIES, sd: float = 1e-4, **arms) -> Study:
    """Return five seeds of losses 3.5 plus ``effects``, and noise of ``sd``."""
    random, arms = np.random.default_rng(0), arms or ARMS
    losses = {
        (entry, arm): list(3.5 + effects.get((entry, arm), 0.0) + sd * random.standard_normal(5))
        for entry in entries for arm in arms
    }  # fmt: skip
    return with_formats(study_of(losses, arms))


def said(study: Study) -> str:
    return headline(study, compare(study))


def rows(table: Table | None) -> dict[str, list[str]]:
    return {row[0].strip("*"): row[1:] for row in texts(table)}


def by_head(table: Table | None) -> list[dict[str, str]]:
    assert table is not None
    heads = [column.head for column in table.columns]
    return [dict(zip(heads, row, strict=True)) for row in texts(table)]


def test_an_effect_that_the_control_has_too_is_not_the_formats():
    same = {(entry, "stiff"): -0.02 for entry in ENTRIES if entry != "bf16"}
    none = "**No format gained by its own spacing**: E4M3 and E3M4 under `stiff`."
    assert said(made(same)).startswith(none)
    assert "In E4M3 and E3M4 an effect beyond ±0.005 is excluded" in said(made(same))
    assert "is excluded" not in said(made(same, sd=0.02)), "an interval that is wider shows nothing"


def test_an_effect_that_the_control_lacks_is_the_formats():
    own = {("E4M3", "stiff"): -0.02, ("virtual.E4M3", "stiff"): -0.005}
    assert said(made(own)) == "**`stiff` has a format-specific effect in E4M3**: there it lowers the loss more."


def test_without_a_control_or_an_optimizer_to_ask_about_the_question_is_open():
    assert said(made({}, ("bf16", "E4M3"))).startswith("**Open.** Without an unquantized control")
    few = study_of(losses_of(ARMS, formats=list(ENTRIES), seeds=4), ARMS)
    assert said(few) == "**Open.** A gain by the own spacing of E4M3 and E3M4 under `stiff`: n < 5, no test."


def test_a_grid_that_asks_nothing_of_geometry_has_its_own_question_and_says_what_formats_and_optimizers_do():
    costs = made({("E4M3", "adamw"): 0.02}, ("bf16", "E4M3", "E3M4"), adamw=ADAMW)
    assert title(costs, compare(costs))[1] == "What does each format cost?"
    assert said(costs) == "**Better than the reference: none.** Worse: `E4M3`. No effect: `E3M4`."
    muon = made({("E4M3", "muon"): -0.02}, ("bf16", "E4M3"), adamw=ADAMW, muon={"base": "muon"})
    assert title(muon, compare(muon))[1] == "What does each format cost, and what does each optimizer change?"
    assert said(muon) == "**Better than the reference: `muon` in `E4M3`.** Worse: none. No effect: `E4M3`."
    aware = made({})
    assert title(aware, compare(aware))[1] == QUESTION
    nothing = study_of({("bf16", "adamw"): [3.5, None], ("E4M3", "adamw"): [None, 3.5]}, {"adamw": ADAMW})
    assert said(nothing).startswith("**Nothing is compared**")


def test_where_nothing_is_tested_there_is_no_p_and_no_word_of_one():
    arms = {"adamw": ADAMW, "muon": {"base": "muon"}}
    study = study_of(losses_of(arms, formats=list(ENTRIES[:3]), seeds=4), arms)
    blocks = summary(study, compare(study))
    tables = [block for block in blocks if isinstance(block, Table)]
    heads = [[column.head for column in table.columns] for table in tables]
    assert len(tables) == 3 and "p" not in heads[2]
    assert all(row[i] == "–" for table, own in zip(tables, heads, strict=True) if "p" in own
               for i in [own.index("p")] for row in texts(table))  # fmt: skip
    words = " ".join(block if isinstance(block, str) else block.note for block in blocks)
    assert "p is adjusted over" not in words and "p adjusted" not in words and "in brackets" not in words
    assert said(study).startswith("**n < 5, no test: `E4M3`; `E3M4`; `muon` in `E4M3` and `E3M4`.**")


def test_effects_in_brackets_are_explained_where_there_are_any():
    found = [certainty(study, compare(study), None) for study in (made({}), made({}, sd=0.02))]
    assert ["in brackets" in line for line in found] == [False, True]


@pytest.mark.parametrize("seeds", [1, 5])
def test_runs_that_are_equal_to_the_last_bit_are_called_identical_in_every_table(seeds):
    losses = {run: noisy(3.5, seeds, i) for i, run in enumerate(product(("bf16", "E4M3", "virtual.E4M3"), ARMS))}
    losses |= {("E4M3", arm): losses["bf16", "adamw"] for arm in ARMS}
    study = with_formats(study_of(losses, ARMS))
    comparison = compare(study)
    cost, change = by_head(costs_table(study, comparison))[0], by_head(gains_table(study, comparison))[0]
    for row in (cost, change):
        assert row["Δ loss"] == row["result"] == "identical" and row["p"] == row["95 % CI"] == "–"
    assert change["against controls"] == "`shuffled` identical"
    assert [row["above the lowest"] for row in by_head(lowest_table(study, comparison))] == ["–", *["identical"] * 2]
    detail = {(row["format"], row["optimizer"]): row for row in by_head(results_table(study, comparison))}
    assert detail["**E4M3**", "adamw"]["Δ loss"] == "identical" and detail["**E4M3**", "adamw"]["95 % CI"] == "–"


def test_a_run_is_not_held_against_the_same_optimizer_where_that_is_its_plain_form():
    """Without a format, `stiff` is AdamW."""
    study = made({}, ("bf16", "E4M3"), adamw=ADAMW, muon={"base": "muon"}, stiff=STIFF)
    compared = compare(study)
    known = {(row.format, row.optimizer) for row in compared.best.itertuples() if row.difference is not None}
    assert known == {("E4M3", "adamw"), ("E4M3", "muon")}
    assert {(row.format, row.optimizer) for row in compared.gains.itertuples()} == {
        ("bf16", "muon"), ("E4M3", "muon"), ("E4M3", "stiff")
    }  # fmt: skip


@pytest.mark.parametrize(("other", "difference", "told"), [
    ({"bias": 9}, 0.0, True), ({"bias": 9}, 1e-9, False), ({"mantissa_bits": 4}, 0.0, False),
])  # fmt: skip
def test_formats_that_differ_in_bias_alone_are_named_where_their_runs_are_identical(other, difference, told):
    same = noisy(3.5)
    losses = {("bf16", "adamw"): noisy(3.5, key=1), ("E4M3", "adamw"): same, ("E3M4", "adamw"): same + difference}
    study = with_formats(study_of(losses, {"adamw": ADAMW}))
    for cell in study.resolved.values():
        if cell["format"] == "E3M4":
            cell["formats"] = {"mine": asdict(replace(get_format("E4M3"), name="mine", **other))}
    note = costs_table(study, compare(study)).note
    assert ("The runs of `E4M3` and `E3M4` are identical" in note) == told


def test_updates_stand_beside_their_controls():
    effects = {("E4M3", "stiff"): -0.03, ("E4M3", "shuffled"): -0.02, ("virtual.E4M3", "stiff"): -0.03}
    found = rows(gains_table(study := made(effects), compare(study)))
    row = found["E4M3"]
    assert list(found) == ["E4M3", "E3M4"] and row[0].startswith("−0.03") and row[1] == "**lower**"
    assert row[5].endswith("no effect")
    assert row[6].startswith("`shuffled` −0.0099") and row[6].endswith("**lower**")


def test_an_optimizer_that_needs_no_format_is_not_called_spacing_scaled_and_has_bf16_for_a_control():
    arms = {"adamw": ADAMW, "muon": {"base": "muon"}, "stiff": STIFF}
    effects = {("E4M3", "muon"): -0.03, ("E3M4", "muon"): -0.03, ("bf16", "muon"): -0.03, ("E4M3", "stiff"): -0.02}
    study = made(effects, ("bf16", "E4M3", "E3M4"), **arms)
    comparison = compare(study)
    table = gains_table(study, comparison)
    leads = [block for block in summary(study, comparison) if isinstance(block, str)]
    assert leads[:3] == ["**What each format costs**", "**What each optimizer changes**", "**Lowest loss**"]
    found = {tuple(row[:2]): row[2:] for row in texts(table)}
    assert found["**E4M3**", "stiff"][0].startswith("−0.02") and "`stiff`'s minus `adamw`'s" in table.note
    assert found["**E4M3**", "muon"][0].startswith("−0.03") and found["**E4M3**", "muon"][5].endswith("no effect")
    assert "`muon`'s minus" in table.note and table.note.endswith("(difference in differences), `bf16`.")
    alone = made(effects, ("bf16", "E4M3", "E3M4"), adamw=ADAMW, muon={"base": "muon"})
    leads = [block for block in summary(alone, compare(alone)) if isinstance(block, str)]
    assert "**What `muon` changes**" in leads


def test_the_lowest_is_listed_with_what_is_above_it():
    study = made({("E3M4", "stiff"): -0.05, ("E4M3", "stiff"): -0.04})
    table = lowest_table(study, comparison := compare(study))
    (first, second), shown = ranked(study, comparison)[:2], texts(table)
    assert [first[:2], second[:2]] == [("E3M4", "stiff"), ("E4M3", "stiff")]
    assert shown[0][2:4] == ["–", "–"] and float(shown[1][2]) == pytest.approx(0.01, abs=1e-3)
    assert float(shown[1][3].removeprefix("< ")) < 0.05
    assert table.note.startswith("The first 5 of 6; p adjusted over all 15 pairs.")
    assert table.note.endswith("Not ranked, since nothing is quantized: `bf16`, `virtual.E4M3` and `virtual.E3M4`.")


def test_every_table_has_a_lead_and_one_line_is_on_certainty():
    study = made({})
    blocks = summary(study, compare(study), None)
    assert sum(isinstance(block, Table) for block in blocks) == 3
    assert blocks[-2] == certainty(study, compare(study), None)
    assert "Paired seeds: 5; p is adjusted over" in blocks[-2]
    assert "Student's paired t" in blocks[-1] and "(../altgrad/reporting/STATISTICS.md)" in blocks[-1]


def test_what_is_significant_alone_and_not_in_its_family_says_both() -> None:
    """Oracle: scipy's p, and Holm's by its definition."""
    rng = np.random.default_rng(3)
    base, noise = 3.5 + 0.03 * rng.standard_normal(5), 0.01 * rng.standard_normal((12, 5))
    noise[0] = 0.01 * np.array([1, 2, 1, 0.5, 3])
    losses = {("bf16", "adamw"): base} | {(f"F{i}", "adamw"): base + own for i, own in enumerate(noise)}
    study = study_of({run: list(values) for run, values in losses.items()}, {"adamw": ADAMW})
    p = np.array([stats.ttest_rel(own, base).pvalue for own in losses.values()][1:])
    assert p[0] < 0.05 and 12 * p.min() > 0.05
    shown = rows(costs_table(study, compare(study)))["F0"]
    assert shown[1].startswith("inconclusive (") and shown[1].endswith(f", p alone {p[0]:.2g}")
    assert sum("alone" in row[1] for row in rows(costs_table(study, compare(study))).values()) == (p < 0.05).sum()


def test_a_run_with_one_seed_far_from_the_others_is_named() -> None:
    study = made({})
    assert not outliers(study, compare(study))
    cells = study.cells
    cells.loc[(cells["format"] == "E4M3") & (cells["optimizer"] == "stiff") & (cells["seed"] == 3), "val_loss"] = 11.0
    (line,) = outliers(study, compare(study))
    assert line.startswith("**Outlier**: `E4M3` under `stiff` with seed 3 has 11, its other seeds 3.")
    assert line.count("with seed") == 1


# --- the metrics of a study that lost runs are those that its report tells --------------------------


def numbers(study: Study) -> dict:
    return all_numbers(study, compare(study), 0)


def test_the_best_is_lowest_over_the_seeds_that_all_completed() -> None:
    """A lost the seed of high losses, and B ends lower wherever both have a loss."""
    losses = {
        ("bf16", "adamw"): [4.0, 2.0, 3.0], ("A", "adamw"): [None, 2.2, 3.2], ("B", "adamw"): [4.1, 2.1, None],
        ("C", "adamw"): [4.3, 2.3, 3.3],
    }  # fmt: skip
    study = study_of(losses, {"adamw": ADAMW})
    assert numbers(study)["best"] == {"format": "B", "optimizer": "adamw", "val_loss": pytest.approx(3.1)}
    assert ranked(study, compare(study))[0][0] == "B"


@pytest.mark.parametrize(("losses", "best"), [([3.2, 3.3], "A"), ([None, None], None)])
def test_the_best_is_something_that_is_quantized_if_any_completed(losses, best) -> None:
    unquantized = {("bf16", "adamw"): [3.0, 3.1], ("virtual.A", "adamw"): [3.0, 3.1]}
    assert numbers(study_of(unquantized | {("A", "adamw"): losses}, {"adamw": ADAMW}))["best"]["format"] == best


def test_the_noise_floor_is_that_of_the_report() -> None:
    """Five seeds, of which one arm lost two: three pairs."""
    rng = np.random.default_rng(0)
    losses = {
        (entry, arm): list(3 + 0.01 * rng.standard_normal(5)) for entry in ("bf16", "A") for arm in ("adamw", "stiff")
    }
    losses["A", "stiff"][1:3] = [None, None]
    study = study_of(losses, {"adamw": ADAMW, "stiff": STIFF})
    comparison = compare(study)
    floor = numbers(study)["noise_floor"]
    oracle = stats.ttest_rel(losses["A", "adamw"], losses["bf16", "adamw"]).confidence_interval()
    assert floor == pytest.approx((oracle.high - oracle.low) / 2)
    assert f"The median 95 % interval of a cost is ±{significant(floor)}." in certainty(study, comparison, None)
