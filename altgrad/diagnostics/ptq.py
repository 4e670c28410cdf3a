"""Quantization after training: the validation loss of a trained cell's weights in every format.

The model is that of `altgrad.model`, with weights and inputs of every linear layer in one format (a head by its weight
only), or the weights alone, and the validation sample is the run's own. Kuzmin et al. 2022 (arXiv:2208.09225) find that
formats differ much after training, and little when trained so.

Of a cell that classifies it is the metric that its grid compares, of test documents. Thresholds are chosen on
validation documents in the unquantized model and kept: quantization comes after all choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from altgrad.config import Cell
from altgrad.config.cell import cell_key
from altgrad.config.files import read_json
from altgrad.config.recipe import Recipe, Rule, TensorRecipe
from altgrad.config.tasks import Found
from altgrad.diagnostics.evaluated import Evaluated
from altgrad.diagnostics.what_if import GRANULARITIES, SPLITS
from altgrad.model.from_cell import recipe_of

UNQUANTIZED, AS_TRAINED = "none", "as trained"


def values(
    cell: Cell,
    run_dir: Path,
    tokens: Path,
    formats: Sequence[str] = SPLITS,
    granularity: str = "tensor",
    *,
    weights_only: bool = False,
    metric: Found | None = None,
) -> dict[str, float]:
    """Return the validation loss (nats per token) of a run's final weights `AS_TRAINED`, `UNQUANTIZED` and in formats.

    With ``metric`` it is that of test documents, higher is better. ``granularity`` is one of
    `what_if.GRANULARITIES`. A loss that is not finite is returned as it is. Raises
    :class:`UserError` when a file of the run is missing or damaged.
    """
    evaluated = Evaluated(cell, run_dir, tokens)
    recipes = {AS_TRAINED: recipe_of(evaluated.cell), UNQUANTIZED: Recipe(rules=())}
    options = GRANULARITIES[granularity]
    for name in formats:
        if weights_only:
            recipes[name] = Recipe(rules=(Rule(layers="*", weight=TensorRecipe(format=name, **options)),))
        else:
            recipes[name] = Recipe.uniform(name, grad=None, **options)
    saved = evaluated.saved
    if metric is None:
        return {name: evaluated.loss(saved, recipe) for name, recipe in recipes.items()}
    from altgrad.data.classification import choose_thresholds, classification_metrics  # which loads scikit-learn

    assert cell.task is not None
    thresholds = choose_thresholds(*evaluated.scores(saved, recipes[UNQUANTIZED], "val"), cell.task.thresholds)
    return {
        name: classification_metrics(*evaluated.scores(saved, recipe, "test"), thresholds)[metric]
        for name, recipe in recipes.items()
    }


def trained(data: Path, cell: Cell, formats: Sequence[str], column: str = "val_loss") -> dict[str, float]:
    """Return what ``column`` of `metrics.json` says of cells of ``formats`` beside ``cell``: same arm, seed, rate.

    A format without a finished cell, or whose cell diverged, is left out.
    """
    found = {}
    for name in formats:
        path = data / "runs" / cell_key(name, cell.optimizer, cell.seed, cell.lr_scale) / "metrics.json"
        value = read_json(path)[column] if path.exists() else None
        if value is not None:
            found[name] = value
    return found
