"""How far the weights have moved."""

from __future__ import annotations

from altgrad.diagnostics.analysis import QUANTIZED, WEIGHT, Analysis
from altgrad.diagnostics.view import LayerView, needed
from altgrad.numerics import rung


def init_distance(view: LayerView) -> float | None:
    """``None`` if the initial weights are all zero."""
    initial = needed(view.initial).double()
    length = initial.norm().item()
    return (needed(view.weight).double() - initial).norm().item() / length if length else None


def init_distance_kept(view: LayerView) -> float | None:
    """It can exceed 1 where small steps cross from one value to the next. ``None`` for weights that have not moved."""
    grid, initial = needed(view.grid), needed(view.initial)
    moved = (view.scaled.double() - grid.scaled(initial).double()).norm().item()
    shown = (view.on_grid.double() - grid.rounded(initial).double()).norm().item()
    return shown / moved if moved else None


def init_distance_rungs(view: LayerView) -> float:
    """Both are on the quantization grid of the weights as they are now."""
    grid = needed(view.grid)
    moved = rung(view.on_grid, grid.format) - grid.rungs(needed(view.initial))
    return moved.abs().double().mean().item()


ORDER = 50
ANALYSES = (
    Analysis(init_distance, (*WEIGHT, "initial")),
    Analysis(init_distance_kept, (*QUANTIZED, "initial")),
    Analysis(init_distance_rungs, (*QUANTIZED, "initial")),
)
