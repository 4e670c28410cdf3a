"""``Recorder`` writes history and monitors of a run that any loop trains, in the same files as a run of the bench.

`make watch`, trackers and the report read these files. In the project folder, ``data/grid`` lists the runs and their
settings. ``scratch`` has a run's rows while it trains, ``data/runs`` and ``data/diag`` have its results.
"""

import math
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch import distributed as dist

from altgrad.common.errors import UserError
from altgrad.common.files import canonical_json, read_json, sha256_of, write_json, write_rows, write_text
from altgrad.common.fingerprint import only_worker
from altgrad.config import cell_key
from altgrad.config.params import GridSettings
from altgrad.config.schema import Divergence, MonitorSettings
from altgrad.config.tasks import HISTORY
from altgrad.diagnostics.diagnose import SCHEMA
from altgrad.formats import definition
from altgrad.model import layer_recipe, linear_layers, matrix_of, quantizable_layers, virtual_weight
from altgrad.optim import ArmOptimizer
from altgrad.training import machine
from altgrad.training.evaluation import perplexity
from altgrad.training.monitor import Measurement, TensorMonitor, UpdateMonitor, largest_overflow
from altgrad.training.outcome import OutcomeTracker
from altgrad.training.records import RowLog, write_history, write_monitors

STEP, TRAIN_LOSS, VAL_LOSS, NORM = (HISTORY.index(n) for n in ("step", "train_loss", "val_loss", "grad_norm"))
LISTS = {"format": "formats", "optimizer": "optimizers", "seed": "seeds", "lr_scale": "lr_scales"}


class Recorder:
    """Records the run in which ``optimizer`` trains ``model``.

    The optimizer's hooks count the steps and show gradients and updates to the monitors. The loop passes its losses to
    :meth:`log`. With :meth:`observe` it lets the monitors see the layers' tensors too. Recording changes no bit of a
    run. With several processes only the first process records, without monitors.

    Args:
        folder: a project folder for all runs that a report compares; created if missing.
        model: quantized or not.
        optimizer: from `build_optimizer`, also inside Accelerate's wrapper.
        format, name, seed: the name of what is quantized, the optimizer's name, and the loop's seed. Together with
            ``lr_scale``, by which the learning rate was multiplied, they name the run, and reports compare by them.
        steps: optimizer steps of the whole run.
        tokens_per_step: tokens, or samples, per step.
        baseline: the ``format`` that reports compare the others with.
        corpus: the name of the training data.
        vocab_size: classes of the loss; default: rows of the largest embedding, or outputs of the last linear layer.
        when: what the monitors observe and how often; ``outputs`` are recorded for the bench's own model alone.
        resume_step: step of the checkpoint that the loop continues from; later rows are dropped. ``None``: a new run.

    Raises ``TypeError`` for any other optimizer, ``ValueError`` for a name that cannot be in a file's name, and
    :class:`altgrad.config.UserError` for a folder whose runs cannot be compared with this run.
    """

    def __init__(
        self, folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, format: str, name: str,
        seed: int, steps: int, tokens_per_step: int, lr_scale: float = 1, baseline: str = "bf16",
        corpus: str = "unnamed", vocab_size: int | None = None, when: MonitorSettings | None = None,
        resume_step: int | None = None,
    ) -> None:  # fmt: skip
        optimizer = getattr(optimizer, "optimizer", optimizer)  # Accelerate's wrapper has it there
        if not isinstance(optimizer, ArmOptimizer):
            raise TypeError(f"expected an optimizer of build_optimizer, got {type(optimizer).__name__}")
        self.model, self.optimizer, self.tokens_per_step = model, optimizer, tokens_per_step
        self.step = self._first = self._observed = self._prepared = resume_step or 0
        self._when, self._began = when or MonitorSettings(), time.perf_counter()
        self._monitor, self._updates = TensorMonitor(model, {}), UpdateMonitor(model, optimizer)
        self._watched = ExitStack()  # watches the update of the current step
        self._seen: list[Measurement] = []  # monitors' rows of this step
        self._lr: float | None = None
        self._row: list[Any] = []  # the row of the last step that was logged
        self._written: list[Any] = []  # the row that was written to the file last
        self._logs: list[RowLog] = []  # the history and the monitors
        identity = {"format": format, "optimizer": name, "seed": seed, "lr_scale": lr_scale}
        self._root, self._settings = Path(folder), _settings(model, optimizer, identity, steps)
        self._key: str = self._settings["key"]
        self._run = self._root / "data/runs" / self._key
        if _processes() == 1 or not dist.get_rank():
            corpus_file = {"corpus": corpus, "vocab_size": vocab_size or _classes(model), "splits": {}}
            self._list_run(corpus_file, baseline)
            scratch = self._root / f"scratch/{self._key}-recorded"
            scratch.mkdir(parents=True, exist_ok=True)
            self._logs = [RowLog(scratch / f"{name}.jsonl", resume_step) for name in ("history", "monitors")]
        before, after = optimizer.register_step_pre_hook, optimizer.register_step_post_hook
        self._hooks = [before(self._before_hook), after(self._after_hook)]

    def observe(self, loss: Callable[[], Tensor]) -> None:
        """If the monitors are due at the coming step, call ``loss()`` and show them every layer's tensors in that call.

        ``loss`` returns the scalar loss of a batch. Call `observe` before the step's own forward pass, under the same
        autocast. Only the first call of a step counts.
        """
        if self._observed <= self.step and self.model.training:
            self._observed = self.step + 1
            if "tensors" in self._due():
                self._seen += self._monitor.observe(self._observed, loss, {"tensors"})

    def before_step(self) -> None:
        """Show the coming step's gradients to the monitors; only the first call of a step counts.

        The optimizer's hook calls it. If the loop passes a closure to ``step``, the closure must call it at its end.
        """
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
        """Set values in the history's row of the last step; several calls for one step share its row.

        Losses are nats per token (or sample), ``norm`` is the norm of all gradients. Each is a number or a tensor of
        one element; ``None`` leaves its column as it is.
        """
        if not self._row or self._row[STEP] != self.step:
            self._write_row()
            self._row = [self.step, self.step * self.tokens_per_step, self._lr, None, None, None, None]
        for place, value in ((TRAIN_LOSS, train_loss), (VAL_LOSS, val_loss), (NORM, norm)):
            if value is not None:
                self._row[place] = float(value.detach() if isinstance(value, Tensor) else value)

    def sync(self) -> None:
        """Write all rows to disk; call it before the loop saves a checkpoint."""
        self._write_row()
        for log in self._logs:
            log.sync()

    def finish(self) -> None:
        """Write the run's output files, and close."""
        self._write_row()
        if self._logs:
            history, monitors = (log.rows() for log in self._logs)
            history = list({row[STEP]: row for row in history}.values())  # a row that was added to is there twice
            write_history(self._run / "history.csv", history)
            write_monitors(self._run / "monitors.parquet", monitors)
            write_json(self._run / "metrics.json", self._metrics(history, monitors))
            write_json(self._run / "timing.json", self._timing())
            self._write_diagnosis()
        self.close()

    def close(self) -> None:
        """Remove the optimizer's hooks and close the files; a resumed run continues them."""
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
        if not any(callable(given) for given in (*args[1:], kwargs.get("closure"))):  # args[0] is the optimizer
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

    def _list_run(self, corpus: dict[str, Any], baseline: str) -> None:
        """Add the run to the folder's list, and remove the results of an earlier run with the same name.

        ``corpus`` is the content of ``data/tokens/meta.json``. Raises `UserError` if the folder's runs have another
        corpus or baseline.
        """
        root, key, grid_folder = self._root, self._key, self._root / "data/grid"
        with only_worker(root / "scratch/recording", lambda: None):
            index = _index(root, grid_folder / "index.json", baseline)
            before = canonical_json(index)
            tokens = root / "data/tokens/meta.json"
            if index["cells"] and read_json(tokens) != corpus:
                raise UserError(f"{root}: its runs read another corpus or vocabulary; record into another folder")
            grid = index["params"]["grid"]
            if grid["baseline"] != baseline:
                raise UserError(f"{root}: its baseline is {grid['baseline']}, not {baseline}; take one for all")
            for name, values in LISTS.items():
                grid[values] += [self._settings[name]] if self._settings[name] not in grid[values] else []
            index["params"]["optimizers"][self._settings["optimizer"]] = self._settings["arm"]
            index["cells"] += [key] if key not in index["cells"] else []
            shutil.rmtree(self._run, ignore_errors=True)
            for suffix in (".json", ".parquet"):
                (root / "data/diag" / (key + suffix)).unlink(missing_ok=True)
            write_json(tokens, corpus)
            write_text(grid_folder / f"{key}.json", canonical_json(self._settings))
            if canonical_json(index) != before:  # the page of `make watch` begins anew with another list
                write_json(grid_folder / "index.json", index)

    def _write_diagnosis(self) -> None:
        """Write an empty diagnosis: a recorded run keeps no weights."""
        folder, settings = self._root / "data/diag", self._root / f"data/grid/{self._key}.json"
        write_rows(folder / f"{self._key}.parquet", [], SCHEMA)
        diagnosis = {"key": self._key, "cell_sha256": sha256_of(settings), "summary": {}, "flags": []}
        write_json(folder / f"{self._key}.json", diagnosis)

    def _metrics(self, history: list[list[Any]], monitors: list[list[Any]]) -> dict[str, Any]:
        settings, tracker = self._settings, _outcome(history, monitors)
        evaluated = [(row[VAL_LOSS], row[STEP]) for row in history if row[VAL_LOSS] is not None]
        best, best_step = min(evaluated, default=(None, None))
        val_loss = evaluated[-1][0] if evaluated and not tracker.diverged else None
        quantized = {layer.weight for layer in quantizable_layers(self.model).values() if layer_recipe(layer)}
        return {
            **{name: settings[name] for name in ("key", "format", "optimizer", "seed", "lr_scale")},
            "outcome": tracker.outcome, "signature": tracker.signature, "outcome_step": tracker.outcome_step,
            "steps": self.step, "tokens": self.step * self.tokens_per_step,
            "parameters": settings["model"]["parameters"], "quantized_parameters": sum(p.numel() for p in quantized),
            "train_loss": next((row[TRAIN_LOSS] for row in reversed(history)), None),
            "val_loss": val_loss, "val_loss_best": best, "val_loss_best_step": best_step,
            "perplexity": perplexity(val_loss),
        }  # fmt: skip

    def _timing(self) -> dict[str, Any]:
        """Return the content of ``timing.json``: times in seconds since this recorder was made."""
        device, seconds = next(self.model.parameters()).device, time.perf_counter() - self._began
        return {
            **machine.used(device), "devices": _processes(), "threads": torch.get_num_threads(),
            "compiled": False, "train_s": seconds, "total_s": seconds,
            "tokens_per_s": (self.step - self._first) * self.tokens_per_step / seconds,
        }  # fmt: skip


def _settings(model: nn.Module, optimizer: ArmOptimizer, identity: dict[str, Any], steps: int) -> dict[str, Any]:
    """Return the settings of a run in the form of a resolved cell, as far as ``model`` and ``optimizer`` hold them.

    ``identity`` has the keys format, optimizer, seed and lr_scale. ``steps`` is the run's number of optimizer steps.
    Raises ``ValueError`` for a name that cannot be in a file's name.
    """
    GridSettings(**{LISTS[name]: [value] for name, value in identity.items()})  # checks the names
    layers = quantizable_layers(model)
    rules = [recipe.on(name) for name, layer in layers.items() if (recipe := layer_recipe(layer)) is not None]
    tensors = [tensor for rule in rules for tensor in rule.tensors().values() if tensor is not None]
    tensors += [tensor for layer in layers.values() if (tensor := virtual_weight(layer))]
    used = [tensor.format for tensor in tensors] + ([optimizer.arm.foreign] if optimizer.arm.foreign else [])
    arm = optimizer.arm.model_dump(mode="json")
    return {
        "key": cell_key(*identity.values()), **identity,
        "rules": [rule.model_dump(mode="json") for rule in rules],
        "formats": {fmt.name: definition(fmt) for fmt in used},
        "arm": arm | {"lr": arm["lr"] / identity["lr_scale"]},
        "model": {"class": type(model).__name__, "parameters": sum(p.numel() for p in model.parameters())},
        "train": {"steps": steps},
    }  # fmt: skip


def _index(root: Path, path: Path, baseline: str) -> dict[str, Any]:
    """Return the list of runs in ``path``, a new list without the file; raise `UserError` for the pipeline's runs."""
    if not path.exists():
        grid: dict[str, Any] = {values: [] for values in LISTS.values()}
        return {"cells": [], "recorded": True, "params": {"grid": grid | {"baseline": baseline}, "optimizers": {}}}
    index: dict[str, Any] = read_json(path)
    if not index.get("recorded"):
        raise UserError(f"{root}: the pipeline's own runs are here; record into another folder")
    return index


def _processes() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _classes(model: nn.Module) -> int:
    """Return the number of rows of the largest embedding; without embeddings, of outputs of the last linear layer."""
    tables = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    return max(tables) if tables else len(matrix_of([*linear_layers(model).values()][-1]))


def _outcome(history: list[list[Any]], monitors: list[list[Any]]) -> OutcomeTracker:
    """Return the outcome of a run from its logged rows; a row without any loss stands for a loss that is not finite."""
    tracker = OutcomeTracker(Divergence().spike, Divergence().window)
    tracker.observe_overflow(largest_overflow([Measurement(*row) for row in monitors]))
    for row in history:
        trained = row[TRAIN_LOSS] is not None or row[VAL_LOSS] is None
        if trained and tracker.update(row[STEP], math.nan if row[TRAIN_LOSS] is None else row[TRAIN_LOSS], 0.0):
            break
    tracker.finish()
    return tracker
