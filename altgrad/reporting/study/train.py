"""Train what the study's table of runs lacks: each experiment in a checkout of its own, by the pipeline as it is.

The checkout is of HEAD, so that a row names the code that trained it, and shares DVC's cache with the project: a run
that was trained before is not trained again. params.yaml and the report of the project are not touched.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd

from altgrad.common.errors import UserError
from altgrad.common.files import read_json, write_text
from altgrad.config import Resolver, load_params
from altgrad.config.models import KEPT, WEIGHTS
from altgrad.config.tasks import ON_TEST
from altgrad.reporting.study.questions import Question
from altgrad.reporting.study.registered import git
from altgrad.reporting.study.runs import AFTER, COLUMNS, KEY, MEASURED, RunTable

TEXTS = Path("data/corpus")
TUNES = "tuning"  # prefix of the names of experiments that choose learning rates


def train_missing(question: Question, runs: RunTable, study: Path, jobs: int | None) -> RunTable:
    """Train the experiments of a question that lack rows; write the rows into the tables, and return the tables.

    Raises :class:`UserError` if the code has changes that are not committed, or if training fails.
    """
    root = study.parents[1]
    params = {name: question.params(name, root / "params.yaml") for name in question.runs}
    besides = {name: question.besides(name) for name in question.runs}
    # The weights of an experiment's one run may be kept, in data/weights, for others to start from.
    weights = {name: root / KEPT / name / WEIGHTS for name in question.runs if besides[name].get("keep")}
    seeds = {name: _lacking(params[name], name, runs, study) for name in question.runs}
    if any(seeds.values()):
        if git(root, "status", "--porcelain", "altgrad", "stages", "dvc.yaml", "params.yaml"):
            raise UserError(
                "the code or params.yaml differs from the last commit, which new rows of the study would name: commit"
            )
        seeds |= {name: params[name]["grid"]["seeds"] for name, path in weights.items() if not path.is_file()}
    for name in filter(seeds.get, question.runs):
        print(f"{question.name}: training {name}", flush=True)
        folder = _checkout(root, name)
        grid = params[name]["grid"] | {"seeds": seeds[name]}
        write_text(folder / "params.yaml", json.dumps(params[name] | {"grid": grid}))  # JSON is YAML
        for ignored in (KEPT, TEXTS):  # by git
            if (root / ignored).is_dir():
                shutil.copytree(root / ignored, folder / ignored, dirs_exist_ok=True)
        for command in besides[name].get("before", []):
            _run(command.split(), folder, name)
        _run(["-m", "altgrad.execution", *(["--jobs", str(jobs)] if jobs else [])], folder, name)
        after = _after(folder, name, besides[name].get("after", {}))
        runs = RunTable(_replaced(runs.table, _rows(folder, name), KEY), _replaced(runs.after, after, AFTER[:-1]))
        runs.write(study / "results")
        if name in weights:
            (trained,) = (folder / "data/runs").glob(f"*/{WEIGHTS}")
            weights[name].parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(trained, weights[name])
        git(root, "worktree", "remove", "--force", str(folder.resolve()))
    return runs


def _lacking(params: dict[str, Any], name: str, runs: RunTable, study: Path) -> list[int]:
    """Return the seeds of the experiment's grid of which a run has no row.

    Raises :class:`UserError` for settings that are refused.
    """
    place = study / "results" / f".{name}.yaml"
    write_text(place, json.dumps(params))
    try:
        # Weights to start from may not have been trained yet; adapters need them. No key of a row names either.
        settings = load_params(place).model_copy(update={"start": None, "lora": None})
        if settings.grid.models:
            raise UserError(f"{name}: grid.models: a row of the study names no model; write an experiment for each")
        cells = list(Resolver(settings, f"{name} (with params.yaml)").cells())
    finally:
        place.unlink()
    there = set(runs.of_experiment(name)[KEY].itertuples(index=False, name=None))
    wanted = {(name, cell.format, cell.optimizer, cell.seed, float(cell.lr_scale)): cell.seed for cell in cells}
    lacking = {seed for key, seed in wanted.items() if key not in there}
    return [seed for seed in settings.grid.seeds if seed in lacking]


def _checkout(root: Path, name: str) -> Path:
    """Return a checkout of HEAD that shares the cache of ``root``; one left by an interrupted command is used again."""
    folder = root / "scratch/study" / name
    if (folder / ".git").exists() and git(folder, "rev-parse", "HEAD") == git(root, "rev-parse", "HEAD"):
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    git(root, "worktree", "prune")
    git(root, "worktree", "add", "--quiet", "--detach", str(folder.resolve()))
    write_text(folder / ".dvc/config.local", f"[cache]\n    dir = {root.resolve() / '.dvc/cache'}\n")
    return folder


def _run(arguments: list[str], folder: Path, name: str) -> None:
    """Run Python with ``arguments`` in the checkout ``folder``. Raises :class:`UserError` if it fails."""
    here = folder.resolve()  # where the command runs
    variables = {"PYTHONPATH": str(here), "ALTGRAD_COMPILE_CACHE": str(here.parents[1] / "compiled")}
    # In its own session the command gets one signal to stop, from this process, and saves checkpoints.
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
    """Return a row (`COLUMNS`) per run of the checkout ``folder``."""
    head = git(folder, "rev-parse", "HEAD")
    rows = []
    for path in sorted((folder / "data/runs").glob("*/metrics.json")):
        metrics, timing = read_json(path), read_json(path.with_name("timing.json"))
        ended = metrics["outcome"] == "completed"
        rows.append({
            "experiment": name, **{key: metrics[key] for key in KEY[1:]},
            "val_loss": round(metrics["val_loss"], 6) if ended else None,
            "status": "ok" if ended else metrics["outcome"],
            **{key: metrics[key] for key in ("steps", "tokens", "parameters")},
            "machine": f"{timing['machine'].rsplit(',', 1)[0]} {timing['compute']}",
            "torch": timing["versions"]["torch"], "commit": head[:10],
            "purpose": "tune" if name.startswith(TUNES) else "test",
        })  # fmt: skip
    return pd.DataFrame(rows, columns=COLUMNS)


def _after(folder: Path, name: str, asked: dict[str, list[str]]) -> pd.DataFrame:
    """Return a row (`AFTER`) per number measured after training: a classifier's metrics, losses as ``asked``."""
    runs = {path.parent.name: read_json(path) for path in sorted((folder / "data/runs").glob("*/metrics.json"))}
    rows = [
        (name, *(metrics[key] for key in KEY[1:]), measure, round(value, 6))
        for metrics in runs.values() for measure in MEASURED
        if (value := metrics.get(ON_TEST[measure])) is not None
    ]  # fmt: skip
    for what, formats in asked.items():
        options = ["--weights-only", "--formats", *formats] if what == "ptq" else []
        table = f"{what}.csv"
        _run(["-m", "altgrad.diagnostics", what, *runs, *options, "--out", table], folder, name)
        for row in pd.read_csv(folder / table).to_dict("records"):
            if row["format"] != "as trained":
                fmt, optimizer, seed, rate = row["cell"].split("-")
                measure = f"pruned-{100 * row['share']:.0f}" if what == "prune" else f"ptq-{row['format']}"
                rows.append((name, fmt, optimizer, int(seed), float(rate), measure, row["after"]))
    return pd.DataFrame(rows, columns=AFTER)


def _replaced(old: pd.DataFrame, new: pd.DataFrame, key: list[str]) -> pd.DataFrame:
    """Return a table with new rows in place of those with the same key."""
    both = pd.concat([old, new.astype(old.dtypes[list(new)].to_dict())]) if len(new) else old
    return both.drop_duplicates(key, keep="last")
