"""One cell from its resolved file to its output directory."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from altgrad.common.files import read_json, write_json
from altgrad.common.fingerprint import mark_finished, only_worker
from altgrad.config.cell import Cell, scratch_directory
from altgrad.data.tasks import task_of
from altgrad.model import account, layer_recipe, linear_layers
from altgrad.model.from_cell import arm_of, build_model, recipes_of
from altgrad.model.hardware import select_device
from altgrad.optim import build_optimizer
from altgrad.optim.weight_grid import weight_grids
from altgrad.training import machine, probes, ranks
from altgrad.training.checkpoint import unique_state
from altgrad.training.ranks import Ranks
from altgrad.training.records import write_history, write_monitors, write_tensors
from altgrad.training.trainer import Trainer

PROBE_SEED_STEP = 0  # batches of updates start at step 1, so step 0 is a batch that training never sees


def train_cell(cell: Cell, tokens: Path, out: Path, root: Path, position: str = "") -> None:
    """Train ``cell`` on the token files in ``tokens`` and write its results into ``out``.

    ``root`` is the project's top folder: checkpoints go under ``root/scratch``, what is compiled into
    `machine.compile_cache`. ``position`` (such as ``3/12``) is shown before the cell's key in the progress bar.
    """
    began = time.perf_counter()
    settled = settle(cell, root)
    meta = read_json(tokens / "meta.json")
    scratch = scratch_directory(root, cell, tokens)
    with only_worker(scratch, lambda: tqdm.write(f"{cell.key}: another process is training this cell; waiting for it")):
        with ranks.started(cell, tokens, scratch, root, settled.device) as all_of_them:
            trainer = make_trainer(cell, meta["vocab_size"], tokens, scratch, *settled, all_of_them)
            trainer.run(f"{position} {cell.key}".strip())
            trainer.ranks.alone(trainer.model, partial(_write_results, trainer, out))
        used = machine.used(settled.device) | machine.bytes_per_parameter(trainer.model, trainer.optimizer)
        used |= trainer.timing() | {"total_s": time.perf_counter() - began}
        write_json(out / "timing.json", used)
        mark_finished(scratch)


class Settled(NamedTuple):
    """What a cell is trained with on this machine: ``compute`` and ``compiled`` are a `Trainer`'s."""

    device: torch.device
    compute: str
    compiled: bool


def settle(cell: Cell, root: Path) -> Settled:
    """Make this process ready to train ``cell``, and say where that is not with what may be expected."""
    machine.make_deterministic()
    machine.use_compile_cache(machine.compile_cache(root))
    device = select_device(cell.train.device)
    machine.keep_to_share(device)
    torch.set_num_threads(cell.model.threads)
    machine.forget_peak_memory(device)
    compiled, notice = machine.should_compile(cell.train, device)
    if compiled and cell.arm.store == "codes":
        compiled, notice = False, f"{cell.optimizer} stores weights as codes, which no compiled graph reads"
    compiled = compiled and cell.lora is None  # a graph is shared by models of one structure, which has no adapters
    compute, slow_bf16 = machine.choose_compute(cell.train.compute, device)
    for said in filter(None, (notice, slow_bf16)):
        tqdm.write(f"notice: {said}")
    return Settled(device, compute, compiled)


def make_trainer(
    cell: Cell, vocab_size: int, tokens: Path, scratch: Path, device: torch.device, compute: str, compiled: bool,
    mine: Ranks | None = None,
) -> Trainer:  # fmt: skip
    """Return what trains ``cell`` on ``tokens``; ``scratch`` and what follows are a `Trainer`'s."""
    train, val = (task_of(cell, tokens, split) for split in ("train", "val"))
    mine = mine or Ranks()
    arm, recipes = arm_of(cell), recipes_of(cell)
    model = build_model(cell, vocab_size, device, train.labels, shared=mine.count > 1)
    tqdm.write(f"{cell.key}: {account(model).summary}")
    mine.shard(model)
    grids = weight_grids(model, on_grid=arm.weights == "quantized")
    if arm.needs_format and not grids:
        plain = arm.plain_form.base
        tqdm.write(f"notice: {cell.format} has no quantized weight; {cell.optimizer} trains as its plain form, {plain}")
    optimizer = build_optimizer(
        model, arm, grids, steps=cell.train.steps, seed=cell.seed, compiled=compiled,
        reference="updates" in cell.monitor.groups,
    )  # fmt: skip
    return Trainer(cell, model, recipes, optimizer, grids, train, val, device, scratch, compute, compiled, mine)


def _write_results(trainer: Trainer, out: Path) -> None:
    """Write everything but the timings: the same bits whenever the cell is run."""
    history = trainer.history.rows()
    write_history(out / "history.csv", history, trainer.measures.columns)
    write_monitors(out / "monitors.parquet", trainer.monitors.rows())
    write_tensors(out / "model.safetensors", unique_state(trainer.model))
    _write_probes(trainer, out / "probes.safetensors")
    write_json(out / "metrics.json", _metrics(trainer, history, out))


def _write_probes(trainer: Trainer, path: Path) -> None:
    model = trainer.model
    inputs, targets = trainer.task.batch(step=PROBE_SEED_STEP, micro=0)
    batch = inputs.to(trainer.device), targets.to(trainer.device)
    model.eval()
    quantized, plain = {}, {}
    if any(layer_recipe(layer) for layer in linear_layers(model).values()):
        train = trainer.cell.train
        factor = train.loss_scale / train.grad_accumulation
        quantized = probes.gradients(model, *batch, trainer.device, trainer.compute, factor)
        plain = probes.gradients(probes.float_copy(model), *batch, trainer.device, "float32")
    steps = sorted({trainer.step, *(step for step in trainer.probe_steps if step < trainer.step)})
    snapshots = [trainer.snapshot(step) for step in steps]
    formats = probes.layer_formats(model)
    probes.write_probes(path, snapshots, quantized, plain, trainer.step, formats)


def _metrics(trainer: Trainer, history: list[list[Any]], out: Path) -> dict[str, object]:
    """Return what ``metrics.json`` holds; a number that could not be measured is null."""
    cell, tracker = trainer.cell, trainer.tracker
    layers = linear_layers(trainer.model)
    evaluated = [(row[4], row[0]) for row in history if row[4] is not None]
    best = min(evaluated, default=(None, None))
    last = history[-1]
    val_loss = None if tracker.diverged else last[4]
    quantized = {layer.weight for layer in layers.values() if layer_recipe(layer)}
    changes: dict[str, object] = {"switches": trainer.switches.made} if cell.schedule else {}
    changes |= {"start": cell.model.start.sha256} if cell.model.start else {}
    return {
        "key": cell.key, "format": cell.format, "optimizer": cell.optimizer,
        "seed": cell.seed, "lr_scale": cell.lr_scale,
        "outcome": tracker.outcome, "signature": tracker.signature,
        "outcome_step": tracker.outcome_step, "first_nonfinite": tracker.first_nonfinite,
        "first_rows": tracker.first_rows,
        "steps": trainer.step, "tokens": last[1],
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "quantized_parameters": sum(p.numel() for p in quantized),
        "train_loss": last[3], "val_loss": val_loss,
        "val_loss_best": best[0], "val_loss_best_step": best[1],
        "clipped_frac": trainer.totals["clipped"] / max(1, trainer.step), **changes,
        **trainer.measures.final(val_loss, out),
    }  # fmt: skip
