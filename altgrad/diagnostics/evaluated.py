"""The loss of a trained cell after its weights are quantized, or pruned.

**Quantized**: weights and inputs of every linear layer are in one format (a head has only its weight quantized), or
the weights alone. The loss is on the run's validation sample. Kuzmin et al. 2022 (arXiv:2208.09225) find that formats
differ much if quantized after training, and little if trained in. For a classifier the result is the metric that its
grid compares, on test documents. Its thresholds are chosen on validation documents in the unquantized model and kept.

**Pruned**: the smallest weights of each layer are set to zero, which shows how few weights carry the loss. Steps in
proportion to the weights leave small weights small, so models trained with them can be pruned further (Schwarz et al.
2021, arXiv:2110.00296). Steps scaled by a format's spacing are nearly proportional. Pruning is by magnitude and layer
by layer, without further training (Han et al. 2015, arXiv:1506.02626).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from altgrad.common.files import read_json
from altgrad.config import Cell
from altgrad.config.cell import cell_key
from altgrad.config.recipe import Recipe, Rule, TensorRecipe
from altgrad.config.tasks import Found
from altgrad.data import Split
from altgrad.data.batches import Classification, TruthAndScores, task_of
from altgrad.diagnostics.saved import SavedRun, load_saved
from altgrad.diagnostics.what_if import GRANULARITIES, SPLITS
from altgrad.model import GPT, embedded_weights, linear_layers, quantize_model
from altgrad.model.from_cell import config_of, recipe_of
from altgrad.model.hardware import multiplies_bf16
from altgrad.model.layers import add_adapters

UNQUANTIZED, AS_TRAINED = "none", "as trained"
SHARES = (0.1, 0.3, 0.5, 0.7)  # of a layer's weights, to be pruned


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
        model = quantize_model(GPT(self._config), recipe)
        if self.cell.lora is not None:
            add_adapters(model, self.cell.lora)
        return model

    def loss(self, weights: Mapping[str, Tensor], recipe: Recipe) -> float:
        """Return the loss of ``weights`` under ``recipe``, in nats per token, finite or not."""
        inputs, targets = self._sample
        batch = self.cell.train.batch
        total = 0.0
        with self._evaluating(weights, recipe) as model:
            for start in range(0, len(inputs), batch):
                part = slice(start, start + batch)
                total += model(inputs[part], targets[part]).item() * len(inputs[part])
        return total / len(inputs)

    def scores(self, weights: Mapping[str, Tensor], recipe: Recipe, split: Split) -> TruthAndScores:
        """Return the true labels and the scores of the documents in ``split``, as `Pieces.scores`; classifiers only."""
        assert isinstance(self._task, Classification)
        with self._evaluating(weights, recipe) as model:
            return self._task.of(split).scores(model, self.cell.train.batch)

    @contextmanager
    def _evaluating(self, weights: Mapping[str, Tensor], recipe: Recipe) -> Iterator[GPT]:
        """Yield the model with ``weights`` under ``recipe``, in the mode and dtype of the run's evaluation."""
        model = self.model(recipe)
        load_saved(self.cell, model, weights)
        low = self.cell.train.compute == "bf16" and multiplies_bf16()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=low):
            yield model.eval()


def quantized(
    cell: Cell, run_dir: Path, tokens: Path, formats: Sequence[str] = SPLITS, granularity: str = "tensor", *,
    weights_only: bool = False, metric: Found | None = None,
) -> dict[str, float]:  # fmt: skip
    """Return the validation loss (nats per token) of a run's final weights, by how they are quantized.

    The keys are `AS_TRAINED`, `UNQUANTIZED` and the names in ``formats``. With ``metric`` the values are that metric on
    test documents, higher is better. ``granularity`` is one of `what_if.GRANULARITIES`; ``weights_only`` leaves inputs
    unquantized. Raises :class:`UserError` if a file of the run is missing or damaged.
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
    from altgrad.data.labels import choose_thresholds, classification_metrics  # which loads scikit-learn

    assert cell.task is not None
    thresholds = choose_thresholds(*evaluated.scores(saved, recipes[UNQUANTIZED], "val"), cell.task.thresholds)
    return {
        name: classification_metrics(*evaluated.scores(saved, recipe, "test"), thresholds)[metric]
        for name, recipe in recipes.items()
    }


def trained(data: Path, cell: Cell, formats: Sequence[str], column: str = "val_loss") -> dict[str, float]:
    """Return ``column`` of ``metrics.json`` by format, from the cells that differ from ``cell`` in the format alone.

    A format without a finished cell, or whose cell diverged, is left out.
    """
    values = {}
    for name in formats:
        key = cell_key(name, cell.optimizer, cell.seed, cell.lr_scale, cell.model_name)
        path = data / "runs" / key / "metrics.json"
        value = read_json(path)[column] if path.exists() else None
        if value is not None:
            values[name] = value
    return values


def pruned(cell: Cell, run_dir: Path, tokens: Path, shares: Sequence[float] = SHARES) -> dict[float, float]:
    """Return the validation loss (nats per token) by the share of each layer's weights set to zero, 0 first.

    Linear layers are pruned, except a head whose weight is also the embedding's. The model is quantized as in the run.
    Raises :class:`UserError` if a file of the run is missing or damaged.
    """
    evaluated = Evaluated(cell, run_dir, tokens)
    recipe = recipe_of(evaluated.cell)
    model = evaluated.model(recipe)
    embedded = embedded_weights(model)
    layers = [f"{name}.weight" for name, layer in linear_layers(model).items() if layer.weight not in embedded]
    return {
        share: evaluated.loss(
            evaluated.saved | {name: without_smallest(evaluated.saved[name], share) for name in layers}, recipe
        )
        for share in (0.0, *shares)
    }


def without_smallest(weight: Tensor, share: float) -> Tensor:
    """Return ``weight`` (n elements) with the ``round(share * n)`` elements of smallest magnitude set to zero."""
    smallest = weight.abs().flatten().argsort(stable=True)[: round(share * weight.numel())]
    return weight.flatten().index_fill(0, smallest, 0.0).reshape(weight.shape)
