"""Train what the study's table of runs lacks: each experiment in a checkout of its own, by the pipeline as it is.

The checkout is of HEAD, so that a row names the code that trained it, and shares DVC's cache with the project: a run
that was trained before is not trained again. params.yaml and the report of the project are not touched.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from altgrad.common.errors import UserError
from altgrad.common.files import read_json, write_text
from altgrad.config import Resolver, load_params
from altgrad.config.models import KEPT, WEIGHTS
from altgrad.config.tasks import ON_TEST
from altgrad.reporting.study.questions import Question, of_experiment, params_of
from altgrad.reporting.study.registered import git
from altgrad.reporting.study.runs import AFTER, COLUMNS, KEY, MEASURED, Runs

TEXTS = Path("data/corpus")
TUNES = "tuning"  # how the name of an experiment begins that chooses learning rates


def train_missing(question: Question, runs: Runs, study: Path, jobs: int | None) -> Runs:
    """Train the experiments of a question of which rows are absent, write them into the tables, and return those.

    Raises :class:`UserError` where git has no commit of the code as it is, or where training fails.
    """
    root = study.parents[1]
    params = root / "params.yaml"
    besides = {name: of_experiment(question, name) for name in question.runs}
    # Weights of an experiment's one run may be kept, in data/weights, for others to start from.
    weights = {name: root / KEPT / name / WEIGHTS for name, own in besides.items() if own.get("keep")}
    missing = [name for name in question.runs if _lacks(params_of(question, name, params), name, runs, study)]
    if missing:
        if git(root, "status", "--porcelain", "altgrad", "stages", "dvc.yaml", "params.yaml"):
            raise UserError(
                "the code or params.yaml differs from the last commit, which new rows of the study would name: commit"
            )
        gone = [name for name, path in weights.items() if not path.is_file()]
        missing = [name for name in question.runs if name in (*missing, *gone)]
    for name in missing:
        print(f"{question.name}: training {name}", flush=True)
        folder = _checkout(root, name)
        write_text(folder / "params.yaml", json.dumps(params_of(question, name, params)))  # JSON is YAML
        for ignored in (KEPT, TEXTS):  # by git
            if (root / ignored).is_dir():
                shutil.copytree(root / ignored, folder / ignored, dirs_exist_ok=True)
        for command in besides[name].get("before", []):
            _run(command.split(), folder, name)
        _run(["-m", "altgrad.execution", *(["--jobs", str(jobs)] if jobs else [])], folder, name)
        runs = _with_rows(runs, _rows(folder, name), _after(folder, name, besides[name].get("after", {})))
        runs.write(study / "results")
        if name in weights:
            (own,) = (folder / "data/runs").glob(f"*/{WEIGHTS}")
            weights[name].parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(own, weights[name])
        git(root, "worktree", "remove", "--force", str(folder.resolve()))
    return runs


def _lacks(params: dict[str, Any], name: str, runs: Runs, study: Path) -> bool:
    """Whether a run of the experiment's grid has no row. Raises :class:`UserError` for settings that are refused."""
    place = study / "results" / f".{name}.yaml"
    write_text(place, json.dumps(params))
    try:
        # Weights to start from may not have been trained yet; adapters need them, and are of each run or none.
        settled = load_params(place).model_copy(update={"start": None, "lora": None})
        cells = list(Resolver(settled, f"{name} (with params.yaml)").cells())
    finally:
        place.unlink()
    wanted = {(name, cell.format, cell.optimizer, cell.seed, float(cell.lr_scale)) for cell in cells}
    have = runs.of_experiment(name)[KEY].itertuples(index=False, name=None)
    return bool(wanted - set(have))


def _checkout(root: Path, name: str) -> Path:
    """Return a checkout of HEAD that shares the cache of ``root``: the one that an interrupted command left, if any."""
    folder = root / "scratch/study" / name
    if (folder / ".git").exists() and git(folder, "rev-parse", "HEAD") == git(root, "rev-parse", "HEAD"):
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    git(root, "worktree", "prune")
    git(root, "worktree", "add", "--quiet", "--detach", str(folder.resolve()))
    write_text(folder / ".dvc/config.local", f"[cache]\n    dir = {root.resolve() / '.dvc/cache'}\n")
    return folder


def _run(arguments: list[str], folder: Path, name: str) -> None:
    here = folder.resolve()  # which is where the command runs
    variables = {"PYTHONPATH": str(here), "ALTGRAD_COMPILE_CACHE": str(here.parents[1] / "compiled")}
    # In a session of its own it is told once to stop, by this process, whoever stops that; and it saves checkpoints.
    command = [sys.executable, *arguments]
    with subprocess.Popen(command, cwd=folder, env=os.environ | variables, start_new_session=True) as process:
        try:
            status = process.wait()
        except KeyboardInterrupt:
            process.terminate()
            process.wait()
            raise
    if status:
        raise UserError(f"{name}: {' '.join(arguments)} ended with status {status}; what it said stands above")


def _rows(folder: Path, name: str) -> pd.DataFrame:
    """Return a row per run of the checkout."""
    head = git(folder, "rev-parse", "HEAD")
    rows = []
    for path in sorted((folder / "data/runs").glob("*/metrics.json")):
        found, timing = read_json(path), read_json(path.with_name("timing.json"))
        ended = found["outcome"] == "completed"
        rows.append({
            "experiment": name, **{key: found[key] for key in KEY[1:]},
            "val_loss": round(found["val_loss"], 6) if ended else None,
            "status": "ok" if ended else found["outcome"],
            **{key: found[key] for key in ("steps", "tokens", "parameters")},
            "machine": f"{timing['machine'].rsplit(',', 1)[0]} {timing['compute']}",
            "torch": timing["versions"]["torch"], "commit": head[:10],
            "purpose": "tune" if name.startswith(TUNES) else "test",
        })  # fmt: skip
    return pd.DataFrame(rows, columns=COLUMNS)


def _after(folder: Path, name: str, asked: dict[str, list[str]]) -> pd.DataFrame:
    """Return what was measured after training: a classifier's metrics; weights set to zero, or in other formats."""
    ended = {path.parent.name: read_json(path) for path in sorted((folder / "data/runs").glob("*/metrics.json"))}
    found = [
        (name, *(metrics[key] for key in KEY[1:]), measure, round(value, 6))
        for metrics in ended.values() for measure in MEASURED
        if (value := metrics.get(ON_TEST[measure])) is not None
    ]  # fmt: skip
    for what, formats in asked.items():
        options = ["--weights-only", "--formats", *formats] if what == "ptq" else []
        table = f"{what}.csv"
        _run(["-m", "altgrad.diagnostics", what, *ended, *options, "--out", table], folder, name)
        for row in pd.read_csv(folder / table).to_dict("records"):
            if row["format"] != "as trained":
                fmt, optimizer, seed, rate = row["cell"].split("-")
                measure = f"pruned-{100 * row['share']:.0f}" if what == "prune" else f"ptq-{row['format']}"
                found.append((name, fmt, optimizer, int(seed), float(rate), measure, row["after"]))
    return pd.DataFrame(found, columns=AFTER)


def _with_rows(runs: Runs, rows: pd.DataFrame, after: pd.DataFrame) -> Runs:
    """Return the tables with new rows in place of those of the same runs."""

    def joined(old: pd.DataFrame, new: pd.DataFrame, key: Iterable[str]) -> pd.DataFrame:
        both = pd.concat([old, new.astype(old.dtypes[list(new)].to_dict())]) if len(new) else old
        return both.drop_duplicates(list(key), keep="last")

    return Runs(joined(runs.table, rows, KEY), joined(runs.after, after, AFTER[:-1]))
