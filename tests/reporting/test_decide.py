"""The written-down tests against planted effects, and scipy's own t-test."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from altgrad.config import UserError
from altgrad.reporting import ladders
from altgrad.reporting.decide import decide, main
from altgrad.reporting.gates import LAW_ORDER
from altgrad.reporting.hypotheses import diagonal
from altgrad.reporting.paired import two_sided
from tests.reporting.made_parts import grid_of, write_part

FORMATS = ("E1M6", "E3M4", "E5M2")
PLAIN = {"base": "adamw", "lr": 1e-3}


def study(
    folder: Path,
    rows: list[tuple[str, str, int, float, float]],
    arms: dict[str, dict],
    grid: Mapping[str, object] = MappingProxyType({}),
    **settings: object,
) -> Path:
    results = pd.DataFrame(rows, columns=["format", "optimizer", "seed", "lr_scale", "val_loss"])
    return write_part(folder, results, optimizers=arms, grid=grid_of(results) | dict(grid), **settings)


def matrix(folder: Path, own: float, noise: float = 1e-3) -> Path:
    """Losses of rows and columns of their own, of which the diagonal is ``own`` higher."""
    rng = np.random.default_rng(5)
    arms = {"adamw": PLAIN} | {f"as_{fmt}": {**PLAIN, "stiffness": "foreign", "foreign": fmt} for fmt in FORMATS}
    level = {name: 0.01 * i for i, name in enumerate((*arms, *FORMATS))}
    rows = [
        (fmt, arm, seed, 1.0, 3 + level[fmt] - level[arm] + own * (arm == f"as_{fmt}") + noise * rng.normal())
        for fmt, arm, seed in itertools.product(FORMATS, arms, range(8))
    ]
    return study(folder / "matrix", rows, arms)


def test_what_rows_and_columns_add_is_not_on_the_diagonal():
    rng = np.random.default_rng(0)
    table = rng.normal(size=(5, 1)) + rng.normal(size=(1, 5))
    assert diagonal(table) == pytest.approx(0, abs=1e-12)
    assert diagonal(table + 0.25 * np.eye(5)) == pytest.approx(0.25)


def test_p_values_are_those_of_scipy():
    differences = np.random.default_rng(1).normal(0.5, size=8)
    assert two_sided(differences) == pytest.approx(stats.ttest_1samp(differences, 0).pvalue)
    assert two_sided(np.zeros(8)) == 1


@pytest.mark.parametrize(("own", "words"), [(-0.01, "below zero"), (0.01, "above zero"), (0.0, "not told apart")])
def test_a_planted_diagonal_is_found_and_none_is_not(own, words, tmp_path):
    text = decide(matrix(tmp_path, own))
    assert f", {words}" in text
    estimate = float(text.split("taken out: ")[1].split(" [")[0].replace("−", "-"))
    assert estimate == pytest.approx(own, abs=1e-3)


def test_a_gain_is_over_the_plain_arm_in_the_same_format(tmp_path):
    text = decide(matrix(tmp_path, -0.01, noise=0))
    row = next(line for line in text.splitlines() if line.startswith("| **E3M4**"))
    # two places below the plain arm's level, and the diagonal's hundredth on top
    assert [cell.split(" [")[0].strip() for cell in row.split("|")[2:6]] == ["+0.0200", "+0.0300", "+0.0200", "+0.0233"]


@pytest.fixture
def low_bits(tmp_path) -> Path:
    """In E2M1 the geometry gains 0.05 of its own; in E1M2 both arms do, which is not geometry; in E3M1 nothing is."""
    rng = np.random.default_rng(11)
    own = {("E2M1", "stiff"): 0.05, ("E1M2", "stiff"): 0.05, ("E1M2", "permuted"): 0.05}
    arms = {"sr": PLAIN, "stiff": {**PLAIN, "stiffness": "ulp"}, "permuted": {**PLAIN, "stiffness": "permuted"}}
    rows = [
        (prefix + fmt, arm, seed, 1.0, 3 - 0.02 * (arm != "sr") - (not prefix) * own.get((fmt, arm), 0.0)
         + 1e-3 * rng.normal())
        for fmt, prefix, arm, seed in itertools.product(("E2M1", "E1M2", "E3M1"), ("", "virtual."), arms, range(6))
    ]  # fmt: skip
    return study(tmp_path / "low-bits", rows, arms)


def test_the_formats_own_part_is_told_from_its_profile_and_from_chance(low_bits):
    text = decide(low_bits)
    assert "above zero in E2M1, E1M2; below in none" in text
    assert "know nothing of the weight, in E2M1." in text


@pytest.mark.parametrize("part", ["profile", "profile-800", "profile-3200"])
def test_the_map_is_of_each_profile_at_its_best_rate(part, tmp_path):
    arms = {"adamw": PLAIN} | {
        f"knee{k}_slope{s}": {**PLAIN, "stiffness": "profile"} for k in (2, 4) for s in ("0p5", "1")
    }
    best = {"adamw": (1.0, 3.0), "knee4_slope0p5": (1.4, 2.9)}
    rows = [
        ("virtual.E4M3", arm, seed, rate, best.get(arm, (0.7, 2.95))[1] + 0.1 * (rate != best.get(arm, (0.7, 0))[0]))
        for arm, seed, rate in itertools.product(arms, range(3), (0.7, 1.0, 1.4))
    ]
    text = decide(study(tmp_path / part, rows, arms))
    assert (tmp_path / part / "figures/profile.png").stat().st_size > 0
    assert "knee 4 and slope 0.5" in text and "+0.1000 [+0.1000, +0.1000] (1.4)" in text and "(0.7)" in text


@pytest.mark.parametrize(("part", "reference"), [("controls", "stiff_matched"), ("masterless", "adamw_sr")])
def test_each_is_held_against_the_reference_in_the_first_format_and_all_count(part, reference, tmp_path):
    """Differences with a known p: of four arms, one is far below, one far above, one below by itself alone."""
    steps = np.array([-1.0, 1.0, -1.0, 1.0, -1.0, 1.0])  # mean 0, standard deviation sqrt(6 / 5)
    at = {"adamw": 0.5, reference: 0.0, "low": -0.1, "high": 0.1, "some": -0.0013, "none": 0.0, "permuted_matched": 0.3}
    rows = [
        (fmt, arm, seed, 1.0, 3 + sign * level + 1e-3 * steps[seed] * (arm not in ("adamw", reference)))
        for (fmt, sign), (arm, level), seed in itertools.product((("E3M4", 1), ("E4M3", -1)), at.items(), range(6))
    ]
    text = decide(study(tmp_path / part, rows, dict.fromkeys(at, PLAIN)))
    alone = stats.ttest_1samp(-0.0013 + 1e-3 * steps, 0).pvalue
    assert alone < 0.05 < 2 * alone  # Holm's factor where two are left
    assert f"In E3M4, lower than `{reference}`: `low`; higher: `high`; not told apart: `some`, `none`." in text
    row = next(line for line in text.splitlines() if line.startswith("| `permuted_matched`"))
    assert row.split("|")[2].startswith(" +0.3000") and row.split("|")[3].startswith(" −0.3000") and "–" in row


def test_what_is_gained_in_the_format_is_told_from_what_is_gained_anyway(tmp_path):
    rng = np.random.default_rng(2)
    gained = {"adamw": 0.0, "stiff_matched": 0.05, "muon": -0.05, "best_profile": 0.0}
    rows = [
        (fmt, arm, seed, 1.0, 3 - gain * (1.0 if fmt == "E3M4" else 0.4) + 1e-3 * rng.normal())
        for fmt, (arm, gain), seed in itertools.product(("E3M4", "virtual.E3M4"), gained.items(), range(5))
    ]
    text = decide(study(tmp_path / "length-800", rows, dict.fromkeys(gained, PLAIN), train={"steps": 800}))
    assert (
        "**L1.** In E3M4, lower than `adamw`: `stiff_matched`; higher: `muon`; not told apart: `best_profile`." in text
    )
    row = next(line for line in text.splitlines() if line.startswith("| `stiff_matched`"))
    measured = [float(cell.split(" [")[0]) for i, cell in enumerate(row.split("|")) if i in (2, 4, 5)]
    assert measured == pytest.approx([0.05, 0.02, 0.03], abs=2e-3)
    arms = dict.fromkeys(gained, PLAIN)
    alone = decide(study(tmp_path / "length-3200", rows[: len(rows) // 2], arms, train={"steps": 3200}))
    assert alone.startswith(text.splitlines()[0].replace("800", "3200"))
    assert [line for line in alone.splitlines() if "L1" in line] == [line for line in text.splitlines() if "L1" in line]
    assert "own part" in text and "own part" not in alone, "it has no virtual twin"


def stated(sentence: str) -> float:
    """Return the mean of the interval that follows a sentence's colon."""
    return float(sentence.split(":")[1].split("[")[0].replace("−", "-"))


@pytest.mark.parametrize(
    ("part", "rival", "hypotheses"),
    [
        ("fading", "stiff_fading", ("L11", "L12")),
        ("permuted", "permuted_matched", ("L23", "L24")),
        ("rate", "mean_matched", ("L29", "L30")),
    ],
)
@pytest.mark.parametrize(
    ("level", "words"), [(0.0, "it ends lower"), (-0.07, "not told apart"), (-0.1, "it ends higher")]
)
def test_a_rival_of_the_geometry_is_held_against_adamw_and_against_it(part, rival, hypotheses, level, words, tmp_path):
    steps = [-1.0, 1.0, 0.0, 1.0, -1.0]  # of mean zero
    gains = {"adamw": 0.0, "stiff_matched": -0.07, rival: level}
    rows = [
        ("E3M4", arm, seed, 1.0, 3 + 0.1 * seed - gain + 1e-3 * steps[seed] * number)
        for (number, (arm, gain)), seed in itertools.product(enumerate(gains.items()), range(5))
    ]
    text = decide(study(tmp_path / f"length-3200-{part}", rows, dict.fromkeys(gains, PLAIN)))
    over_plain, over_stiff = hypotheses
    apart = f"`stiff_matched`; not told apart: `{rival}`" if not level else f"`stiff_matched`, `{rival}`;"
    assert f"**{over_plain}.** In E3M4, lower than `adamw`: none; higher: {apart}" in text
    second = next(line for line in text.splitlines() if line.startswith(f"**{over_stiff}.** What `{rival}` gains over"))
    assert second.endswith(f", {words}.")
    assert ("p &lt; 0.0001" in second) == (words != "not told apart") and "p = &lt;" not in second
    assert stated(second) == pytest.approx(level + 0.07, abs=1e-4)


@pytest.mark.parametrize(("rung", "words"), [(0.05, "it ends lower"), (-0.05, "it ends higher")])
def test_weights_without_masters_are_held_against_bf16_and_muon_is_asked_for_its_own_part(rung, words, tmp_path):
    """AdamW loses 0.02 to the format and Muon 0.03, so that 0.01 less of its gain is left in it; rungs lose nothing."""
    rng = np.random.default_rng(8)
    gains = {
        "E3M4": {"adamw": -0.02, "muon": 0.27, "adamw_sr": -0.02, "rung": rung},
        "virtual.E3M4": {"adamw": 0.0, "muon": 0.3, "adamw_sr": 0.1, "rung": 0.2},
    }
    rows = [
        (fmt, arm, seed, 1.0, 3 + 0.1 * seed - gain + 1e-4 * rng.normal())
        for fmt, of_format in gains.items()
        for arm, gain in of_format.items()
        for seed in range(5)
    ]
    text = decide(study(tmp_path / "ladder-nano-bf16", rows, dict.fromkeys(gains["E3M4"], PLAIN)))
    own = next(line for line in text.splitlines() if line.startswith("**L27.** The format's own part of what `muon`"))
    assert own.endswith(", below zero.")
    assert stated(own) == pytest.approx(-0.01, abs=3e-4)
    lower = next(line for line in text.splitlines() if line.startswith("**L28.** What `rung` in E3M4 gains over"))
    assert lower.endswith(f", {words}.")
    assert stated(lower) == pytest.approx(rung, abs=3e-4)
    row = next(line for line in text.splitlines() if line.startswith("| `adamw` |")).split("|")
    assert stated(":" + row[2]) == pytest.approx(-0.02, abs=3e-4)
    assert row[3] == " – ", "bf16 is what the others are held against"


def test_gains_are_drawn_by_length_up_to_that_of_the_part(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(ladders, "draw_courses", lambda courses, *_: drawn.append(courses))
    for name, steps, gain in (("controls", 200, 0.1), ("length-800", 800, 0.2), ("length-3200", 3200, 0.3)):
        rows = [("E3M4", arm, seed, 1.0, 3 + 0.01 * seed - gain * (arm == "muon"))
                for arm, seed in itertools.product(("adamw", "muon"), range(5))]  # fmt: skip
        study(tmp_path / name, rows, {"adamw": PLAIN, "muon": PLAIN}, train={"steps": steps})
    for name in ("length-800", "length-3200"):
        assert "figures/lengths.png" in decide(tmp_path / name)
    assert [list(courses["muon"]) for courses in drawn] == [[200, 800], [200, 800, 3200]]
    assert [gain for gain, *_ in drawn[1]["muon"].values()] == pytest.approx([0.1, 0.2, 0.3])


@pytest.mark.parametrize(
    ("part", "hypothesis"),
    [
        ("ladder-nano-3300-E4M3", "L10"),
        ("length-3200-masterless", "L14"),
        ("length-3200-shared", "L18"),
        ("length-3200-batch-4", "L25"),
        ("length-800-batch-64", "L26"),
        ("length-3200-slow", "L31"),
    ],
)
@pytest.mark.parametrize(
    ("gain", "found"), [(0.05, "lower than `{0}`: `{1}`"), (-0.05, "higher: `{1}`"), (0.0, "not told apart: `{1}`")]
)
def test_a_long_run_is_read_by_the_arm_of_its_regime(part, hypothesis, gain, found, tmp_path):
    plain, arm = ("adamw_sr", "rung") if "masterless" in part else ("adamw", "stiff_matched")
    steps = [-1.0, 1.0, 0.0]  # of mean zero
    rows = [(part[-4:], name, seed, 1.0, 3 + 0.1 * seed - gain * (name == arm) + 1e-3 * steps[seed] * (name == arm))
            for name, seed in itertools.product((plain, arm), range(3))]  # fmt: skip
    text = decide(study(tmp_path / part, rows, {plain: PLAIN, arm: {**PLAIN, "stiffness": "ulp"}}))
    assert f"**{hypothesis}.** " in text and found.format(plain, arm) in text


def test_gains_are_drawn_by_size_for_each_number_of_tokens(tmp_path, monkeypatch):
    """Beside the top of the ladder, whose own decision has the format's own part too."""
    drawn = []
    monkeypatch.setattr(ladders, "draw_courses", lambda courses, *_: drawn.append(courses))
    sizes = {"pico": {"context": 64}, "nano": {"context": 256}, "m124": {"context": 256}}
    parts = [("controls", 800, "pico", 16, 0.1), ("length-3200", 3200, "pico", 16, -0.2),
             ("ladder-nano", 400, "nano", 8, 0.2),
             ("ladder-m124", 400, "m124", 8, 0.3), ("ladder-other", 1, "pico", 1, 9.0)]  # fmt: skip
    for name, steps, model, batch, gain in parts:
        rows = [
            (entry, arm, seed, 1.0, 3 - gain * (arm == "stiff_matched") * (1 + 0.1 * seed * (entry == "E3M4")))
            for entry in ("E3M4", "virtual.E3M4")
            for arm in ("adamw", "stiff_matched")
            for seed in (-1, 0, 1)
        ]
        train = {"steps": steps, "batch": batch, "grad_accumulation": 1}
        arms = {"adamw": PLAIN, "stiff_matched": {**PLAIN, "stiffness": "ulp"}}
        study(tmp_path / name, rows, arms, train=train, model=model, models=sizes)
    text = decide(tmp_path / "ladder-m124")
    assert "figures/ladder.png" in text and "**L47.** " in text and "**L48.** " in text
    found = {tokens: {size: gain for size, (gain, *_) in points.items()} for tokens, points in drawn[0].items()}
    expected = {"0.8 M tokens": {0.17: 0.1, 1.3: 0.2, 124: 0.3}, "3.3 M tokens": {0.17: -0.2}}
    assert found == {tokens: pytest.approx(points) for tokens, points in expected.items()}
    assert len(drawn) == 1


def test_damage_that_grows_with_training_is_told_from_damage_that_does_not(tmp_path):
    rng = np.random.default_rng(6)
    for steps, growth in ((200, 0.0), (800, 0.1), (3200, 0.2)):
        cells = [(f"virtual.E3M4-adamw-{seed}-1", 1e-3 * rng.normal()) for seed in range(20, 25)]
        rows = [
            (cell, fmt, 3.0, level + growth * grows + noise)
            for fmt, level, grows in (("none", 0, 0), ("E1M1", 0.5, 1), ("E3M0", 0.4, 0), ("E2M1", 0.6, -1))
            for cell, noise in cells
        ]
        (tmp_path / "gate-tokens" / str(steps)).mkdir(parents=True)
        table = pd.DataFrame(rows, columns=["cell", "format", "after", "cost"])
        table.to_csv(tmp_path / "gate-tokens" / str(steps) / "after.csv", index=False)
    text = decide(tmp_path / "gate-tokens")
    assert "From 200 to 3200 steps" in text
    assert "grows in E1M1; shrinks in E2M1; not told apart in E3M0." in text
    row = next(line for line in text.splitlines() if line.startswith("| **E1M1**")).split("|")
    assert [float(cell.split(" [")[0]) for cell in row[2:6]] == pytest.approx([0.5, 0.6, 0.7, 0.2], abs=3e-3)
    (tmp_path / "empty" / "gate-tokens").mkdir(parents=True)
    with pytest.raises(UserError, match="fewer than two lengths"):
        decide(tmp_path / "empty" / "gate-tokens")


@pytest.mark.parametrize(
    ("own", "verdict"), [(0.0, "not told apart from zero"), (0.02, "above zero"), (-0.02, "below zero")]
)
def test_the_formats_own_part_is_tested_with_other_texts_and_in_a_larger_model(own, verdict, tmp_path):
    rng = np.random.default_rng(4)
    gained = {"adamw": 0.0, "stiff_matched": 0.05, "muon": -0.05}
    rows = [
        (fmt, arm, seed, 1.0, 3 - gain - own * (fmt == "E3M4" and arm == "stiff_matched") + 1e-3 * rng.normal())
        for fmt, (arm, gain), seed in itertools.product(("E3M4", "virtual.E3M4"), gained.items(), range(8))
    ]
    text = decide(study(tmp_path / "corpus", rows, dict.fromkeys(gained, PLAIN)))
    assert "**C1.** In E3M4, lower than `adamw`: `stiff_matched`; higher: `muon`; not told apart: none." in text
    assert f", {verdict}." in text[text.index("**C2.**") :]
    larger = decide(study(tmp_path / "ladder-nano-twin", rows, dict.fromkeys(gained, PLAIN)))
    assert f", {verdict}." in larger[larger.index("**L3.**") :] and "L2" not in larger
    names = {"adamw": "adamw_sr", "stiff_matched": "rung"}
    without_masters = [(entry, names[arm], *rest) for entry, arm, *rest in rows if arm in names]
    of_rungs = {"ladder-nano-arms-twin": "L13", "length-3200-masterless-twin": "L15", "ladder-micro-arms-twin": "L36"}
    for part, hypothesis in of_rungs.items():
        rungs = decide(study(tmp_path / part, without_masters, dict.fromkeys(names.values(), PLAIN)))
        assert f"**{hypothesis}.** The format's own part of what `rung` gains: " in rungs and f", {verdict}." in rungs


def test_each_of_the_other_arms_is_held_against_that_of_its_regime_in_a_larger_model(tmp_path):
    """Rungs end above AdamW with masters, and below it without: that is a gain."""
    steps = [-1.0, 1.0, 0.0, 1.0, -1.0]  # of mean zero: an arm that gains nothing gains nothing by chance
    gains = {"adamw": 0.0, "stiff_matched": 9.0, "best_profile": 0.0, "muon": 0.1, "adamw_sr": -0.05, "rung": -0.02}
    rows = [
        ("E3M4", arm, seed, 1.0, 3 + 0.1 * seed - gain + 1e-3 * steps[seed] * number)
        for (number, (arm, gain)), seed in itertools.product(enumerate(gains.items()), range(5))
    ]
    text = decide(study(tmp_path / "ladder-nano-arms", rows, dict.fromkeys(gains, PLAIN)))
    found = "`muon`, `rung`; higher: `adamw_sr`; not told apart: `best_profile`."
    assert f"**L9.** In E3M4, lower than the arm that each is held against: {found}" in text
    row = next(line for line in text.splitlines() if line.startswith("| `rung` | `adamw_sr`"))
    assert float(row.split("|")[3].split()[0]) == pytest.approx(0.03, abs=2e-3)
    others = {"adamw", "stiff_matched", "permuted_matched", "muon", "adamw_sr", "rung"}  # the second as the profile was
    renamed = [(entry, arm.replace("best_profile", "permuted_matched"), *rest) for entry, arm, *rest in rows]
    text = decide(study(tmp_path / "ladder-micro-arms", renamed, dict.fromkeys(others, PLAIN)))
    found = "`stiff_matched`, `muon`, `rung`; higher: `adamw_sr`; not told apart: none."
    assert f"**L21.** In E3M4, lower than the arm that each is held against: {found}" in text
    assert "by Holm over the 4 arms" in text and "| `stiff_matched` | `permuted_matched` | +9.0" in text


def test_what_each_format_gains_in_a_larger_model_is_told_from_what_the_shuffled_geometry_gains(tmp_path):
    rng = np.random.default_rng(7)
    gains = {"E4M3": (0.02, 0.0), "E3M4": (0.03, 0.03), "E5M2": (-0.02, 0.02), "E1M6": (0.0, 0.0)}
    rows = [
        (fmt, arm, seed, 1.0, 3 + 0.1 * seed - gain + 1e-3 * rng.normal())
        for fmt, (stiff, shuffled) in gains.items()
        for arm, gain in (("adamw", 0.0), ("stiff_matched", stiff), ("permuted_matched", shuffled))
        for seed in range(5)
    ]
    arms = {"adamw": PLAIN} | {arm: {**PLAIN, "stiffness": "ulp"} for arm in ("stiff_matched", "permuted_matched")}
    text = decide(study(tmp_path / "ladder-nano-formats", rows, arms))
    null = decide(study(tmp_path / "ladder-micro-null", rows, arms))
    assert null.split("\n\n")[2:] == [
        said.replace("**L7.", "**L19.").replace("**L8.", "**L35.") for said in text.split("\n\n")[2:]
    ]
    over_plain = "`stiff_matched` ends lower than `adamw` in E4M3, E3M4; higher in E5M2; of the 4 formats."
    assert f"**L7.** {over_plain}" in text
    assert "**L8.** `stiff_matched` ends lower than `permuted_matched` in E4M3; higher in E5M2;" in text
    row = next(line for line in text.splitlines() if line.startswith("| **E5M2**")).split("|")
    assert [float(row[i].split(" [")[0].replace("−", "-")) for i in (2, 4)] == pytest.approx([-0.02, -0.04], abs=2e-3)
    of_two = {arm: arms[arm] for arm in ("adamw", "stiff_matched")}
    text = decide(study(tmp_path / "ladder-micro-formats", [row for row in rows if row[1] in of_two], of_two))
    assert f"**L19.** {over_plain}" in text and "permuted" not in text and "L8" not in text
    muon = [(entry, arm.replace("stiff_matched", "muon"), *rest) for entry, arm, *rest in rows if arm in of_two]
    text = decide(study(tmp_path / "ladder-nano-muon", muon, {"adamw": PLAIN, "muon": {"base": "muon"}}))
    assert f"**L32.** {over_plain.replace('stiff_matched', 'muon')}" in text and "stiff" not in text


@pytest.mark.parametrize(
    ("works_up_to", "verdict"), [(0, "holds"), (4, "fails"), (0.3, "is left open")], ids=["none", "most", "four"]
)
def test_runs_fail_that_diverge_or_stay_near_the_untrained_loss(works_up_to, verdict, tmp_path):
    """E4M3 works at three of four rates, and diverges at the fourth; E7M0 stays at the untrained loss beyond one."""
    rates, seeds, arms = [0.25, 1, 4, 16], range(10), {"adamw": PLAIN, "adamw_sr": PLAIN}
    rows = [
        (fmt, arm, seed, rate, 3.0 if rate <= limit and (limit != 0.3 or (arm == "adamw" and seed < 4)) else 6.9)
        for (fmt, limit), arm, rate, seed in itertools.product((("E4M3", 4), ("E7M0", works_up_to)), arms, rates, seeds)
        if not (fmt == "E4M3" and rate == 16)
    ]
    grid = {"formats": ["E4M3", "E7M0"], "optimizers": list(arms), "seeds": list(seeds), "lr_scales": rates}
    folder = study(tmp_path / "no-significand", rows, arms, grid | {"baseline": "E4M3"}, tokenizer={"vocab_size": 1024})
    text = decide(folder)
    failed = {0: 80, 4: 20, 0.3: 76}[works_up_to]
    low, high = stats.binomtest(failed, 80).proportion_ci(method="wilson")
    assert f"E4M3 20 of 80 [17 %, 35 %], E7M0 {failed} of 80 [{100 * low:.0f} %, {100 * high:.0f} %]" in text
    assert f"more than 90 % of E7M0's do {verdict}." in text
    first = {0: "0.25 times", 4: "16 times", 0.3: "0.25 times"}[works_up_to]
    assert f"`adamw` E4M3 16 times, E7M0 {first}" in text


def test_the_order_of_formats_is_held_against_the_laws(tmp_path):
    """At 4 bits a split beats the law's best, at 3 none does; of the 8-bit splits the first two change places."""
    level = {name: 0.01 * i for i, name in enumerate(LAW_ORDER)} | {"E4M3": 0.01, "E3M4": 0.0}
    level |= {"E1M1": 0.5, "E2M0": 0.6, "E2M1": 0.4, "E1M2": 0.3, "E3M0": 0.4, "E2M2": 0.2, "bf16": 0.0}
    rng = np.random.default_rng(3)
    rows = [
        (fmt, "adamw", seed, 1.0, 3 + above + 1e-3 * rng.normal())
        for (fmt, above), seed in itertools.product(level.items(), range(6))
    ]
    text = decide(study(tmp_path / "gate-formats", rows, {"adamw": PLAIN}))
    assert "Above the law's best, E1M1: E2M0; below it: none; not told apart: none" in text
    assert "Above the law's best, E2M1: none; below it: E1M2; not told apart: E3M0" in text
    few = decide(
        study(tmp_path / "gate-formats-blocks", [row for row in rows if row[0] not in LAW_ORDER], {"adamw": PLAIN})
    )
    assert "**G3, 5 bits.**" in few and "8 bits.**" not in few
    orders = [[level[name] for name in LAW_ORDER], range(8)]
    assert f"correlation +{stats.spearmanr(*orders).statistic:.2f}" in text
    same = [("E0M7", *row[1:]) for row in rows if row[0] == "E1M6"]  # one set of values, and so the same losses
    text = decide(
        study(tmp_path / "tied" / "gate-formats", [row for row in rows if row[0] != "E0M7"] + same, {"adamw": PLAIN})
    )
    orders[0][LAW_ORDER.index("E0M7")] = level["E1M6"]
    assert f"correlation +{stats.spearmanr(*orders).statistic:.2f}" in text


def test_a_recipe_is_held_against_single_formats_of_its_own_width(tmp_path):
    """Of 4 bits the recipe ends below one format and above another; of 8 bits it is one of two equals."""
    level = {"E2M5": 0.0, "E4M3": 0.02, "what_if8": 0.0, "E2M1": 0.3, "E3M0": 0.1, "what_if4": 0.2}
    rng = np.random.default_rng(4)
    rows = [
        (fmt, "adamw", seed, 1.0, 3 + 0.1 * seed + above + 1e-3 * rng.normal())
        for (fmt, above), seed in itertools.product(level.items(), range(6))
    ]
    text = decide(study(tmp_path / "what-if", rows, {"adamw": PLAIN}, {"formats": [*level, "E1M2"]}))
    first, second = (line for line in text.splitlines() if line.startswith(("**W1", "**W2")))
    assert first.endswith("ends below E2M1; above E3M0; not told apart from none. Diverged with every seed: E1M2.")
    assert second.endswith("ends below E4M3; above none; not told apart from E2M5.")
    row = next(line for line in text.splitlines() if line.startswith("| `what_if4` | **E2M1**"))
    assert float(row.split("|")[3].split(" [")[0].replace("−", "-")) == pytest.approx(-0.1, abs=3e-3)


def test_rounding_by_chance_is_held_against_nearest_of_the_same_recipe(tmp_path):
    """Whatever lies between the recipes themselves."""
    level = {"a": 0.0, "a_grads": -0.05, "a_forward": 0.1, "b": 1.0, "b_grads": 1.0, "b_forward": 0.9}
    rng = np.random.default_rng(5)
    rows = [
        (fmt, "adamw", seed, 1.0, 3 + 0.1 * seed + above + 1e-3 * rng.normal())
        for (fmt, above), seed in itertools.product(level.items(), range(8))
    ]
    text = decide(study(tmp_path / "gate-rounding", rows, {"adamw": PLAIN}))
    assert "gradients rounded by chance, lower than to nearest in a; higher in none; not told apart in b." in text
    assert "inputs rounded by chance, lower than to nearest in b; higher in a; not told apart in none." in text
    assert "over 8 seeds, each by itself; p by Holm over the 4 differences." in text


def test_it_writes_beside_the_results_and_says_what_is_missing(low_bits, tmp_path):
    main([str(low_bits)])
    assert (low_bits / "DECISION.md").read_text() == decide(low_bits)
    with pytest.raises(UserError, match="no test was written down"):
        decide(tmp_path / "other")
    (low_bits / "results.csv").unlink()
    with pytest.raises(UserError, match="no results.csv; make study PART=low-bits makes it"):
        decide(low_bits)


@pytest.mark.parametrize(
    ("own", "words"), [(0.0, "not told apart from zero"), (0.01, "above zero"), (-0.01, "below zero")]
)
def test_each_of_the_first_rules_is_held_against_the_plain_arm_of_its_regime(own, words, tmp_path):
    rng = np.random.default_rng(3)
    gains = {"adamw": 0.0, "stiff_grad": 0.0, "riemann": 0.02, "adamw_sr": -0.5, "rung": -0.46}
    rows = [
        (entry, arm, seed, 1.0, 3.5 - gain - own * (entry == "E3M4" and arm == "rung") + 1e-3 * rng.normal())
        for entry, (arm, gain), seed in itertools.product(("E3M4", "virtual.E3M4"), gains.items(), range(6))
    ]
    text = decide(study(tmp_path / "arms", rows, dict.fromkeys(gains, PLAIN)))
    assert "lower than the plain arm: `riemann`, `rung`; higher: none; not told apart: `stiff_grad`." in text
    assert f", {words}." in text
    row = next(line for line in text.splitlines() if line.startswith("| `rung` | `adamw_sr`"))
    assert float(row.split("|")[3].split()[0]) == pytest.approx(0.04 + own, abs=2e-3)
    names = {"adamw": "adamw", "riemann": "madam", "adamw_sr": "adamw_sr", "rung": "madam_sr"}
    madam = [(entry, names[arm], *rest) for entry, arm, *rest in rows if arm in names]
    text = decide(study(tmp_path / "madam", madam, dict.fromkeys(names.values(), PLAIN)))
    assert "**A6.** In E3M4, lower than the plain arm: `madam`, `madam_sr`; higher: none;" in text
    assert "**A7.** The format's own part of what `madam_sr` gains: " in text and f", {words}." in text
