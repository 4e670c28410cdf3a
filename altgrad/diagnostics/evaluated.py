"""The validation loss of a trained cell with weights and a recipe of the caller's choice, on the run's own sample."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from altgrad.config import Cell, UserError
from altgrad.config.recipe import Recipe
from altgrad.data.tasks import task_of
from altgrad.diagnostics.saved import SavedRun
from altgrad.model import GPT, quantize_model
from altgrad.model.from_cell import config_of
from altgrad.model.hardware import multiplies_bf16


class Evaluated:
    """A run's final weights, ``saved`` by parameter name, and its validation sample.

    Raises :class:`UserError` when a file of the run is missing or damaged.
    """

    def __init__(self, cell: Cell, run_dir: Path, tokens: Path) -> None:
        with SavedRun(cell, run_dir) as run:
            self.cell, self.saved = run.cell, run.model()
        task = task_of(cell, tokens, "val")
        self._config = config_of(cell, task.vocab_size, task.labels)
        self._sample = task.sample()

    def model(self, recipe: Recipe) -> GPT:
        """Return the cell's model under ``recipe``, with weights of its own."""
        model = GPT(self._config)
        quantize_model(model, recipe)
        return model

    def loss(self, weights: Mapping[str, Tensor], recipe: Recipe) -> float:
        """Return the loss of ``weights`` under ``recipe``, nats per token; one that is not finite as it is."""
        model = self.model(recipe)
        missing = set(model.load_state_dict(weights, strict=False).missing_keys) - {"head.weight"}
        if missing:
            raise UserError(f"the weights saved for {self.cell.key} lack {min(missing)}; run `dvc repro` to train it")
        inputs, targets = self._sample
        batch = self.cell.train.batch
        low = self.cell.train.compute == "bf16" and multiplies_bf16("cpu")  # as the run was evaluated
        total = 0.0
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=low):
            for start in range(0, len(inputs), batch):
                part = slice(start, start + batch)
                total += model.eval()(inputs[part], targets[part]).item() * len(inputs[part])
        return total / len(inputs)
