"""A project whose cells train before one's eyes: the files of finished runs, played back as training writes them."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from altgrad.common.files import replacing
from tests.reporting.synthetic_project import write_project

PROJECT = Path(__file__).parents[2]


@contextmanager
def started(folder: Path, *arguments: str) -> Iterator[str]:
    """Run the command in a folder with params.yaml, as its user does; give the page's address, and end it quietly."""
    process = subprocess.Popen(
        [sys.executable, "-m", "altgrad.watch", *arguments], cwd=folder, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(PROJECT)},
    )  # fmt: skip
    try:
        found = re.search(r"http://127\.0\.0\.1:\d+/", process.stdout.readline())
        yield found[0] if found else ""
    finally:
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=20)
    assert error == "" and process.returncode == 0


class Play:
    """The project in ``root``, whose cells train when they are told to; what they will write is in another folder."""

    def __init__(self, root: Path, whole: Path, **settings: Any) -> None:
        self.root, self.whole = root, whole
        self.keys = write_project(whole, **settings)
        for part in ("grid", "tokens"):
            shutil.copytree(whole / "data" / part, root / "data" / part)
        long_ago = 1e9
        for file in (root / "data/grid").iterdir():
            os.utime(file, (long_ago, long_ago))

    def history(self, key: str) -> list[list[Any]]:
        """Return all rows that a cell will log, as training writes them."""
        frame = pd.read_csv(self.whole / "data/runs" / key / "history.csv", dtype="float64").astype(object)
        return [[int(row[0]), int(row[1]), *row[2:]] for row in frame.where(frame.notna(), None).to_numpy().tolist()]

    def log(self, key: str) -> Path:
        """Return the file that a cell's rows go to while it trains."""
        return self.root / "scratch" / f"{key}-0123456789abcdef" / "history.jsonl"

    def train(self, key: str, to: int) -> None:
        """Have a cell log its rows up to step ``to``, after those that it has logged."""
        log = self.log(key)
        log.parent.mkdir(parents=True, exist_ok=True)
        done = len(log.read_text().splitlines()) if log.exists() else 0
        with open(log, "a", encoding="utf-8") as file:
            for row in self.history(key)[done:]:
                if row[0] <= to:
                    file.write(json.dumps(row) + "\n")

    def resume(self, key: str, checkpoint: int) -> None:
        """Have a cell that was stopped begin again after ``checkpoint``, as `records.RowLog` does."""
        kept = [row for row in self.history(key) if row[0] <= checkpoint]
        with replacing(self.log(key)) as temporary:
            temporary.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")

    def finish(self, key: str) -> None:
        """Have a cell write its outputs."""
        shutil.copytree(self.whole / "data/runs" / key, self.root / "data/runs" / key)

    def diagnose(self, key: str) -> None:
        """Have a cell diagnosed."""
        (self.root / "data/diag").mkdir(exist_ok=True)
        for end in ("json", "parquet"):
            shutil.copy(self.whole / "data/diag" / f"{key}.{end}", self.root / "data/diag")


@pytest.fixture
def play(tmp_path: Path):
    """Return what makes a `Play` of a grid with the given settings of `write_project`."""

    def make(**settings: Any) -> Play:
        small = {"formats": ["bf16", "E4M3"], "steps": 60, "blocks": 1}
        return Play(tmp_path / "project", tmp_path / "whole", **small | settings)

    return make
