"""Which runs are asked for their first anomalous tensor, which healthy ones they are held against, and how it is told.

Oracle: made-up projects with an excursion put into one run's measurements.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from altgrad.config import UserError
from altgrad.diagnostics.__main__ import main
from altgrad.reporting.anomalies import case, cases, ended_worse, sentences
from altgrad.reporting.diagnosis_tables import EXPLAIN, failures_table
from altgrad.reporting.load import IDENTITY, MISSING
from tests.reporting.synthetic_project import SMALL, read, write_project

BAD = "E4M3-adamw-0-1"
LAYER = "blocks.0.mlp.up"


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """Five seeds in two formats, one cell diverged and one missing. Shared: tests must not change it."""
    root = tmp_path_factory.mktemp("anomalies")
    settings = {"seeds": range(5), "missing": ("bf16-adamw-4-1",), "diverged": {BAD: 55}}
    write_project(root, ["bf16", "E4M3"], **SMALL | settings)
    return root


@pytest.fixture(scope="module")
def study(project):
    return read(project)


def injected(study, key=BAD, metric="sqnr_db", value=3.0):
    """Return the study with a metric of one run's weight in one layer set at every step."""
    cell, rows = study.cells.loc[key], study.monitors
    here = (rows[IDENTITY] == cell[IDENTITY].tolist()).all(axis=1) & (rows["layer"] == LAYER)
    here &= (rows["role"] == "weight") & (rows["metric"] == metric)
    assert here.any()
    return replace(study, monitors=rows.assign(value=rows["value"].mask(here, value)))


def with_loss(study, key, factor):
    cells = study.cells.copy()
    cells.loc[key, "val_loss"] *= factor
    return replace(study, cells=cells)


def test_a_diverged_run_is_told_with_its_tensor_its_step_and_the_loss(study) -> None:
    (found,) = cases(injected(study))
    told = " ".join(sentences(found))
    assert f"{BAD} diverged at step 55 (spike)." in told
    assert f"sqnr_db of the weights of {LAYER}, at step 0: 3 dB, where healthy runs have" in told
    assert "4 healthy runs of the same format, arm and learning rate" in told
    assert found.anomaly.loss_step == 30 and "The loss showed it at step 30, 30 steps later." in told
    table = failures_table(study, [found])
    lost, row = table.rows
    assert lost == ["`bf16-adamw-4-1`", "missing: not trained", *["–"] * 5]
    assert row[:3] == [f"`{BAD}`", "diverged at step 55 (spike)", f"sqnr_db of the weights of {LAYER}"]
    assert row[3:] == ["0", "30", "30", "4"]
    assert EXPLAIN in table.note
    assert failures_table(replace(study, cells=study.cells.assign(status="completed")), []) is None


def test_the_rows_that_a_divergence_was_in_are_told(study) -> None:
    def told(nonfinite, rows):
        cells = study.cells.copy()
        cells.loc[BAD, ["first_nonfinite", "first_rows"]] = [nonfinite, rows]
        return sentences(case(replace(study, cells=cells), BAD))[1]

    first = told(f"{LAYER} grad", "output rows 3 to 17 (5 of 128)")
    assert first == f"NaN and infinity came first in the incoming gradients of {LAYER}: output rows 3 to 17 (5 of 128)."
    assert "beside the rest of their layer as blocks.1.attn.qkv output row 2 (of 192)." in told(
        "", "blocks.1.attn.qkv output row 2 (of 192)"
    )
    assert "held against" in told("", "").lower()  # nothing is known, and nothing said


def test_without_an_excursion_before_the_loss_it_says_so(study) -> None:
    found = case(study, BAD)
    assert found.anomaly.excursion is None
    assert "no tensor left its band before the loss did. The loss showed it at step 30" in " ".join(sentences(found))


def test_worse_is_beyond_the_limit_above_the_baselines_median_and_nothing_else(study) -> None:
    key = "E4M3-adamw-1-1"
    base = study.cells[study.cells["format"] == "bf16"]["val_loss"].median()
    own = study.cells.loc[key, "val_loss"]
    assert ended_worse(study) == {}
    assert ended_worse(with_loss(study, key, 1.099 * base / own)) == {}
    worse = with_loss(study, key, 1.101 * base / own)
    assert ended_worse(worse) == {key: (pytest.approx(10.1), "the baseline's")}
    assert [found.key for found in cases(worse)] == [BAD, key]
    told = sentences(case(injected(worse, key), key))
    assert told[0] == f"{key} ended with a validation loss 10 % above the baseline's."
    assert told[-1] == "The loss never left its own band."


def test_a_run_is_not_called_worse_than_a_baseline_that_never_completed(study) -> None:
    """The only loss to hold it against is then the best format's, and that is what it says."""
    key, alike = "E4M3-adamw-1-1", study.cells["format"] == "E4M3"
    own = study.cells["val_loss"].where(study.cells.index != key).loc[alike].median()
    worse = with_loss(study, key, 1.5 * own / study.cells.loc[key, "val_loss"])
    lost = replace(worse, cells=worse.cells.assign(status=worse.cells["status"].where(alike, MISSING)))
    than = "that of E4M3, the best of its arm, where no baseline completed"
    assert {name: than for name, (_, than) in ended_worse(lost).items()} == {key: than}
    assert re.fullmatch(rf"ended with a validation loss \d+ % above {than}", case(lost, key).ended)


def test_peers_are_healthy_and_like_the_run_or_of_its_arm_or_there_are_none(study) -> None:
    def without(*keys):
        status = study.cells["status"].mask(study.cells.index.isin(keys), MISSING)
        return case(replace(study, cells=study.cells.assign(status=status)), BAD)

    like = [f"E4M3-adamw-{seed}-1" for seed in (1, 2, 3, 4)]
    others = [f"bf16-adamw-{seed}-1" for seed in (0, 1, 2, 3)]
    alike = without(like[0])
    assert alike.anomaly.peers == 3 and "same format, arm and learning rate" in alike.group
    wider = without(*like[:2])
    assert wider.anomaly.peers == 2 + len(others) and "in other formats too" in wider.group
    told = " ".join(sentences(without(*like, *others[:2])))
    assert "Held against the limits of the metrics, as fewer than 3 healthy runs are like it" in told


def test_the_command_tells_draws_and_names_what_is_wrong_with_a_cell(project, tmp_path, capsys) -> None:
    where = ["--data", str(project / "data"), "--out", str(tmp_path)]
    main(["explain", BAD, *where])
    assert "diverged at step 55" in capsys.readouterr().out
    assert {file.name for file in tmp_path.iterdir()} == {f"{BAD}.png", f"{BAD}.svg"}
    with pytest.raises(UserError, match=r"^E4M3-adam-0-1: the grid has no such cell; did you mean E4M3-adamw-0-1"):
        main(["explain", "E4M3-adam-0-1", *where])
    with pytest.raises(UserError, match=r"^bf16-adamw-4-1: there is no run to explain \(not trained\); run `dvc"):
        main(["explain", "bf16-adamw-4-1", *where])
    with pytest.raises(UserError, match="does not exist"):
        main(["explain", BAD, "--data", str(tmp_path / "nowhere")])
