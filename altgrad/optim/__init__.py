"""Optimizer arms: what each cell of the grid is trained with."""

from altgrad.optim.build import build_optimizer

__all__ = ["build_optimizer"]
