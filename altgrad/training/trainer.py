"""The training loop of one cell.

One update sets the learning rate, runs ``grad_accumulation`` micro-batches forward and backward, clips the global
gradient norm and steps the optimizer. Instrumented passes, evaluations on the fixed validation sample, snapshots and
checkpoints happen at steps of their own. None of them changes the weights, and every batch is a pure function of seed
and step. So a run that is interrupted anywhere and resumed ends with the same bits.
"""

import math
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from altgrad.common.console import handled
from altgrad.config import Cell
from altgrad.config.schema import learning_rate, schedule_of
from altgrad.data.batches import Task
from altgrad.model import requantize_model
from altgrad.model.from_cell import recipe_of
from altgrad.model.gpt import GPT, Block
from altgrad.optim import ArmOptimizer
from altgrad.optim.sharded import gather_full
from altgrad.optim.weight_grid import weight_grids
from altgrad.training import machine, records
from altgrad.training.evaluation import Evaluation
from altgrad.training.graphs import compile_model
from altgrad.training.monitor import PASS, Measurement, TensorMonitor, UpdateMonitor, first_nonfinite, largest_overflow
from altgrad.training.outcome import OutcomeTracker, Switches, outstanding_rows
from altgrad.training.ranks import Ranks


class Interrupted(Exception):
    """SIGTERM or SIGINT arrived; a checkpoint of ``step`` has been written."""

    def __init__(self, signum: int, step: int) -> None:
        super().__init__(f"interrupted after step {step}; the checkpoint is saved, run the same command to resume")
        self.signum = signum


class Trainer:
    """Trains ``model`` by the settings of ``cell``; the folder ``scratch`` has checkpoints, row logs and snapshots."""

    def __init__(
        self, cell: Cell, model: GPT, optimizer: ArmOptimizer, task: Task, val: Task, device: torch.device,
        scratch: Path, compute: str, compiled: bool, ranks: Ranks,
    ) -> None:  # fmt: skip
        self.cell, self.model, self.optimizer, self.ranks = cell, model, optimizer, ranks
        self.task, self.device, self.scratch = task, device, scratch
        self.compute = compute  # bf16 or float32: dtype of products that no format quantizes
        self.compiled = compiled
        self.peaks = [group["lr"] for group in optimizer.param_groups]  # at the peak of the schedule
        self.evaluation = Evaluation(cell, model, val, device, compute, self.ranks)
        self._follow_recipe()
        self.probe_steps = probe_steps(cell.train.steps, cell.monitor.probes)
        self.tokens_per_step = cell.train.grad_accumulation * cell.train.batch * cell.model.context
        self.step_seconds: list[float] = []
        self.first_calls = [0]  # indices of steps that called a graph for the first time
        self.busy: list[float | None] = []  # the GPU's share of time at each logged step
        self.interrupted = 0  # the number of the signal that arrived
        self._resume()

    def _follow_recipe(self) -> None:
        """Build the compiled loss and both monitors for the present recipe of the model."""
        model = self.model
        self.loss_of = compile_model(model) if self.compiled else model
        self.evaluation.loss_of = self.loss_of
        blocks = {f"blocks.{i}": block for i, block in enumerate(model.blocks) if isinstance(block, Block)}
        self.monitor = TensorMonitor(model, blocks)
        self.updates = UpdateMonitor(model, self.optimizer)

    def _requantize(self) -> None:
        """Quantize the model by the schedule's present recipe; weights and the optimizer's state stay."""
        place = self.switches.place
        requantize_model(self.model, recipe_of(self.cell.under(place)), seed=self.cell.seed, change=place)
        self.optimizer.look_at(weight_grids(self.model, on_grid=False))
        self._follow_recipe()

    # --- state that a checkpoint carries ---------------------------------------------------------

    def _resume(self) -> None:
        saved, problems = records.load_newest(self.scratch)
        for problem in problems:
            tqdm.write(f"{self.cell.key}: {problem}")
        divergence = self.cell.train.divergence
        self.step = 0
        self.tracker = OutcomeTracker(divergence.spike, divergence.window)
        self.switches = Switches(self.cell, **(saved.state["switches"] if saved else {}))
        # Sums since the last logged row, and over the whole run.
        self.totals: dict[str, Any] = {"loss": 0.0, "seen": 0, "seen_clipped": 0, "clipped": 0}
        self.totals |= {"train_s": 0.0, "check_s": 0.0, "observe_s": 0.0, "evaluate_s": 0.0, "resumed": 0}
        if saved is not None:
            if self.switches.place:
                self._requantize()
            records.unpack(saved.tensors, self.model, self.optimizer)
            self.step = saved.step
            self.tracker = OutcomeTracker(**saved.state["tracker"])
            self.totals |= saved.state["totals"]
            self.totals["resumed"] += 1
            tqdm.write(f"{self.cell.key}: resuming after step {self.step}")
        self.ranks.require_same(self.step)
        if not self.ranks.first:
            return
        resume_step = None if saved is None else self.step
        logs = (records.RowLog(self.scratch / f"{name}.jsonl", resume_step) for name in ("history", "monitors"))
        self.history, self.monitors = logs

    def save(self) -> None:
        """Write a checkpoint of the present step. Rows are written first, so that none is missing after a resume."""
        tensors = records.pack(self.model, self.optimizer)
        if not self.ranks.first:
            return
        self.history.sync()
        self.monitors.sync()
        state = {"tracker": asdict(self.tracker), "totals": self.totals, "switches": self.switches.state()}
        records.save_checkpoint(self.scratch, self.step, tensors, state)

    # --- the loop --------------------------------------------------------------------------------

    def run(self, description: str) -> None:
        """Train to the last step, or to a divergence; raises :class:`Interrupted` on a signal."""
        train = self.cell.train
        with self._signals(), self._progress(description) as bar:
            if self.loss_of is not self.model:
                bar.set_postfix_str("compiling, quickly once another cell has")
            started = time.perf_counter()
            if self.step == 0:
                self._save_probe(0)
                with self._timed("check_s"):
                    self.evaluation.check_graph()
                self._at_rest(0)
            while self.step < train.steps and not self.tracker.diverged:
                self.update(self.step + 1)
                now = time.perf_counter()
                self.totals["train_s"] += now - started
                started = now
                self._show(bar)
                self.interrupted = self.ranks.any(self.interrupted)
                due = self.step % train.checkpoint_every == 0 or self.step == train.steps
                if due or self.interrupted or self.tracker.diverged:
                    self.save()
                if self.interrupted and self.step < train.steps:
                    raise Interrupted(self.interrupted, self.step)
            self.tracker.finish()
            if self.tracker.diverged and self.tracker.first_rows is None:
                self.tracker.first_rows = self.ranks.alone(
                    self.model, lambda: outstanding_rows(records.moved_since(self.snapshot(0), self.model))
                )

    def update(self, step: int) -> None:
        """Do update ``step``, counted from 1, with the measurements and records that are due at this step."""
        train, changes = self.cell.train, len(self.switches.made)
        if self.switches.before(step, self.tracker.smoothed):
            self._change()
        due = self.cell.monitor.due(step)
        rows = (self.ranks.alone(self.model, partial(self._observe, step, due)) or []) if due & PASS else []
        if self.switches.when(step, overflow=largest_overflow(rows)):
            self._change()
        began = time.perf_counter()
        rate = partial(learning_rate, step, **schedule_of(vars(train)))
        lr = rate(peak=self.cell.peak_lr)
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            group["lr"] = rate(peak=peak)
        loss, total_norm, norm = self._gradients(step)
        while not (math.isfinite(loss) and math.isfinite(norm)) and self.switches.when(step, nonfinite=True):
            self._change()
            loss, total_norm, norm = self._gradients(step)
        if "gradients" in due:
            rows += self.monitor.gradients(step)
        diverged = self.tracker.update(step, loss, norm)
        if not diverged:
            nn.utils.clip_grads_with_norm_(self.model.parameters(), train.clip, total_norm)
            with self.updates.watching(step, rows) if "updates" in due else nullcontext():
                self.optimizer.step(norm=norm)
            totals, clipped = self.totals, norm > train.clip
            for name, more in {"loss": loss, "seen": 1, "seen_clipped": clipped, "clipped": clipped}.items():
                totals[name] += more
        elif not (math.isfinite(loss) and math.isfinite(norm)):
            first = self.ranks.alone(self.model, partial(self._first_nonfinite, step))
            self.tracker.first_nonfinite, self.tracker.first_rows = first or (None, None)
        self.step_seconds.append(time.perf_counter() - began)
        self.step = step
        if rows and self.ranks.first:
            self.monitors.extend(rows)
        logged = step % train.log_every == 0 or step % train.eval_every == 0 or step == train.steps
        if logged or diverged or len(self.switches.made) > changes:
            self._at_rest(step, lr, norm)
        if step in self.probe_steps or self.tracker.diverged:
            self._save_probe(step)

    def _gradients(self, step: int) -> tuple[float, Tensor, float]:
        """Compute the gradients of ``step``; return its loss, and their total norm as a tensor and as a float."""
        self.optimizer.zero_grad(set_to_none=True)
        losses = [self._backward(step, micro) for micro in range(self.cell.train.grad_accumulation)]
        loss = self.ranks.sum(sum(losses[1:], losses[0]))
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        if (factor := self.cell.train.loss_scale) != 1:
            for grad in grads:
                grad.div_(factor)
        total_norm = nn.utils.get_total_norm(grads)
        # The one wait for a device.
        loss_value, norm = torch.stack([loss.float(), gather_full(total_norm).float()]).tolist()
        return loss_value, total_norm, norm

    def _change(self) -> None:
        """Requantize the model to the recipe that ``switches`` has just changed to, and check its graph."""
        switch = self.switches.made[-1]
        tqdm.write(f"{self.cell.key}: {switch['recipe']} from step {switch['step']} on ({switch['why']})")
        self._requantize()
        self.first_calls.append(len(self.step_seconds))
        with self._timed("check_s"):
            self.evaluation.check_graph()

    def _backward(self, step: int, micro: int) -> Tensor:
        """Run forward and backward on this process's rows of a micro-batch; return its share of the step's loss."""
        parts = self.cell.train.grad_accumulation
        with self._autocast():
            shares = map(self.ranks.share, self._batch(step, micro))
            loss = self.ranks.loss(self.loss_of, *shares, last=micro + 1 == parts) / (parts * self.ranks.count)
        (loss * self.cell.train.loss_scale).backward()
        return loss.detach()

    def _batch(self, step: int, micro: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.task.batch(step=step, micro=micro)
        return inputs.to(self.device, non_blocking=True), targets.to(self.device, non_blocking=True)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.compute == "bf16")

    # --- what is recorded ------------------------------------------------------------------------

    def _first_nonfinite(self, step: int) -> tuple[str | None, str | None]:
        """Return the first tensor of ``step`` that is not finite, and its rows, in any micro-batch; or two ``None``."""
        for micro in range(self.cell.train.grad_accumulation):
            name = first_nonfinite(self._observe(step, {"tensors"}, micro))
            if name is not None:
                return name, self.monitor.nonfinite[name]
        return None, None

    def _observe(self, step: int, groups: set[str], micro: int = 0) -> list[Measurement]:
        """Run an instrumented pass on a micro-batch of ``step``; return the rows of those ``groups`` in `PASS`."""

        def loss() -> Tensor:  # scaled as in the step, so that gradients are the step's
            train = self.cell.train
            with self._autocast():
                return self.model(*self._batch(step, micro)) / train.grad_accumulation * train.loss_scale

        with self._timed("observe_s"):
            rows = self.monitor.observe(step, loss, groups)
        self.tracker.observe_overflow(largest_overflow(rows))
        return rows

    def _at_rest(self, step: int, lr: float | None = None, norm: float | None = None) -> None:
        """Log a row of the history after update ``step``, with an evaluation if one is due."""
        train, totals = self.cell.train, self.totals
        val_loss = None
        measured: list[float | None] = [None] * len(self.evaluation.columns)
        if (step % train.eval_every == 0 or step == train.steps) and not self.tracker.diverged:
            with self._timed("evaluate_s"):
                val_loss = self.evaluation.loss()
                if val_loss is not None and measured:
                    measured = self.ranks.alone(self.model, self.evaluation.label_metrics) or measured
            if val_loss is None:
                self.tracker.diverge("nonfinite", step)
        seen = totals["seen"]
        train_loss = totals["loss"] / seen if seen else None
        clipped = totals["seen_clipped"] / seen if seen else None
        norm = norm if norm is not None and math.isfinite(norm) else None
        if self.ranks.first:
            row = [step, step * self.tokens_per_step, lr, train_loss, val_loss, norm, clipped]
            row += [*measured, *([self.switches.recipe] if self.cell.schedule else [])]
            self.history.append(row)
            self.busy.append(machine.gpu_busy(self.device))
        totals |= {"loss": 0.0, "seen": 0, "seen_clipped": 0}

    def _save_probe(self, step: int) -> None:
        self.ranks.alone(self.model, partial(records.save_weights, self.snapshot(step), self.model, step))

    def snapshot(self, step: int) -> Path:
        return self.scratch / f"weights-{step:08d}.safetensors"

    @contextmanager
    def _timed(self, total: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.totals[total] += time.perf_counter() - began

    # --- progress bar and signals ----------------------------------------------------------------

    def _progress(self, description: str) -> tqdm:
        return tqdm(
            total=self.cell.train.steps, initial=self.step, desc=description, unit="step",
            disable=not self.ranks.first, dynamic_ncols=True, mininterval=0.5 if sys.stderr.isatty() else 5,
        )  # fmt: skip

    def _show(self, bar: tqdm) -> None:
        # The median of the last steps only, since this runs after each.
        rate = self.tokens_per_step / statistics.median(self.step_seconds[-100:])
        loss = self.tracker.smoothed
        bar.set_postfix_str(f"loss {loss:.3f}, {rate / 1e3:.1f}k tok/s" if loss else "", refresh=False)
        bar.update()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Inside, the first SIGTERM or SIGINT makes a checkpoint after the step; the second ends the run at once."""
        if not self.ranks.first:  # the first process says when to stop
            yield
            return

        def handle(signum: int, frame: object) -> None:
            if self.interrupted:
                raise KeyboardInterrupt
            self.interrupted = signum
            tqdm.write("stopping after this step (once more to stop at once)")

        with handled(handle):
            yield


def probe_steps(steps: int, count: int) -> list[int]:
    """Return ``count`` steps evenly spaced from 0 to ``steps``, both included; only ``[steps]`` if ``count`` is 1."""
    if count == 1:
        return [steps]
    return sorted({round(i * steps / (count - 1)) for i in range(count)})
