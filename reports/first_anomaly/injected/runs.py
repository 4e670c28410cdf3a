"""The runs: a transformer of two blocks that learns a pattern in half a second, healthy or with a fault.

All are of one entry and one arm, E4M3 under AdamW, and differ in their seed and their fault.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tqdm import tqdm

from altgrad.common.files import read_json, write_json
from altgrad.config import Cell
from altgrad.formats import get_format
from altgrad.training import train_cell
from reports.first_anomaly.injected.faults import BAD_FORMAT, HEALTHY, KINDS, Fault, drawn, injected, injected_in

VOCABULARY = 64
STEPS, EVERY = 160, 10  # of a run, and between its instrumented passes and logged losses
BLOCKS = 2
LAYERS = [f"blocks.{i}.{name}" for i in range(BLOCKS) for name in ("attn.qkv", "attn.out", "mlp.up", "mlp.down")]
TENSORS = [(layer, role) for layer in LAYERS for role in ("input", "weight", "grad")]
TENSORS += [("head", "weight"), ("head", "grad")]  # whose input is not quantized
FIRST_INJECTED = 1000  # the seeds of runs with a fault start here, so no healthy run is their twin


@dataclasses.dataclass(frozen=True)
class Run:
    """A run: its seed, which also tells its half, its fault, and the folder that training wrote."""

    seed: int
    fault: Fault
    folder: Path


def cell_of(seed: int, fault: Fault) -> Cell:
    """Return the cell of ``seed``, with its fault if that is one of settings."""
    cell = Cell.model_validate({
        "key": f"{fault.kind}-{seed}", "format": "E4M3", "optimizer": "adamw", "seed": seed, "lr_scale": 1,
        "model": {"layers": BLOCKS, "width": 32, "heads": 2, "context": 32},
        "rules": [{"layers": "*", "weight": "E4M3", "input": "E4M3", "grad": "E5M2"},
                  {"layers": "head", "weight": "E4M3", "input": None, "grad": "E5M2"}],
        "formats": {name: dataclasses.asdict(get_format(name)) for name in ("E4M3", "E5M2")},
        "arm": {"lr": 1e-2, "plain_lr": 1e-2},
        "train": {
            "steps": STEPS, "batch": 8, "log_every": EVERY, "eval_every": 4 * EVERY, "eval_sequences": 16,
            "checkpoint_every": STEPS, "compile": "off", "device": "cpu", "divergence": {"spike": 2.0, "window": 10},
        },
        "monitor": {"every": EVERY, "probes": 1},
    })  # fmt: skip
    return injected_in(cell, fault, dataclasses.asdict(get_format(BAD_FORMAT)))


def trained(folder: Path, healthy: int, each: int) -> Iterator[Run]:
    """Yield ``healthy`` runs without and ``each`` with a fault of every kind; what ``folder`` has is not trained again.

    The fault of a seed is always the same.
    """
    tokens = folder / "tokens"
    if not (tokens / "meta.json").is_file():
        write_tokens(tokens)
    faults = [(seed, Fault(HEALTHY)) for seed in range(healthy)]
    for place, kind in enumerate(KINDS):
        seeds = [FIRST_INJECTED * (place + 1) + i for i in range(each)]
        faults += [(seed, drawn(kind, np.random.default_rng(seed), TENSORS, STEPS)) for seed in seeds]
    for seed, fault in tqdm(faults, desc="runs", unit="run", mininterval=5):
        cell = cell_of(seed, fault)
        out, stamp = folder / cell.key, {"sha256": cell.sha256(), "fault": dataclasses.asdict(fault)}
        if not (out / "fault.json").is_file() or read_json(out / "fault.json") != stamp:
            _forget(folder, cell)
            with injected(fault), contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
                train_cell(cell, tokens, out, folder)
            write_json(out / "fault.json", stamp)
            _forget(folder, cell)
        yield Run(seed, fault, out)


def _forget(folder: Path, cell: Cell) -> None:
    """Delete the checkpoints of ``cell``, which say nothing of the fault that they were made with."""
    for scratch in (folder / "scratch").glob(f"{cell.key}-*"):
        shutil.rmtree(scratch)


def write_tokens(folder: Path) -> None:
    """Write token files in which nine tokens of ten are the one before the last plus one: blocks have to look back."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    splits = {}
    for split, count in (("train", 60_000), ("val", 4_000)):
        jumps = np.where(random.random((count // 2, 2)) < 0.9, 1, random.integers(0, VOCABULARY, (count // 2, 2)))
        (np.cumsum(jumps, axis=0) % VOCABULARY).ravel().astype("<u2").tofile(folder / f"{split}.bin")
        splits[split] = {"documents": 1, "characters": count, "tokens": count}
    meta = {"corpus": "made", "tokenizer": "none", "vocab_size": VOCABULARY, "dtype": "uint16", "splits": splits}
    write_json(folder / "meta.json", meta)
