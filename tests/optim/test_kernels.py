"""A GPU's kernels for arms do what the rules say, in Triton's interpreter, and compile to instructions that keep it.

Oracle: `update`. Operations are its own in its order, so what needs no mean is equal to the bit; a mean is of float64
sums in another order, and so perhaps a float32's last place off, as is what is divided by it.
"""

from __future__ import annotations

import os
import re
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from altgrad.numerics import gpu_launch as launch
from altgrad.optim import update, update_cpu, update_gpu
from tests.numerics.test_triton import in_a_process
from tests.optim.arms import arm_named, grid_of, make, normal_weights, step

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton: see CONTRIBUTING.md")
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in a process with Triton's interpreter")
apart = pytest.mark.skipif(INTERPRETED, reason="is that process")

EXACT = {  # that take no mean
    "spacing_gradient": {}, "spacing_sgd": {"normalise": "none"},
    "spacing_squared_sgd": {"normalise": "none", "momentum": 0.0},
    "spacing_unmatched": {"normalise": "none", "power": 2}, "foreign_unmatched": {"normalise": "none"},
    "adamw": {"stiffness": "range", "normalise": "none"},
}  # fmt: skip
MEANS = {
    "spacing_unmatched": {}, "spacing_scaled": {}, "spacing_sgd": {"acts": "update"},
    "foreign_unmatched": {"stiffness": "range", "foreign": None},
}  # fmt: skip
SHAPES = ((67, 131), (3, 5), (64, 64))  # more than a chunk, a part of one, and one


@apart
def test_kernels_in_the_interpreter():
    code = f"import sys, pytest; sys.exit(pytest.main(['-p', 'no:cacheprovider', '-p', 'no:xdist', {__file__!r}]))"
    assert " passed" in in_a_process(code, TRITON_INTERPRET="1")


COMPILED = """
import re
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from altgrad.optim import update_gpu_kernels as kernels

POINTERS = {"table": "*i64", "of_chunk": "*i32", "largest": "*i32", "found": "*i32", "sums": "*fp64", "means": "*fp32",
            "means_of_steps": "*fp32"}

def instructions(kernel, **constants):
    kinds = {name: "constexpr" if name in constants else POINTERS.get(name, "i32") for name in kernel.arg_names}
    sixteenths = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(kinds.values()) if kind[0] == "*"}
    source = ASTSource(kernel, kinds, constexprs=constants, attrs=sixteenths)
    made = compile(source, GPUTarget("cuda", 90, 32), {"num_warps": 8, "enable_fp_fusion": False})
    print(*sorted(set(re.findall(r"\\n\\s+(?:@%p\\d+ )?([a-z][a-z0-9_.]+)", made.asm["ptx"]))))

instructions(kernels.add_up, TERMS=2, LENGTH=4096)
instructions(kernels.find_largest, FORMULA="ulp", LENGTH=4096)
for phase, adam in (("spacings", True), ("sizes", True), ("step", True), ("step", False)):
    instructions(kernels.step, PHASE=phase, ADAM=adam, FORMULA="ulp", RULE=0, ON_GRADIENT=False, POWER=1, RMS=True,
                 MOMENTUM_KEPT=True, MATCH=adam, LENGTH=4096)
"""


@apart
def test_what_is_compiled_for_a_gpu_fuses_nothing_and_divides_exactly():
    """Without one: for compute capability 9.0."""
    _, *found = (line.split() for line in in_a_process(COMPILED, TRITON_INTERPRET="0").splitlines())
    assert len(found) == 5
    for i, used in enumerate(found):
        assert not [name for name in used if re.match(r"fma|mad.*f\d|.*(approx|full)|.*\.ftz", name)]
        assert i in (0, 1) or "sqrt.rn.f32" in used or i == 4


def adam(m: Tensor, v: Tensor, h: Tensor) -> Tensor:
    """Do what `update._adam` does, with the root to nearest, as a GPU has it; a CPU's may be a last place off."""
    root = (v * h[update.UNBIAS2]).double().sqrt().float()
    return m * h[update.UNBIAS1] / (root + h[update.EPS])


@pytest.fixture
def by_kernels(monkeypatch):
    """Return what takes steps of three weights by the rules, or by kernels as if the CPU were a GPU."""

    def run(arm, fmt: str, kernels: bool, steps: int = 3, weights: list[Tensor] | None = None):
        with monkeypatch.context() as patch:
            patch.setattr(launch, "DEVICE", "cpu" if kernels else "cuda")
            patch.setattr(launch, "_failures", [])
            patch.setattr(update_cpu, "available", lambda *_: False)
            patch.setattr(update, "_adam", adam)
            found, optimizer = make(arm, fmt, weights or normal_weights(*SHAPES), steps=20, seed=3)
            assert len(optimizer._loops) == kernels * len(found)
            for i in range(steps):
                step(found, optimizer, seed=i)
            assert not launch._failures
        return [t for p in found for t in (p.detach(), *(optimizer.state[p][name] for name in optimizer._acting.names))]

    return run


@interpreted
@pytest.mark.parametrize("fmt", ["E0M7", "E4M3", "E7M0"])
@pytest.mark.parametrize("name", EXACT)
def test_without_a_mean_the_bits_are_those_of_the_rules(by_kernels, name, fmt):
    arm = arm_named(name, **EXACT[name])
    for found, expected in zip(by_kernels(arm, fmt, True), by_kernels(arm, fmt, False), strict=True):
        assert torch.equal(found, expected)


@interpreted
@pytest.mark.parametrize("name", MEANS)
def test_with_a_mean_they_are_so_to_a_few_roundings(by_kernels, name):
    arm = arm_named(name, **MEANS[name])
    for found, expected in zip(by_kernels(arm, "E4M3", True), by_kernels(arm, "E4M3", False), strict=True):
        assert torch.allclose(found, expected, rtol=2e-6, atol=2**-21 * expected.abs().max().item())


@interpreted
def test_unusual_weights_and_gradients_have_the_bits_of_the_rules(by_kernels):
    """Zeros, an infinity, a NaN, and an address that is no multiple of 16."""

    def weights() -> list[torch.nn.Parameter]:
        several = [torch.randn(6, 700, generator=torch.Generator().manual_seed(1)) for _ in range(3)]
        several[0][:, 3:9], several[1][2, 3], several[2][1, 1] = 0.0, torch.inf, torch.nan
        odd = torch.zeros(4201)[1:].view(6, 700).copy_(several[0])
        return [torch.nn.Parameter(t) for t in (*several, odd, torch.zeros(5, 7))]

    arm = arm_named("spacing_gradient")
    both = (by_kernels(arm, "E4M3", kernels, 2, weights()) for kernels in (True, False))
    for found, expected in zip(*both, strict=True):
        assert torch.equal(found.nan_to_num(7.5), expected.nan_to_num(7.5))


@interpreted
def test_a_kernel_that_fails_leaves_the_step_to_the_rules(by_kernels, monkeypatch):
    arm = arm_named("spacing_unmatched")
    expected = by_kernels(arm, "E4M3", False)
    monkeypatch.setattr(launch, "DEVICE", "cpu")
    monkeypatch.setattr(launch, "_failures", [])
    monkeypatch.setattr(update_cpu, "available", lambda *_: False)
    monkeypatch.setattr(update, "_adam", adam)

    def fails(*_: object) -> None:
        raise RuntimeError("no such instruction")

    weights, optimizer = make(arm, "E4M3", normal_weights(*SHAPES), steps=20, seed=3)
    with monkeypatch.context() as patch, pytest.warns(UserWarning, match="training is slower: no such instruction"):
        patch.setattr(update_gpu, "_launch", fails)
        for i in range(3):
            step(weights, optimizer, seed=i)
    assert all(torch.equal(p, e) for p, e in zip(weights, expected[::3], strict=True))


def test_kernels_are_for_what_they_can_do(monkeypatch):
    monkeypatch.setattr(launch, "DEVICE", "cpu")
    monkeypatch.setattr(launch, "_failures", [])
    p, names = normal_weights((4, 8))[0], ("exp_avg", "exp_avg_sq")
    for name, changes, takes in (
        ("spacing_unmatched", {}, True), ("spacing_scaled", {}, True), ("spacing_sgd", {}, True),
        ("foreign_unmatched", {}, True), ("shuffled_unmatched", {}, False), ("riemann_adam", {}, False),
        ("rung", {}, False), ("spacing_unmatched_sr_weights", {}, False),
        ("spacing_sgd", {"match_rms": True}, False), ("spacing_unmatched", {"schedule": "linear"}, False),
        ("spacing_unmatched", {"state": arm_named("adamw_e4m3_state").state}, False), ("muon", {}, False),
    ):  # fmt: skip
        arm = arm_named(name, **changes)
        assert update_gpu.available(arm, p, grid_of("E4M3", arm), names) == takes, name
    arm = arm_named("spacing_unmatched")
    assert not update_gpu.available(arm, p, grid_of("E4M3", arm), (*names, "reference_avg"))
    assert not update_gpu.available(arm, p.detach().bfloat16(), grid_of("E4M3", arm), names)
