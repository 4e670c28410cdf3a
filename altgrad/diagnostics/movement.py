"""How far the weights have moved."""

from __future__ import annotations

from altgrad.diagnostics.view import LayerView


def init_distance(view: LayerView) -> float | None:
    """``None`` if the initial weights are all zero."""
    initial = view.initial.double()
    length = initial.norm().item()
    return (view.weight.double() - initial).norm().item() / length if length else None


def init_distance_kept(view: LayerView) -> float | None:
    """It can exceed 1 where small steps cross from one value to the next. ``None`` for weights that have not moved."""
    grid = view.grid
    moved = (view.scaled.double() - grid.scaled(view.initial).double()).norm().item()
    shown = (view.on_grid.double() - grid.rounded(view.initial).double()).norm().item()
    return shown / moved if moved else None
