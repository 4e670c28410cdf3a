"""The formulas of the stiffness against their definitions in float64, and the manifold against geoopt's axioms."""

import math

import geoopt
import pytest
import torch

from altgrad.formats import get_format
from altgrad.numerics import amax, compute_scale, ulp
from altgrad.optim import ArmOptimizer, FormatManifold, WeightGrid, stiffness, update_cpu
from altgrad.optim.stiffness import FORMULAS
from tests.optim.arms import FORMATS, OPTIONS, arm_named, final, make, normal_weights, step

OWN = {"foreign": {"foreign": "E5M2"}, "profile": {"knee": 7.0, "slope": 0.75}}  # settings of a formula alone


def weights(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return torch.cat([torch.randn(5000, generator=generator) * 0.02, torch.zeros(5), torch.tensor([1e-30, -1e-30])]).to(
        dtype
    )


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ulp_is_the_spacing_of_the_quantization_grid_in_the_weights_own_unit(fmt, dtype):
    w = weights(dtype)
    scale = compute_scale(amax(w), fmt).to(dtype)
    assert torch.equal(stiffness(w, fmt), ulp(w * scale, fmt) / scale)


@pytest.mark.parametrize("fmt", ["POSIT8", "HIF8", "LNS8", "NF4"])
def test_ulp_of_a_table_is_the_distance_of_its_values_at_its_own_scale(fmt):
    w, found = weights(), get_format(fmt)
    size = w.square().mean(dtype=torch.float64).sqrt().float() if found.scale_statistic == "rms" else w.abs().amax()
    scale = compute_scale(size, fmt)
    expected = torch.from_numpy(found.spacing((w * scale).double().numpy())).float() / scale
    assert torch.allclose(stiffness(w, fmt), expected, rtol=1e-6)
    assert torch.equal(stiffness(w, "E4M3", "foreign", foreign=fmt), stiffness(w, fmt))
    assert stiffness(w, fmt, "permuted", seed=3).sort().values.equal(stiffness(w, fmt).sort().values)
    with pytest.raises(ValueError, match=f"smooth needs mantissa bits, which {fmt} does not have"):
        stiffness(w, fmt, "smooth")


@pytest.mark.parametrize("fmt", FORMATS)
def test_mantissa_ignores_the_scale_and_the_subnormal_numbers(fmt):
    w = weights()
    found, bits = stiffness(w, fmt, "mantissa"), max(6, 0) if fmt == "E0M7" else get_format(fmt).mantissa_bits
    large = w.abs() > found.max() * 2.0**-20
    expected = torch.tensor([2.0 ** (math.floor(math.log2(abs(x))) - bits) for x in w[large].tolist()])
    assert torch.equal(found[large], expected)
    assert torch.equal(found, stiffness(w, fmt, "mantissa", scale=torch.tensor(77.0)))


def test_mantissa_ends_at_a_share_of_the_largest_stiffness():
    w = torch.tensor([1.0, 2.0**-24, 2.0**-30, 0.0])
    assert stiffness(w, "E4M3", "mantissa").tolist() == [2.0**-3, 2.0**-27, 2.0**-27, 2.0**-27]


@pytest.mark.parametrize("fmt", ["E1M6", "E4M3", "E7M0"])
def test_smooth_is_its_formula(fmt):
    """Twice the spacing's floor lies at w0, below which ulp is constant."""
    w, found = weights(torch.float64), get_format(fmt)
    scale = compute_scale(amax(w), fmt).double()
    w0 = 2.0**found.emin / scale
    expected = (w.square() + w0.square()).sqrt() * 2.0**-found.mantissa_bits
    assert torch.allclose(stiffness(w, fmt, "smooth"), expected, rtol=1e-6)


def test_range_divides_by_the_binades_of_the_format():
    w = weights()
    assert torch.allclose(stiffness(w, "E4M3", "range"), stiffness(w, "E4M3") / math.log2(448 * 512))


@pytest.mark.parametrize("fmt", FORMATS)
def test_the_controls_carry_the_mean_the_histogram_or_another_format(fmt):
    w, exact = weights(), stiffness(weights(), fmt)
    assert torch.allclose(stiffness(w, fmt, "mean"), exact.mean())
    shuffled = stiffness(w, fmt, "permuted", seed=3)
    assert torch.equal(shuffled.sort().values, exact.sort().values)
    assert torch.equal(shuffled, stiffness(w, fmt, "permuted", seed=3))
    if len(exact.unique()) > 1:
        assert not torch.equal(shuffled, exact)
        assert not torch.equal(shuffled, stiffness(w, fmt, "permuted", seed=4))
    assert torch.equal(stiffness(w, fmt, "foreign", foreign="E5M2"), stiffness(w, "E5M2"))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("formula", FORMULAS)
def test_stiffness_is_positive_at_zero_and_the_same_on_both_sides(fmt, formula):
    w = weights()
    found = stiffness(w, fmt, formula, **OWN.get(formula, {}))
    assert (found > 0).all() and found.isfinite().all()
    if formula != "permuted":
        assert torch.equal(found, stiffness(-w, fmt, formula, **OWN.get(formula, {})))
        assert (found[w == 0] == found.min()).all()


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="expected one of ulp, mantissa"):
        stiffness(weights(), "E4M3", "ulps")
    with pytest.raises(ValueError, match="foreign: needed"):
        stiffness(weights(), "E4M3", "foreign")
    with pytest.raises(ValueError, match="foreign: needed"):
        stiffness(weights(), "E4M3", "ulp", foreign="E5M2")
    for settings in ({"formula": "profile", "knee": 7}, {"formula": "profile", "slope": 1}, {"slope": 1}):
        with pytest.raises(ValueError, match="knee and slope: needed"):
            stiffness(weights(), "E4M3", **settings)


# --- the manifold, as geoopt's own tests check theirs (tests/test_manifold_basic.py) -------------------


@pytest.fixture(params=range(5))
def points(request):
    """Return two points and two tangent vectors in float64."""
    generator = torch.Generator().manual_seed(request.param)
    return [torch.randn(30, generator=generator, dtype=torch.float64) for _ in range(4)]


@pytest.mark.parametrize("fmt", FORMATS)
def test_the_manifold_satisfies_geoopts_axioms(fmt, points):
    x, y, u, v = points
    manifold = FormatManifold(fmt, scale=compute_scale(amax(torch.cat([x, y])), fmt))
    manifold.assert_check_point_on_manifold(x)
    manifold.assert_check_vector_on_tangent(x, u)
    assert torch.equal(manifold.projx(x), x) and torch.equal(manifold.proju(x, u), u)
    # Inner product: symmetric, bilinear, positive, and the norm's square.
    assert torch.equal(manifold.inner(x, u, v), manifold.inner(x, v, u))
    assert torch.allclose(manifold.inner(x, 2 * u + y, v), 2 * manifold.inner(x, u, v) + manifold.inner(x, y, v))
    assert (manifold.inner(x, u) > 0).all() and (manifold.inner(x, torch.zeros_like(u)) == 0).all()
    assert torch.allclose(manifold.norm(x, u).square(), manifold.inner(x, u))
    # The Riemannian gradient represents the derivative: <grad, v>_x = df(v).
    assert torch.allclose(manifold.inner(x, manifold.egrad2rgrad(x, u), v), u * v)
    # Retraction: R_x(0) = x, and its derivative there is the identity.
    assert torch.equal(manifold.retr(x, torch.zeros_like(x)), x)
    assert torch.allclose((manifold.retr(x, 1e-6 * u) - x) / 1e-6, u, rtol=1e-6, atol=1e-8)
    # Transport: linear, an isometry, back again the identity, to the same place nothing.
    transported = manifold.transp(x, y, u)
    assert torch.allclose(manifold.transp(x, y, u + 2 * v), transported + 2 * manifold.transp(x, y, v))
    assert torch.allclose(manifold.inner(y, transported, manifold.transp(x, y, v)), manifold.inner(x, u, v))
    assert torch.allclose(manifold.transp(y, x, transported), u)
    assert torch.equal(manifold.transp(x, x, u), u)
    moved, carried = manifold.retr_transp(x, u, v)
    assert torch.equal(moved, manifold.retr(x, u)) and torch.equal(carried, manifold.transp(x, moved, v))


def test_a_unit_divides_the_stiffness():
    x = torch.linspace(-1, 1, 50)
    whole, halved = (FormatManifold("E4M3", scale=4.0, unit=unit).stiffness(x) for unit in (1.0, 2.0))
    assert torch.equal(whole, stiffness(x, "E4M3", scale=torch.tensor(4.0))) and torch.equal(halved, whole / 2)


@pytest.mark.parametrize("fmt", FORMATS)
def test_geoopts_own_optimizer_takes_the_manifold(fmt):
    w = weights()[:100]
    manifold = FormatManifold(fmt, scale=compute_scale(amax(w), fmt))
    point = geoopt.ManifoldParameter(w.clone(), manifold=manifold)
    optimizer = geoopt.optim.RiemannianAdam([point], lr=0.5, eps=1e-14, stabilize=1)
    before = point.detach().clone()
    point.square().sum().backward()
    optimizer.step()
    moved = (point.detach() - before)[before != 0].abs() / manifold.stiffness(before)[before != 0]
    assert torch.allclose(moved[moved > 1e-3], torch.tensor(0.5), rtol=1e-3)  # half a rung, whatever the weight


def test_a_point_that_is_no_number_is_off_the_manifold():
    manifold = FormatManifold("E4M3")
    with pytest.raises(ValueError, match="not finite"):
        manifold.assert_check_point_on_manifold(torch.tensor([1.0, torch.nan]))


# --- controls that look at no format -----------------------------------------------------------------


POINTS = [(0.0, 1.0), (2.5, 0.5), (7.0, 1.0), (7.0, 2.0), (12.0, 0.75), (62.0, 1.0)]


@pytest.fixture(params=["loops", "rules"])
def way(request, monkeypatch):
    """Take steps by the loops, then by the rules."""
    if request.param == "rules":
        monkeypatch.setattr(update_cpu, "available", lambda *_: False)
    else:
        request.getfixturevalue("compiler")


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


@pytest.mark.parametrize("knee", [0.0, 7.0, 62.0])
def test_without_a_slope_the_arm_is_its_plain_form(way, knee):
    start, plain = normal_weights((24, 32))[0].detach(), final(arm_named("adamw", lr=arm_named("size_profile").lr))
    for normalise in ("rms", "none"):
        found = final(arm_named("size_profile", knee=knee, slope=0.0, normalise=normalise))
        assert torch.allclose(found - start, plain - start, rtol=1e-4, atol=1e-8)
    assert not torch.allclose(final(arm_named("size_profile")) - start, plain - start, rtol=0.1, atol=1e-8)


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
