"""Lightning: a callback that quantizes a module, and a callback that records a training run."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from altgrad.integrations.recorder import Recorder
from altgrad.model import Recipe, layer_recipe, quantizable_layers, quantize_model


class QuantizeCallback(Callback):
    """Quantizes the module's linear layers that ``recipe`` matches, as `quantize_model` does, with any precision.

    It quantizes before Lightning loads a checkpoint and makes the optimizer. A precision plugin would quantize too
    late to load a checkpoint's remembered scales.
    """

    def __init__(self, recipe: Recipe, *, seed: int = 0) -> None:
        self._recipe, self._seed = recipe, seed

    def setup(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        """Quantize ``module`` in place, unless one of its layers is quantized already."""
        if not any(layer_recipe(layer) for layer in quantizable_layers(module).values()):
            quantize_model(module, self._recipe, seed=self._seed)


class RecorderCallback(Callback):
    """Records a run of a Trainer in ``folder``; ``settings`` go to `Recorder`, without ``steps`` and ``resume_step``.

    It writes a row with the step's loss every ``log_every_n_steps`` steps of the Trainer. Before a step that the
    monitors observe, it calls ``training_step`` once more, without logging. ``val_loss`` is the name under which the
    module logs its validation loss. The module must use automatic optimization with one optimizer.
    """

    def __init__(self, folder: str | Path, *, val_loss: str = "val_loss", **settings: Any) -> None:
        self._folder, self._val_loss, self._settings = folder, val_loss, settings
        self._recorder: Recorder | None = None
        self._loss, self._logged = 0.0, 0  # loss of the current step so far; the last complete step

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Begin a record, or continue the record of the checkpoint that the Trainer loaded."""
        if not module.automatic_optimization or len(trainer.optimizers) != 1:
            raise ValueError("to be recorded, a module needs automatic optimization and one optimizer")
        self._close()
        self._loss, self._logged = 0.0, trainer.global_step
        self._recorder = Recorder(
            self._folder, module, trainer.optimizers[0], steps=int(trainer.estimated_stepping_batches),
            resume_step=trainer.global_step or None, **self._settings,
        )  # fmt: skip

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Show the step's first batch to the monitors, if they are due."""
        step = module.training_step
        inputs = (batch, batch_idx)[: len(inspect.signature(step).parameters)]

        def loss() -> torch.Tensor:
            output: Any = step(*inputs)
            return output["loss"] if isinstance(output, dict) else output

        if self._recorder:
            with trainer.precision_plugin.train_step_context(), _silent(module):
                self._recorder.observe(loss)

    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
        """Record the gradients that the step's closure has just computed."""
        if self._recorder:
            self._recorder.before_step()

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, *batch: Any) -> None:
        """Add the batch's share to the step's loss; after the step's last batch write a row if one is due."""
        if not self._recorder:
            return
        self._loss += float(outputs["loss"])
        step = self._recorder.step
        if step == self._logged:  # the step has more batches
            return
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if step % every == 0 or step == trainer.estimated_stepping_batches:
            self._recorder.log(self._loss)
        self._loss, self._logged = 0.0, step

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        if self._recorder and not trainer.sanity_checking and self._val_loss in trainer.callback_metrics:
            self._recorder.log(val_loss=trainer.callback_metrics[self._val_loss])

    def on_save_checkpoint(self, *arguments: Any) -> None:
        """Write all rows to disk when the Trainer saves a checkpoint."""
        if self._recorder:
            self._recorder.sync()

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        if self._recorder:
            self._recorder.finish()
        self._close()

    def on_exception(self, trainer: Trainer, module: LightningModule, exception: BaseException) -> None:
        """Close the files; a resumed run continues them."""
        self._close()

    def _close(self) -> None:
        if self._recorder:
            self._recorder.close()
            self._recorder = None


@contextmanager
def _silent(module: LightningModule) -> Iterator[None]:
    """Discard what ``module`` logs within the context: it logs the batch again when it trains on the batch."""
    for name in ("log", "log_dict"):
        vars(module)[name] = lambda *arguments, **options: None
    try:
        yield
    finally:
        for name in ("log", "log_dict"):
            del vars(module)[name]
