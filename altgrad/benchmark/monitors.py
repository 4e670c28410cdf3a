"""What watching a run costs: the share of its steps' time that goes into what is recorded inside.

A cell is trained three times at once, turn by turn: with nothing watched, as `monitor:` is by default, and with every
group watched as often as a row of history.csv is written. A step that is watched comes right beside one of the same
run that is not, so that whatever else the machine does meets both alike.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from altgrad.benchmark.limits import synchronize
from altgrad.config import Cell, Resolver
from altgrad.config.files import write_json
from altgrad.config.schema import Monitor, Params, Train
from altgrad.training import machine
from altgrad.training.run import make_trainer
from altgrad.training.trainer import Trainer

ARM, WARM, TOKENS = "adamw", 2, 100_000
OFTEN = Train.model_fields["log_every"].default
SETTINGS = {"off": Monitor(every=OFTEN, groups=[]), "default": Monitor(), "everything": Monitor(every=OFTEN)}


class Pair(NamedTuple):
    """Seconds of a step that is not watched and of one that is, where anything is."""

    plain: float
    watched: float


def measure(params: Params, model: str, formats: list[str], rounds: int, device: torch.device) -> list[dict[str, Any]]:
    """Return a result per format and setting of `SETTINGS`.

    ``step_ms`` of a step that is not watched, ``watched_ms`` of one that is, both medians; ``share`` is the median of
    their differences, over the steps from one look to the next, of the step's time with nothing watched; quartiles.

    Args:
        params: of the project.
        model: one of its models.
        formats: grid entries.
        rounds: steps of each kind.
        device: where.
    """
    found = []
    threads = torch.get_num_threads()
    for name in formats:
        with tempfile.TemporaryDirectory(prefix="altgrad-monitors-") as folder:
            trainers = dict(_trainers(params, model, name, Path(folder), device))
            pairs = _pairs(trainers, rounds, f"{model}, {name}: watched steps")
        off = statistics.median(pair.plain for pair in pairs["off"])
        found += [{"model": model, **_result(name, setting, pairs[setting], off)} for setting in SETTINGS]
    torch.set_num_threads(threads)
    return found


def _trainers(
    params: Params, model: str, name: str, folder: Path, device: torch.device
) -> Iterator[tuple[str, Trainer]]:
    vocabulary = params.tokenizer.vocab_size
    _write_tokens(folder, vocabulary)
    grid = params.grid.but(formats=[name], optimizers=[ARM], seeds=[0], lr_scales=[1], baseline=name)
    (cell,) = Resolver(params.model_copy(update={"grid": grid, "model": model})).cells()
    torch.set_num_threads(cell.model.threads)
    compute, _ = machine.choose_compute(cell.train.compute, device)
    for setting, monitor in SETTINGS.items():
        scratch = folder / setting
        scratch.mkdir()
        yield setting, make_trainer(_to_measure(cell, monitor), vocabulary, folder, scratch, device, compute, True)


def _to_measure(cell: Cell, monitor: Monitor) -> Cell:
    """Return the cell with no evaluation and no snapshot among its first steps."""
    far = Train.model_fields["steps"].metadata[-1].le
    train = cell.train.but(steps=far, eval_every=far, checkpoint_every=far, log_every=far)
    return cell.model_copy(update={"train": train, "monitor": monitor})


def _write_tokens(folder: Path, vocabulary: int) -> None:
    generator = np.random.default_rng(0)
    splits = {}
    for split in ("train", "val"):
        generator.integers(0, vocabulary, TOKENS).astype("<u2").tofile(folder / f"{split}.bin")
        splits[split] = {"tokens": TOKENS}
    write_json(folder / "meta.json", {"dtype": "uint16", "vocab_size": vocabulary, "splits": splits})


def _pairs(trainers: dict[str, Trainer], rounds: int, description: str) -> dict[str, list[Pair]]:
    shuffle = random.Random(0).shuffle
    pairs: dict[str, list[Pair]] = {setting: [] for setting in trainers}
    order = list(trainers.items())
    for at in tqdm(range(WARM + rounds), desc=description, leave=False):
        shuffle(order)
        for setting, trainer in order:
            every = SETTINGS[setting].every
            steps = [("plain", (at + 1) * every + 1), ("watched", (at + 1) * every)]
            shuffle(steps)
            seconds = {kind: _seconds(trainer, step) for kind, step in steps}
            if at >= WARM:
                pairs[setting].append(Pair(**seconds))
    return pairs


def _seconds(trainer: Trainer, step: int) -> float:
    synchronize(trainer.device)
    began = time.perf_counter()
    trainer.update(step)
    synchronize(trainer.device)
    return time.perf_counter() - began


def _result(name: str, setting: str, pairs: list[Pair], off: float) -> dict[str, Any]:
    every = SETTINGS[setting].every
    shares = [(pair.watched - pair.plain) / every / off for pair in pairs]
    low, share, high = statistics.quantiles(shares, n=4)
    return {
        "name": f"{name}, {setting}",
        "every": every if SETTINGS[setting].groups else None,
        "step_ms": round(1e3 * statistics.median(pair.plain for pair in pairs), 2),
        "watched_ms": round(1e3 * statistics.median(pair.watched for pair in pairs), 2),
        "share": round(share, 4),
        "share_quartiles": [round(low, 4), round(high, 4)],
        "rounds": len(pairs),
    }
