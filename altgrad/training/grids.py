"""Re-exports `weight_grids` of `altgrad.optim.weight_grid` for callers that import it from here."""

from altgrad.optim.weight_grid import weight_grids

__all__ = ["weight_grids"]
