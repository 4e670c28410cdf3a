"""The algebra of the arms, against AdamW, geoopt, each other, and torch's Muon."""

import geoopt
import pytest
import torch
from torch import nn

from altgrad.formats import get_format
from altgrad.optim import ArmOptimizer, FormatManifold, WeightGrid, stiffness
from altgrad.optim.update import MUON_COEFFICIENTS, MUON_RMS
from tests.optim.arms import MASTER, arm_named, final, grid_of, make, normal_weights, step

# --- the plain arms -----------------------------------------------------------------------------------


def test_adamw_is_torchs_fused_adamw_to_the_bit():
    arm = arm_named("adamw")
    (ours,), (theirs,) = normal_weights((24, 32)), normal_weights((24, 32))
    optimizer = ArmOptimizer({ours: grid_of("E4M3", arm)}, [], arm)
    oracle = torch.optim.AdamW(
        [theirs], lr=arm.lr, betas=arm.betas, eps=arm.eps, weight_decay=arm.decay / arm.lr, fused=True
    )
    for i in range(8):
        step([ours], optimizer, seed=i)
        theirs.grad = ours.grad.clone()
        oracle.step()
    assert torch.equal(ours, theirs)


def test_sgd_is_torchs_with_decoupled_decay():
    arm = arm_named("sgd", decay=0.0)
    (theirs,) = normal_weights((24, 32))
    oracle = torch.optim.SGD([theirs], lr=arm.lr, momentum=arm.momentum)
    weights, optimizer = make(arm)
    for i in range(8):
        step(weights, optimizer, seed=i)
        theirs.grad = weights[0].grad.clone()
        oracle.step()
    assert torch.equal(weights[0], theirs)
    decaying = final(arm.but(decay=0.05), steps=1)
    first = normal_weights((24, 32))[0].detach()
    assert torch.allclose(decaying, final(arm, steps=1) - first * 0.05)


@pytest.mark.parametrize("name", MASTER)
def test_without_quantized_weights_an_arm_is_its_plain_form(name):
    arm = arm_named(name)
    plain = arm_named("sgd", momentum=arm.momentum) if "sgd" in arm.base else arm_named("adamw")
    found = []
    for settings in (arm, plain):
        weights = normal_weights((8, 8), (5, 8))
        optimizer = ArmOptimizer({}, weights, settings)
        for i in range(3):
            step(weights, optimizer, seed=i)
        found.append(torch.cat([w.detach() for w in weights]))
    assert torch.equal(*found)


# --- stiffness in Adam ----------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ["E1M6", "E4M3", "E7M0"])
def test_stiffness_of_the_gradient_is_adamw_of_scaled_gradients(fmt):
    arm = arm_named("spacing_gradient", normalise="none", decay=0.0)
    weights, optimizer = make(arm, fmt)
    (theirs,) = normal_weights((24, 32))
    oracle = torch.optim.AdamW([theirs], lr=arm.lr, betas=arm.betas, eps=arm.eps, weight_decay=0.0)
    for i in range(5):
        spacing = stiffness(weights[0].detach(), fmt)
        step(weights, optimizer, seed=i)
        theirs.grad = weights[0].grad * spacing
        oracle.step()
        assert torch.allclose(weights[0], theirs, rtol=1e-4, atol=1e-7)
        moments = (o.state[w]["exp_avg"] for o, w in ((optimizer, weights[0]), (oracle, theirs)))
        assert torch.allclose(*moments, rtol=1e-3, atol=1e-9)


def test_stiff_update_is_adamw_in_a_uniform_format_and_not_elsewhere():
    found = {fmt: final(arm_named("spacing_unmatched"), fmt) for fmt in ("E0M7", "E4M3")}
    plain, start = final(arm_named("adamw")), normal_weights((24, 32))[0].detach()
    assert torch.allclose(found["E0M7"] - start, plain - start, rtol=1e-4, atol=1e-8)
    assert not torch.allclose(found["E4M3"] - start, plain - start, rtol=0.1, atol=1e-8)


@pytest.mark.parametrize("fmt", ["E1M6", "E4M3", "E7M0"])
def test_mean_control_is_a_change_of_learning_rate_alone(fmt):
    start, plain = normal_weights((24, 32))[0].detach(), final(arm_named("adamw"), fmt)
    assert torch.allclose(final(arm_named("mean_unmatched"), fmt) - start, plain - start, rtol=1e-4, atol=1e-8)
    # Unnormalised it is that of a rate times the mean stiffness.
    raw = arm_named("mean_unmatched", normalise="none", decay=0.0)
    mean = stiffness(start, fmt).mean().item()
    step_of = {arm: final(arm, fmt, steps=1) - start for arm in (raw, arm_named("adamw", decay=0.0))}
    changed, plain = step_of.values()
    ratio = (changed / plain).median().item()
    assert ratio == pytest.approx(mean, rel=1e-3)


@pytest.mark.parametrize("name", ["spacing_scaled", "spacing_sgd", "riemann_adam", "madam"])
def test_matched_updates_have_the_size_of_adamws(name):
    sizes = []
    for arm in (arm_named(name, match_rms=True, decay=0.0, lr=1e-3), arm_named("adamw", decay=0.0, lr=1e-3)):
        start = normal_weights((24, 32))[0].detach()
        sizes.append((final(arm, "E5M2", steps=1) - start).square().mean().sqrt().item())
    assert sizes[0] == pytest.approx(sizes[1], rel=0.1 if name == "madam" else 1e-3)  # madam's is a step in log |w|


# --- the Riemannian arms ----------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ["E1M6", "E4M3", "E7M0"])
@pytest.mark.parametrize("name", ["riemann_adam", "riemann_sgd"])
def test_the_riemannian_arms_are_geoopts_optimizers_on_the_manifold(fmt, name):
    """The scale follows the weights here, and geoopt's manifold is told of it before each step."""
    arm = arm_named(name, normalise="none", decay=0.0, lr={"riemann_adam": 0.3, "riemann_sgd": 30.0}[name])
    weights, optimizer = make(arm, fmt)
    manifold = FormatManifold(fmt)
    point = geoopt.ManifoldParameter(weights[0].detach().clone(), manifold=manifold)
    oracle = (
        geoopt.optim.RiemannianAdam([point], lr=arm.lr, betas=arm.betas, eps=arm.eps)
        if name == "riemann_adam"
        else geoopt.optim.RiemannianSGD([point], lr=arm.lr)
    )
    grid = next(iter(optimizer.grids.values()))
    for i in range(6):
        manifold.scale = grid.scale(point.detach())
        step(weights, optimizer, seed=i)
        point.grad = weights[0].grad.clone()
        oracle.step()
        assert torch.allclose(weights[0], point, rtol=1e-4, atol=1e-7)
    assert not torch.equal(weights[0], normal_weights((24, 32))[0])


# --- stochastic gradient descent, Madam, rungs -----------------------------------------------------------


@pytest.mark.parametrize(("name", "power"), [("spacing_sgd", 1), ("spacing_squared_sgd", 2)])
def test_sgd_takes_stiffness_at_its_power(name, power):
    start = normal_weights((24, 32))[0].detach()
    arm = arm_named(name, decay=0.0, normalise="none")
    weights, optimizer = make(arm)
    step(weights, optimizer, seed=0)
    expected = start - arm.lr * stiffness(start, "E4M3") ** power * weights[0].grad
    assert torch.allclose(weights[0], expected, rtol=1e-5, atol=1e-12)


def test_madam_moves_the_logarithm_and_never_the_sign():
    start = normal_weights((24, 32))[0].detach()
    arm = arm_named("madam", decay=0.0)
    weights, optimizer = make(arm)
    step(weights, optimizer, seed=0)
    ratio = (weights[0].detach() / start).log()
    assert torch.allclose(ratio, -arm.lr * (weights[0].grad * start).sign(), rtol=1e-3)
    for i in range(50):
        step(weights, optimizer, seed=i, std=10.0)
    assert torch.equal(weights[0].sign(), start.sign())


def per(granularity: str) -> WeightGrid:
    """Return a quantization grid with a scale per row, or 5 elements of one, which leaves a shorter last block."""
    return WeightGrid(get_format("E4M3"), {"granularity": granularity, "block": 5, "scale_format": "E8M0"})


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("granularity", ["row", "block"])
def test_every_scale_has_its_stiffness(granularity, compiled):
    """Rows of very different size: with a scale each, stiffness follows the row."""
    start = normal_weights((24, 32))[0].detach() * torch.logspace(-4, 0, 24)[:, None]
    arm = arm_named("spacing_unmatched", decay=0.0)
    weight, grid = nn.Parameter(start.clone()), per(granularity)
    optimizer = ArmOptimizer({weight: grid}, [], arm, compiled=compiled)
    step([weight], optimizer, seed=0)
    found = (weight.detach() - start).abs()
    expected = stiffness(start, "E4M3", scale=grid.scale(start))
    ratio = found / expected
    assert torch.allclose(ratio, ratio.median().expand_as(ratio), rtol=1e-2)


# --- Muon --------------------------------------------------------------------------------------------


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
    for formula in (None, "row_rms"):
        start = normal_weights((24, 32))[0].detach() * torch.logspace(-1, 1, 24)[:, None]
        arm = arm_named("muon", stiffness=formula, decay=0.0)
        weights, optimizer = make(arm, weights=[nn.Parameter(start.clone())])
        step(weights, optimizer, seed=0)
        moved.append(weights[0].detach() - start)
    size = start.double().square().mean(1, keepdim=True).sqrt().clamp_min(1e-3)
    assert torch.allclose(moved[1].double(), moved[0] * size / size.square().mean().sqrt(), rtol=1e-2, atol=1e-7)
