"""Laws of every written-down test: what is paired has one seed, a lost cell turns no verdict, and families are whole.

Oracle: planted differences, whose t-tests SciPy makes.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from altgrad.config import UserError
from altgrad.reporting.decide import decide
from altgrad.reporting.paired import interval
from altgrad.reporting.wording import p_value
from tests.reporting.made_parts import part_of, without, write_part

SEEDS = 6
TWINS = ("E3M4", "virtual.E3M4")
WITHOUT_MASTERS = ("adamw_sr", "rung")
#: Parts by their formats and arms, the one that others are held against first.
PARTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "low-bits": (("E2M1", "E3M1", "virtual.E2M1", "virtual.E3M1"), ("sr", "stiff_matched_sr", "permuted_matched_sr")),
    "controls": (TWINS, ("adamw", "stiff_matched", "muon", "madam", "relative")),
    "masterless": (("E4M3", "E3M4"), ("adamw_sr", "nearest", "eco", "eco_sr")),
    "corpus": (TWINS, ("adamw", "stiff_matched", "muon")),
    "arms": (TWINS, ("adamw", "adamw_sr", "stiff_grad", "riemann", "rung")),
    "formats": (("E4M3", "E5M2", "E3M4"), ("adamw", "stiff_matched", "permuted_matched")),
    "formats-muon": (("E4M3", "E5M2", "E3M4"), ("adamw", "muon")),
    "splits": (("E4M3", "E7M0", "virtual.E4M3", "virtual.E7M0"), ("adamw", "stiff_matched")),
    "gate-formats": (("E1M1", "E2M0", "E2M1", "E1M2", "E3M0", "E2M2", "E1M3", "E3M1"), ("adamw",)),
    "gate-rounding": (("nvfp4", "nvfp4_grads", "nvfp4_forward", "fp8", "fp8_grads", "fp8_forward"), ("adamw",)),
    "length-3200-fading": (("E3M4",), ("adamw", "stiff_matched", "stiff_fading")),
    "length-3200-masterless-twin": (TWINS, WITHOUT_MASTERS),
    "length-3200-masters": (TWINS, ("adamw", "adamw_sr")),
    "ladder-nano-bf16": (TWINS, ("adamw", "muon", "adamw_sr", "rung")),
    "ladder-nano-arms": (("E3M4",), ("adamw", "muon", "adamw_sr", "rung")),
    "ladder-m50": (TWINS, ("adamw", "stiff_matched", "permuted_matched")),
}
Loss = Callable[[str, str, int], float]


def made(folder: Path, name: str, loss: Loss) -> Path:
    entries, arms = PARTS[name]
    cells = itertools.product(entries, arms)
    return part_of(folder / name, {(e, arm): [loss(e, arm, seed) for seed in range(SEEDS)] for e, arm in cells})


def large(name: str) -> Loss:
    """Losses that differ from cell to cell by 0.03 and more, from seed to seed by more, and by a little noise."""
    random = np.random.default_rng(len(name))
    cells = list(itertools.product(*PARTS[name]))
    level = dict(zip(cells, 0.03 * random.permutation(len(cells)) ** 1.3, strict=True))
    noise = {(*cell, seed): 1e-3 * random.normal() for cell in cells for seed in range(SEEDS)}
    return lambda entry, arm, seed: 3 + 0.3 * seed + level[entry, arm] + noise[entry, arm, seed]


def verdicts(text: str) -> list[str]:
    """Return the sentences of a decision without their numbers."""
    return [re.sub(r"[+−<]? ?\b\d[\d.]*", "#", line) for line in text.splitlines() if re.match(r"\*\*[A-Z]\d", line)]


def table(text: str) -> tuple[list[str], list[list[str]]]:
    """Return the heads and the rows of a decision's table."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return lines[0], lines[2:]


def estimates(text: str, column: str) -> list[tuple[float, float, float]]:
    """Return the means and intervals of a column of the table."""
    heads, rows = table(text)
    numbers = [re.findall(r"[+-]?\d+\.\d+", row[heads.index(column)].replace("−", "-")) for row in rows]
    return [tuple(map(float, found)) for found in numbers if found]


@pytest.mark.parametrize("name", PARTS)
def test_a_lost_cell_turns_no_verdict_and_is_named(name, tmp_path):
    whole = verdicts(decide(made(tmp_path, name, large(name))))
    assert whole
    for number, (entry, arm) in enumerate(itertools.product(*PARTS[name])):
        folder = made(tmp_path / str(number), name, large(name))
        without(folder, entry, arm, number % SEEDS)
        text = decide(folder)
        assert verdicts(text) == whole, f"without {entry} {arm}"
        assert f"`{entry}-{arm}-{number % SEEDS}` ended without a loss and is in no pair" in text


def test_an_arm_without_any_loss_in_a_format_is_said_to_have_none(tmp_path):
    folder = made(tmp_path, "formats-muon", large("formats-muon"))
    without(folder, "E5M2", "muon", *range(SEEDS))
    with pytest.raises(UserError, match="muon has no loss in E5M2, with any seed, so that nothing can be said of it"):
        decide(folder)


def shared_gain(own: float) -> Loss:
    """An arm gains from seed to seed what it gains in the twin, which differs by much, and ``own`` more in a format."""
    random = np.random.default_rng(7)
    of_seed, noise = random.normal(scale=0.2, size=SEEDS), 1e-4 * random.normal(size=(2, SEEDS))

    def loss(entry: str, arm: str, seed: int) -> float:
        virtual, plain = entry.startswith("virtual."), arm in ("sr", "adamw", "adamw_sr")
        gain = 0.0 if plain else of_seed[seed] + own * (not virtual) + noise[int(virtual), seed]
        return 3 + 0.3 * seed + 0.5 * virtual - gain

    return loss


@pytest.mark.parametrize("name", ["low-bits", "corpus", "arms", "splits", "length-3200-masterless-twin", "ladder-m50"])
def test_a_format_and_its_twin_are_paired_by_seed_though_each_has_lost_one(name, tmp_path):
    folder = made(tmp_path, name, shared_gain(0.02))
    arm = PARTS[name][1][-1]
    for entry in PARTS[name][0]:
        without(folder, entry, arm, SEEDS - 1 if entry.startswith("virtual.") else 0)
    for mean, low, high in estimates(decide(folder), "own part"):
        assert mean == pytest.approx(0.02, abs=5e-4) and high - low < 1e-3


def test_rungs_of_a_format_and_its_twin_are_paired_by_seed_and_no_family_is_judged_in_part(tmp_path):
    loss, study = shared_gain(0.02), tmp_path / "ladder-micro-rungs"
    entries = [(fmt, virtual + fmt) for fmt in ("E4M3", "E5M2") for virtual in ("", "virtual.")]
    for number, (fmt, entry) in enumerate(entries):
        losses = {(entry, arm): [loss(entry, arm, seed) for seed in range(SEEDS)] for arm in WITHOUT_MASTERS}
        part_of(study / entry, losses)
        without(study / entry, entry, "rung", number)
        text = decide(study)
        assert ("own part" in text.lower()) == (number in (1, 3)), f"with {entry}, the twin of {fmt} or not"
        assert f"`{entry}-rung-{number}`" in text
    for mean, low, high in estimates(text, "own part"):
        assert mean == pytest.approx(0.02, abs=5e-4) and high - low < 1e-3


# Of one size in every comparison, and by itself just told apart from zero: p = 0.03.
STEP = np.array([-1.0, 2.0, 0.5, -2.5, 1.5, -0.5])
JUST = STEP + 2.98 * np.std(STEP, ddof=1) / np.sqrt(SEEDS)
SINGLE = float(stats.ttest_1samp(JUST, 0).pvalue)
#: How many comparisons each family of a part has, in the order of the table's columns of p; two or more differ.
FAMILIES = {
    "low-bits": (2, 2), "controls": (3,), "masterless": (3,), "corpus": (2,), "arms": (3,), "formats": (3, 3),
    "formats-muon": (3,), "splits": (2, 2), "gate-rounding": (4,), "length-3200-fading": (2,), "ladder-nano-arms": (3,),
    "ladder-m50": (2,),
}  # fmt: skip
REFERENCE = {"controls": "stiff_matched"}
ALIKE = ("sr", "adamw", "adamw_sr", "permuted_matched_sr", "nvfp4", "fp8")  # these have the losses of the reference


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_told_apart_by_itself_is_not_among_so_many(name, tmp_path):
    def loss(entry: str, arm: str, seed: int) -> float:
        same = entry.startswith("virtual.") or arm in (*ALIKE, REFERENCE.get(name))
        of_null = arm == "permuted_matched" and name == "formats"
        if name == "gate-rounding":
            same = entry in ALIKE
        return 3 + 0.3 * seed - (0.0 if same or of_null else 1e-3 * JUST[seed])

    assert abs(SINGLE - 0.03) < 1e-3
    heads, rows = table(decide(made(tmp_path, name, loss)))
    columns = [place for place, head in enumerate(heads) if head == "p"]
    assert len(columns) == len(FAMILIES[name])
    for place, size in zip(columns, FAMILIES[name], strict=True):
        shown = [row[place] for row in rows if row[place] not in ("–", "1")]
        assert len(shown) > 1 and set(shown) == {p_value(size * SINGLE)}, f"{name}, column {place}"


def test_splits_of_a_width_are_a_family(tmp_path):
    best = ("E1M1", "E2M1", "E2M2")
    text = decide(
        made(tmp_path, "gate-formats", lambda entry, _, seed: 3 + 0.3 * seed + 1e-3 * JUST[seed] * (entry not in best))
    )
    _, rows = table(text)
    of_width = {row[0].strip("*"): row[3] for row in rows}
    assert of_width["E2M0"] == p_value(SINGLE)
    assert {of_width[name] for name in ("E1M2", "E3M0", "E1M3", "E3M1")} == {p_value(2 * SINGLE)}


def test_a_format_that_diverged_counts_in_its_family(tmp_path):
    names = ["what_if4", "E2M1", "E3M0", "what_if8", "E4M3"]
    losses = {
        (name, "adamw"): [3 + 0.3 * seed - 1e-3 * JUST[seed] * name.startswith("E") for seed in range(SEEDS)]
        for name in names
    }
    grid = {"formats": [*names, "E1M2"], "optimizers": ["adamw"], "seeds": list(range(SEEDS))}
    _, rows = table(decide(part_of(tmp_path / "what-if", losses, grid=grid)))
    assert [row[-1] for row in rows] == [p_value(3 * SINGLE)] * 2 + [p_value(SINGLE)]


def test_damage_after_training_is_paired_by_cell_and_its_formats_are_a_family(tmp_path):
    formats = ("E1M1", "E2M1", "E3M0")
    for steps, grown in ((200, 0.0), (800, 0.0), (3200, 1e-3)):
        rows = [
            (f"virtual.E3M4-adamw-{seed}-1", fmt, 3.0, 0.3 * (seed % 4) + grown * JUST[seed])
            for fmt in formats
            for seed in (range(SEEDS) if grown else reversed(range(SEEDS)))
        ]
        (tmp_path / "gate-tokens" / str(steps)).mkdir(parents=True)
        after = pd.DataFrame(rows, columns=["cell", "format", "after", "cost"])
        after.to_csv(tmp_path / "gate-tokens" / str(steps) / "after.csv", index=False)
    text = decide(tmp_path / "gate-tokens")
    for mean, low, high in estimates(text, "growth"):
        assert mean == pytest.approx(1e-3 * JUST.mean(), abs=1e-4) and high - low < 0.01
    assert [row[-1] for row in table(text)[1]] == [p_value(3 * SINGLE)] * 3


def test_what_half_of_the_weights_is_worth_is_paired_by_seed_and_its_arms_are_a_family(tmp_path):
    arms = ("adamw", "stiff_matched", "permuted_matched", "mean_matched")
    folder = part_of(
        tmp_path / "length-3200-pruned", {("E3M4", arm): [3.0 + seed for seed in range(SEEDS)] for arm in arms}
    )
    rows = [
        (arm, seed, share, 3.0 + seed, 0.0 if not share else 0.3 * (seed % 4) + 1e-3 * JUST[seed] * (arm != arms[1]))
        for arm in arms
        for seed in (range(SEEDS) if arm == "adamw" else reversed(range(SEEDS)))
        for share in (0.0, 0.5)
    ]
    pruned = pd.DataFrame(rows, columns=["optimizer", "seed", "share", "after", "cost"])
    pruned.to_csv(folder / "pruned.csv", index=False)
    shown = [row[-1] for row in table(decide(folder))[1]]
    assert shown == [p_value(3 * SINGLE), "–"] + [p_value(3 * SINGLE)] * 2


def test_two_widths_are_paired_by_seed_though_each_has_lost_one(tmp_path):
    loss, study = shared_gain(0.02), tmp_path / "length-3200-widths"
    for name, width, entry in (("narrow", 32, "virtual.E3M4"), ("wide", 128, "E3M4")):
        losses = {
            ("E3M4", arm): [loss(entry, arm, seed) for seed in range(SEEDS)] for arm in ("adamw", "stiff_matched")
        }
        part_of(study / name, losses, model="pico", models={"pico": {"width": width}})
        without(study / name, "E3M4", "stiff_matched", width % 5)
    line = next(line for line in decide(study).splitlines() if line.startswith("**L42.**"))
    mean, low, high = (float(x) for x in re.findall(r"[+-]\d\.\d+", line.replace("−", "-"))[:3])
    assert mean == pytest.approx(0.02, abs=5e-4) and high - low < 1e-3


def test_a_rate_at_which_a_run_diverged_is_not_the_best_of_a_map(tmp_path):
    random = np.random.default_rng(1)
    level = {("adamw", 1.0): 0.0, ("adamw", 2.0): 0.1, ("knee2_slope1", 1.0): 0.3, ("knee2_slope1", 2.0): -0.2}
    rows = [
        ("virtual.E3M4", arm, seed, rate, 3 + above + 1e-3 * random.normal())
        for (arm, rate), above in level.items()
        for seed in range(3)
        if (arm, rate, seed) != ("knee2_slope1", 2.0, 1)
    ]
    results = pd.DataFrame(rows, columns=["format", "optimizer", "seed", "lr_scale", "val_loss"])
    arms = {"adamw": {"base": "adamw"}, "knee2_slope1": {"base": "adamw", "stiffness": "profile"}}
    heads, ((_, cell),) = table(decide(write_part(tmp_path / "profile", results, optimizers=arms)))
    assert heads[1] == "knee 2" and cell.startswith("−0.2996 ") and cell.endswith("(1.0)")


def test_intervals_are_those_of_scipy():
    differences = np.random.default_rng(2).normal(0.5, size=7)
    low, high = stats.t.interval(0.95, 6, differences.mean(), stats.sem(differences))
    assert interval(differences) == pytest.approx((differences.mean(), low, high))
    lost = np.append(differences, np.nan)
    assert interval(lost) == interval(pd.Series(lost)) == interval(differences)


def test_a_p_value_has_the_digits_that_show_its_side_of_the_level():
    shown = {0.0497: "0.0497", 0.05: "0.05", 0.04996: "0.04996", 0.0502: "0.0502", 0.051: "0.051", 0.03004: "0.03"}
    assert {p: p_value(p) for p in shown} == shown
