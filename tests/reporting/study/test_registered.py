"""A hypothesis is registered by a commit that is older than its runs. Oracle: the order in which a test commits."""

from __future__ import annotations

import csv
import io
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from ruamel.yaml import YAML

from altgrad.config import UserError
from altgrad.reporting.study.__main__ import write_pages
from altgrad.reporting.study.questions import Question, Registration, answered
from altgrad.reporting.study.registered import History, checked, git
from altgrad.reporting.study.runs import RunTable
from tests.reporting.study.made_study import rows, write_study

ROOT = Path(__file__).parents[3]
DAY = "2026-01-02"
SEEDS = np.arange(5) * 1e-4
LOSSES = {("one", fmt, optimizer): 3.5 + SEEDS for fmt in ("E3M4", "E4M3") for optimizer in ("adamw", "rung", "eco")}
X1 = {"says": "Rung gains.", "registered": DAY, "of": "one", "contrast": "rung - adamw in {format}",
      "over": {"format": ["E3M4", "E4M3"]}, "expected": "lower"}  # fmt: skip
ONE = {"over": {"format": ["E3M4"]}}


class Repository:
    """A study in a git repository of its own, whose commits are all of one day."""

    def __init__(self, root: Path) -> None:
        self.study = write_study(root, rows(LOSSES), a={})
        self.run("init", "--quiet")
        self.first = self.commit()

    def run(self, *arguments: str) -> str:
        names = {f"GIT_{who}_{what}": "a@b.c" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        dates = {f"GIT_{who}_DATE": f"{DAY}T12:00:00Z" for who in ("AUTHOR", "COMMITTER")}
        command = ["git", "-C", self.study.parents[1], *arguments]
        done = subprocess.run(command, env=os.environ | names | dates, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def commit(self) -> str:
        self.run("add", "--all")
        self.run("commit", "--quiet", "--allow-empty", "--message", "m")
        return self.run("rev-parse", "HEAD")

    def state(self, name: str = "X1", question: str = "a", **changes: Any) -> None:
        """Write the hypothesis into a question's file."""
        hypothesis = {key: value for key, value in (X1 | changes).items() if value is not None}
        write_study_question(self.study, question, {name: hypothesis})

    def train(self, commit: str, **losses: str) -> None:
        """Write rows of runs that name a commit; ``losses`` by optimizer another one."""
        table = rows(LOSSES)
        table["commit"] = table["optimizer"].map(losses).fillna(commit[:10])
        table.to_csv(self.study / "results/runs.csv", index=False)

    def found(self, question: str = "a") -> Registration:
        runs = RunTable.read(self.study / "results")
        (answer,) = answered(Question.read(self.study / f"{question}.yaml"), runs)
        return checked(answer, runs, History.read(self.study)).registration


def write_study_question(study: Path, name: str, hypotheses: dict[str, Any]) -> None:
    with open(study / f"{name}.yaml", "w") as file:
        YAML().dump({"question": "Q?", "answer": "A.", "runs": {"one": {}}, "hypotheses": hypotheses}, file)


@pytest.fixture
def repository(tmp_path):
    return Repository(tmp_path)


@pytest.fixture
def registered(repository):
    """A hypothesis with its commit, and runs that were trained from a later one."""
    repository.state()
    commit = repository.commit()
    repository.train(repository.commit())
    assert repository.found() == Registration("registered", commit[:7])
    return repository


def test_words_a_place_and_a_name_may_change(registered):
    commit = registered.found().commit
    registered.state(says="Rung has the lower loss.", deviation="of words")
    registered.commit()
    assert registered.found() == Registration("registered", commit)
    (registered.study / "a.yaml").unlink()
    registered.state("X9", "b")
    assert registered.found("b") == Registration("registered", commit)


@pytest.mark.parametrize(
    "change",
    [{"contrast": "rung - eco in {format}"}, {"expected": "not significant"}, {"expected": {"E3M4": "lower"}},
     {"rule": "student"}, {"rate": "best"}, {"family": "other"}],
)  # fmt: skip
def test_what_was_stated_after_the_runs_is_exploratory(registered, change):
    registered.state(**change)
    assert registered.found() == Registration("exploratory", why="which no commit states as it stands")
    later = registered.commit()
    registered.state(**change, says="In other words.")
    registered.commit()
    assert registered.found() == Registration("exploratory", later[:7], "which is younger than its runs")


def test_other_runs_than_the_stated_ones_are_exploratory_and_further_ones_not(registered):
    commit = registered.found().commit
    table = pd.read_csv(registered.study / "results/runs.csv")
    pd.concat([table, table.assign(experiment="two")]).to_csv(registered.study / "results/runs.csv", index=False)
    registered.state(of=["two", "one"])
    assert registered.found().kind == "exploratory"
    registered.state(of=["one", "two"])
    assert registered.found() == Registration("registered", commit)


def test_a_comparison_may_be_left_out_which_is_said_but_not_added(registered):
    commit = registered.found().commit
    registered.state(**ONE)
    assert registered.found() == Registration("registered", commit, "with 2 comparisons there and 1 here")
    over = X1["over"] | {"other": ["adamw", "eco"]}
    registered.state(contrast="rung - {other} in {format}", over=over)
    assert registered.found().kind == "exploratory"


def test_a_baseline_that_was_there_may_be_older_but_not_both_runs(repository):
    repository.state()
    commit = repository.commit()
    repository.train(repository.first, rung=commit[:10])
    assert repository.found() == Registration("registered", commit[:7])
    repository.train(repository.first, eco=commit[:10])
    assert repository.found().kind == "exploratory"


def test_runs_of_the_commit_itself_are_younger_than_it_and_a_date_before_its_day_is_no_registration(repository):
    repository.state()
    commit = repository.commit()
    repository.train(commit)
    assert repository.found() == Registration("registered", commit[:7])
    repository.state(registered="2020-01-01")
    assert repository.found() == Registration("exploratory", commit[:7], f"which is of {DAY}, not of 2020-01-01")


def test_runs_of_another_branch_are_not_younger_and_of_an_unknown_commit_not_known(repository):
    repository.run("checkout", "--quiet", "-b", "other")
    other = repository.commit()
    repository.run("checkout", "--quiet", "-")
    repository.state()
    repository.commit()
    repository.run("merge", "--quiet", "--no-edit", "other")
    repository.train(other)
    assert repository.found().kind == "exploratory"
    repository.train("0123456789")
    assert repository.found().kind == "not checked"
    repository.train("0123456789", rung=other[:10], adamw=other[:10])
    assert repository.found().kind == "exploratory"


def test_a_renamed_optimizer_is_the_one_that_was_stated(repository):
    repository.state(contrast="whole_steps - adamw in {format}")
    commit = repository.commit()
    repository.train(commit)
    repository.state()
    assert repository.found().kind == "exploratory"
    (repository.study / "results/renamed.csv").write_text("old,new\nwhole_steps,rung\n")
    assert repository.found() == Registration("registered", commit[:7])


def test_a_hypothesis_from_before_the_files_names_its_commit_which_is_older_than_the_results(repository, tmp_path):
    repository.run("checkout", "--quiet", "--orphan", "new")
    (repository.study / "a.yaml").unlink()
    notes = repository.study / "HYPOTHESES.md"
    notes.write_text("- X2: rung gains.\n")
    without = repository.commit()
    notes.write_text("- X1: rung gains.\n")
    commit = repository.commit()
    (repository.study / "one").mkdir()
    (repository.study / "one/results.csv").write_text("loss\n")
    results = repository.commit()
    notes.write_text("- X1: rung gains.\n- X3: more.\n")
    late = repository.commit()
    repository.state()
    repository.commit()
    for named in (without, commit, results):  # the last changed no notes
        repository.state(commit=named[:7])
        assert repository.found().kind == ("registered" if named == commit else "exploratory"), named
    repository.state("X3", commit=late[:7])
    assert repository.found() == Registration("exploratory", late[:7], "whose runs had their results by then")
    notes.write_text("- X1, X3 and X4.\n")
    repository.state("X4", commit=repository.commit()[:7])
    assert repository.found().kind == "exploratory"  # it is not from before the files
    repository.state("X1", commit=commit[:7], registered="2025-01-01")
    assert repository.found().why == f"which is of {DAY}, not of 2025-01-01"


def test_without_the_whole_history_the_pages_say_that_nothing_was_checked(registered, tmp_path, capsys):
    registered.commit()
    page, results = write_pages(registered.study, [])
    assert "**X1** (registered in `" in page.read_text() and "confirms 1 of 1 registrations." in results.read_text()
    clone = tmp_path / "clone"
    registered.run("clone", "--quiet", "--depth", "1", f"file://{tmp_path}", str(clone))
    copied = write_study(tmp_path.parent / f"{tmp_path.name}-copy", rows(LOSSES))
    (copied / "a.yaml").write_bytes((registered.study / "a.yaml").read_bytes())
    for study, why in ((clone / "reports/study", "git fetch --unshallow"), (copied, "not a git repository")):
        with pytest.raises(UserError, match=why):
            History.read(study)
        page, results = write_pages(study, [])
        assert "**X1** (not checked, as this page was written" in page.read_text()
        assert "X1 is not checked." in results.read_text()
        assert why in capsys.readouterr().out


def test_who_trains_hears_first_which_hypotheses_no_commit_states(registered, monkeypatch, capsys):
    monkeypatch.setattr("altgrad.reporting.study.__main__.train_missing", lambda question, runs, study, jobs: runs)
    write_pages(registered.study, [], train=True)
    assert "exploratory" not in capsys.readouterr().out
    registered.state(expected="higher")
    write_pages(registered.study, [], train=True)
    assert "a: X1 will be exploratory, as no commit states it" in capsys.readouterr().out


def test_the_list_of_renamed_optimizers_is_what_renamed_the_rows_of_runs():
    """Oracle: runs.csv before and after each commit that changed the list's new names."""
    study, renaming = ROOT / "reports/study", "846cb9a1"
    try:
        before, after = (
            list(csv.DictReader(io.StringIO(git(study, "show", f"{commit}:./results/runs.csv"))))
            for commit in (f"{renaming}^", renaming)
        )
    except UserError as error:
        pytest.skip(f"the rows of then are needed: {error}")
    renamed = dict(csv.reader((study / "results/renamed.csv").read_text().splitlines()[1:]))
    assert {row["optimizer"] for row in before} - {row["optimizer"] for row in after} <= set(renamed)

    def as_now(row: dict[str, str]) -> tuple[str, ...]:
        return tuple((row | {"optimizer": renamed.get(row["optimizer"], row["optimizer"])}).values())

    assert sorted(map(as_now, before)) == sorted(tuple(row.values()) for row in after)
