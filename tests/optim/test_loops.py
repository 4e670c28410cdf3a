"""The CPU's own loops and the rules, eager and compiled, are the same arms."""

import importlib

import pytest
import torch

from altgrad.config.arms import ADAM, Base
from altgrad.config.recipe import TensorRecipe
from altgrad.numerics.scaling import SCALE_ROUNDINGS
from altgrad.optim import update_cpu
from tests.optim import arms
from tests.optim.arms import ARMS, EXTREMES, arm_named, final, make, normal_weights, step

FORMULAS = {formula: ("spacing_unmatched", {"stiffness": formula}) for formula in ("mantissa", "smooth", "range")}
RAW = {f"{formula}_raw": ("spacing_unmatched", {"stiffness": formula, "normalise": "none", "lr": 0.3}) for formula in (
    "ulp", "mantissa", "smooth", "range", "mean", "permuted",
)}  # fmt: skip
PROFILES = {f"profile_{knee}_{slope}": ("size_profile", dict(knee=knee, slope=slope, **more)) for knee, slope, more in (
    (0, 1.0, {}), (3.5, 2.0, {}), (62, 0.5, {}), (7, 0.0, {}), (7, 0.75, {"normalise": "none", "lr": 0.03}),
)}  # fmt: skip
BY_RULES = {  # arms that the loops leave to the rules
    "row_relative": ("row_relative", {}), "muon": ("muon", {}), "cosine": ("spacing_unmatched", {"schedule": "cosine"}),
}  # fmt: skip
BY_LOOPS = [name for name in ARMS if arm_named(name).has_own_step and name not in BY_RULES]
CASES = FORMULAS | RAW | PROFILES | {name: (name, {}) for name in BY_LOOPS} | {
    "profile_on_grid": ("spacing_unmatched_sr_weights", {"stiffness": "profile", "knee": 7, "slope": 1.0}),
    "squared": ("spacing_unmatched", {"power": 2}),
    "gradient_matched": ("spacing_gradient", {"match_rms": True}),
    "madam_matched": ("madam", {"match_rms": True, "lr": 1e-3}),  # larger ones explode
    "riemann_matched": ("riemann_adam", {"match_rms": True}),
    "riemann_momentum": ("riemann_sgd", {"momentum": 0.9}),
    "nearest": ("adamw_sr_weights", {"rounding": "nearest"}),
    "fixed": ("adamw_sr_weights", {"held_scale": "fixed"}),
    "eco_nearest": ("eco", {"rounding": "nearest", "held_scale": "fixed"}),
    "eco_sgd": ("eco", {"base": "sgd", "betas": None, "momentum": 0.9}),
}  # fmt: skip
#: In whose loops the format matters, beside formulas: weights with masters and on their grid, by spacings and by rungs.
OF_EVERY_KIND = ("spacing_scaled", "spacing_unmatched_sr_weights", "riemann_adam", "rung", "nearest", "eco")
SHAPE = (67, 131)  # more than one chunk, and a part of one


@pytest.fixture
def by_rules(monkeypatch):
    """Return what takes steps by the rules, and by the loops, as function of whether to compile."""
    assert update_cpu.loops.load(update_cpu.SOURCE, definitions=update_cpu.DEFINITIONS) is None, "no C++ compiler"
    own = update_cpu.available

    def run(arm, fmt, rules, steps=6, amax=None, **options):
        monkeypatch.setattr(update_cpu, "available", (lambda *_: False) if rules else own)
        weights = normal_weights(SHAPE)
        if amax is not None:
            weights[0].data *= amax / weights[0].detach().abs().max()
        weights, optimizer = make(arm, fmt, weights, steps=20, seed=3, reference=True, **options)
        assert bool(optimizer._loops) != rules
        for i in range(steps):
            step(weights, optimizer, seed=i)
        return weights[0].detach(), optimizer.state[weights[0]]

    return run


def agree(found, expected, share):
    """Assert that a share of the elements is equal to a few roundings of float32."""
    close = torch.isclose(found, expected, rtol=2e-6, atol=2**-21 * expected.abs().max().item())
    assert close.float().mean().item() >= share, (found - expected).abs().max()


@pytest.mark.parametrize(("case", "fmt"), [
    (case, fmt) for case in CASES for fmt in EXTREMES if fmt == "E4M3" or case in (*FORMULAS, *RAW, *OF_EVERY_KIND)
])  # fmt: skip
def test_the_loops_do_what_the_rules_say(by_rules, case, fmt):
    """After a step everywhere; after more of them a weight may have come to lie on the other side of a boundary.

    E7M0's largest weight, whose stiffness is most of the tensor's, always lies at one.
    """
    name, changes = CASES[case]
    arm = arm_named(name, **changes)
    for steps, share in ((1, 1.0), (6, 0.999))[: 1 if fmt == "E7M0" else 2]:
        (weight, state), (expected, expected_state) = (by_rules(arm, fmt, rules, steps) for rules in (False, True))
        agree(weight, expected, share)
        assert state.keys() == expected_state.keys()
        for key, tensor in state.items():
            agree(tensor, expected_state[key], share)


@pytest.mark.parametrize("case", ["nearest", "fixed"])
def test_a_weight_that_becomes_zero_keeps_its_sign(by_rules, case):
    """To nearest and stochastically: the scale is taken off by fused instructions, where a processor has them."""
    name, changes = CASES[case]
    found, expected = (by_rules(arm_named(name, **changes), "E0M7", rules, 1)[0] for rules in (False, True))
    zero = (found == 0) & (expected == 0)
    assert (zero & expected.signbit()).sum() > 10
    assert torch.equal(found.signbit()[zero], expected.signbit()[zero])


@pytest.mark.parametrize("rounding", SCALE_ROUNDINGS)
@pytest.mark.parametrize("name", ["spacing_unmatched", "adamw_sr_weights"])
def test_the_loops_have_each_rule_for_powers_of_two(by_rules, monkeypatch, name, rounding):
    """At three amax, between which the rules for E4M3 go from one power of two to the next."""
    options = TensorRecipe(format="E4M3", scale="E8M0", scale_rounding=rounding).scale_options
    monkeypatch.setattr(arms, "OPTIONS", options)
    arm = arm_named(name, **({"rounding": "nearest"} if name == "adamw_sr_weights" else {}))
    for amax in (1.5, 1.9, 1.95):
        found, expected = (by_rules(arm, "E4M3", rules, 1, amax)[0] for rules in (False, True))
        agree(found, expected, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES, *BY_RULES])
def test_the_rules_compiled_and_eager_agree(by_rules, case):
    name, changes = (CASES | BY_RULES)[case]
    arm = arm_named(name, **changes)
    for steps, share in ((1, 1.0), (6, 0.999)):
        found, expected = (by_rules(arm, "E4M3", True, steps, compiled=compiled)[0] for compiled in (True, False))
        agree(found, expected, share)


@pytest.mark.parametrize("name", BY_LOOPS)
def test_the_loops_have_the_same_bits_with_any_number_of_threads(name):
    assert update_cpu.loops.load(update_cpu.SOURCE, definitions=update_cpu.DEFINITIONS) is None, "no C++ compiler"
    threads, found = torch.get_num_threads(), []
    for count in (1, 3):
        torch.set_num_threads(count)
        weights = normal_weights((700, 513))  # more than one thread's share
        weights, optimizer = make(arm_named(name), weights=weights)
        for i in range(2):
            step(weights, optimizer, seed=i)
        found.append(weights[0].detach())
    torch.set_num_threads(threads)
    assert torch.equal(*found)


@pytest.mark.parametrize("name", ["spacing_unmatched", "riemann_adam", "rung"])
def test_compiling_changes_no_bit_where_there_are_loops(name):
    assert torch.equal(final(arm_named(name), compiled=True), final(arm_named(name)))


@pytest.fixture(params=[1, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("match_rms", [False, True])
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"base": "nesterov", "weights": "quantized"}, "update_cpu.cpp has no direction of number 5"),
        ({"base": "nesterov", "stiffness": "ulp"}, "update_cpu.cpp has no direction of number 5"),
        ({"stiffness": "cubic"}, "update_cpu.cpp has no stiffness of number 11"),
        ({"stiffness": "cubic", "normalise": "none"}, "update_cpu.cpp has no stiffness of number 11"),
    ],
)
def test_an_arm_that_the_loops_do_not_know_is_an_error(monkeypatch, threads, settings, words, match_rms):
    """A base or a formula that someone adds in Python alone. Neither weights nor moments have moved by then."""
    monkeypatch.setitem(update_cpu.BASES, "nesterov", Base("nesterov", ADAM, plain="adamw"))
    monkeypatch.setattr(update_cpu, "DIRECTIONS", (*update_cpu.DIRECTIONS, "nesterov"))
    for package in (update_cpu, importlib.import_module("altgrad.optim.stiffness")):
        monkeypatch.setattr(package, "FORMULAS", (*package.FORMULAS, "cubic"))
    arm = arm_named("adamw", match_rms=match_rms).model_copy(update=settings)
    weights, optimizer = make(arm, weights=normal_weights((700, 513)))  # more than one thread's share
    start = weights[0].detach().clone()
    with pytest.raises(RuntimeError, match=words):
        step(weights, optimizer, seed=0)
    assert torch.equal(weights[0], start) and not optimizer.state[weights[0]]["exp_avg"].any()


@pytest.mark.parametrize("name", ["spacing_scaled", "rung", "adamw_coat"])
def test_the_operator_keeps_torchs_contract(name, monkeypatch):
    """It changes what its schema says and nothing else, and can be traced."""
    assert update_cpu.loops.load(update_cpu.SOURCE, definitions=update_cpu.DEFINITIONS) is None, "no C++ compiler"
    calls = []
    monkeypatch.setattr(update_cpu, "arm_step", lambda *arguments: calls.append(arguments))
    weights, optimizer = make(arm_named(name), weights=normal_weights((67, 131)))
    step(weights, optimizer, seed=0)
    with torch.no_grad():
        torch.library.opcheck(torch.ops.altgrad.arm_step.default, calls[0])
