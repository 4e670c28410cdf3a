"""The CPU's own loops and the rules, eager and compiled, are the same arms."""

import pytest
import torch

from altgrad.optim import loops
from tests.optim.arms import ARMS, arm_named, final, make, normal_weights, step

FORMULAS = {formula: ("stiff_update", {"stiffness": formula}) for formula in ("mantissa", "smooth", "range")}
CASES = FORMULAS | {name: (name, {}) for name in ARMS if name not in ("adamw", "sgd")} | {
    "squared": ("stiff_update", {"power": 2}),
    "gradient_matched": ("stiff_grad", {"match_rms": True}),
    "madam_matched": ("madam", {"match_rms": True, "lr": 1e-3}),  # larger ones explode
    "riemann_matched": ("riemann", {"match_rms": True}),
    "riemann_momentum": ("riemann_sgd", {"momentum": 0.9}),
    "nearest": ("adamw_sr", {"rounding": "nearest"}),
    "fixed": ("adamw_sr", {"grid_scale": "fixed"}),
}  # fmt: skip
SHAPE = (67, 131)  # more than one chunk, and a part of one


@pytest.fixture
def by_rules(monkeypatch):
    """Return what takes steps by the rules, and by the loops, as function of whether to compile."""
    assert loops.kernels.load(loops.SOURCE) is None, "no C++ compiler: nothing to compare"
    own = loops.available

    def run(arm, fmt, rules, steps=6, **options):
        monkeypatch.setattr(loops, "available", (lambda *_: False) if rules else own)
        weights, optimizer = make(arm, fmt, normal_weights(SHAPE), steps=20, seed=3, reference=True, **options)
        assert bool(optimizer._loops) != rules
        for i in range(steps):
            step(weights, optimizer, seed=i)
        return weights[0].detach(), optimizer.state[weights[0]]

    return run


def agree(found, expected, share):
    """Assert that a share of the elements is equal to a few roundings of float32."""
    close = torch.isclose(found, expected, rtol=2e-6, atol=2**-21 * expected.abs().max().item())
    assert close.float().mean().item() >= share, (found - expected).abs().max()


@pytest.mark.parametrize("fmt", ["E0M7", "E4M3", "E7M0"])
@pytest.mark.parametrize("case", CASES)
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


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_rules_compiled_and_eager_agree(by_rules, case):
    name, changes = CASES[case]
    arm = arm_named(name, **changes)
    for steps, share in ((1, 1.0), (6, 0.999)):
        found, expected = (by_rules(arm, "E4M3", True, steps, compiled=compiled)[0] for compiled in (True, False))
        agree(found, expected, share)


@pytest.mark.parametrize("name", [name for name in ARMS if name not in ("adamw", "sgd")])
def test_the_loops_have_the_same_bits_with_any_number_of_threads(name):
    assert loops.kernels.load(loops.SOURCE) is None, "no C++ compiler: nothing to compare"
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


@pytest.mark.parametrize("name", ["stiff_update", "riemann", "rung"])
def test_compiling_changes_no_bit_where_there_are_loops(name):
    assert torch.equal(final(arm_named(name), compiled=True), final(arm_named(name)))


def test_a_gradient_need_not_be_contiguous():
    found = []
    for transposed in (False, True):
        weights, optimizer = make(arm_named("stiff_update"))
        gradient = torch.randn(24, 32, generator=torch.Generator().manual_seed(0))
        weights[0].grad = gradient.t().contiguous().t() if transposed else gradient
        optimizer.step()
        found.append(weights[0].detach())
    assert torch.equal(*found)


@pytest.mark.parametrize("name", ["stiff_matched", "rung"])
def test_the_operator_keeps_torchs_contract(name, monkeypatch):
    """It changes what its schema says and nothing else, and can be traced."""
    assert loops.kernels.load(loops.SOURCE) is None, "no C++ compiler: nothing to trace"
    calls = []
    monkeypatch.setattr(loops, "arm_step", lambda *arguments: calls.append(arguments))
    weights, optimizer = make(arm_named(name))
    step(weights, optimizer, seed=0)
    with torch.no_grad():
        torch.library.opcheck(torch.ops.altgrad.arm_step.default, calls[0])
