"""A trained cell with weights and a recipe of the caller's choice: its loss on the run's own sample, or its scores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from altgrad.config import Cell
from altgrad.config.recipe import Recipe
from altgrad.data.pieces import TruthAndScores
from altgrad.data.splits import Split
from altgrad.data.tasks import Classification, task_of
from altgrad.diagnostics.rebuilt import load_saved
from altgrad.diagnostics.saved import SavedRun
from altgrad.model import GPT, quantize_model
from altgrad.model.from_cell import config_of
from altgrad.model.hardware import multiplies_bf16
from altgrad.model.lora import add_adapters


class Evaluated:
    """A run's final weights, ``saved`` by parameter name, and its validation sample.

    Raises :class:`UserError` when a file of the run is missing or damaged.
    """

    def __init__(self, cell: Cell, run_dir: Path, tokens: Path) -> None:
        with SavedRun(cell, run_dir) as run:
            self.cell, self.saved = run.cell, run.model()
        self._task = task = task_of(cell, tokens, "val")
        self._config = config_of(cell, task.vocab_size, task.labels)
        self._sample = task.sample()

    def model(self, recipe: Recipe) -> GPT:
        """Return the cell's model under ``recipe``, with weights of its own."""
        model = GPT(self._config)
        return add_adapters(quantize_model(model, recipe), self.cell.lora)

    def loss(self, weights: Mapping[str, Tensor], recipe: Recipe) -> float:
        """Return the loss of ``weights`` under ``recipe``, nats per token; one that is not finite as it is."""
        inputs, targets = self._sample
        batch = self.cell.train.batch
        total = 0.0
        with self._evaluating(weights, recipe) as model:
            for start in range(0, len(inputs), batch):
                part = slice(start, start + batch)
                total += model(inputs[part], targets[part]).item() * len(inputs[part])
        return total / len(inputs)

    def scores(self, weights: Mapping[str, Tensor], recipe: Recipe, split: Split) -> TruthAndScores:
        """Return truth and scores of a split's documents, as `Pieces.scores`, of a cell that classifies."""
        assert isinstance(self._task, Classification)
        with self._evaluating(weights, recipe) as model:
            return self._task.of(split).scores(model, self.cell.train.batch)

    @contextmanager
    def _evaluating(self, weights: Mapping[str, Tensor], recipe: Recipe) -> Iterator[GPT]:
        """Give the model with ``weights`` under ``recipe``, and compute as the run was evaluated."""
        model = self.model(recipe)
        load_saved(self.cell, model, weights)
        low = self.cell.train.compute == "bf16" and multiplies_bf16("cpu")
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=low):
            yield model.eval()
