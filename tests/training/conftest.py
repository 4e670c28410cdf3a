"""A training cell small enough to run in a second: one layer, width 16, random tokens with a pattern to learn."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from altgrad.config import Cell
from altgrad.config.files import write_json
from altgrad.formats import get_format
from altgrad.training import Interrupted
from altgrad.training.trainer import Trainer

VOCABULARY = 300


def make_tokens(directory: Path) -> Path:
    """Write token files whose next token is mostly the present one plus one."""
    directory.mkdir(parents=True)
    generator = np.random.default_rng(0)
    splits = {}
    for split, count in (("train", 6000), ("val", 1500)):
        jumps = np.where(generator.random(count) < 0.9, 1, generator.integers(0, VOCABULARY, count))
        (np.cumsum(jumps) % VOCABULARY).astype("<u2").tofile(directory / f"{split}.bin")
        splits[split] = {"documents": 1, "characters": count, "tokens": count}
    meta = {"corpus": "made", "tokenizer": "none", "vocab_size": VOCABULARY, "dtype": "uint16", "splits": splits}
    write_json(directory / "meta.json", meta)
    return directory


def make_cell(
    format: str = "E4M3", *, seed: int = 0, scaling: str = "dynamic", lr: float = 1e-2,
    arm: dict[str, Any] | None = None, **train: Any,
) -> Cell:  # fmt: skip
    """Return a cell of 12 steps; ``format`` bf16 quantizes nothing; ``train`` are fields of Train."""
    rules = []
    if format != "bf16":
        spec = {"format": format, "scaling": scaling}
        rules = [{"layers": "*", "weight": format, "input": spec, "grad": {"format": "E5M2", "scaling": scaling}}]
    return Cell.model_validate({
        "key": f"{format}-adamw-{seed}-1", "format": format, "optimizer": "adamw", "seed": seed, "lr_scale": 1,
        "model": {"layers": 1, "width": 16, "heads": 2, "context": 16, "dropout": 0.1},
        "rules": rules,
        "formats": {name: dataclasses.asdict(get_format(name)) for name in {format, "E5M2"} - {"bf16"}},
        "arm": arm or {"lr": lr},
        "train": {
            "steps": 12, "batch": 4, "grad_accumulation": 2, "log_every": 2, "eval_every": 6, "eval_sequences": 10,
            "checkpoint_every": 4, "compile": "off", **train,
        },
        "monitor": {"every": 5, "probes": 3},
    })  # fmt: skip


@contextmanager
def interruption(monkeypatch: pytest.MonkeyPatch, step: int) -> Iterator[pytest.ExceptionInfo[Interrupted]]:
    """Send SIGTERM after update ``step`` of the training inside, which must end by it."""
    update = Trainer.update

    def disturbed(self: Trainer, at: int) -> None:
        update(self, at)
        if at == step:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch, pytest.raises(Interrupted) as raised:
        patch.setattr(Trainer, "update", disturbed)
        yield raised


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory of token files."""
    return make_tokens(tmp_path_factory.mktemp("data") / "tokens")
