"""``Recorder``: history and monitors of a run that any loop trains, in the files that a run of the bench leaves."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch import distributed as dist

from altgrad.config.schema import Divergence
from altgrad.config.schema import Monitor as When
from altgrad.config.tasks import HISTORY
from altgrad.integrations.folder import Folder, settings_of
from altgrad.model import layer_recipe, linear_layers, matrix_of
from altgrad.optim import ArmOptimizer
from altgrad.optim.weight_grid import weight_grids
from altgrad.training import machine
from altgrad.training.evaluation import LossAlone
from altgrad.training.monitor import Monitor, Row, largest_overflow
from altgrad.training.outcome import OutcomeTracker
from altgrad.training.records import RowLog, write_history, write_monitors
from altgrad.training.updates import UpdateMonitor

STEP, TRAIN_LOSS, VAL_LOSS, NORM = (HISTORY.index(n) for n in ("step", "train_loss", "val_loss", "grad_norm"))


class Recorder:
    """Records below ``folder`` the run of ``model`` that ``optimizer`` trains.

    The optimizer's own hooks count the steps and show the monitors gradients and updates. The loop says its losses,
    by :meth:`log`, and where it wants the layers' tensors watched the batch, by :meth:`observe`. A run has the same
    bits recorded or not. Of several processes the first records, without monitors.

    Args:
        folder: of its own, for all runs that are to be compared; made if need be.
        model: quantized or not; ``optimizer`` is one of `build_optimizer`.
        format, name, seed: what is quantized, what the arm is called, the seed of the loop. With ``lr_scale``, a
            multiple of a learning rate, they name the run and are what a report compares by.
        steps: optimizer steps that the run is to take.
        tokens_per_step: tokens, or samples, that a step sees.
        baseline: the ``format`` that others are compared with.
        corpus: what is trained on.
        vocab_size: classes of the loss; default: rows of the largest embedding, or outputs of the last linear layer.
        when: how often the monitors look, and at what; ``outputs`` are of the bench's own model alone.
        resume_step: step of the checkpoint from which the loop goes on; rows after it are dropped.

    Raises ``TypeError`` for another optimizer, ``ValueError`` for a name that no file can have, and
    :class:`altgrad.config.UserError` for a folder with runs that these cannot be compared with.
    """

    def __init__(
        self, folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, format: str, name: str,
        seed: int, steps: int, tokens_per_step: int, lr_scale: float = 1, baseline: str = "bf16",
        corpus: str = "unnamed", vocab_size: int | None = None, when: When | None = None,
        resume_step: int | None = None,
    ) -> None:  # fmt: skip
        optimizer = getattr(optimizer, "optimizer", optimizer)  # inside that of Accelerate
        if not isinstance(optimizer, ArmOptimizer):
            raise TypeError(f"expected an optimizer of build_optimizer, got {type(optimizer).__name__}")
        self.model, self.optimizer, self.tokens_per_step = model, optimizer, tokens_per_step
        self.step = self._first = self._observed = self._prepared = resume_step or 0
        self._when, self._began = when or When(), time.perf_counter()
        on_grid = optimizer.arm.weights == "quantized"
        grids = optimizer.grids if on_grid else weight_grids(model, on_grid=False)
        self._monitor, self._updates = Monitor(model, {}), UpdateMonitor(model, optimizer, grids)
        self._watched = ExitStack()  # the step whose update is watched
        self._seen: list[Row] = []  # of the step under way
        self._lr: float | None = None
        self._row: list[Any] = []  # of the last step that was logged,
        self._written: list[Any] = []  # as it stands in the file
        self._logs: list[RowLog] = []  # the history and the monitors
        identity = {"format": format, "optimizer": name, "seed": seed, "lr_scale": lr_scale}
        self._folder = Folder(Path(folder), settings_of(model, optimizer, identity, steps))
        if _processes() == 1 or not dist.get_rank():
            corpus_file = {"corpus": corpus, "vocab_size": vocab_size or _classes(model), "splits": {}}
            self._folder.begin(corpus_file, baseline)
            logs = (self._folder.scratch / f"{name}.jsonl" for name in ("history", "monitors"))
            self._logs = [RowLog(path, resume_step) for path in logs]
        before, after = optimizer.register_step_pre_hook, optimizer.register_step_post_hook
        self._hooks = [before(self._before_hook), after(self._after_hook)]

    def observe(self, loss: Callable[[], Tensor]) -> None:
        """Watch every layer's tensors under ``loss()``, the scalar loss of the coming step's batch, if that is due.

        To be called before the step's own forward pass, within its autocast; of a step's batches the first counts.
        """
        if self._observed <= self.step and self.model.training:
            self._observed = self.step + 1
            if "tensors" in self._due():
                self._seen += self._monitor.observe(self._observed, loss, {"tensors"})

    def before_step(self) -> None:
        """Take in the step's gradients: for loops that give ``step`` a closure, which computes them; once a step."""
        if self._prepared > self.step:
            return
        self._prepared = self.step + 1
        self._write_row()
        self._lr = float(self.optimizer.param_groups[0]["lr"])
        if "gradients" in self._due():
            self._seen += self._monitor.gradients(self._prepared)
        if "updates" in self._due():
            self._watched.enter_context(self._updates.watching(self._prepared, self._seen))

    def log(self, train_loss: Any = None, *, val_loss: Any = None, norm: Any = None) -> None:
        """Write a row of the history for the last step; what comes later of the same step joins it.

        Losses are nats per token (or sample), numbers or tensors of one element; ``norm`` is that of all gradients.
        """
        if not self._row or self._row[STEP] != self.step:
            self._write_row()
            self._row = [self.step, self.step * self.tokens_per_step, self._lr, None, None, None, None]
        for place, value in ((TRAIN_LOSS, train_loss), (VAL_LOSS, val_loss), (NORM, norm)):
            if value is not None:
                self._row[place] = float(value.detach() if isinstance(value, Tensor) else value)

    def sync(self) -> None:
        """Return when all rows are on disk: to be called before the loop writes a checkpoint."""
        self._write_row()
        for log in self._logs:
            log.sync()

    def finish(self) -> None:
        """Write the run's output files, and let go of the optimizer."""
        self._write_row()
        if self._logs:
            history, monitors = (log.rows() for log in self._logs)
            history = list({row[STEP]: row for row in history}.values())  # a row that was joined is there twice
            write_history(self._folder.run / "history.csv", history)
            write_monitors(self._folder.run / "monitors.parquet", monitors)
            self._folder.end(self._metrics(history, monitors), self._timing())
        self.close()

    def close(self) -> None:
        """Let go of the optimizer and of the files, which a resumed run continues."""
        for hook in self._hooks:
            hook.remove()
        for log in self._logs:
            log.close()
        self._hooks, self._logs = [], []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if kind is None:
            self.finish()
        self.close()

    def _before_hook(self, optimizer: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not any(callable(given) for given in (*args[1:], kwargs.get("closure"))):  # the first is the optimizer
            self.before_step()

    def _after_hook(self, *_: Any) -> None:
        self._watched.close()
        self.step += 1
        if self._logs:
            self._logs[1].extend(self._seen)
        self._seen.clear()

    def _due(self) -> set[str]:
        return self._when.due(self.step + 1) if _processes() == 1 else set()

    def _write_row(self) -> None:
        if self._logs and self._row != self._written:
            self._logs[0].extend([self._row])
            self._written = list(self._row)

    def _metrics(self, history: list[list[Any]], monitors: list[list[Any]]) -> dict[str, Any]:
        settings, tracker = self._folder.settings, _outcome(history, monitors)
        evaluated = [(row[VAL_LOSS], row[STEP]) for row in history if row[VAL_LOSS] is not None]
        best, best_step = min(evaluated, default=(None, None))
        val_loss = evaluated[-1][0] if evaluated and not tracker.diverged else None
        quantized = {layer.weight for layer in linear_layers(self.model).values() if layer_recipe(layer)}
        return {
            **{name: settings[name] for name in ("key", "format", "optimizer", "seed", "lr_scale")},
            "outcome": tracker.outcome, "signature": tracker.signature, "outcome_step": tracker.outcome_step,
            "steps": self.step, "tokens": self.step * self.tokens_per_step,
            "parameters": settings["model"]["parameters"], "quantized_parameters": sum(p.numel() for p in quantized),
            "train_loss": next((row[TRAIN_LOSS] for row in reversed(history)), None),
            "val_loss": val_loss, "val_loss_best": best, "val_loss_best_step": best_step,
            **LossAlone().final(val_loss, self._folder.run),
        }  # fmt: skip

    def _timing(self) -> dict[str, Any]:
        """Return what ``timing.json`` holds, of this process since it began."""
        device, seconds = next(self.model.parameters()).device, time.perf_counter() - self._began
        return {
            **machine.used(device), "devices": _processes(), "threads": torch.get_num_threads(),
            "compiled": False, "train_s": seconds, "total_s": seconds,
            "tokens_per_s": (self.step - self._first) * self.tokens_per_step / seconds,
        }  # fmt: skip


def _processes() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _classes(model: nn.Module) -> int:
    """Return the rows of the largest embedding, or without one the outputs of the last linear layer."""
    tables = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    return max(tables) if tables else len(matrix_of([*linear_layers(model).values()][-1]))


def _outcome(history: list[list[Any]], monitors: list[list[Any]]) -> OutcomeTracker:
    """Judge a run by its rows, as the bench judges one of its own by every step; null is a loss that is not finite."""
    tracker = OutcomeTracker(Divergence().spike, Divergence().window)
    tracker.observe_overflow(largest_overflow([Row(*row) for row in monitors]))
    for row in history:
        trained = row[TRAIN_LOSS] is not None or row[VAL_LOSS] is None
        if trained and tracker.update(row[STEP], math.nan if row[TRAIN_LOSS] is None else row[TRAIN_LOSS], 0.0):
            break
    tracker.finish()
    return tracker
