"""Whether a hypothesis was registered before its runs: git's history decides, not the hypothesis' file.

The registering commit is the first that states the hypothesis as it stands: its contrasts, expectations, experiments
and rule. Its words (`says`) may change, and so may the names in `RENAMED`. Each comparison needs a run that was
trained from that commit or a later one.

A hypothesis that is older than the questions' files names its commit. At that commit, `BEFORE` must have the
hypothesis. The commit must be older than the results of the hypothesis' runs: their rows do not say which commit they
were trained from.
"""

import csv
import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from altgrad.common.errors import UserError
from altgrad.reporting.study.questions import RULE, Answer, Hypothesis, Kind, Question, Registration
from altgrad.reporting.study.runs import RunTable

RENAMED = "results/renamed.csv"  # old and new names of optimizers and experiments
BEFORE = "HYPOTHESES.md"  # held the hypotheses before the questions' files did
NO_HISTORY = "as this page was written without git's history"
CODEC = ("utf-8", "surrogateescape")


@dataclass(frozen=True)
class Stated:
    """What a hypothesis states: its comparisons with the expectation of each, its experiments, how it is judged."""

    comparisons: frozenset[tuple[str, str | None]]
    of: tuple[str, ...]
    judged: tuple[str | None, ...]

    @classmethod
    def by(cls, asked: Hypothesis, rule: str) -> Self:
        """Return the statement of ``asked``, in a question with this ``rule``. Without a contrast it has the words."""
        comparisons = [(" + ".join(texts), asked.expectation(label)) for label, texts in asked.filled.items()]
        judged = (asked.rate, asked.family, asked.rule or rule)
        return cls(frozenset(comparisons or [(asked.says, None)]), tuple(asked.of), judged)

    def covers(self, later: Self) -> bool:
        """Whether this states all that ``later`` states; only ``later`` may add experiments, at the end."""
        same = self.of == later.of[: len(self.of)] and self.judged == later.judged
        return same and later.comparisons <= self.comparisons


@dataclass(frozen=True)
class History:
    """The commits that lead to HEAD."""

    parents: dict[str, list[str]]  # by commit
    days: dict[str, str]  # by commit, such as "2026-11-27"
    stated: list[tuple[str, Stated]]  # commits with what a hypothesis states there, oldest first
    noted: dict[str, str]  # the text of `BEFORE` by the commit that changed it
    results: dict[str, str]  # by experiment older than the questions' files, the commit that first had its results
    _ancestors: dict[str, set[str]] = field(default_factory=dict)

    @classmethod
    def read(cls, study: Path) -> Self:
        """Read the history of a study's folder. Raises :class:`UserError` where git does not have all of it."""
        if git(study, "rev-parse", "--is-shallow-repository") != "false":
            raise UserError("this clone lacks older commits; get them with `git fetch --unshallow`")
        commits = [line.split() for line in git(study, "log", "--format=%H %as %P").splitlines()]
        path = study / RENAMED
        renamed = dict(csv.reader(path.read_text().splitlines()[1:])) if path.exists() else {}
        changes = [
            (commit, line.split("\t")[1], line.split()[3])  # commit, file, and git's name of its content
            for commit, line in _log(study, "-m", "--raw", "--no-abbrev", "--", ":(glob)*.yaml", BEFORE)
            if line.split()[4] != "D"
        ]
        contents = _contents(study, dict.fromkeys(blob for _, _, blob in changes))
        stated = {blob: _stated(contents[blob], renamed) for _, name, blob in changes if name != BEFORE}
        if not stated:
            raise UserError(f"no commit has {study}/*.yaml")
        results: dict[str, str] = {}
        for commit, line in _log(study, "--diff-filter=A", "--name-only", "--", ":(glob)*/**/results.csv"):
            name = line.removesuffix("/results.csv").replace("/", "-")
            results.setdefault(renamed.get(name, name), commit)
        return cls(
            {commit: parents for commit, _, *parents in commits}, {commit: day for commit, day, *_ in commits},
            [(commit, one) for commit, _, blob in changes for one in stated.get(blob, [])],
            {commit: contents[blob] for commit, name, blob in changes if name == BEFORE}, results,
        )  # fmt: skip

    def registration(self, answer: Answer, runs: RunTable) -> Registration:
        """Return whether the hypothesis of ``answer``, which claims a registration, was registered before its runs."""
        asked = answer.hypothesis
        commit, kind, why = self._stated_in(answer, runs) if asked.commit is None else self._named_in(answer)
        if commit and str(asked.registered) < self.days[commit]:
            kind, why = "exploratory", f"which is of {self.days[commit]}, not of {asked.registered}"
        return Registration(kind, commit[:7], why)

    def unstated(self, question: Question) -> list[str]:
        """Return the names of hypotheses that claim a registration but that no commit states as they stand."""
        asked = {name: one for name, one in question.hypotheses.items() if one.registered and not one.commit}
        now = {name: Stated.by(one, question.rule) for name, one in asked.items()}
        return [name for name, one in now.items() if not any(stated.covers(one) for _, stated in self.stated)]

    def _stated_in(self, answer: Answer, runs: RunTable) -> tuple[str, Kind, str]:
        """Return commit, kind and reason: the first commit that states the hypothesis, if possible before its runs."""
        now = Stated.by(answer.hypothesis, answer.question.rule)
        counts: dict[str, int] = {}  # of comparisons
        for commit, stated in self.stated:
            if stated.covers(now):
                counts.setdefault(commit, len(stated.comparisons))
        if not counts:
            return "", "exploratory", "which no commit states as it stands"
        older = {commit: self._is_older(commit, answer, runs) for commit in counts}
        commit = next((commit for commit, is_older in older.items() if is_older), next(iter(older)))
        if older[commit] is None:
            return commit, "not checked", "whose runs name a commit that this history lacks"
        if not older[commit]:
            return commit, "exploratory", "which is younger than its runs"
        kept = len(now.comparisons)
        why = f"with {counts[commit]} comparisons there and {kept} here" * (counts[commit] > kept)
        return commit, "registered", why

    def _named_in(self, answer: Answer) -> tuple[str, Kind, str]:
        """Return commit, kind and reason for a hypothesis that names its commit, older than the questions' files."""
        asked, first = answer.hypothesis, self.stated[0][0]
        commit = next((one for one in self.noted if one.startswith(asked.commit or "")), first)
        if commit == first or commit not in self._with_ancestors(first):
            return "", "exploratory", f"whose `commit: {asked.commit}` is none of before the questions' files"
        if not re.search(rf"\b{answer.name.split('-')[0]}\b", self.noted[commit]):
            return commit, "exploratory", f"where {BEFORE} does not have it"
        experiments = {run.experiment for one in answer.comparisons for run in one.runs} or set(asked.of)
        results = [self.results.get(name, commit) for name in experiments]
        if all(commit != one and commit in self._with_ancestors(one) for one in results):
            return commit, "registered", ""
        return commit, "exploratory", "whose runs had their results by then"

    def _is_older(self, commit: str, answer: Answer, runs: RunTable) -> bool | None:
        """Return whether each comparison has a run from ``commit`` or a later one; ``None`` if that is not known."""
        of_runs = [[runs.commits[run[:3]] for run in one.runs] for one in answer.comparisons]
        if not of_runs:  # it is answered in words
            of_runs = [[set(runs.of_experiment(*answer.hypothesis.of)["commit"])]]
        known = []
        for comparison in of_runs:
            older = [self._precedes(commit, names) for names in comparison]
            known.append(True if True in older else None if None in older else False)
        return False if False in known else None if None in known else True

    def _precedes(self, commit: str, names: set[str]) -> bool | None:
        """Return whether the history of every commit in ``names`` (abbreviated) has ``commit``; None if not known."""
        commits = [next((one for one in self.parents if one.startswith(name)), None) for name in names]
        known = [commit in self._with_ancestors(one) for one in commits if one is not None]
        return False if False in known else None if None in commits else True

    def _with_ancestors(self, commit: str) -> set[str]:
        """Return the commit and all its ancestors."""
        if commit not in self._ancestors:
            ancestors: set[str] = set()
            waiting = [commit]
            while waiting:
                if (one := waiting.pop()) not in ancestors:
                    ancestors.add(one)
                    waiting += self.parents[one]
            self._ancestors[commit] = ancestors
        return self._ancestors[commit]


def checked(answer: Answer, runs: RunTable, history: History | None) -> Answer:
    """Return ``answer`` with its registration, "not checked" without a history; unchanged if it claims none."""
    if not answer.hypothesis.registered:
        return answer
    without = Registration("not checked", why=NO_HISTORY)
    return replace(answer, registration=history.registration(answer, runs) if history else without)


def _log(folder: Path, *arguments: str) -> Iterable[tuple[str, str]]:
    """Yield each line of ``git log`` with the commit that it belongs to, oldest first, as (commit, line)."""
    log = ["log", "--reverse", "--topo-order", "--no-renames", "--relative", "--format=commit %H"]
    commit = ""
    for line in git(folder, *log, *arguments).splitlines():
        if line.startswith("commit "):
            commit = line.split()[1]
        elif line:
            yield commit, line


def _stated(text: str, renamed: dict[str, str]) -> list[Stated]:
    """Return the statements of a question's file, in today's names; empty if the file cannot be read."""
    rule = re.search(r"^rule: (\w+)", text, re.MULTILINE)
    try:
        today = re.sub(r"\w+(-\w+)*", lambda word: renamed.get(word[0], word[0]), text[text.index("\nhypotheses:") :])
        hypotheses = YAML(typ="safe").load(today)["hypotheses"] or {}
        return [Stated.by(Hypothesis(**one), rule[1] if rule else RULE) for one in hypotheses.values()]
    except (ValueError, YAMLError):  # pydantic's errors are the former
        return []


def _contents(folder: Path, blobs: Iterable[str]) -> dict[str, str]:
    """Return the text of each of git's objects, by its hash."""
    left, texts = git(folder, "cat-file", "--batch", feed="\n".join(blobs)).encode(*CODEC), {}
    for name in blobs:
        head, _, left = left.partition(b"\n")
        size = int(head.split()[2])
        texts[name], left = left[:size].decode(*CODEC), left[size + 1 :]
    return texts


def git(folder: Path, *arguments: str, feed: str = "") -> str:
    """Return the output of git in ``folder``, with ``feed`` as its input. Raises :class:`UserError` if it fails."""
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, check=False, input=feed.encode())
    except OSError as error:
        raise UserError(f"git: {error.strerror}; the study needs git") from None
    if done.returncode:
        message = done.stderr.decode(*CODEC).strip() or done.returncode
        raise UserError(f"git {' '.join(arguments)}: {message}; the study needs git")
    return done.stdout.decode(*CODEC).strip()
