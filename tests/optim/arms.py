"""The arms of params.yaml, and small weights to try them on."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from altgrad.config import load_params
from altgrad.config.recipe import TensorRecipe
from altgrad.formats import get_format
from altgrad.optim import Arm, ArmOptimizer, WeightGrid

PARAMS = load_params(Path(__file__).parents[2] / "params.yaml")
ARMS: dict[str, dict[str, Any]] = {name: arm.model_dump() for name, arm in PARAMS.optimizers.items()}
MASTER = [name for name, arm in ARMS.items() if arm["weights"] == "master"]
ON_GRID = [name for name, arm in ARMS.items() if arm["weights"] == "quantized"]
FORMATS = tuple(f"E{e}M{7 - e}" for e in range(8))
EXTREMES = ("E0M7", "E4M3", "E7M0")  # no exponent, some of both, no mantissa
OPTIONS = TensorRecipe(format="E4M3").scale_options


def arm_named(name: str, **changes: Any) -> Arm:
    """Return an arm of params.yaml with some settings changed, or left out where they are ``None``."""
    left_out = {key for key, value in changes.items() if value is None}
    return Arm(**{key: value for key, value in (ARMS[name] | changes).items() if key not in left_out})


def grid_of(fmt: str, arm: Arm, device: torch.device | None = None) -> WeightGrid:
    """Return the quantization grid of a weight under ``arm``: held where the arm keeps weights on it."""
    if arm.weights == "master":
        return WeightGrid(get_format(fmt), OPTIONS, device=device)
    held = torch.zeros(1, device=device)
    return WeightGrid(get_format(fmt), OPTIONS, remembered=lambda: held[0], held=held, device=device)


def normal_weights(*shapes: tuple[int, int], seed: int = 0, std: float = 0.02) -> list[nn.Parameter]:
    """Return parameters from N(0, std^2)."""
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator) * std) for shape in shapes]


def make(
    arm: Arm, fmt: str = "E4M3", weights: Iterable[nn.Parameter] | None = None, **options: Any
) -> tuple[list[nn.Parameter], ArmOptimizer]:
    """Return weights in ``fmt`` and their optimizer."""
    weights = normal_weights((24, 32)) if weights is None else list(weights)
    return weights, ArmOptimizer({p: grid_of(fmt, arm) for p in weights}, [], arm, **options)


def step(weights: list[nn.Parameter], optimizer: ArmOptimizer, seed: int, std: float = 0.01) -> None:
    """Take a step on gradients from N(0, std^2)."""
    generator = torch.Generator().manual_seed(seed)
    for p in weights:
        p.grad = torch.randn(p.shape, generator=generator) * std
    optimizer.step()


def final(arm: Arm, fmt: str = "E4M3", steps: int = 8, **options: Any) -> torch.Tensor:
    """Return the weight after ``steps`` steps."""
    weights, optimizer = make(arm, fmt, **options)
    for i in range(steps):
        step(weights, optimizer, seed=i)
    return weights[0].detach()
