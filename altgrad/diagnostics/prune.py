"""Pruning after training: the validation loss of a trained cell with the smallest of each layer's weights set to zero.

How few weights carry the loss. A step in proportion to a weight leaves small weights small, which trains models that
can be pruned further (Schwarz et al. 2021, arXiv:2110.00296); a format's spacings are such a step. Pruning is by
magnitude and layer by layer, without training on (Han et al. 2015, arXiv:1506.02626, before theirs).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from altgrad.config import Cell
from altgrad.diagnostics.evaluated import Evaluated
from altgrad.model.from_cell import recipe_of
from altgrad.model.layers import embedded_weights, linear_layers

SHARES = (0.1, 0.3, 0.5, 0.7)


def losses(cell: Cell, run_dir: Path, tokens: Path, shares: Sequence[float] = SHARES) -> dict[float, float]:
    """Return the validation loss (nats per token) by the share of each layer's weights that is zero, 0 first.

    The layers are the linear ones, but for a head that is an embedding too; formats are those of the run. Raises
    :class:`altgrad.config.UserError` when a file of the run is missing or damaged.
    """
    evaluated = Evaluated(cell, run_dir, tokens)
    recipe = recipe_of(evaluated.cell)
    model = evaluated.model(recipe)
    embedded = embedded_weights(model)
    layers = [f"{name}.weight" for name, layer in linear_layers(model).items() if layer.weight not in embedded]
    return {
        share: evaluated.loss(evaluated.saved | {name: pruned(evaluated.saved[name], share) for name in layers}, recipe)
        for share in (0.0, *shares)
    }


def pruned(weight: Tensor, share: float) -> Tensor:
    """Return ``weight`` with ``share`` of its values, rounded to a whole number of them, at zero: the smallest ones."""
    smallest = weight.abs().flatten().argsort(stable=True)[: round(share * weight.numel())]
    return weight.flatten().index_fill(0, smallest, 0.0).reshape(weight.shape)
