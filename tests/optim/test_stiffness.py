"""The formulas against their definitions, zero and signs, and the manifold's axioms."""

import math

import geoopt
import pytest
import torch

from altgrad.formats import get_format
from altgrad.numerics import amax, compute_scale, ulp
from altgrad.optim import FormatManifold, stiffness
from altgrad.optim.stiffness import FORMULAS, exponent
from tests.optim.arms import FORMATS

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


@pytest.mark.parametrize("fmt", FORMATS)
def test_smooth_lies_within_a_binade_of_ulp_and_never_jumps(fmt):
    w = weights().sort().values
    smooth, exact = stiffness(w, fmt, "smooth"), stiffness(w, fmt)
    assert (smooth / exact >= 1 - 1e-6).all() and (smooth / exact <= math.sqrt(5)).all()
    assert torch.equal(smooth[w <= 0], smooth[w <= 0].sort(descending=True).values)


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


def test_schedules_begin_at_one_and_end_at_zero():
    assert [exponent("constant", p) for p in (0, 0.5, 1)] == [1, 1, 1]
    assert [exponent("linear", p) for p in (0, 0.25, 1)] == [1, 0.75, 0]
    assert [exponent("cosine", p) for p in (0, 0.5, 1)] == pytest.approx([1, 0.5, 0])


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


def test_a_single_weight_is_a_point():
    """The manifold is one-dimensional, element by element: a product over weights sums nothing up."""
    manifold = FormatManifold("E4M3")
    assert manifold.check_point(torch.tensor(1.0)) and manifold.ndim == 0 and not manifold.reversible
    assert manifold.inner(torch.ones(3), torch.ones(3)).shape == (3,)


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
