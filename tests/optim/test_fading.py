"""A stiffness on a schedule: S^a of root mean square 1, from the arm itself (a = 1) to its plain form (a = 0)."""

import pytest
import torch

from altgrad.optim import ArmOptimizer, stiffness, update, update_cpu
from tests.optim.arms import ARMS, arm_named, final, grid_of, make, normal_weights, step

STIFF = [name for name, arm in ARMS.items() if arm["stiffness"]]


def steps_of(arm, seeds, steps):
    """Return the weight after steps on the gradients of these seeds; None: gradients of zero."""
    weights, optimizer = make(arm, steps=steps, seed=1)
    for seed in seeds:
        step(weights, optimizer, seed=seed or 0, std=0.0 if seed is None else 0.01)
    return weights[0].detach()


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("name", STIFF)
def test_at_the_end_an_arm_is_its_plain_form(name, schedule):
    """A first step that leaves the moments at zero, then three beyond the schedule's end, which stays.

    On master weights the plain form is torch's kernel, which rounds in another order: they agree to four roundings
    of each of the steps, which are about ``lr`` long, and of the weight.
    """
    arm = arm_named(name, schedule=schedule, match_rms=False)
    plain = arm_named("sgd", momentum=arm.momentum) if "sgd" in arm.base else arm_named("adamw", lr=arm.lr)
    plain = arm_named("adamw_sr_weights") if arm.weights == "quantized" else plain
    found, expected = (steps_of(settings, (None, 1, 2, 3), steps=2) for settings in (arm, plain))
    if arm.weights == "quantized":
        assert torch.equal(found, expected)
    assert torch.allclose(found, expected, rtol=4 * 2.0**-24, atol=3 * arm.lr * 4 * 2.0**-24)
    early = steps_of(arm, (None, 1, 2, 3), steps=100)
    assert name == "mean_unmatched" or not torch.allclose(found, early, rtol=1e-4, atol=1e-9)  # a mean over itself is 1


def test_at_the_end_the_rule_is_the_plain_rule_to_the_bit():
    arm = arm_named("spacing_unmatched", schedule="linear")
    (weight,), optimizer = make(arm, steps=2)
    step([weight], optimizer, seed=0)
    before = weight.detach().clone()
    step([weight], optimizer, seed=1)
    numbers = optimizer._numbers(optimizer.param_groups[0], 2, 1, weight.device)
    direction = optimizer.adamw_direction(weight)
    assert torch.equal(weight.detach(), before * numbers[update.DECAY] - numbers[update.LR] * direction)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("name", STIFF)
def test_at_the_beginning_an_arm_is_unchanged(monkeypatch, name, schedule):
    monkeypatch.setattr(update_cpu, "available", lambda *_: False)
    found = [final(arm_named(name, schedule=s), steps=1, seed=2) for s in ("constant", schedule)]
    assert torch.equal(*found)


@pytest.mark.parametrize("fmt", ["E1M6", "E4M3", "E7M0"])
@pytest.mark.parametrize("at", range(1, 6))
def test_along_the_way_the_root_mean_square_is_one(fmt, at):
    """The factor at a is S^a over its own root mean square: no second decay of the learning rate."""
    arm = arm_named("spacing_unmatched", schedule="linear")
    (weight,), optimizer = make(arm, fmt, steps=5)
    a = 1 - (at - 1) / 4
    numbers = optimizer._numbers(optimizer.param_groups[0], at, 1, weight.device)
    assert numbers[update.EXPONENT].item() == a
    factor = update._factor(arm, weight.detach(), numbers, optimizer._grid_tensors(weight, (0, 0, at), None))
    expected = stiffness(weight, fmt).double() ** a
    expected /= expected.square().mean().sqrt()
    assert factor.double().square().mean().sqrt().item() == pytest.approx(1.0, abs=1e-6)
    assert torch.allclose(factor.double(), expected, rtol=1e-5)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_last_step_of_a_run_is_plain_and_the_first_is_not(schedule):
    _, optimizer = make(arm_named("spacing_unmatched", schedule=schedule), steps=300)
    group = optimizer.param_groups[0]
    exponents = [optimizer._numbers(group, s, 1, "cpu")[update.EXPONENT].item() for s in range(1, 311)]
    assert exponents[0] == 1 and exponents[299:] == [0.0] * 11
    assert exponents == sorted(exponents, reverse=True) and exponents[298] > 0
    assert exponents[150] == pytest.approx(0.5, abs=0.01)


@pytest.mark.usefixtures("compiler")
def test_the_loops_leave_a_schedule_to_the_rules():
    (weight,) = normal_weights((8, 8))
    for schedule, taken in (("constant", True), ("linear", False), ("cosine", False)):
        arm = arm_named("spacing_unmatched", schedule=schedule)
        assert update_cpu.available(arm, weight, grid_of("E4M3", arm)) == taken
        assert bool(ArmOptimizer({weight: grid_of("E4M3", arm)}, [], arm)._loops) == taken
