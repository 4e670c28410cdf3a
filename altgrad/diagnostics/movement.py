"""How far the weights have moved."""

from __future__ import annotations

from altgrad.diagnostics.view import LayerView


def init_distance(view: LayerView) -> float | None:
    """||w - w_0|| / ||w_0|| of the master weights, w_0 being the initial ones; ``None`` if those are all zero."""
    initial = view.initial.double()
    length = initial.norm().item()
    return (view.weight.double() - initial).norm().item() / length if length else None


def init_distance_kept(view: LayerView) -> float | None:
    """||q(w) - q(w_0)|| / ||w - w_0||, both on today's grid: how much of the movement the format shows.

    Near 1 where the movement is wide against the spacing; it falls to 0 where it stays between two
    representable values, and can exceed 1 where small steps cross from one to the next. ``None`` for
    weights that have not moved.
    """
    grid = view.grid
    moved = (view.scaled.double() - grid.scaled(view.initial).double()).norm().item()
    shown = (view.on_grid.double() - grid.rounded(view.initial).double()).norm().item()
    return shown / moved if moved else None
