"""The step-time benchmark: what it records, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from altgrad.benchmark.limits import gemm_rate
from altgrad.benchmark.steps import Contestant, matmul_operations, measure
from altgrad.model import GPTConfig, Recipe

CPU = torch.device("cpu")
TINY = GPTConfig(vocab_size=64, layers=1, width=16, heads=2, context=8)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--models", "nanoo"], "--models: nanoo is not in models:"),
        (["--rounds", "1"], "at least 2 rounds"),
        (["--batches", "0"], "batches of at least 1"),
        (["--formats", "E4M33"], "--formats: unknown format 'E4M33'"),
    ],
)
def test_bad_input_is_one_sentence(arguments, words):
    command = [sys.executable, "-m", "altgrad.benchmark", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 1 and words in done.stderr and len(done.stderr.splitlines()) == 1


def test_operations_are_those_of_three_products_per_layer():
    weights = 16 * (3 * 16 + 16 + 2 * 64) + 64 * 16  # attention, MLP, head
    assert matmul_operations(TINY, batch=4) == 3 * 2 * weights * 4 * 8
    assert gemm_rate(torch.float32, CPU) > 0


@pytest.mark.slow
def test_every_contestant_is_measured_beside_the_baseline():
    found = measure(TINY, 2, [Contestant("bf16"), Contestant("E4M3", Recipe.uniform("E4M3"))], 4, CPU)
    assert [result["name"] for result in found] == ["bf16", "E4M3"]
    assert found[0]["over_bf16"] == 1 and found[0]["over_bf16_quartiles"] == [1, 1]
    for result in found:
        assert result["rounds"] == 4 and result["step_ms"] > 0
        assert result["tokens_per_s"] == pytest.approx(2 * 8 / (result["step_ms"] / 1e3), rel=0.05)
