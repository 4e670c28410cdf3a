"""Weight decay against the product of what each step leaves: the same share in every arm that says ``decay``, whatever
its learning rate, and otherwise ``weight_decay`` times the rate.

Gradients are zero, so that decay is all that moves a weight.
"""

import pytest
import torch
from torch import nn

from altgrad.config.schema import kept_by_decay, learning_rate
from altgrad.optim import Arm, ArmOptimizer
from tests.optim.arms import ARMS, MASTER, ON_GRID, arm_named, grid_of, make, normal_weights

SCHEDULE = {"steps": 60, "warmup": 0.1, "final": 0.1}


def run(optimizer: ArmOptimizer) -> None:
    """Take the steps of the schedule on gradients of zero, as the trainer does."""
    peaks = [group["lr"] for group in optimizer.param_groups]
    for i in range(SCHEDULE["steps"]):
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = learning_rate(i + 1, peak=peak, **SCHEDULE)
            for p in group["params"]:
                p.grad = torch.zeros_like(p)
        optimizer.step()


def scaled(name: str, lr_scale: float, **changes) -> Arm:
    """Return an arm as a cell with this ``lr_scale`` has it."""
    return arm_named(name, lr=ARMS[name]["lr"] * lr_scale, **changes)


def test_every_arm_has_the_same_decay():
    assert {(arm["decay"], arm["plain_decay"]) for arm in ARMS.values()} == {(3e-4, 1.2e-3)}


@pytest.mark.parametrize(("lr_scale", "decay"), [(0.5, 2e-2), (2, 3e-4)])
@pytest.mark.parametrize("name", MASTER)
def test_master_weights_keep_the_same_share(name, lr_scale, decay):
    weights, optimizer = make(scaled(name, lr_scale, decay=decay))
    start = weights[0].detach().clone()
    run(optimizer)
    expected = kept_by_decay(decay, **SCHEDULE)
    lost = 1 - (weights[0].detach() / start).double()
    # 60 roundings of float32, each of half an ulp at most.
    assert torch.allclose(lost, torch.full_like(lost, 1 - expected), rtol=0, atol=60 * 2.0**-24)


@pytest.mark.parametrize(("lr_scale", "fmt"), [(0.5, "E1M6"), (2, "E3M4")])
@pytest.mark.parametrize("name", [name for name in ON_GRID if ARMS[name]["rounding"] == "stochastic" and (
    ARMS[name]["store"] == "float32")])  # what lies as codes has the same bits: tests/training/test_state_cells.py
def test_weights_on_the_quantization_grid_keep_it_in_expectation(name, lr_scale, fmt):
    """Within 5 standard errors of the mean over the weights, which are a 30th of what is lost or less."""
    weights, optimizer = make(scaled(name, lr_scale), fmt, normal_weights((400, 500)))
    start = weights[0].detach().double()
    run(optimizer)
    expected = kept_by_decay(3e-4, **SCHEDULE)
    rest = (weights[0].detach().double() - expected * start) * start.sign()
    size = start.abs().sum()
    error = rest.std() * rest.numel() ** 0.5 / size
    assert error < (1 - expected) / 30
    assert abs(rest.sum() / size) < 5 * error


@pytest.mark.parametrize("lr_scale", [0.5, 2])
@pytest.mark.parametrize("name", ARMS)
def test_what_an_arm_leaves_plain_keeps_the_same_shares_too(name, lr_scale):
    """A linear layer that is not quantized as a quantized one, an embedding as it should, a vector all."""
    arm = scaled(name, lr_scale)
    linear, embedding = normal_weights((8, 16), (8, 16))
    vector = nn.Parameter(torch.ones(8))
    starts = [p.detach().clone() for p in (linear, embedding, vector)]
    optimizer = ArmOptimizer({}, [linear, embedding, vector], arm, linear=[linear])
    run(optimizer)
    shares = [kept_by_decay(arm.decay, **SCHEDULE), kept_by_decay(arm.plain_decay, **SCHEDULE), 1.0]
    for p, start, share in zip((linear, embedding, vector), starts, shares, strict=True):
        assert torch.allclose(p.detach(), start * share, rtol=60 * 2.0**-24, atol=0)


@pytest.mark.parametrize("name", ["adamw", "spacing_sgd", "madam", "rung"])
def test_by_itself_a_step_is_one_at_the_peak_and_torchs_schedulers_work(name):
    arm = arm_named(name, decay=0.1)
    weights, optimizer = make(arm)
    assert optimizer.decay(weights[0]) == pytest.approx(0.9)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.25)
    assert optimizer.decay(weights[0]) == pytest.approx(0.975)


@pytest.mark.parametrize("lr", [1e-6, 1e-2])
@pytest.mark.parametrize(
    ("settings", "own", "plain"),
    [
        ({}, 0.01, 0.01), ({"weight_decay": 0.5}, 0.5, 0.5), ({"stiffness": "ulp"}, 0.01, 0.01),
        ({"base": "muon"}, 0.1, 0.01), ({"base": "muon", "weight_decay": 0.5}, 0.5, 0.5),
        ({"base": "madam"}, 0.0, 0.01), ({"base": "sgd"}, 0.0, 0.0), ({"base": "sgd", "weight_decay": 0.5}, 0.5, 0.5),
    ],
)  # fmt: skip
def test_without_a_share_of_its_own_an_arm_decays_by_its_rate(lr, settings, own, plain):
    """In torch's meaning, so that 300 steps at a rate of fine-tuning take next to nothing away."""
    arm = Arm(lr=lr, **settings)
    weight, embedding = normal_weights((8, 16), (8, 16))
    starts = [p.detach().double() for p in (weight, embedding)]
    optimizer = ArmOptimizer({weight: grid_of("E4M3", arm)}, [embedding], arm)
    for _ in range(300):
        for p in (weight, embedding):
            p.grad = torch.zeros_like(p)
        optimizer.step()
    for p, start, decay in zip((weight, embedding), starts, (own, plain), strict=True):
        torch.testing.assert_close(p.detach().double(), start * (1 - lr * decay) ** 300, rtol=600 * 2.0**-24, atol=0)
    assert arm.shares == (lr * own, lr * plain)


def test_a_scale_that_is_held_follows_the_weights_as_they_decay():
    """Far below a quarter of its range, the scale has followed by then, and the weights have not been lost."""
    arm = arm_named("adamw_sr_weights", decay=0.1)
    weights = normal_weights((50, 60))
    optimizer = ArmOptimizer({weights[0]: grid_of("E3M4", arm)}, [], arm)
    held = optimizer.grids[weights[0]].held
    for _ in range(80):
        weights[0].grad = torch.zeros_like(weights[0])
        optimizer.step()
        assert held.item() / 4.5 < weights[0].abs().max().item() <= held.item()
    assert weights[0].abs().max() < 1e-3
