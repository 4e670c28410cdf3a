"""What is timed: steps, their memory, operands. Oracles: operations and bytes counted by hand, operands of training."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from altgrad.benchmark import operands, steps
from altgrad.benchmark.records import BASELINE
from altgrad.benchmark.session import MINIATURE, ON_CPU, ON_GPU
from altgrad.benchmark.steps import Step, contestants, matmul_operations
from altgrad.benchmark.timing import gemm_rate, ratio
from altgrad.config import load_params
from altgrad.model import GPT, GPTConfig, quantize_model
from altgrad.numerics import format_constants, quantize_operand

CPU, GPU = torch.device("cpu"), torch.device("cuda")
TINY = GPTConfig(vocab_size=64, layers=1, width=16, heads=2, context=8)
SMALL = GPTConfig(vocab_size=2048, layers=1, width=64, heads=2, context=64)


def test_operations_are_those_of_three_products_per_layer():
    weights = 16 * (3 * 16 + 16 + 2 * 64) + 64 * 16  # attention, MLP, head
    assert matmul_operations(TINY, batch=4) == 3 * 2 * weights * 4 * 8
    mixture = dataclasses.replace(TINY, experts=4, active=2)  # an MLP more per token, and a router
    assert matmul_operations(mixture, batch=4) == 3 * 2 * (weights + 16 * 2 * 64 + 4 * 16) * 4 * 8
    assert gemm_rate(torch.float32, CPU) > 0


def uncompiled(monkeypatch: pytest.MonkeyPatch, config: GPTConfig, name: str, batch: int) -> Step:
    """Return a contestant's step, warm."""
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    entry = next(entry for entry in contestants(CPU) if entry.name == name)
    step = Step(config, entry, batch, CPU)
    step()
    step()
    return step


def test_state_is_the_weights_and_two_averages(monkeypatch):
    step = uncompiled(monkeypatch, TINY, "bf16", 2)
    weights = sum(parameter.numel() * 4 for parameter in step.model.parameters())
    assert steps.state_mb(step) * 1e6 == pytest.approx(3 * weights, rel=0.02)  # and a count of steps each


def test_peak_memory_grows_with_the_batch_by_its_logits(monkeypatch):
    peaks = []
    for batch in (16, 64):
        step = uncompiled(monkeypatch, SMALL, "fp32", batch)
        peaks.append(steps.peak_mb(step))
        if peaks[-1] is None:
            pytest.skip("this system does not tell a process's peak memory")
        assert peaks[-1] > steps.state_mb(step)
    logits = 48 * 64 * 2048 * 4 / 1e6  # MB of those of 48 more sequences; their gradient takes as much
    assert 1.5 * logits < peaks[1] - peaks[0] < 8 * logits


def test_every_step_is_of_a_recipe_that_a_model_takes():
    config = GPTConfig(vocab_size=64, layers=1, width=32, heads=2, context=16)
    of_device = {device: [entry.name for entry in contestants(device)] for device in (CPU, GPU)}
    for names in of_device.values():
        assert len(set(names)) == len(names) and names[0] == BASELINE
    assert set(MINIATURE.entries) <= set(of_device[CPU]) and set(ON_GPU.entries) <= set(of_device[GPU])
    for entry in (*contestants(CPU), *contestants(GPU)[-4:]):
        if entry.recipe is not None:
            model = quantize_model(GPT(config), entry.recipe)
            assert any(type(layer).__name__ != "Linear" for layer in model.modules()), entry.name


@pytest.mark.parametrize("sizes", [ON_CPU, ON_GPU, MINIATURE], ids=["cpu", "gpu", "miniature"])
def test_what_is_measured_is_in_params(sizes):
    params = load_params(Path(__file__).parents[2] / "params.yaml")
    assert {*sizes.parts_of, *(model for model, _ in sizes.steps)} <= set(params.models)
    assert set(sizes.optimizers) <= set(params.optimizers)


def test_a_result_holds_the_median_beside_the_baseline_of_the_same_turn():
    taken = {"E4M3": [2.0, 6.0, 4.0], BASELINE: [1.0, 2.0, 1.0]}
    found = steps.result("E4M3", TINY, 2, 9.0, taken)
    assert (found["step_ms"], found["over_bf16"], found["rounds"]) == (4000, 3.0, 3)
    assert found["tokens_per_s"] == 2 * 8 / 4.0 and found["over_bf16_quartiles"] == [2.5, 3.5]


@pytest.mark.parametrize("times", [[1.0, 9.0], [1.0, 9.0, 9.0], [5.0, 5.0]])
def test_quartiles_of_few_ratios_lie_within_them(times):
    """The miniature's two rounds once gave a negative quartile, beyond both of its ratios."""
    found = ratio("over", times, [1.0] * len(times))
    assert min(times) <= found["over_quartiles"][0] <= found["over"] <= found["over_quartiles"][1] <= max(times)


def test_operands_that_are_timed_are_those_of_training_and_one_that_fails_leaves_the_others(monkeypatch):
    monkeypatch.setattr(operands, "compile_apart", lambda function, **_: function)
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    entries = operands.contestants(CPU, torch.bfloat16)
    found = {entry.name: entry.run(x) for entry in entries if "kernels" not in entry.name}
    for name, fmt, options in (
        ("E3M4, a scale per tensor", "E3M4", {}),
        ("E4M3, a scale per row", "E4M3", {"granularity": "row"}),
        ("E4M3, blocks of 32 (MXFP8)", "E4M3", {"granularity": "block", "block": 32, "scale_format": "E8M0"}),
        ("E2M1, two-level blocks of 16 (NVFP4)", "E2M1",
         {"granularity": "block", "block": 16, "scale_format": "E4M3"}),
    ):  # fmt: skip
        constants = format_constants(fmt, scale_format=options.get("scale_format", "float32"))
        expected = quantize_operand(x, constants, **options)
        assert torch.equal(found[name][0], expected.values), name
        if other := found.get(f"{name}, by tensor operations"):
            assert torch.equal(other[0], expected.values), name
    *rows, absent = operands.measure((16, 32), 3, CPU)
    assert [row["name"] for row in rows] == list(found) and rows[0]["over_copy"] == 1
    assert absent["name"] == "E4M3, a scale per tensor, by kernels" and "needs a GPU and Triton" in absent["absent"]
    for row, written in zip(rows, (2, 1, 1, 2, 1), strict=False):
        assert row["gb_per_s"] == pytest.approx(512 * (2 + written) / row["call_ms"] / 1e6, rel=1e-2)
