"""Muon against its polynomial on singular values in float64, and against torch's own."""

import pytest
import torch
from torch import nn

from altgrad.optim import ArmOptimizer
from altgrad.optim.update import MUON_COEFFICIENTS, MUON_RMS
from tests.optim.arms import arm_named, grid_of, make, normal_weights, step

SHAPES = [(24, 32), (32, 24), (16, 16), (8, 64)]


def orthogonal(m: torch.Tensor) -> torch.Tensor:
    """Return what five steps of the iteration make of ``m``, each singular value by itself, in float64."""
    u, values, v = torch.linalg.svd(m.double() / m.double().norm(), full_matrices=False)
    a, b, c = MUON_COEFFICIENTS
    for _ in range(5):
        values = a * values + b * values**3 + c * values**5
    return u @ values.diag() @ v


@pytest.mark.parametrize("shape", SHAPES)
def test_a_step_takes_the_singular_values_of_nesterovs_momentum_to_about_one(shape):
    arm = arm_named("muon", decay=0.0)
    weights, optimizer = make(arm, weights=normal_weights(shape))
    m = torch.zeros(shape, dtype=torch.float64)
    for i in range(4):
        before = weights[0].detach().double()
        step(weights, optimizer, seed=i)
        g = weights[0].grad.double()
        m = arm.momentum * m + g
        wanted = arm.lr * MUON_RMS * max(shape) ** 0.5 * orthogonal(g + arm.momentum * m)
        assert torch.allclose(before - weights[0].detach().double(), wanted, rtol=1e-3, atol=1e-4 * arm.lr)
    assert ((before - weights[0].detach()).square().mean().sqrt() / arm.lr).item() == pytest.approx(MUON_RMS, rel=0.2)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("momentum", [0.95, 0.0])
def test_it_is_torchs_muon_at_the_size_of_adamws_updates(shape, momentum):
    """To the bfloat16 that torch's takes the iteration in: its steps are a few of its roundings away."""
    arm = arm_named("muon", momentum=momentum, decay=1e-3)
    (ours,), (theirs,) = normal_weights(shape), normal_weights(shape)
    optimizer = ArmOptimizer({ours: grid_of("E4M3", arm)}, [], arm)
    oracle = torch.optim.Muon(
        [theirs], lr=arm.lr, momentum=momentum, weight_decay=arm.decay / arm.lr, adjust_lr_fn="match_rms_adamw"
    )
    start = ours.detach().clone()
    for i in range(5):
        step([ours], optimizer, seed=i)
        theirs.grad = ours.grad.clone()
        oracle.step()
    apart = (ours - theirs).detach().norm() / (ours.detach() - start).norm()
    assert apart < 0.02


def test_a_stiffness_acts_on_what_is_orthogonal():
    """With a stiffness of rows, each row of the step is as much larger as the row."""
    moved = []
    for stiffness in (None, "row_rms"):
        start = normal_weights((24, 32))[0].detach() * torch.logspace(-1, 1, 24)[:, None]
        arm = arm_named("muon", stiffness=stiffness, decay=0.0)
        weights, optimizer = make(arm, weights=[nn.Parameter(start.clone())])
        step(weights, optimizer, seed=0)
        moved.append(weights[0].detach() - start)
    size = start.double().square().mean(1, keepdim=True).sqrt().clamp_min(1e-3)
    assert torch.allclose(moved[1].double(), moved[0] * size / size.square().mean().sqrt(), rtol=1e-2, atol=1e-7)
