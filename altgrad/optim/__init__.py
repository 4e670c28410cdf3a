"""Optimizer arms: how a cell moves its weights, and the spacing of a format that some arms use."""

from typing import TYPE_CHECKING

from altgrad.config.arms import Arm
from altgrad.optim.build import build_optimizer
from altgrad.optim.optimizer import ArmOptimizer
from altgrad.optim.stiffness import stiffness
from altgrad.optim.weight_grid import WeightGrid, weight_grids

if TYPE_CHECKING:
    from altgrad.optim.manifold import FormatManifold

__all__ = ["Arm", "ArmOptimizer", "FormatManifold", "WeightGrid", "build_optimizer", "stiffness", "weight_grids"]


def __getattr__(name: str) -> object:
    """Import `FormatManifold` on first use: it needs geoopt, which takes a second to import."""
    if name == "FormatManifold":
        from altgrad.optim.manifold import FormatManifold

        return FormatManifold
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
