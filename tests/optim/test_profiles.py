"""Controls that look at no format: a step's size as a function of the weights alone.

Oracles: the formulas written out in float64, what they have to be in special cases, and a change of the weights' unit.
"""

import math

import pytest
import torch

from altgrad.formats import get_format
from altgrad.optim import ArmOptimizer, WeightGrid, stiffness, update_cpu
from tests.optim.arms import FORMATS, OPTIONS, arm_named, final, make, normal_weights, step

POINTS = [(0.0, 1.0), (2.5, 0.5), (7.0, 1.0), (7.0, 2.0), (12.0, 0.75), (62.0, 1.0)]


@pytest.fixture(params=["loops", "rules"])
def way(request, monkeypatch):
    """Take steps by the loops, then by the rules."""
    if request.param == "rules":
        monkeypatch.setattr(update_cpu, "available", lambda *_: False)
    else:
        request.getfixturevalue("compiler")


def weights(unit: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return weights (5002,) of standard deviation ``unit / 50``, with a zero and a very small one."""
    drawn = torch.randn(5000, generator=torch.Generator().manual_seed(0)) * 0.02
    return torch.cat([drawn, torch.tensor([0.0, 1e-12])]).to(dtype) * unit


def profile(w: torch.Tensor, knee: float, slope: float) -> torch.Tensor:
    """Return ``(w^2 + w0^2)^(slope / 2)`` in float64."""
    w = w.double()
    return (w.square() + (w.abs().max() * 2.0**-knee).square()) ** (slope / 2)


def over_its_rms(t: torch.Tensor) -> torch.Tensor:
    return t.double() / t.double().square().mean().sqrt()


def knee_of(fmt: str) -> float:
    """Return how many binades the largest value of a format lies above the smallest normal one."""
    found = get_format(fmt)
    return math.log2(found.max / 2.0**found.emin)


# --- the profile -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("knee", "slope"), POINTS)
def test_a_profile_is_its_formula(knee, slope, dtype):
    w = weights(dtype=dtype)
    found = stiffness(w, "E4M3", "profile", knee=knee, slope=slope)
    assert found.dtype == dtype and torch.allclose(found.double(), profile(w, knee, slope), rtol=2e-6, atol=0)


@pytest.mark.parametrize(("knee", "slope"), POINTS)
def test_a_profile_looks_at_no_format_and_no_scale(knee, slope):
    w = weights()
    found = [stiffness(w, fmt, "profile", knee=knee, slope=slope, scale=torch.tensor(s)) for fmt, s in zip(
        FORMATS, (1.0, 3.0, 0.1, 100.0, 1e-6, 7.0, 5.0, 2.0), strict=True,
    )]  # fmt: skip
    assert all(torch.equal(found[0], other) for other in found)


@pytest.mark.parametrize("fmt", ["E1M6", "E2M5", "E3M4", "E4M3", "E5M2"])
def test_smooth_is_the_profile_of_slope_one_with_the_formats_own_knee(fmt):
    w = weights()
    found = over_its_rms(stiffness(w, fmt, "profile", knee=knee_of(fmt), slope=1.0))
    assert torch.allclose(found, over_its_rms(stiffness(w, fmt, "smooth")), rtol=2e-6, atol=0)


@pytest.mark.parametrize("fmt", ["E1M6", "E3M4", "E5M2"])
def test_the_arm_of_that_profile_is_the_arm_of_smooth(way, fmt):
    changes = {"knee": knee_of(fmt), "slope": 1.0}
    found, start = final(arm_named("size_profile", **changes), fmt), normal_weights((24, 32))[0].detach()
    expected = final(arm_named("spacing_unmatched", stiffness="smooth", lr=arm_named("size_profile").lr), fmt)
    assert torch.allclose(found - start, expected - start, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("knee", [0.0, 7.0, 62.0])
def test_without_a_slope_the_arm_is_its_plain_form(way, knee):
    start, plain = normal_weights((24, 32))[0].detach(), final(arm_named("adamw", lr=arm_named("size_profile").lr))
    for normalise in ("rms", "none"):
        found = final(arm_named("size_profile", knee=knee, slope=0.0, normalise=normalise))
        assert torch.allclose(found - start, plain - start, rtol=1e-4, atol=1e-8)
    assert not torch.allclose(final(arm_named("size_profile")) - start, plain - start, rtol=0.1, atol=1e-8)


@pytest.mark.parametrize("unit", [2.0**-20, 0.25, 2.0, 2.0**20])
@pytest.mark.parametrize(("knee", "slope"), POINTS)
def test_in_another_unit_a_profile_is_that_units_power_as_large(knee, slope, unit):
    w = weights()
    found, scaled = (stiffness(t, "E4M3", "profile", knee=knee, slope=slope).double() for t in (w, w * unit))
    assert torch.allclose(scaled, found * unit**slope, rtol=1e-6, atol=0)


@pytest.mark.parametrize("unit", [2.0**-100, 2.0**-60, 2.0**60, 2.0**124])
@pytest.mark.parametrize("slope", [0.5, 1.0, 2.0])
def test_weights_of_any_size_take_the_same_steps(way, slope, unit):
    """In their own unit, at a rate in it, towards either end of float32's range."""
    arm, moved = arm_named("size_profile", slope=slope, decay=0.0, eps=0.0), []
    for u in (1.0, unit):
        (weight,) = normal_weights((24, 32))
        start = weight.data.mul_(u).clone()
        _, optimizer = make(arm, weights=[weight])
        optimizer.param_groups[0]["lr"] = 0.25 * u
        step([weight], optimizer, seed=1)
        moved.append((weight.detach() / u - start / u).double())
    assert torch.allclose(*moved, rtol=1e-4, atol=1e-6) and moved[0].abs().max() > 0.5


@pytest.mark.parametrize("normalise", ["rms", "none"])
@pytest.mark.parametrize("slope", [0.0, 0.5, 1.0, 2.0])
def test_weights_of_zero_have_a_profile(way, slope, normalise):
    """Over its root mean square it is one; by itself it is next to nothing, and never 0 / 0."""
    weight = torch.nn.Parameter(torch.zeros(4, 4))
    _, optimizer = make(arm_named("size_profile", slope=slope, normalise=normalise), weights=[weight])
    step([weight], optimizer, seed=0)
    assert weight.isfinite().all()
    if normalise == "rms":
        assert torch.allclose(weight.abs(), torch.tensor(3e-3), rtol=1e-4)


@pytest.mark.parametrize("granularity", ["row", "block"])
def test_a_profile_is_that_of_the_tensor_whatever_has_a_scale(granularity):
    arm = arm_named("size_profile")
    found = []
    for options in (OPTIONS, {"granularity": granularity, "block": 5, "scale_format": "E8M0"}):
        (weight,) = normal_weights((24, 32))
        optimizer = ArmOptimizer({weight: WeightGrid(get_format("E4M3"), options)}, [], arm)
        step([weight], optimizer, seed=0)
        found.append(weight.detach())
    assert torch.allclose(*found, rtol=1e-6, atol=1e-9)


# --- relative steps ----------------------------------------------------------------------------------


def uneven_rows() -> torch.Tensor:
    """Return weights (24, 32), a row of which is of zeros and others of very different size."""
    rows = normal_weights((24, 32))[0].detach() * torch.logspace(-2, 2, 24)[:, None]
    rows[5] = 0.0
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rms_is_that_of_the_tensor_and_row_rms_that_of_each_row(dtype):
    w = uneven_rows().to(dtype)
    for formula, rms in (("rms", w.double().square().mean().sqrt()), ("row_rms", w.double().square().mean(1).sqrt())):
        expected = torch.maximum(rms, torch.tensor(1e-3)).reshape(-1, 1).expand(24, 32)
        found = stiffness(w, "E4M3", formula)
        assert found.dtype == dtype and torch.allclose(found.double(), expected.double(), rtol=1e-6, atol=0)
    assert torch.equal(stiffness(w.t(), "E4M3", "row_rms", dim=0), stiffness(w, "E4M3", "row_rms").t())


@pytest.mark.parametrize("formula", ["rms", "row_rms"])
@pytest.mark.parametrize("unit", [0.25, 2.0, 2.0**30])
def test_in_another_unit_a_size_is_as_much_larger(formula, unit):
    w = uneven_rows()[6:] * 4
    found, scaled = (stiffness(t, "E4M3", formula) for t in (w, w * unit))
    assert torch.equal(scaled, found * unit)


@pytest.mark.parametrize("unit", [1.0, 30.0])
def test_a_relative_step_is_adamws_times_the_size_of_the_tensor(way, unit):
    arm = arm_named("tensor_relative", decay=0.0)
    start = normal_weights((24, 32), std=0.02 * unit)[0].detach()
    weights, optimizer = make(arm, weights=[torch.nn.Parameter(start.clone())])
    step(weights, optimizer, seed=0)
    rate = arm.lr * start.double().square().mean().sqrt().item()
    expected = final(arm_named("adamw", lr=rate, decay=0.0), weights=[torch.nn.Parameter(start.clone())], steps=1)
    assert torch.allclose(weights[0] - start, expected - start, rtol=1e-3, atol=1e-8 * unit)


def test_relative_rows_move_by_the_same_share_and_a_row_of_zeros_moves():
    start, arm = uneven_rows(), arm_named("row_relative", decay=0.0)
    weights, optimizer = make(arm, weights=[torch.nn.Parameter(start.clone())])
    step(weights, optimizer, seed=0)
    moved = (weights[0].detach() - start).double().square().mean(1).sqrt()
    share = moved / stiffness(start, "E4M3", "row_rms")[:, 0]
    assert torch.allclose(share, share.median().expand_as(share), rtol=1e-3) and moved[5] > 0
    assert moved.square().mean().sqrt().item() == pytest.approx(arm.lr, rel=1e-3)  # AdamW's first step is the sign


def test_the_rows_of_a_transposed_weight_are_those_of_the_product():
    arm, found = arm_named("row_relative"), []
    for options in (OPTIONS, OPTIONS | {"dim": 0}):
        start = uneven_rows()
        weight = torch.nn.Parameter(start.t().contiguous() if "dim" in options else start)
        optimizer = ArmOptimizer({weight: WeightGrid(get_format("E4M3"), options)}, [], arm)
        gradient = torch.randn(24, 32, generator=torch.Generator().manual_seed(0))
        weight.grad = gradient.t().contiguous() if "dim" in options else gradient
        optimizer.step()
        found.append(weight.detach().t() if "dim" in options else weight.detach())
    assert torch.allclose(*found, rtol=1e-6, atol=1e-9)
