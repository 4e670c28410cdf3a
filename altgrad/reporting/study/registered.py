"""Whether a hypothesis was registered before its runs, by git's history in place of what its file says.

The registering commit is the first that states the hypothesis as it stands: its contrasts, expectations, experiments
and rule. Its words (`says`) may change, and the names in `RENAMED`. Each comparison needs a run that was trained from
that commit or a later one.

A hypothesis from before the questions' files names its commit. `BEFORE` must have it there, and the results of its
runs must be younger: the rows of those runs do not say which commit they were trained from.
"""

from __future__ import annotations

import csv
import re
import subprocess
from dataclasses import dataclass, field, replace
from pathlib import Path

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from altgrad.common.errors import UserError
from altgrad.reporting.study.answers import Answer, Kind, Registration
from altgrad.reporting.study.questions import RULE, Hypothesis, Question
from altgrad.reporting.study.runs import Runs

RENAMED = "results/renamed.csv"  # old and new names of optimizers and experiments
BEFORE = "HYPOTHESES.md"  # had the hypotheses before the questions' files did
NO_HISTORY = "as this page was written without git's history"
CODEC = ("utf-8", "surrogateescape")


@dataclass(frozen=True)
class Stated:
    """What a hypothesis states: its comparisons with the expectation of each, its experiments, how it is judged."""

    comparisons: frozenset[tuple[str, str | None]]
    of: tuple[str, ...]
    judged: tuple[str | None, ...]

    @classmethod
    def by(cls, asked: Hypothesis, rule: str) -> Stated:
        """Return what a hypothesis of a question with this ``rule`` states; its words, where no contrast says it."""
        compared = [(" + ".join(texts), asked.expectation(label)) for label, texts in asked.filled.items()]
        judged = (asked.rate, asked.family, asked.rule or rule)
        return cls(frozenset(compared or [(asked.says, None)]), tuple(asked.of), judged)

    def holds(self, later: Stated) -> bool:
        """Whether all of ``later`` was stated here; it may have further experiments behind those named here."""
        same = self.of == later.of[: len(self.of)] and self.judged == later.judged
        return same and later.comparisons <= self.comparisons


@dataclass(frozen=True)
class History:
    """The commits that lead to HEAD.

    ``parents`` and ``days`` by commit. ``stated`` pairs commits with what a hypothesis states there, oldest first. From
    the time before the questions' files, ``noted`` has `BEFORE` by the commit that changed it, and ``results`` by
    experiment the commit that first had its results.
    """

    parents: dict[str, list[str]]
    days: dict[str, str]
    stated: list[tuple[str, Stated]]
    noted: dict[str, str]
    results: dict[str, str]
    _ancestors: dict[str, set[str]] = field(default_factory=dict)

    @classmethod
    def read(cls, study: Path) -> History:
        """Read the history of a study's folder. Raises :class:`UserError` where git does not have all of it."""
        if git(study, "rev-parse", "--is-shallow-repository") != "false":
            raise UserError("this clone lacks older commits; get them with `git fetch --unshallow`")
        commits = [line.split() for line in git(study, "log", "--format=%H %as %P").splitlines()]
        log = ["log", "--reverse", "--topo-order", "--no-renames", "--relative", "--format=commit %H"]
        commit, versions = "", []
        results: dict[str, str] = {}
        for line in git(study, *log, "-m", "--raw", "--no-abbrev", "--", ":(glob)*.yaml", BEFORE).splitlines():
            if line.startswith("commit "):
                commit = line.split()[1]
            elif line and line.split()[4] != "D":
                versions.append((commit, line.split("\t")[1], line.split()[3]))
        path = study / RENAMED
        renamed = dict(csv.reader(path.read_text().splitlines()[1:])) if path.exists() else {}
        contents = _contents(study, list(dict.fromkeys(blob for _, _, blob in versions)))
        stated = {blob: _stated(contents[blob], renamed) for _, name, blob in versions if name != BEFORE}
        if not stated:
            raise UserError(f"no commit has {study}/*.yaml")
        for line in git(study, *log, "--diff-filter=A", "--name-only", "--", ":(glob)*/**/results.csv").splitlines():
            if line.startswith("commit "):
                commit = line.split()[1]
            elif line:
                name = line.removesuffix("/results.csv").replace("/", "-")
                results.setdefault(renamed.get(name, name), commit)
        return cls(
            {commit: parents for commit, _, *parents in commits}, {commit: day for commit, day, *_ in commits},
            [(commit, one) for commit, _, blob in versions for one in stated.get(blob, [])],
            {commit: contents[blob] for commit, name, blob in versions if name == BEFORE}, results,
        )  # fmt: skip

    def registration(self, answer: Answer, runs: Runs) -> Registration:
        """Return whether a hypothesis that says it was registered was so before its runs."""
        asked = answer.hypothesis
        commit, kind, why = self._stated_in(answer, runs) if asked.commit is None else self._named_in(answer)
        if commit and str(asked.registered) < self.days[commit]:
            kind, why = "exploratory", f"which is of {self.days[commit]}, not of {asked.registered}"
        return Registration(kind, commit[:7], why)

    def unstated(self, question: Question) -> list[str]:
        """Return the hypotheses that say they are registered, and that no commit states as they stand."""
        asked = {name: one for name, one in question.hypotheses.items() if one.registered and not one.commit}
        now = {name: Stated.by(one, question.rule) for name, one in asked.items()}
        return [name for name, own in now.items() if not any(stated.holds(own) for _, stated in self.stated)]

    def _stated_in(self, answer: Answer, runs: Runs) -> tuple[str, Kind, str]:
        """Return the first commit that states a hypothesis, of those older than its runs if there is one."""
        found: dict[str, tuple[bool | None, int]] = {}
        now = Stated.by(answer.hypothesis, answer.question.rule)
        for commit, stated in self.stated:
            if stated.holds(now) and commit not in found:
                found[commit] = self._is_older(commit, answer, runs), len(stated.comparisons)
        if not found:
            return "", "exploratory", "which no commit states as it stands"
        commit = next((commit for commit, (older, _) in found.items() if older), next(iter(found)))
        older, count = found[commit]
        if older is None:
            return commit, "not checked", "whose runs name a commit that this history lacks"
        if not older:
            return commit, "exploratory", "which is younger than its runs"
        kept = len(now.comparisons)
        return commit, "registered", f"with {count} comparisons there and {kept} here" * (count > kept)

    def _named_in(self, answer: Answer) -> tuple[str, Kind, str]:
        """Return the commit that a hypothesis from before the questions' files names."""
        asked, first = answer.hypothesis, self.stated[0][0]
        commit = next((one for one in self.noted if one.startswith(asked.commit or "")), first)
        if commit == first or commit not in self._behind(first):
            return "", "exploratory", f"whose `commit: {asked.commit}` is none of before the questions' files"
        if not re.search(rf"\b{answer.name.split('-')[0]}\b", self.noted[commit]):
            return commit, "exploratory", f"where {BEFORE} does not have it"
        named = {run.experiment for found in answer.comparisons for run in found.runs} or set(asked.of)
        younger = (self.results.get(name, commit) for name in named)
        if all(commit != one and commit in self._behind(one) for one in younger):
            return commit, "registered", ""
        return commit, "exploratory", "whose runs had their results by then"

    def _is_older(self, commit: str, answer: Answer, runs: Runs) -> bool | None:
        """Whether each comparison has a run that was trained from ``commit`` or later; None where that is not known."""
        of_runs = [[runs.commits(run) for run in found.runs] for found in answer.comparisons]
        if not of_runs:  # it is answered in words
            of_runs = [[set(runs.of_experiment(*answer.hypothesis.of)["commit"])]]
        compared = [[self._is_behind(commit, names) for names in comparison] for comparison in of_runs]
        known = [True if True in one else None if None in one else False for one in compared]
        return False if False in known else None if None in known else True

    def _is_behind(self, commit: str, names: set[str]) -> bool | None:
        found = [next((one for one in self.parents if one.startswith(name)), None) for name in names]
        known = [commit in self._behind(one) for one in found if one is not None]
        return False if False in known else None if None in found else True

    def _behind(self, commit: str) -> set[str]:
        """Return a commit and all that it builds on."""
        if commit not in self._ancestors:
            found: set[str] = set()
            waiting = [commit]
            while waiting:
                if (one := waiting.pop()) not in found:
                    found.add(one)
                    waiting += self.parents[one]
            self._ancestors[commit] = found
        return self._ancestors[commit]


def checked(answer: Answer, runs: Runs, history: History | None) -> Answer:
    """Return an answer with its registration; without a history that is not checked."""
    if not answer.hypothesis.registered:
        return answer
    found = history.registration(answer, runs) if history else Registration("not checked", why=NO_HISTORY)
    return replace(answer, registration=found)


def _stated(text: str, renamed: dict[str, str]) -> list[Stated]:
    """Return what the hypotheses of a question's file state, under today's names; none where they cannot be read."""
    rule = re.search(r"^rule: (\w+)", text, re.MULTILINE)
    try:
        own = re.sub(r"\w+(-\w+)*", lambda word: renamed.get(word[0], word[0]), text[text.index("\nhypotheses:") :])
        asked = YAML(typ="safe").load(own)["hypotheses"] or {}
        return [Stated.by(Hypothesis(**one), rule[1] if rule else RULE) for one in asked.values()]
    except (ValueError, YAMLError):  # pydantic's errors are the former
        return []


def _contents(folder: Path, objects: list[str]) -> dict[str, str]:
    """Return the texts of git's objects, by their names."""
    left, found = git(folder, "cat-file", "--batch", feed="\n".join(objects)).encode(*CODEC), {}
    for name in objects:
        head, _, left = left.partition(b"\n")
        size = int(head.split()[2])
        found[name], left = left[:size].decode(*CODEC), left[size + 1 :]
    return found


def git(folder: Path, *arguments: str, feed: str = "") -> str:
    """Return what git prints. Raises :class:`UserError` where it fails."""
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, check=False, input=feed.encode())
    except OSError as error:
        raise UserError(f"git: {error.strerror}; the study needs git") from None
    if done.returncode:
        said = done.stderr.decode(*CODEC).strip() or done.returncode
        raise UserError(f"git {' '.join(arguments)}: {said}; the study needs git")
    return done.stdout.decode(*CODEC).strip()
