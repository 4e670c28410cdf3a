"""`weight_grids` under the name that callers know; `altgrad.optim.grids` has it."""

from altgrad.optim.grids import weight_grids

__all__ = ["weight_grids"]
