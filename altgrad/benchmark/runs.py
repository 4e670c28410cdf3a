"""Measures whole runs: how many finish in an hour with several at a time, and the seconds of a run's parts.

The runs belong to a temporary project: params.yaml with a small grid, on random tokens. DVC is not used, since a rented
machine lacks it.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import chdir, closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from altgrad.common.files import read_yaml, write_json, write_text
from altgrad.config import Resolver, write_grid
from altgrad.config.models import Model
from altgrad.config.params import load_params
from altgrad.execution import LOGS, Task
from altgrad.execution.local import LocalPool
from altgrad.model import GPT, GPTConfig

TOKENS = {"train": 2_000_000, "val": 300_000}
ROUNDS = 4  # runs per worker; the first one loads libraries and graphs and is not timed
FORMAT = "E4M3"
POLL_S = 0.05


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
    """Return the seconds of the parts of a run of ``model`` in `FORMAT`, as `altgrad.benchmark.probe` measures them.

    The result also has ``parameters``, ``sizes``, ``batch`` and ``tokens_per_s``. ``vocabulary`` is the vocabulary's
    size; ``train`` replaces settings of the section ``train`` in params.yaml.
    """
    grid = {"formats": [FORMAT], "optimizers": ["adamw"], "seeds": [0], "baseline": FORMAT}
    with project(root, model, grid, train, vocabulary) as (key,):
        command = [sys.executable, "-m", "altgrad.benchmark.probe", key]
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
    params["grid"] |= {"lr_scales": [1]} | grid
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
