"""Every arm of params.yaml takes the same steps on a GPU as on the CPU, but for the last digits of sums."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from altgrad.optim import ArmOptimizer
from tests.optim.arms import ARMS, ON_GRID, arm_named, grid_of, normal_weights

NAMES = ARMS if torch.cuda.is_available() else ("adamw_sr_weights", "eco")  # by loops, and by rules
SHAPE = (67, 131)
CPU = torch.device("cpu")


def after(name: str, fmt: str, steps: int, device: torch.device, compiled: bool = False) -> torch.Tensor:
    """Return a weight after ``steps`` steps on gradients from N(0, 0.01^2)."""
    arm = arm_named(name)
    weight = nn.Parameter(normal_weights(SHAPE)[0].detach().to(device))
    optimizer = ArmOptimizer({weight: grid_of(fmt, arm, device)}, [], arm, steps=20, seed=3, compiled=compiled)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        weight.grad = (torch.randn(SHAPE, generator=generator) * 0.01).to(device)
        optimizer.step()
    return weight.detach().cpu()


@pytest.mark.parametrize("fmt", ["E4M3", "E1M6"])
@pytest.mark.parametrize("name", NAMES)
def test_a_step_is_the_same(device, name, fmt):
    """After one step all but those that a last digit moved over a boundary are equal to a few roundings."""
    found, expected = after(name, fmt, 1, device), after(name, fmt, 1, CPU)
    close = torch.isclose(found, expected, rtol=4e-6, atol=2**-20 * expected.abs().max().item())
    assert close.float().mean() >= (0.999 if name in ON_GRID else 1.0), (found - expected).abs().max()
    assert not torch.equal(found, normal_weights(SHAPE)[0])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name == "eco" else name for name in NAMES]
)
def test_compiled_steps_are_those_of_eager_mode(device, name):
    found, expected = (after(name, "E4M3", 3, device, compiled) for compiled in (True, False))
    close = torch.isclose(found, expected, rtol=4e-6, atol=2**-20 * expected.abs().max().item())
    assert close.float().mean() >= 0.99, (found - expected).abs().max()


@pytest.mark.parametrize("name", NAMES)
def test_the_same_steps_have_the_same_bits(device, name):
    assert torch.equal(after(name, "E4M3", 3, device), after(name, "E4M3", 3, device))
