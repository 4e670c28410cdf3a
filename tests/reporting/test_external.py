"""What a table of runs is compared by, and what the page says of it. Oracle: SciPy's tests.

muon.csv and muon_curves.csv are numbers of another project, github.com/KellerJordan/modded-nanogpt, in
records/track_3_optimization/results: 20260715_bimaxwell_baseline_3210/summary.tsv (seeds 0 to 7) and
20260722_muonh_power04_3150/README.md (seeds 0 to 11), validation losses of a GPT-2 small after 3150 to 3250 steps.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from altgrad import compare as command
from altgrad.common import errors
from tests.reporting.compared import report, rows_of, table

HERE = Path(__file__).parent
PUBLISHED, CURVES = HERE / "muon.csv", HERE / "muon_curves.csv"
BASE, METHOD = "muon_bimaxwell", "muonh_power04"


def copied(folder: Path) -> Path:
    path = folder / "results.csv"
    path.write_bytes(PUBLISHED.read_bytes())
    return path


def number(text: str) -> float:
    return float(text.replace("−", "-").strip("*"))


def ends(text: str) -> list[float]:
    return [number(end) for end in text.strip("[]").split(", ")]


def pairs() -> tuple[np.ndarray, np.ndarray]:
    """Return the losses of the method and of its reference with the seeds that both have."""
    losses = pd.read_csv(PUBLISHED).pivot(index="seed", columns="optimizer", values="loss").dropna()
    return losses[METHOD].to_numpy(), losses[BASE].to_numpy()


def test_a_published_table_has_the_difference_the_interval_and_the_p_value_that_scipy_finds(tmp_path):
    page = report(copied(tmp_path), "--reference-optimizer", BASE, "--curves", CURVES)
    oracle = stats.ttest_rel(*pairs())
    ((_, delta, result, p, interval, n),) = rows_of(page, "changes**")
    assert number(delta) == pytest.approx(oracle.statistic * stats.sem(np.subtract(*pairs())), abs=5e-5)
    assert ends(interval) == pytest.approx(list(oracle.confidence_interval()), abs=5e-5)
    assert float(p) == pytest.approx(oracle.pvalue, rel=0.05) and n == "8"
    one_sided = [stats.ttest_1samp(np.subtract(*pairs()), bound, alternative=side).pvalue
                 for bound, side in ((-0.005, "greater"), (0.005, "less"))]  # fmt: skip
    assert max(one_sided) < 0.025 and result == "no effect"
    assert "No effect: `muonh_power04`." in page and "8 of 12 (4 missing)" in page
    drawn = {path.stem for path in (tmp_path / "out/figures").glob("*.png")}
    assert drawn == {"gains", "gains_over_run", "loss_curves"}


def test_a_smaller_effect_of_interest_leaves_it_inconclusive_with_what_would_have_been_seen(tmp_path):
    page = report(copied(tmp_path), "--reference-optimizer", BASE, "--smallest-effect", "0.001")
    ((_, _, result, *_),) = rows_of(page, "changes**")
    differences = np.subtract(*pairs())
    seen = float(result.removeprefix("inconclusive (").rstrip(")"))
    t = stats.t.ppf(0.975, 7)
    assert 1 - stats.nct.cdf(t, 7, seen / stats.sem(differences)) == pytest.approx(0.9, abs=0.01)
    assert "(±0.001)" in page


def accuracies(sign: int) -> list[tuple[str, str, int, float]]:
    random = np.random.default_rng(1)
    means = {("base", "sgd"): 90, ("mixup", "sgd"): 92, ("base", "muon"): 89, ("mixup", "muon"): 91}
    return [(*run, seed, sign * (mean + 0.1 * random.standard_normal()))
            for run, mean in means.items() for seed in range(5)]  # fmt: skip


def test_where_higher_is_better_the_sign_stays_and_the_better_end_is_the_other(tmp_path):
    flags = ("--reference", "base", "--reference-optimizer", "sgd")
    (tmp_path / "up").mkdir()
    up = report(table(tmp_path / "up/results.csv", accuracies(1)), *flags, "--higher-is-better")
    down = report(table(tmp_path / "results.csv", accuracies(-1)), *flags)
    first = "**Better than the reference: `mixup`.** Worse: `muon` in `base` and `mixup`."
    assert first in up and first in down
    assert "above zero is better" in up and "below zero is better" in down
    flip = str.maketrans("+−", "−+")
    for lead in ("**What each configuration changes**", "**What `muon` changes**"):
        for above, below in zip(rows_of(up, lead), rows_of(down, lead), strict=True):
            assert above[1] == below[1].translate(flip) and (above[3], above[5]) == (below[3], below[5])
            assert {above[2], below[2]} == {"**higher**", "**lower**"}
    ups, downs = rows_of(up, "**Highest loss**"), rows_of(down, "**Lowest loss**")
    assert [row[:2] for row in ups] == [row[:2] for row in downs] and ups[0][:2] == ["**mixup**", "sgd"]
    assert [row[3] for row in ups] == [row[3] for row in downs]


def test_a_metric_is_a_column_and_names_the_page(tmp_path):
    rows = pd.DataFrame(accuracies(1), columns=["configuration", "optimizer", "seed", "accuracy"])
    rows.to_csv(tmp_path / "results.csv", index=False)
    page = report(tmp_path / "results.csv", "--metric", "accuracy", "--higher-is-better", "--reference", "base",
                  "--reference-optimizer", "sgd")  # fmt: skip
    assert "Δ accuracy" in page and "Highest accuracy" in page
    assert "loss" not in page and "perplexity" not in page


def test_a_diverged_run_is_counted_and_enters_no_mean(tmp_path):
    rows = accuracies(1)
    lost = [(*row[:3], "diverged") if row[:3] == ("mixup", "sgd", 2) else row for row in rows]
    page = report(table(tmp_path / "results.csv", lost), "--reference", "base", "--reference-optimizer", "sgd")
    found = {row[0]: row for row in rows_of(page, "**What each configuration changes**")}["**mixup**"]
    own = {seed: loss for *run, seed, loss in rows if run == ["mixup", "sgd"] and seed != 2}
    base = {seed: loss for *run, seed, loss in rows if run == ["base", "sgd"]}
    assert number(found[1]) == pytest.approx(np.mean([own[s] - base[s] for s in own]), abs=5e-5) and found[5] == "4"
    assert "4 of 5 (1 diverged)" in page and "n &lt; 5, no test" in page


def spreading(seeds: int) -> list[tuple[str, str, int, float]]:
    random = np.random.default_rng(2)
    means = {"adamw": 3.5, "lion": 3.51}
    return [("bf16", name, seed, round(mean + 0.01 * random.standard_normal(), 3))
            for seed in range(seeds) for name, mean in means.items()]  # fmt: skip


FLAGS = ("--reference", "bf16", "--reference-optimizer", "adamw")


@pytest.mark.parametrize(("seeds", "gap"), [(2, 2), (4, 0.01), (5, -0.3), (9, 0.001)])
def test_a_difference_that_is_the_same_in_every_seed_is_not_tested_and_changes_no_other(tmp_path, seeds, gap):
    """By definition: without a spread there is no t. SciPy finds p = 0, from a division by zero."""
    rows = spreading(seeds)
    equal = [("bf16", "muon", seed, round(loss + gap, 3)) for _, name, seed, loss in rows if name == "adamw"]
    both = report(table(tmp_path / "results.csv", rows + equal), *FLAGS)
    said = "zero spread, no test" if seeds >= 5 else "n &lt; 5, no test"
    lion, muon = rows_of(both, "**What each optimizer changes**")
    assert muon == ["**bf16**", "muon", f"{gap:+.4f}".replace("-", "−"), said, "–", "–", str(seeds)]
    said = said.capitalize() if seeds >= 5 else said
    assert f"{said}: " in both and "`muon`" in both.split(f"{said}: ")[1].split(".")[0]
    alone = report(table(tmp_path / "results.csv", rows), *FLAGS)
    assert [lion[:1] + lion[2:]] == rows_of(alone, "**What `lion` changes**")


@pytest.mark.parametrize("missing", ["configuration", "optimizer"])
def test_a_table_without_configurations_or_optimizers_is_one_in_which_all_have_the_same(tmp_path, missing):
    rows = pd.DataFrame(spreading(6), columns=["other", "method", "seed", "loss"]).drop(columns="other")
    present = ({"configuration", "optimizer"} - {missing}).pop()
    rows = rows.rename(columns={"method": present})
    flag = "--reference" if present == "configuration" else "--reference-optimizer"
    rows.to_csv(tmp_path / "results.csv", index=False)
    short = report(tmp_path / "results.csv", flag, "adamw")
    rows.assign(**{missing: "all"}).to_csv(tmp_path / "results.csv", index=False)
    assert short == report(tmp_path / "results.csv", flag, "adamw")


@pytest.mark.parametrize(
    "columns", [("configuration", "optimizer"), ("other", "optimizer"), ("other", "configuration")]
)
def test_other_columns_and_what_pandas_adds_change_no_number_and_are_named(tmp_path, columns):
    """Pandas adds an index without a name, and writes seeds as 0.0 after a gap; `duration` is near `configuration`."""
    rows = pd.DataFrame(spreading(6), columns=[*columns, "seed", "loss"]).drop(columns="other", errors="ignore")
    flags = ("--reference-optimizer", "adamw") if columns[1] == "optimizer" else ("--reference", "adamw")
    rows.to_csv(tmp_path / "results.csv", index=False)
    expected = report(tmp_path / "results.csv", *flags)
    rows.assign(duration=12.5, lr=0.1, seed=rows.seed.astype(float)).to_csv(tmp_path / "results.csv")
    found, unread = report(tmp_path / "results.csv", *flags), "| columns not read | {} |"
    assert found.replace(unread.format("duration and lr"), unread.format("–")) == expected != found


def test_a_flag_goes_before_the_family_in_the_file(tmp_path):
    (tmp_path / "family.yaml").write_text("reference_optimizer: muonh_power04\nmetric: loss\n")
    page = report(copied(tmp_path), "--family", tmp_path / "family.yaml", "--reference-optimizer", BASE)
    assert "minus `muon_bimaxwell`" in page and "minus `muonh_power04`" not in page


A = "configuration,optimizer,seed,loss\n"
GOOD = A + "a,sgd,0,1.0\na,sgd,1,2.0\nb,sgd,0,1.5\nb,sgd,1,2.25\n"


# What stands in results.csv, the flags, and what is said of them.
OF_RESULTS = [
    ("", (), "results.csv is empty; expected the columns configuration, optimizer, seed, loss in its first line"),
    (A, (), "results.csv: no row below the names of the columns"),
    ("configuration,optimizer,seed,los\n", (), "results.csv, line 1: no column 'loss'; did you mean los?"),
    ("loss," + A, (), "results.csv, line 1: 2 columns 'loss'; rename all but one"),
    ("format,optimizer,seed,loss\na,sgd,0,1.0\nb,sgd,0,2.0\n", (),
     "line 2 too; remove one, or rename what tells them apart (format) configuration"),
    ("config,optimizer,seed,loss\n", (), "results.csv, line 1: no column 'configuration'; did you mean config?"),
    ("Optimizer,seed,loss\n", (), "results.csv, line 1: no column 'optimizer'; did you mean Optimizer?"),
    ("optimizer,seed,val_loss\n", (), "no column 'loss'; did you mean val_loss? Each row is a run; --metric names"),
    ("seed,loss\n", (), "results.csv, line 1: no column 'configuration' or 'optimizer'; known: seed, loss. Each row"),
    ("seed,adamw,muon\n", (), "no column 'configuration' or 'optimizer'; known: seed, adamw, muon. Each row is a run"),
    ("optimizer;seed;loss\n", (), "results.csv, line 1: columns are separated by ';'; save the table with commas"),
    (GOOD + 'b,"sgd,2,1.0\nb,sgd,3,1.0\n', (), "results.csv, line 6: the row that begins here is not valid CSV"),
    (GOOD + "b,sgd,2\n", (), "results.csv, line 6: 3 values for 4 columns"),
    (GOOD + "b,sgd,2,low\n", (), "results.csv, line 6: loss is 'low'; expected a finite number, or 'diverged'"),
    (GOOD + "b,sgd,2,nan\n", (), "results.csv, line 6: loss is 'nan'; expected a finite number, or 'diverged'"),
    (GOOD + "b,sgd,2,\n", (), "results.csv, line 6: loss is ''"),
    (GOOD + "b,sgd,two,1.0\n", (), "results.csv, line 6: seed is 'two'; expected a whole number"),
    (GOOD + ",sgd,2,1.0\n", (), "results.csv, line 6: configuration is empty"),
    (GOOD + "a,sgd,1,3.0\n", (), "results.csv, line 6: 'a' under 'sgd' with seed 1 stands in line 3 too"),
    (GOOD, (), "results.csv: which configuration is the reference? Say --reference a or b"),
    (GOOD + "a,adamw,0,1.0\n", ("--reference", "a"), "which optimizer is the reference? Say --reference-optimizer"),
    (GOOD, ("--reference", "A"), "results.csv: no run of configuration 'A'; did you mean a?"),
    (A + "a,sgd,0,1.0\na,sgd,1,1.0\n", (), "one configuration under one optimizer; there is nothing to compare"),
    (A + "a,sgd,0,1.0\nb,sgd,0,1.0\n", ("--reference", "a"), "no comparison has two seeds in common"),
    (A + "a,sgd,0,1.0\na,sgd,1,1.0\nb,sgd,2,1.0\nb,sgd,3,1.0\n", ("--reference", "a"), "two seeds in common"),
    (GOOD, ("--smallest-effect", "0"), "flags: smallest_effect: input should be greater than 0, not 0.0"),
    (GOOD, ("--metric", "acc"), "results.csv, line 1: no column 'acc'"),
    (GOOD, ("--family", "none.yaml"), "none.yaml does not exist"),
    (GOOD, ("--reference", "a", "--curves", "none.csv"), "none.csv cannot be read: No such file or directory"),
]
OF_FAMILY = [
    ("reference: a\noptimizer_controls: {sgd2: sgd}\n", "results.csv: no run of optimizer 'sgd2'"),
    ("reference: a\nunquantized: [c]\n", "results.csv: no run of configuration 'c'; known: a, b"),
    ("reference: a\nconfiguration_controls: {a: b}\n", "'a' cannot be the control of 'b'"),
    ("referense: a\n", "family.yaml: unknown setting 'referense'; did you mean reference"),
    ("reference: [a\n", "family.yaml, line 2, column 1 is not valid YAML"),
]
OF_CURVES = [
    ("c,sgd,0,10,1.0", "curves.csv, line 2: the results have no run of 'c' under 'sgd' with seed 0 at step 10"),
    ("a,sgd,0,first,1.0", "curves.csv, line 2: step is 'first'; expected a whole number"),
    ("a,sgd,0,10,1.0\na,sgd,0,10,1.0", "line 3: 'a' under 'sgd' with seed 0 at step 10 stands in line 2"),
]


@pytest.mark.parametrize(
    ("files", "flags", "said"),
    [
        *(({"results.csv": text}, flags, said) for text, flags, said in OF_RESULTS),
        *(({"results.csv": GOOD, "family.yaml": text}, ("--family", "family.yaml"), said) for text, said in OF_FAMILY),
        *(({"results.csv": GOOD, "curves.csv": f"configuration,optimizer,seed,step,loss\n{row}\n"},
           ("--reference", "a", "--curves", "curves.csv"), said) for row, said in OF_CURVES),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence_and_nothing_is_written(tmp_path, capsys, monkeypatch, files, flags, said):
    """The command is run as a user does: a sentence on stderr, a status, no file."""
    monkeypatch.chdir(tmp_path)
    for name, text in files.items():
        Path(name).write_text(text)
    monkeypatch.setattr("sys.argv", ["altgrad compare", "results.csv", *flags])
    monkeypatch.setattr(errors, "_raise_when_stopped", lambda stops: None)  # of the process of the tests
    before = sorted(Path().rglob("*"))
    with pytest.raises(SystemExit) as ended:
        errors.run_stage(command.main)
    message = str(ended.value)
    assert message.startswith("error: ") and said in message and "\n" not in message
    assert sorted(Path().rglob("*")) == before and capsys.readouterr().out == ""
