"""Measures whole runs: how many finish in an hour with several at a time, and the seconds of a run's parts.

The runs of the benchmark belong to a temporary project: params.yaml with a small grid, on random tokens. DVC is not
used, since a rented machine lacks it. ``python -m altgrad.benchmark.runs KEY ...`` times the parts of a project's runs,
from a few steps of each; `altgrad.execution` calls it for estimates.
"""

import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import chdir, closing, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch

from altgrad.common.errors import run_stage
from altgrad.common.files import read_json, read_yaml, write_json, write_text
from altgrad.common.fingerprint import discard_finished
from altgrad.config import Cell, Resolver, write_grid
from altgrad.config.models import Model
from altgrad.config.params import load_params
from altgrad.execution import LOGS, Task
from altgrad.execution.local import LocalPool
from altgrad.model import GPT, GPTConfig

TOKENS = {"train": 2_000_000, "val": 300_000}
ROUNDS = 4  # runs per worker; the first one loads libraries and graphs and is not timed
FORMAT = "E4M3"
POLL_S = 0.05
STEPS, FEWEST = 24, 4
ENOUGH = 3.0  # seconds that the steps of the second run should take
LONGEST = 30.0  # seconds after which no further kind of cell is begun
NAME = f"probe.{os.getpid()}"  # key of the cell that is trained: no grid and no other probe uses it


def at_once(root: Path, model: str, jobs: int, train: dict[str, Any]) -> dict[str, Any]:
    """Measure how many runs of ``model`` are trained and diagnosed in an hour, ``jobs`` at a time: ``runs_per_hour``.

    A round has ``jobs`` runs, and the first round is not counted. ``runs_per_hour_range`` is from the slowest round to
    the fastest. ``first_s`` is the time until the first run ended. ``train`` replaces settings of the section ``train``
    in params.yaml.
    """
    grid = {"formats": [FORMAT], "optimizers": ["adamw"], "seeds": list(range(ROUNDS * jobs)), "baseline": FORMAT}
    with project(root, model, grid, train) as keys, closing(LocalPool(jobs)) as pool:
        LOGS.mkdir(parents=True, exist_ok=True)
        waiting = [Task("train", key, (), 1) for key in keys]
        pool.submit(waiting[:jobs])
        del waiting[:jobs]
        began = time.perf_counter()
        ended: list[float] = []
        while len(ended) < len(keys):
            time.sleep(POLL_S)
            for task, status in pool.poll().ended:
                if status:
                    raise RuntimeError(f"{task.name}: {task.log.read_text(errors='replace').strip().splitlines()[-1]}")
                if task.stage == "train":
                    pool.submit([Task("diagnose", task.key, (), 1)])
                else:
                    ended.append(time.perf_counter() - began)
                    pool.submit(waiting[:1])
                    del waiting[:1]
    rounds = ended[jobs - 1 :: jobs]  # the time at which each round ended
    rates = [3600 * jobs / (b - a) for a, b in itertools.pairwise(rounds)]
    overall = 3600 * jobs * len(rates) / (rounds[-1] - rounds[0])
    return {
        "name": f"{jobs} at a time", "model": model, "jobs": jobs, "runs": len(ended), "took_s": round(ended[-1], 1),
        "first_s": round(ended[0], 1), "runs_per_hour": round(overall),
        "runs_per_hour_range": [round(min(rates)), round(max(rates))],
    }  # fmt: skip


def parts_of(root: Path, model: str, vocabulary: int, train: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds of the parts of a run of ``model`` in `FORMAT`, as `parts_measured` finds them.

    The result also has ``parameters``, ``sizes``, ``batch`` and ``tokens_per_s``. ``vocabulary`` is the vocabulary's
    size; ``train`` replaces settings of the section ``train`` in params.yaml.
    """
    grid = {"formats": [FORMAT], "optimizers": ["adamw"], "seeds": [0], "baseline": FORMAT}
    with project(root, model, grid, train, vocabulary) as (key,):
        command = [sys.executable, "-m", "altgrad.benchmark.runs", key]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr.strip().splitlines()[-1])
        found = json.loads(done.stdout.strip().splitlines()[-1])
        settings = load_params()
    preset = settings.models[model]
    assert isinstance(preset, Model)
    sizes, batch = preset.sizes, settings.train.batch * settings.train.grad_accumulation
    with torch.device("meta"):
        parameters = sum(p.numel() for p in GPT(GPTConfig(vocab_size=vocabulary, **sizes)).parameters())
    seconds = {name: round(value, 5) for name, value in found.items() if name.endswith("_s")}
    return {
        "name": model, "format": FORMAT, "vocabulary": vocabulary, "parameters": parameters, "sizes": sizes,
        "batch": batch, "tokens_per_s": round(batch * sizes["context"] / found["step_s"]), "steps": found["steps"],
        **seconds,
    }  # fmt: skip


@contextmanager
def project(
    root: Path, model: str, grid: dict[str, Any], train: dict[str, Any], vocabulary: int | None = None
) -> Iterator[list[str]]:
    """Work in a temporary project with this ``grid``; yield its cell keys. It shares ``root``'s compiled graphs."""
    params = read_yaml(root / "params.yaml")
    params["model"] = model
    params["grid"] |= {"lr_scales": [1], "models": []} | grid
    params["train"] |= train
    params["tokenizer"]["vocab_size"] = vocabulary = vocabulary or params["tokenizer"]["vocab_size"]
    before = {name: os.environ.get(name) for name in ("ALTGRAD_COMPILE_CACHE", "PYTHONPATH")}
    cache = before["ALTGRAD_COMPILE_CACHE"] or str(root / "scratch/compiled")
    paths = [str(root), *filter(None, [before["PYTHONPATH"]])]
    with tempfile.TemporaryDirectory(prefix="altgrad-runs-") as folder, chdir(folder):
        os.environ |= {"ALTGRAD_COMPILE_CACHE": cache, "PYTHONPATH": os.pathsep.join(paths)}
        try:
            write_text(Path("params.yaml"), json.dumps(params))  # JSON is YAML
            make_tokens(Path("data/tokens"), vocabulary)
            resolver = Resolver(load_params())
            cells = list(resolver.cells())
            write_grid(cells, resolver.selected(), Path("data/grid"))
            yield [cell.key for cell in cells]
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})


def make_tokens(folder: Path, vocabulary: int) -> None:
    """Write token files with random ids, small ids more often, as in real text, and their meta.json."""
    folder.mkdir(parents=True)
    chance = np.random.default_rng(0)
    for split, count in TOKENS.items():
        (vocabulary * chance.random(count) ** 4).astype("<u2").tofile(folder / f"{split}.bin")
    splits = {split: {"documents": 1, "characters": count, "tokens": count} for split, count in TOKENS.items()}
    meta = {"corpus": "made up", "tokenizer": "none", "vocab_size": vocabulary, "dtype": "uint16", "splits": splits}
    write_json(folder / "meta.json", meta)


def parts_measured(key: str, root: Path, settings: Any, *, eager: bool = False) -> dict[str, float]:
    """Train the cell ``key`` of the project ``root`` twice with few steps, diagnose it, and return its seconds by part.

    The first run has `FEWEST` steps; the second has as many as fit into `ENOUGH` seconds, at most `STEPS`. ``first_s``
    is the second run's time if it were the first of its process, compiling included. The other times are of the second
    run: ``step_s`` (median) and ``step_p90_s`` per step, ``evaluate_s`` per evaluation, ``observe_s`` per observation
    by the monitors, ``diagnose_s`` of the diagnosis, and ``setup_s`` of the rest of training. ``steps`` is its length.

    ``settings`` is the section ``diagnose`` of params.yaml. With ``eager`` nothing is compiled.
    """
    from altgrad.diagnostics import diagnose_cell
    from altgrad.training import train_cell

    whole = Cell.read(root / "data/grid" / f"{key}.json")
    compiles = "on" if whole.train.compiles and not eager else "off"  # as in a whole run: auto depends on the steps
    tokens, steps, took = root / "data/tokens", FEWEST, []
    with tempfile.TemporaryDirectory(prefix="altgrad-probe-") as folder:
        place = Path(folder)
        run = place / "run"
        for _ in range(2):
            short = {"steps": steps, "eval_every": steps, "checkpoint_every": steps, "compile": compiles}
            looks = {"every": steps // 2, "intervals": {}}
            cell = whole.model_dump(mode="json")
            cell |= {"key": NAME, "train": cell["train"] | short, "monitor": cell["monitor"] | looks}
            write_text(place / "cell.json", Cell.model_validate(cell).to_json())
            shutil.rmtree(run, ignore_errors=True)
            began = time.perf_counter()
            train_cell(Cell.read(place / "cell.json"), tokens, run, root)
            took.append(time.perf_counter() - began)
            discard_finished(root, NAME)
            timing = read_json(run / "timing.json")
            measured = steps
            steps = max(FEWEST, min(STEPS, int(ENOUGH / (timing["step_ms_median"] / 1e3))))
        diagnosing: list[float] = []
        while len(diagnosing) < 2 and sum(diagnosing) < ENOUGH:  # the first loads what the others have
            began = time.perf_counter()
            diagnose_cell(place / "cell.json", run, place / "diagnosis.json", place / "rows.parquet", tokens, settings)
            diagnosing.append(time.perf_counter() - began)
    parts = {
        "step_s": timing["step_ms_median"] / 1e3, "evaluate_s": timing["evaluate_s"] / 2,
        "observe_s": timing["observe_s"] / 3,
    }  # fmt: skip
    rest = took[1] - measured * parts["step_s"] - timing["evaluate_s"] - timing["observe_s"]
    return {
        "steps": measured, "first_s": took[0] + (measured - FEWEST) * parts["step_s"], **parts,
        "step_p90_s": timing["step_ms_p90"] / 1e3, "setup_s": max(0.0, rest), "diagnose_s": min(diagnosing),
    }  # fmt: skip


def main(arguments: list[str]) -> None:
    """Print a line of JSON per cell key in ``arguments``, none after `LONGEST` s. ``--eager``: compile nothing."""
    settings, began = load_params().diagnose, time.perf_counter()
    keys = [argument for argument in arguments if argument != "--eager"]
    for key in keys:
        if key != keys[0] and time.perf_counter() - began > LONGEST:
            return
        with redirect_stdout(sys.stderr):
            found = parts_measured(key, Path().resolve(), settings, eager=len(keys) < len(arguments))
        print(json.dumps({"key": key} | found), flush=True)


if __name__ == "__main__":
    run_stage(main)
