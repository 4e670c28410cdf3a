"""A training cell small enough to run in a second: one layer, width 16, random tokens with a pattern to learn."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from altgrad.common.files import read_json, write_json, write_text
from altgrad.config import Cell
from altgrad.config.recipe import Rule
from altgrad.config.schema import Diagnose, LocalCorpus, Tokenizer
from altgrad.config.tasks import Classify
from altgrad.data.tokens import write_tokens
from altgrad.diagnostics import diagnose_cell
from altgrad.formats import get_format
from altgrad.training import Interrupted, train_cell
from altgrad.training.trainer import Trainer
from tests.optim.arms import ARMS

VOCABULARY = 300
WORDS = {"blue": "navy", "green": "olive", "red": "scarlet"}  # by which documents show their labels


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


def make_documents(root: Path) -> Path:
    """Write 300 documents with three labels, and their tokens to the folder that is returned."""
    generator = np.random.default_rng(0)
    with open(root / "rows.jsonl", "w") as file:
        for number in range(300):
            own = [name for name in WORDS if generator.random() < 0.4]
            text = f"{number} {' '.join(WORDS[name] for name in own)} {'and ' * (number % 9)}{number}"
            file.write(json.dumps({"text": text, "labels": own}) + "\n")
    corpus = LocalCorpus(source="local", path=str(root / "rows.jsonl"), max_repeated=1)
    write_tokens("made", corpus, Tokenizer(vocab_size=VOCABULARY), root / "tokens", task=Classify())
    return root / "tokens"


def make_cell(
    format: str = "E4M3", *, seed: int = 0, scaling: str = "dynamic", lr: float = 1e-2,
    arm: dict[str, Any] | None = None, rounding: str = "nearest", **train: Any,
) -> Cell:  # fmt: skip
    """Return a cell of 12 steps; ``format`` bf16 quantizes nothing; ``train`` are fields of Train."""
    rules = []
    if format != "bf16":
        spec = {"format": format, "rounding": rounding}
        tensor = spec | {"scaling": scaling}
        rules = [{"layers": "*", "weight": spec, "input": tensor, "grad": tensor | {"format": "E5M2"}}]
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


STATEFUL = {"scaling": "delayed", "rounding": "stochastic"}  # with dropout and accumulation, every kind of state


def arm_cell(name: str, format: str = "E4M3", **changes: Any) -> Cell:
    """Return a cell of an arm of `tests.optim.arms`; that of ``virtual.NAME`` sees the format and quantizes nothing."""
    virtual, arm = name.startswith("virtual."), {**ARMS[name.removeprefix("virtual.")], **changes}
    if arm["foreign"] is not None:
        arm["foreign"] = "E5M2"  # which the cell has for its gradients
    cell = make_cell(format, arm=arm)
    return with_weight(cell, virtual=True) if virtual else cell


def with_weight(cell: Cell, **spec: Any) -> Cell:
    """Return the cell with other settings of the weights' quantization; with ``virtual`` nothing else is quantized."""
    rule = cell.rules[0]
    weight = rule.weight.model_copy(update=spec)
    if rule.weight.virtual or not weight.virtual:
        return cell.model_copy(update={"rules": [rule.model_copy(update={"weight": weight})]})
    names = {"format": f"virtual.{cell.format}", "key": f"virtual.{cell.key}"}
    return cell.model_copy(update={"rules": [Rule(layers="*", weight=weight)], **names})


def without_dropout(cell: Cell) -> Cell:
    """Return the cell with a model that drops nothing."""
    return cell.model_copy(update={"model": cell.model.model_copy(update={"dropout": 0.0})})


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


def outputs(directory: Path) -> dict[str, bytes]:
    """Return the files of a run that must not depend on when or how often it ran."""
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name != "timing.json"}


def trained(cell: Cell, tokens: Path, root: Path) -> dict[str, bytes]:
    """Return the same files of a run in ``root``."""
    train_cell(cell, tokens, root / "out", root)
    return outputs(root / "out")


def resumed(cell: Cell, tokens: Path, root: Path, monkeypatch: pytest.MonkeyPatch, step: int = 7) -> dict[str, bytes]:
    """Return the same files of a run that SIGTERM stopped after update ``step``, and that went on."""
    with interruption(monkeypatch, step) as raised:
        train_cell(cell, tokens, root / "out", root)
    assert raised.value.signum == signal.SIGTERM and not (root / "out").exists()
    found = trained(cell, tokens, root)
    assert read_json(root / "out" / "timing.json")["resumed"] == 1
    return found


def diagnosed(
    cell: Cell, run: Path, root: Path, tokens: Path | None = None, settings: Diagnose | None = None
) -> tuple[dict[str, Any], pd.DataFrame]:
    """Return the diagnosis of a run and its rows, which are written to ``root``."""
    files = [root / f"diagnosis.{suffix}" for suffix in ("json", "parquet")]
    write_text(root / "cell.json", cell.to_json())
    diagnose_cell(root / "cell.json", run, *files, tokens, settings)
    return read_json(files[0]), pd.read_parquet(files[1])


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory of token files."""
    return make_tokens(tmp_path_factory.mktemp("data") / "tokens")


@pytest.fixture(scope="session")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of tokens of documents with three labels."""
    return make_documents(tmp_path_factory.mktemp("documents"))


@pytest.fixture(scope="session")
def finished(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of a cell of `STATEFUL`, with its checkpoints."""
    root = tmp_path_factory.mktemp("finished")
    trained(make_cell(**STATEFUL), tokens, root)
    return root


@pytest.fixture(scope="session")
def undisturbed(finished: Path) -> dict[str, bytes]:
    """Return that run's files."""
    return outputs(finished / "out")
