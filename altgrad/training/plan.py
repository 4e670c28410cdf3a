"""From the plain values of a resolved cell to formats and recipes, and what is wrong with them.

Everything that can be known to be wrong is said here, before any cell trains.
"""

from __future__ import annotations

import torch

from altgrad.config import Cell, UserError
from altgrad.formats import Format
from altgrad.model import GPT, GPTConfig, Recipe, matched_layers, quantize_model
from altgrad.model.surgery import TORCHAO_DIVISOR
from altgrad.optim import Arm
from altgrad.training import machine
from altgrad.training.grids import weight_grids


def formats_of(cell: Cell) -> dict[str, Format]:
    """Return the formats that a resolved cell defines, by name."""
    return {name: Format(**fields) for name, fields in cell.formats.items()}


def recipe_of(cell: Cell) -> Recipe:
    """Return the recipe of a resolved cell."""
    formats = formats_of(cell)
    return Recipe(rules=tuple(rule.with_formats(formats) for rule in cell.rules))


def arm_of(cell: Cell) -> Arm:
    """Return the arm of a resolved cell, its learning rate scaled.

    Raises ``ValueError`` for settings that do not go together.
    """
    return cell.arm.with_formats(formats_of(cell)).but(lr=cell.peak_lr)


def check_cells(cells: list[Cell], vocab_size: int, baseline: str) -> None:
    """Raise :class:`UserError` for a recipe that does not fit its model, an arm that does not fit either, or a device
    that is not there.

    In the cells of the ``baseline`` a geometry-aware arm may find no quantized weight: there it trains as its plain
    form, which shows that the two agree.
    """
    for cell in cells:
        machine.select_device(cell.train.device)
        with torch.device("meta"):
            model = GPT(GPTConfig(vocab_size=vocab_size, **cell.model.model_dump()))
        try:
            recipe = recipe_of(cell)
            matched_layers(model, recipe)
        except ValueError as error:
            raise UserError(f"params.yaml: recipe of cell {cell.key}: {error}") from None
        _check_arm(cell, model, recipe, baseline)
        tokens = cell.train.batch * cell.model.context
        if tokens % TORCHAO_DIVISOR and any(rule.torchao for rule in cell.rules):
            raise UserError(
                f"params.yaml: cell {cell.key}: train.batch {cell.train.batch} times context {cell.model.context} is "
                f"{tokens} tokens, and torchao's recipes need a multiple of {TORCHAO_DIVISOR}; change one of the two"
            )


def _check_arm(cell: Cell, model: GPT, recipe: Recipe, baseline: str) -> None:
    where = f"params.yaml: optimizers.{cell.optimizer}"
    try:
        arm = arm_of(cell)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None
    if not arm.looks_at_grid:
        return
    try:
        grids = weight_grids(quantize_model(model, recipe), on_grid=arm.weights == "grid")
    except ValueError as error:
        raise UserError(f"{where}: cell {cell.key}: {error}") from None
    if not grids and (cell.format != baseline or arm.weights == "grid"):
        raise UserError(
            f"{where}: cell {cell.key} has no quantized weight for this arm to act on; take {cell.format} out of "
            f"grid.formats or {cell.optimizer} out of grid.optimizers"
        )
