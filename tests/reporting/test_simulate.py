"""The simulation reads studies by the report's own rules, and those rules err as seldom as they say.

`make simulate` has more draws and every design; here one of each kind, within four standard errors.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from altgrad.reporting import simulate
from altgrad.reporting.compare import compare
from altgrad.reporting.simulate import EFFECT, NOISE, NOISES, Design, rates, worst_rate


def with_losses(design: Design, losses: np.ndarray):
    cells = design.study.cells.assign(val_loss=losses.ravel(), train_loss=losses.ravel(), steps=1.0, planned_steps=1.0)
    return dataclasses.replace(design.study, cells=cells, corpus={"corpus": "made"})


def test_what_is_simulated_is_what_the_report_finds() -> None:
    """A study with the drawn losses goes through `compare`: the same results."""
    design, random = Design.of(4, 3, 5), np.random.default_rng(0)
    gains = np.zeros((4, 3, 1))
    gains[2, 1] = 0.1
    for key in range(6):
        runs = design.drawn(random, NOISES["equal"], gains * (key % 2))
        found = compare(with_losses(design, runs.losses)).claims
        assert found == design.read(runs)
        assert any(result.significant for result in found.values()) or key % 2 == 0


@pytest.mark.parametrize("noise", ["equal", "unequal from run to run"])
def test_few_null_studies_have_a_significant_result_and_real_effects_are_found(noise: str) -> None:
    draws = 250
    found = rates(Design.of(5, 2, 5), NOISES[noise], draws)
    bound = 0.05 + 4 * math.sqrt(0.05 * 0.95 / draws)
    assert found["false_significant"] <= bound
    assert found["covered"] >= 0.95 - 4 * math.sqrt(0.05 * 0.95 / draws)
    # Of nine questions; Bonferroni's share of the level is the least that Holm's first step has.
    dof, effect = 4, EFFECT / math.sqrt(2 / 5)
    power = stats.nct.sf(stats.t.isf(0.05 / 18, dof), dof, effect)
    if noise == "equal":
        assert power > 0.7 and found["found"] > power - 4 * math.sqrt(power * (1 - power) / draws)
    else:
        assert found["found"] > 0.2


def test_noises_are_what_they_are_called() -> None:
    random, shape = np.random.default_rng(1), (6, 4, 2000)
    drawn = {name: change(random, NOISE * random.standard_normal(shape)) for name, change in NOISES.items()}
    spread = {name: np.nanstd(noise, axis=2) / NOISE for name, noise in drawn.items()}
    last = slice(None), -1
    times = {"equal": (..., 1), "heavy tails (t, 3 degrees)": (..., 1), "one arm 2 times as noisy": (last, 2),
             "one arm 5 times as noisy": (last, 5), "one run 3 times as noisy": ((-1, -1), 3),
             "one run 10 times as noisy": ((-1, -1), 10), "baseline 3 times as noisy": (0, 3),
             "baseline optimizer 3 times as noisy": ((slice(None), 0), 3)}  # fmt: skip
    for name, (place, factor) in times.items():
        assert spread[name][place].mean() == pytest.approx(factor, rel=0.15), name
    assert drawn["one seed of one run 7.5 nats higher"].max() == pytest.approx(7.5, abs=0.05)
    assert spread["unequal from run to run"].max() > 1.5 * spread["unequal from run to run"].min()
    by_format = spread["unequal from format to format"]
    assert (by_format.std(axis=1) / by_format.mean(axis=1)).max() < 0.1 < by_format.std() / by_format.mean()
    assert np.isnan(drawn["a tenth of the cells lost"]).mean() == pytest.approx(0.1, abs=0.01)


def test_a_gain_is_as_large_as_it_is_said_to_be() -> None:
    design, gains = Design.of(5, 2, 3), np.zeros((5, 2, 1))
    gains[-2, 1] = EFFECT * NOISE
    runs = design.drawn(np.random.default_rng(0), lambda random, noise: 0 * noise, gains)
    claim = design.read(runs)["gain", design.study.formats[-2], design.study.optimizers[1]]
    assert claim.difference.mean == pytest.approx(-0.04)


def test_the_report_names_the_simulated_design_most_like_it(tmp_path) -> None:
    table = pd.DataFrame([
        {"formats": f, "arms": a, "seeds": s, "noise": noise, "draws": 9,
         "false_significant": (f * a + s - 4) / 1000 + worse, "found": 1}
        for f, a in ((5, 2), (8, 8)) for s in (2, 5, 10) for noise, worse in (("equal", 0), ("other", 0.01))
    ])  # fmt: skip
    table.to_csv(tmp_path / "table.csv", index=False)
    assert worst_rate(tmp_path / "table.csv", Design.of(8, 6, 6).study) == 0.065 + 0.01
    assert worst_rate(tmp_path / "absent.csv", Design.of(8, 6, 6).study) is None


def test_the_command_writes_its_table(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(simulate, "DESIGNS", [(3, 2, 2)])
    simulate.main(["--draws", "2", "--jobs", "1", "--out", str(tmp_path / "a/table.csv")])
    table = pd.read_csv(tmp_path / "a/table.csv")
    assert list(table["noise"]) == list(NOISES) and set(table["draws"]) == {2}
