"""Train one cell from its resolved file to its output directory, in one process or in several.

`train_cell` runs in the first process and writes the results. `train_beside` runs in each further process, which
`altgrad.training.ranks` starts.
"""

import copy
import math
import os
import signal
import statistics
import sys
import threading
import time
import warnings
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from altgrad.common.files import write_json
from altgrad.common.fingerprint import mark_finished, only_worker
from altgrad.config.cell import Cell, scratch_directory
from altgrad.data.batches import task_of
from altgrad.model import account, layer_recipe, linear_layers, unquantize_model
from altgrad.model.from_cell import arm_of, build_model
from altgrad.model.hardware import select_device
from altgrad.optim import build_optimizer
from altgrad.training import machine, ranks, records
from altgrad.training.ranks import Ranks
from altgrad.training.trainer import Interrupted, Trainer

PROBE_SEED_STEP = 0  # updates begin at step 1, so training never sees the batch of step 0


def train_cell(cell: Cell, tokens: Path, out: Path, root: Path, position: str = "") -> None:
    """Train ``cell`` on the token files in ``tokens`` and write its results into ``out``.

    ``root`` is the project's top folder: checkpoints go to ``root/scratch``, compiled files to
    `machine.compile_cache`. The progress bar shows ``position`` (such as ``3/12``) before the cell's key.
    """
    began = time.perf_counter()
    device, compute, compiled = settle(cell, root)
    scratch = scratch_directory(root, cell, tokens)
    with only_worker(scratch, lambda: tqdm.write(f"{cell.key}: another process is training this cell; waiting for it")):
        with ranks.started(cell, tokens, scratch, root, device) as mine:
            trainer = make_trainer(cell, tokens, scratch, device, compute, compiled, mine)
            trainer.run(f"{position} {cell.key}".strip())
            trainer.ranks.alone(trainer.model, partial(_write_results, trainer, out))
        used = machine.used(device) | machine.bytes_per_parameter(trainer.model, trainer.optimizer)
        write_json(out / "timing.json", used | _timing(trainer) | {"total_s": time.perf_counter() - began})
        mark_finished(scratch)


def train_beside(arguments: list[str]) -> None:
    """Train a cell in a further process, which ends with the first; ``arguments``: SCRATCH TOKENS ROOT RANK."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)  # the first process says when to stop
    threading.Thread(target=_end_with_first, daemon=True).start()
    print("here", flush=True)
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - the first process reports for all
    scratch, tokens, root, rank = Path(arguments[0]), Path(arguments[1]), Path(arguments[2]), int(arguments[3])
    cell = Cell.read(scratch / ranks.CELL)
    device, compute, compiled = settle(cell, root)
    with ranks.connected(scratch / ranks.MEETING, rank, cell.train.devices, device) as mine:
        trainer = make_trainer(cell, tokens, scratch, device, compute, compiled, mine)
        with suppress(Interrupted):
            trainer.run(cell.key)
            mine.alone(trainer.model, lambda: None)  # while the first writes the results


def _end_with_first() -> None:
    """End this process as soon as the process that started it closes its end of the pipe, or is gone."""
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


def settle(cell: Cell, root: Path) -> tuple[torch.device, str, bool]:
    """Prepare this process to train ``cell``; return the device, the dtype of products, and whether to compile.

    Prints a notice if a missing tool or coded weights prevent compiling, or if the dtype is not the cell's setting.
    """
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
    for text in filter(None, (notice, slow_bf16)):
        tqdm.write(f"notice: {text}")
    return device, compute, compiled


def make_trainer(
    cell: Cell, tokens: Path, scratch: Path, device: torch.device, compute: str, compiled: bool,
    mine: Ranks | None = None,
) -> Trainer:  # fmt: skip
    """Build the model and optimizer of ``cell`` and return their `Trainer`; ``scratch`` and all after it go to it."""
    train, val = (task_of(cell, tokens, split) for split in ("train", "val"))
    mine = mine or Ranks()
    arm = arm_of(cell)
    model = build_model(cell, train.vocab_size, device, train.labels, shared=mine.count > 1)
    tqdm.write(f"{cell.key}: {account(model).summary}")
    mine.shard(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the arm is its plain form")  # the notice below says it for a cell
        optimizer = build_optimizer(
            model, arm, steps=cell.train.steps, seed=cell.seed, compiled=compiled,
            reference="updates" in cell.monitor.groups,
        )  # fmt: skip
    if arm.needs_format and not optimizer.grids:
        plain = arm.plain_form.base
        tqdm.write(f"notice: {cell.format} has no quantized weight; {cell.optimizer} trains as its plain form, {plain}")
    return Trainer(cell, model, optimizer, train, val, device, scratch, compute, compiled, mine)


def _write_results(trainer: Trainer, out: Path) -> None:
    """Write all result files but ``timing.json`` to ``out``: each run of the cell writes the same bits."""
    history = trainer.history.rows()
    records.write_history(out / "history.csv", history, trainer.evaluation.columns)
    records.write_monitors(out / "monitors.parquet", trainer.monitors.rows())
    records.write_tensors(out / "model.safetensors", records.unique_state(trainer.model))
    _write_probes(trainer, out / "probes.safetensors")
    write_json(out / "metrics.json", _metrics(trainer, history, out))


def _write_probes(trainer: Trainer, path: Path) -> None:
    model = trainer.model
    inputs, targets = trainer.task.batch(step=PROBE_SEED_STEP, micro=0)
    batch = inputs.to(trainer.device), targets.to(trainer.device)
    model.eval()
    grads: dict[str, Tensor] = {}
    if any(layer_recipe(layer) for layer in linear_layers(model).values()):
        train = trainer.cell.train
        factor = train.loss_scale / train.grad_accumulation
        quantized = records.weight_gradients(model, *batch, trainer.device, trainer.compute, factor)
        plain = unquantize_model(copy.deepcopy(model))
        unquantized = records.weight_gradients(plain, *batch, trainer.device, "float32")
        for label, by_layer in (("grad_quantized", quantized), ("grad_float", unquantized)):
            grads |= {f"{label}/{trainer.step}/{name}": grad for name, grad in by_layer.items()}
    steps = sorted({trainer.step, *(step for step in trainer.probe_steps if step < trainer.step)})
    records.write_probes(path, [trainer.snapshot(step) for step in steps], grads, model, trainer.step)


def _metrics(trainer: Trainer, history: list[list[Any]], out: Path) -> dict[str, object]:
    """Return the content of ``metrics.json``. A number that could not be measured is ``None``."""
    cell, tracker = trainer.cell, trainer.tracker
    layers = linear_layers(trainer.model)
    evaluated = [(row[4], row[0]) for row in history if row[4] is not None]
    best = min(evaluated, default=(None, None))
    last = history[-1]
    val_loss = None if tracker.diverged else last[4]
    quantized = {layer.weight for layer in layers.values() if layer_recipe(layer)}
    optional: dict[str, object] = {"switches": trainer.switches.made} if cell.schedule else {}
    optional |= {"model_name": cell.model_name} if cell.model_name else {}
    optional |= {"start": cell.model.start.sha256} if cell.model.start else {}
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
        "clipped_frac": trainer.totals["clipped"] / max(1, trainer.step), **optional,
        **trainer.evaluation.final(val_loss, out),
    }  # fmt: skip


def _timing(trainer: Trainer) -> dict[str, Any]:
    """Return the entries of ``timing.json`` about the run: seconds, milliseconds per step, MB of 10^6 bytes.

    ``compile_s`` is the time of the graph's check, and the time by which first calls of a graph exceed the median call.
    ``evaluate_s`` leaves that excess out. ``compile_s`` is ``None`` if nothing was compiled.
    """
    seconds = sorted(trainer.step_seconds)
    median = statistics.median(seconds) if seconds else None
    speed = trainer.tokens_per_step / median if median else None
    busy = [share for share in trainer.busy if share is not None]
    checkpoints = sorted(trainer.scratch.glob("step-*.safetensors"))
    steps = _excess(trainer.step_seconds, trainer.first_calls) if trainer.compiled else 0.0
    evaluations = _excess(trainer.evaluation.seconds, [0]) if trainer.compiled else 0.0
    return {
        "devices": trainer.ranks.count, "threads": trainer.cell.model.threads,
        "compute": trainer.compute, "compiled": trainer.compiled, "resumed": trainer.totals["resumed"],
        "train_s": trainer.totals["train_s"],
        "compile_s": trainer.totals["check_s"] + steps + evaluations if trainer.compiled else None,
        "observe_s": trainer.totals["observe_s"], "evaluate_s": trainer.totals["evaluate_s"] - evaluations,
        "tokens_per_s": speed,
        "tflops": speed and speed * trainer.model.flops_per_token() / 1e12,  # a second, of products
        "gpu_busy": statistics.fmean(busy) if busy else None,
        "step_ms_median": median and 1e3 * median,
        "step_ms_p90": 1e3 * seconds[math.ceil(0.9 * len(seconds)) - 1] if seconds else None,
        "checkpoint_mb": checkpoints[-1].stat().st_size / 1e6 if checkpoints else None,
    }  # fmt: skip


def _excess(seconds: list[float], first: list[int]) -> float:
    """Return the sum of ``seconds`` by which the calls with the indices ``first`` exceed the median call."""
    return sum(max(0.0, seconds[i] - statistics.median(seconds)) for i in first if i < len(seconds))
