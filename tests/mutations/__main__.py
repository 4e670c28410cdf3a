"""``make mutate``: break the package on purpose, one line at a time, and see that a fast test notices each time.

``mutations.yaml`` lists what is broken. Each entry is applied alone, in a copy of the repository outside the tree, and
only the tests that it names run there. An entry that they do not notice *survives*: a law is missing.

    python -m tests.mutations                   all of them; exit status 1 for a survivor that nothing explains
    python -m tests.mutations -j 1 resolve.py   one at a time, of entries whose file or description has that text
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("mutations.yaml")
PYTEST = [
    sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-n", "0", "-m", "not slow and not long"
]  # fmt: skip
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", ".dvc", "__pycache__", "scratch", ".*_cache")
PATIENCE = 1200  # seconds, after which tests count as hung
TESTS_FAILED = 1  # pytest's exit status; 2 and above: no test ran, or not all could be collected


@dataclass(frozen=True)
class Mutation:
    """One way to break a file of the repository.

    ``text`` stands in ``file`` once and is replaced by ``becomes``; ``breaks`` says in words what is wrong then;
    ``tests`` are files or node ids that must notice, none of which needs git. ``survives`` explains why they cannot,
    where they cannot.
    """

    file: str
    text: str
    becomes: str
    breaks: str
    tests: list[str] = field(default_factory=list)
    survives: str = ""

    def problem(self, root: Path) -> str:
        """Return what is wrong with the entry in the repository ``root``, or nothing."""
        path = root / self.file
        found = path.read_text().count(self.text) if path.is_file() else 0
        missing = [test for test in self.tests if not (root / test.partition("::")[0]).exists()]
        if not path.is_file():
            return "the file is gone; name the one that has the code now"
        if found != 1:
            return f"its text stands there {found} times, not once; the code was changed, so change the entry too"
        return f"there is no {missing[0]}; name the test that notices" if missing else ""


def mutations(table: Path = TABLE) -> list[Mutation]:
    return [Mutation(**entry) for entry in yaml.safe_load(table.read_text())]


def tried(mutation: Mutation, root: Path) -> tuple[str, str]:
    """Break the copy ``root``, run the tests there and mend it; return the result and what tells more about it."""
    path = root / mutation.file
    whole = path.read_text()
    path.write_text(whole.replace(mutation.text, mutation.becomes))
    try:
        status, output = ran(mutation.tests, root)
    finally:
        path.write_text(whole)
    if status == 0:
        return "survived", mutation.survives
    by = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
    if status != TESTS_FAILED or by is None:
        return "error", f"the tests did not run: {output.strip()[-600:]}"
    if ran([by[1]], root)[0] != 0:
        return "error", f"{by[1]} fails without the mutation too"
    return "caught", by[1]


def ran(tests: list[str], root: Path) -> tuple[int, str]:
    """Run ``tests`` in ``root``; return pytest's exit status and output. Tests that hang fail."""
    environment = os.environ | {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        found = subprocess.run(
            [*PYTEST, *tests], cwd=root, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
    except subprocess.TimeoutExpired:
        return TESTS_FAILED, f"FAILED {tests[0]} (ran longer than {PATIENCE} s)"
    return found.returncode, found.stdout + found.stderr


def report(todo: list[Mutation], root: Path, jobs: int, say: Callable[[str], None] = print) -> bool:
    """Try all of ``todo`` in ``jobs`` copies of ``root``; say each result; return whether all is well."""
    if stale := [f"error     {m.file}: {m.breaks}: {problem}" for m in todo if (problem := m.problem(root))]:
        say("\n".join(stale))
        return False
    with tempfile.TemporaryDirectory(prefix="altgrad-mutations-") as scratch:
        copies: queue.Queue[Path] = queue.Queue()
        for i in range(jobs):
            copies.put(Path(shutil.copytree(root, Path(scratch) / str(i), ignore=LEFT_OUT, symlinks=True)))

        def one(mutation: Mutation) -> tuple[Mutation, str, str, float]:
            copy, began = copies.get(), time.perf_counter()
            try:
                return mutation, *tried(mutation, copy), time.perf_counter() - began
            finally:
                copies.put(copy)

        with ThreadPoolExecutor(jobs) as pool:
            results = list(_said(pool.map(one, todo), say))
    counts = {name: results.count(name) for name in dict.fromkeys(results)}
    say(", ".join(f"{count} {name}" for name, count in counts.items()))
    return not {"survived", "error"} & set(results)


def _said(results: Iterator[tuple[Mutation, str, str, float]], say: Callable[[str], None]) -> Iterator[str]:
    for mutation, found, more, seconds in results:
        result = "explained" if found == "survived" and more else found
        say(f"{result:9} {mutation.file}: {mutation.breaks} [{seconds:.0f} s]{f': {more}' if more else ''}")
        yield result


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("-j", type=int, default=os.cpu_count(), help="mutations tried at a time")
    parser.add_argument("words", nargs="*", help="try only entries whose file or description has one of these")
    chosen = parser.parse_args(arguments)
    todo = [m for m in mutations() if not chosen.words or any(w in f"{m.file}: {m.breaks}" for w in chosen.words)]
    return 0 if todo and report(todo, ROOT, chosen.j, lambda line: print(line, flush=True)) else 1


if __name__ == "__main__":
    sys.exit(main())
