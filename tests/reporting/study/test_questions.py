"""A question is refused in one sentence or becomes a page. Oracle: what stands in the made-up study."""

from __future__ import annotations

import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from altgrad.common.files import read_json, read_yaml, write_json
from altgrad.config import Resolver, UserError, load_params
from altgrad.config.params import presets
from altgrad.reporting.study.__main__ import write_pages
from altgrad.reporting.study.law import sizes_of
from altgrad.reporting.study.questions import ContrastResult, Hypothesis, Question, answered
from altgrad.reporting.study.registered import History
from altgrad.reporting.study.runs import AFTER, MEASURED, RunTable, StudyRun
from tests.reporting.study.made_study import rows, write_study

ROOT = Path(__file__).parents[3]
STUDY = ROOT / "reports/study"
SEEDS = np.arange(6) * 1e-4
LOSSES = {
    ("one", "E3M4", "adamw"): 3.5 + SEEDS, ("one", "E3M4", "rung"): 3.4 + SEEDS[::-1],
    ("one", "E4M3", "adamw"): 3.5 + SEEDS, ("one", "E4M3", "rung"): 3.5 + SEEDS[::-1],
}  # fmt: skip
X1 = {"says": "It gains.", "registered": "2026-01-01", "of": "one", "contrast": "rung - adamw in {format}",
      "over": {"format": ["E3M4", "E4M3"]}, "expected": {"E3M4": "lower", "E4M3": "lower"}}  # fmt: skip


def made(tmp_path: Path, hypothesis: dict[str, Any] = X1, **content: Any) -> Path:
    return write_study(tmp_path, rows(LOSSES), a={"hypotheses": {"X1": hypothesis}}, **content)


def test_a_page_says_what_came_and_what_was_expected(tmp_path):
    study = made(tmp_path)
    page, results = write_pages(study, [])
    text = page.read_text()
    assert "| **X1** | `rung - adamw in E3M4` | 0.17 M, 0.2 M | −0.1000 |" in text
    ends = {line.split(" | ")[4]: line.split(" | ")[-1] for line in text.splitlines() if " in E" in line}
    assert ends == {"**lower**": "lower |", "no effect": "lower: no |"}
    assert "24 of 24 runs ended, on AMD EPYC bf16." in text and (study / "figures/a.png").exists()
    row = next(line for line in results.read_text().splitlines() if line.startswith("| X1 "))
    assert row.startswith("| X1 | It gains. | −0.1000 | 1 of 2 significant |") and " | no | not checked |" in row


@pytest.mark.parametrize(("expected", "cell"), [
    ({"E3M4": "-0.2 to -0.05", "E4M3": "0.1 to 0.2"}, "1 of 2 as predicted"), (None, "n &lt; 5, no test"),
])  # fmt: skip
def test_a_family_with_too_few_seeds_for_a_test_has_no_number_of_significant_results(tmp_path, expected, cell):
    table = rows({run: losses[:3] for run, losses in LOSSES.items()})
    study = write_study(tmp_path, table, a={"hypotheses": {"X1": X1 | {"expected": expected}}})
    row = next(line for line in write_pages(study, [])[-1].read_text().splitlines() if line.startswith("| X1 "))
    assert row.startswith(f"| X1 | It gains. | −0.0997 | {cell} |")


def test_pages_are_the_same_bytes_again(tmp_path):
    study = made(tmp_path)
    written = [path.read_bytes() for path in write_pages(study, [])]
    assert [path.read_bytes() for path in write_pages(study, ["a"])] == written


def test_a_question_that_was_not_trained_yet_keeps_no_other_from_its_page(tmp_path, capsys):
    later = {"runs": {"two": {}}, "hypotheses": {"X2": X1 | {"of": "two"}}}
    study = write_study(tmp_path, rows(LOSSES), a={"hypotheses": {"X1": X1}}, b=later)
    page, results = write_pages(study, ["a"])
    assert page.name == "a.md" and "| X1 |" in results.read_text() and "| X2 |" not in results.read_text()
    missing = r"b\.yaml: hypotheses\.X2: two: no run of rung in E3M4; `make study` trains it"
    assert re.search(f"left out of RESULTS.md: .*{missing}", capsys.readouterr().out)
    for names in (["b"], []):
        with pytest.raises(UserError, match=missing):
            write_pages(study, names)


TWICE = {"hypotheses": {"X1": X1}, "runs": {"two": {}}}


@pytest.mark.parametrize(
    ("change", "content", "names", "words"),
    [
        ({"contrasts": "x"}, {}, [], "a.yaml: hypotheses.X1: unknown setting 'contrasts'; did you mean contrast"),
        ({"contrast": None}, {}, [], "a.yaml: hypotheses.X1: needs either `contrast` or"),
        ({"status": "dropped"}, {}, [], "a.yaml: hypotheses.X1: status 'dropped' needs `why`"),
        ({"expected": "better"}, {}, [], "a.yaml: hypotheses.X1.expected"),
        ({"expected": "0.024 to 0.010"}, {}, [], "0.024 to 0.010: the lower end comes first"),
        ({"of": "tow"}, {}, [], "a.yaml: hypotheses.X1.of: no experiment 'tow'"),
        ({"over": {"fmt": ["E3M4"]}}, {}, [], "a.yaml: hypotheses.X1: no value for 'format' in `over`"),
        ({"over": {"format": ["E3M5"]}}, {}, [],
         "a.yaml: hypotheses.X1: one: no run of format 'E3M5'; did you mean E3M4"),
        ({}, {"b": TWICE}, [], "b.yaml: hypotheses.X1 stands in"),
        ({}, {}, ["b"], "no question 'b'"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence_with_its_place(tmp_path, change, content, names, words):
    study = made(tmp_path, X1 | change, **content)
    with pytest.raises(UserError) as error:
        write_pages(study, names)
    assert words in str(error.value) and str(study) in str(error.value)


def test_hypotheses_of_one_family_are_judged_together(tmp_path):
    alone = {name: X1 | {"over": {"format": [fmt]}, "expected": None} for name, fmt in (("A", "E3M4"), ("B", "E4M3"))}
    study = write_study(tmp_path, rows(LOSSES), a={"hypotheses": alone})
    runs = RunTable.read(study / "results")
    apart = [found.comparisons[0].result for found in answered(Question.read(study / "a.yaml"), runs)]
    of_one = {name: hypothesis | {"family": "f"} for name, hypothesis in alone.items()}
    together = write_study(tmp_path / "2", rows(LOSSES), a={"hypotheses": of_one})
    joint = [found.comparisons[0].result for found in answered(Question.read(together / "a.yaml"), runs)]
    assert [found.difference for found in joint] == [found.difference for found in apart]
    alone = apart[0].difference.p_value()
    assert joint[0].adjusted == pytest.approx(2 * alone) and apart[0].adjusted == alone


def test_a_page_on_several_sizes_has_the_law_of_their_runs(tmp_path):
    """The costs of the page's figure are differences of rows; a size with fewer seeds or formats keeps its place."""
    sizes = {"a": (6e4, 3e5), "b": (6e4, 1.2e6), "c": (1.7e5, 2e5), "d": (1.7e5, 3.4e6), "e": (5e5, 5e5),
             "f": (5e5, 2.7e6)}  # fmt: skip
    chance, losses = np.random.default_rng(1), {}
    for name, (n, d) in sizes.items():
        base = 1.7 + 40 / n**0.34 + 60 / d**0.31 + chance.normal(0, 1e-3, 5)
        losses[name, "bf16", "adamw"] = base
        losses[name, "E3M4", "adamw"] = base[: 3 if name == "a" else 5] + 1e-2 * (d / n / 20) ** 0.7
    losses["d", "E4M3", "adamw"] = losses["d", "bf16", "adamw"] + 0.25
    formats = {name: ["bf16", "E3M4", *["E4M3"] * (name == "d")] for name in sizes}
    table = rows(losses)
    table[["parameters", "tokens"]] = [[int(value) for value in sizes[name]] for name in table["experiment"]]
    content = {"runs": {name: {"grid": {"formats": of_one}} for name, of_one in formats.items()}, "law": list(sizes)}
    study = write_study(tmp_path, table, a=content)
    found = sizes_of(formats, RunTable.read(study / "results"))
    assert list(zip(found.parameters, found.tokens, strict=True)) == sorted(sizes.values())
    assert found.models == ["0.06 M", "0.06 M", "0.17 M", "0.17 M", "0.5 M", "0.5 M"]
    assert np.isnan(found.costs["E3M4"][0, 3:]).all() and np.isfinite(found.costs["E3M4"][1:]).all()
    np.testing.assert_allclose(found.costs["E4M3"][:, 0], [np.nan] * 3 + [0.25] + [np.nan] * 2)
    page = write_pages(study, [])[0].read_text()
    ((k, d, e),) = re.findall(r"\| \*\*E3M4\*\* \| (0\.\d+) .*?\| (0\.\d+) .*?\| (0\.\d+) ", page)
    assert (float(k), float(d), float(e)) == pytest.approx((0.01 / 20**0.7, 0.7, 0.7), rel=3e-3)
    assert re.search(r"\| 0\.17 M \| 170.000 \| 3\.4 \|.*\| 0\.2500 \|", page)
    assert "tokens per parameter: k is the cost" in page and (study / "figures/a-law.png").exists()


def test_a_law_of_an_experiment_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"a\.yaml: law: no experiment 'tow'; did you mean two"):
        write_pages(write_study(tmp_path, rows(LOSSES), a={"runs": {"two": {}}, "law": ["tow"]}), [])


@pytest.mark.parametrize(("formats", "optimizers", "words"), [
    (["E3M4"], ["adamw"], "costs are measured against bf16"),
    (["bf16", "E3M4", "E4M3"], ["adamw"], "one: no run in E4M3; `make study` trains it"),
    (["bf16", "E3M4"], ["adamw", "rung"], "one: bf16 has several runs with a seed"),
])  # fmt: skip
def test_a_law_that_the_runs_cannot_have_is_refused(tmp_path, formats, optimizers, words):
    losses = {("one", fmt, optimizer): 3.5 + SEEDS for fmt in ("bf16", "E3M4") for optimizer in optimizers}
    runs = RunTable.read(write_study(tmp_path, rows(losses)) / "results")
    with pytest.raises(UserError, match=words):
        sizes_of({"one": formats}, runs)


def test_settings_are_those_of_the_experiment_it_is_like_with_its_own():
    base = {"train": {"steps": 10, "batch": 2}}
    runs = {"one": {"grid": {"seeds": [1], "formats": ["E3M4"]}}, "two": {"like": "one", "grid": {"seeds": [2]}},
            "three": {"like": "four"}, "five": {"like": "five"}}  # fmt: skip
    question = Question(question="?", answer=".", path=Path("a.yaml"), base=base, runs=runs)
    assert question.settings("two") == {**base, "grid": {"seeds": [2], "formats": ["E3M4"]}}
    for name, words in (("three", "no experiment 'four'"), ("five", "leads back to itself")):
        with pytest.raises(UserError, match=words):
            question.settings(name)


@pytest.mark.parametrize("name", sorted(path.stem for path in STUDY.glob("*.yaml")))
def test_every_experiment_of_the_study_resolves_and_has_its_runs(tmp_path, monkeypatch, name):
    """Oracle: the table, which has one row for each run of each grid."""
    monkeypatch.setattr("altgrad.reporting.study.questions.read_yaml", cache(read_yaml))  # it is read into another
    presets()  # of YAML, and read once
    monkeypatch.setattr("altgrad.config.params.read_yaml", read_json)  # which the file below is as well
    question, runs = Question.read(STUDY / f"{name}.yaml"), RunTable.read(STUDY / "results")
    not_run = [asked for asked in question.hypotheses.values() if asked.status == "not run"]
    planned = {experiment for hypothesis in not_run for experiment in hypothesis.of}
    for experiment in question.runs:
        write_json(tmp_path / "params.yaml", question.params(experiment, ROOT / "params.yaml"))
        # Weights to start from, which adapters need, are what another experiment leaves.
        params = load_params(tmp_path / "params.yaml").model_copy(update={"start": None, "lora": None})
        cells = list(Resolver(params).cells())
        rows_of = runs.of_experiment(experiment)
        if experiment in planned and rows_of.empty:
            continue
        wanted = {(cell.format, cell.optimizer, cell.seed, float(cell.lr_scale)) for cell in cells}
        columns = ["format", "optimizer", "seed", "lr_scale"]
        assert wanted == set(rows_of[columns].itertuples(index=False, name=None)), experiment
        assert {cell.train.steps for cell in cells} >= set(rows_of.loc[rows_of["status"] == "ok", "steps"]), experiment


def test_the_committed_pages_are_what_the_tables_give(tmp_path, monkeypatch):
    shutil.copytree(STUDY, tmp_path / "reports/study", ignore=shutil.ignore_patterns("figures"))
    name_of = "altgrad.reporting.study.__main__.draw_forest"

    def drawn(answers, _):
        return f"{answers[0].question.name}.png" if any(answer.comparisons for answer in answers) else None

    monkeypatch.setattr(name_of, drawn)
    try:
        history = History.read(STUDY)
    except UserError as error:
        pytest.skip(f"the pages name commits: {error}")
    for path in write_pages(tmp_path / "reports/study", [], history=history):
        assert path.read_text() == (ROOT / path.relative_to(tmp_path)).read_text(), path.name


def test_the_template_of_the_readme_is_a_question(tmp_path):
    text = (STUDY / "README.md").read_text().split("```yaml\n")[1].split("```")[0]
    (tmp_path / "template.yaml").write_text(text)
    question = Question.read(tmp_path / "template.yaml")
    write_json(tmp_path / "params.yaml", question.params("foreign", ROOT / "params.yaml"))
    assert len(list(Resolver(load_params(tmp_path / "params.yaml")).cells())) == 10
    assert read_yaml(tmp_path / "params.yaml")["optimizers"]["as_E5M2"]["foreign"] == "E5M2"


def test_what_was_not_run_keeps_its_contrast_and_asks_for_no_run():
    asked = {"says": "It is so.", "contrast": "adamw in {format} - bf16", "over": {"format": ["E4M3", "E5M2"]}}
    assert list(Hypothesis(**asked).comparisons) == ["E4M3", "E5M2"]
    assert Hypothesis(**asked, status="not run", why="no time").comparisons == {}


@pytest.mark.parametrize(
    ("measures", "unit"),
    [*(([name], "F1") for name in MEASURED), (["macro_f1", "micro_f1"], "F1"), (["trained"], "nats"),
     (["pruned-50", "trained"], "nats"), (["micro_f1", "trained"], "ratio")],
)  # fmt: skip
def test_a_difference_has_the_unit_of_what_was_measured(measures, unit):
    runs = {StudyRun("one", fmt, "adamw", measure=measure): 1.0 for measure in measures for fmt in ("E4M3", "bf16")}
    assert ContrastResult("", [], runs, None, None).unit == unit


def test_the_key_stands_before_the_rows_and_only_losses_stand_in_a_column_of_losses(tmp_path):
    of_f1 = {"says": "So is F1.", "registered": "2026-01-01", "of": "one"}
    of_f1 |= {"contrast": "rung - adamw in E3M4 at micro_f1"}
    questions = {"a": {"hypotheses": {"X1": X1}}, "b": {"hypotheses": {"X2": of_f1}, "runs": {}}}
    study = write_study(tmp_path, rows(LOSSES), **questions)
    after = rows(LOSSES)[AFTER[:5]].assign(measure="micro_f1", value=rows(LOSSES)["val_loss"])
    after.to_csv(study / "results/after_training.csv", index=False)
    (study / "ABOUT.md").write_text("# Results\n\nabove\n\n<!-- table -->\n\nbelow\n")
    text = write_pages(study, [])[-1].read_text()
    parts = ("above", "smallest p", "| Δ loss |", "| X1 |", "| Δ | unit |", "| X2 |", "below")
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    assert "| X2 | So is F1. | −0.1000 | F1 | **lower** |" in text
