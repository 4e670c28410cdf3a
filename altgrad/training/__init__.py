"""Training one cell: the loop, checkpoints, live measurements and the outcome."""

from altgrad.training.run import train_cell
from altgrad.training.trainer import Interrupted

__all__ = ["Interrupted", "train_cell"]
