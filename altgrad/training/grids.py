"""`weight_grids` under the name that callers know; `altgrad.optim.weight_grid` has it."""

from altgrad.optim.weight_grid import weight_grids

__all__ = ["weight_grids"]
