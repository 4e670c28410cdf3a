"""What the arms of a resolved cell see of a format, and whether the products see it too."""

from __future__ import annotations

from altgrad.config.cell import Cell


def is_virtual(cell: Cell) -> bool:
    """Return whether some layer's weight has *virtual* geometry: its optimizer sees a format that no product has."""
    return any(rule.weight is not None and rule.weight.virtual for rule in cell.rules)


def geometry_format(cell: Cell) -> str | None:
    """Return the name of the one format whose grid the arms see at the weights, quantized to it or not.

    ``None`` where no rule names one for a weight, or rules name several.
    """
    names = {rule.weight.format for rule in cell.rules if rule.weight is not None}
    return names.pop() if len(names) == 1 else None
