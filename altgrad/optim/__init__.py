"""Optimizer arms: how the weights of each cell of the grid are moved, and the geometry that some of them use."""

from altgrad.config.arms import Arm
from altgrad.optim.build import build_optimizer
from altgrad.optim.manifold import FormatManifold
from altgrad.optim.optimizer import ArmOptimizer
from altgrad.optim.stiffness import stiffness
from altgrad.optim.weight_grid import WeightGrid

__all__ = ["Arm", "ArmOptimizer", "FormatManifold", "WeightGrid", "build_optimizer", "stiffness"]
