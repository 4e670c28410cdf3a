"""The runs of ``grid.yaml``, and a digest of each file that a run and its diagnosis write."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file

from altgrad.common.files import read_json, read_yaml, write_text
from altgrad.config import Cell, Resolver
from altgrad.config.params import Params, validated
from altgrad.config.schema import Diagnose
from altgrad.diagnostics import diagnose_cell
from altgrad.model import GPT, GPTConfig
from altgrad.numerics import loops
from altgrad.training import train_cell
from tests.training.conftest import VOCABULARY, interruption, make_documents, make_tokens

GRID = Path(__file__).with_name("grid.yaml")
#: What is no result: when a run took place, and the digest of its cell's file.
NO_FILES, NO_VALUES = {"timing.json"}, {"cell_sha256"}
LOSS = "val_loss"  # among the digests, for whoever reads a difference

Results = dict[str, str | float | None]


class Run(NamedTuple):
    """One run: ``name`` is its grid's name and its cell's key.

    A signal stops it after update ``stop``, if any; without ``loops`` it computes by tensor operations alone.
    """

    name: str
    cell: Cell
    task: str
    diagnose: Diagnose
    stop: int | None
    loops: bool


def make_inputs(root: Path) -> None:
    """Write what the runs read to ``root``: tokens by task, and weights to start from."""
    make_tokens(root / "language")
    (root / "documents").mkdir()
    with redirect_stderr(io.StringIO()):  # progress
        make_documents(root / "documents").rename(root / "classify")
    torch.manual_seed(1)
    model = GPT(GPTConfig(VOCABULARY, layers=2, width=32, heads=2, context=32))
    (root / "weights").mkdir()
    save_file(dict(model.named_parameters()), root / "weights/model.safetensors")


def runs(root: Path, *patterns: str) -> Iterator[Run]:
    """Yield the runs whose name matches one of ``patterns``, in the order of the file; ``root`` is of `make_inputs`."""
    content = read_yaml(GRID)
    for grid, changes in content["grids"].items():
        settings = dict(content["settings"])
        for section, change in changes.items():
            settings[section] = {**settings.get(section, {}), **change} if isinstance(change, dict) else change
        stop, loops = settings.pop("stop", None), settings.pop("loops", True)
        if "start" in settings:
            settings["start"] = str(root / settings["start"])
        where = f"{GRID.name}: {grid}"
        params = validated(Params, settings, where)
        for cell in Resolver(params, where).cells():
            name = f"{grid}/{cell.key}"
            if any(fnmatchcase(name, pattern) for pattern in patterns):
                yield Run(name, cell, params.task, params.diagnose, stop, loops)


def results(run: Run, root: Path) -> Results:
    """Train and diagnose ``run``; return the digest of each file by its name, and the validation loss beside them."""
    said, out, tokens = io.StringIO(), root / "runs" / run.name, root / run.task
    scratch, cell = out.parent / f"{out.name}.scratch", out.parent / f"{out.name}.json"
    try:
        with redirect_stdout(said), redirect_stderr(said), pytest.MonkeyPatch.context() as patch:
            if not run.loops:
                patch.setattr(loops, "load", lambda *_, **__: "left out")
            if run.stop is not None:
                with interruption(patch, run.stop):
                    train_cell(run.cell, tokens, out, scratch)
            train_cell(run.cell, tokens, out, scratch)
            write_text(cell, run.cell.to_json())
            diagnosis = [out / f"diagnosis.{suffix}" for suffix in ("json", "parquet")]
            diagnose_cell(cell, out, *diagnosis, tokens, run.diagnose)
    except BaseException:
        print(f"{run.name}:\n{said.getvalue()}")
        raise
    found = {path.name: digest(path) for path in sorted(out.iterdir()) if path.name not in NO_FILES}
    return {LOSS: read_json(out / "metrics.json")[LOSS], **found}


def digest(path: Path) -> str:
    """Return 16 digits of the SHA-256 of a file's values, whichever version of a library wrote it."""
    if path.suffix == ".json":
        values = {name: value for name, value in read_json(path).items() if name not in NO_VALUES}
        content = json.dumps(values, sort_keys=True).encode()
    elif path.suffix == ".parquet":
        frame = pd.read_parquet(path)
        content = repr([(name, str(column.dtype), column.tolist()) for name, column in frame.items()]).encode()
    elif path.suffix == ".safetensors":
        content = b"".join(
            f"{name} {t.dtype} {list(t.shape)}".encode() + t.reshape(-1).view(torch.uint8).numpy().tobytes()
            for name, t in sorted(load_file(path).items())
        )
    else:
        content = path.read_bytes()
    return hashlib.sha256(content).hexdigest()[:16]
