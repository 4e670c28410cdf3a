"""The step-time benchmark: what it records, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from altgrad.benchmark import alone, command_line, memory, quantizers
from altgrad.benchmark.limits import gemm_rate
from altgrad.benchmark.steps import Contestant, Step, contestants, matmul_operations, measure, random_tokens
from altgrad.model import GPTConfig, Recipe

CPU = torch.device("cpu")
TINY = GPTConfig(vocab_size=64, layers=1, width=16, heads=2, context=8)
SMALL = GPTConfig(vocab_size=2048, layers=1, width=64, heads=2, context=64)


MISTAKES = [
    (["--parts", "step"], "--parts: there is no part step; did you mean steps?"),
    (["--models", "nanoo"], "--models: nanoo is not in models:"),
    (["--rounds", "1"], "at least 2 rounds"),
    (["--rounds", "many"], "--rounds: invalid int value: 'many'"),
    (["--batches", "0"], "batches of at least 1"),
    (["--elements", "-4"], "--elements: expected numbers of at least 1"),
    (["--formats", "E4M33"], "--formats: unknown format 'E4M33'"),
]
# As many runs of the command in one process, which loads torch once.
SEVERAL = """
import contextlib, io, json, runpy, sys
told = []
for arguments in json.loads(sys.argv[1]):
    sys.argv[1:], errors = arguments, io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            runpy.run_module("altgrad.benchmark", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, str):  # which Python prints
            print(end.code, file=errors)
        told.append([end.code if isinstance(end.code, int) else int(end.code is not None), errors.getvalue()])
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told() -> list[tuple[int, str]]:
    """Return the exit status of the command for each of the mistakes, and what it says."""
    command = [sys.executable, "-c", SEVERAL, json.dumps([arguments for arguments, _ in MISTAKES])]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=True)
    assert not done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("number", range(len(MISTAKES)), ids=[" ".join(arguments) for arguments, _ in MISTAKES])
def test_bad_input_is_one_sentence(told, number):
    status, said = told[number]
    assert status == 1 and MISTAKES[number][1] in said and len(said.splitlines()) == 1


def test_every_model_has_one_batch_and_the_first_has_all():
    options = command_line.parse(["--models", "micro", "nano", "--batches", "8", "16"])
    assert command_line.sizes(options) == [("micro", 16), ("nano", 16), ("micro", 8)]
    assert command_line.sizes(command_line.parse(["--models", "micro", "--batches"])) == [("micro", 16)]


def test_operations_are_those_of_three_products_per_layer():
    weights = 16 * (3 * 16 + 16 + 2 * 64) + 64 * 16  # attention, MLP, head
    assert matmul_operations(TINY, batch=4) == 3 * 2 * weights * 4 * 8
    assert gemm_rate(torch.float32, CPU) > 0


def uncompiled(monkeypatch: pytest.MonkeyPatch, config: GPTConfig, name: str, batch: int) -> Step:
    """Return a contestant's step, warm."""
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    entry = next(entry for entry in contestants(["E4M3"], torch.device("cpu")) if entry.name == name)
    step = Step(config, entry, random_tokens(config, batch, CPU), CPU)
    step()
    step()
    return step


def test_state_is_the_weights_and_two_averages(monkeypatch):
    step = uncompiled(monkeypatch, TINY, "bf16", 2)
    weights = sum(parameter.numel() * 4 for parameter in step.model.parameters())
    assert memory.state_mb(step) * 1e6 == pytest.approx(3 * weights, rel=0.02)  # and a count of steps each


def test_peak_memory_grows_with_the_batch_by_its_logits(monkeypatch):
    peaks = []
    for batch in (16, 64):
        step = uncompiled(monkeypatch, SMALL, "fp32", batch)
        peaks.append(memory.peak_mb(step))
        if peaks[-1] is None:
            pytest.skip("this system does not tell a process's peak memory")
        assert peaks[-1] > memory.state_mb(step)
    logits = 48 * 64 * 2048 * 4 / 1e6  # MB of those of 48 more sequences; their gradient takes as much
    assert 1.5 * logits < peaks[1] - peaks[0] < 8 * logits


def test_a_contestant_that_fails_says_why(tmp_path):
    with pytest.raises(RuntimeError, match="the process for bf16, width 16, batch 0 failed"):
        alone.measure(TINY, 0, "bf16", ["E4M3"], device="nonsense", threads=1, cache=tmp_path)


def test_the_second_process_finds_the_cache_of_the_first():
    found = []

    def first_step_in(cache: Path) -> float:
        found.append(sorted(file.name for file in cache.iterdir()))
        (cache / "kernel").touch()
        return 20.04 / len(found)

    assert alone.cold_and_warm(first_step_in) == {"cold_s": 20.0, "warm_s": 10.0}
    assert found == [[], ["kernel"]]


def test_quantizers_that_are_not_installed_are_named(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(quantizers, "PEERS", {"no_such_module": "QPyTorch"} | quantizers.PEERS)
    found = {result["name"]: result for result in quantizers.measure("E4M3", 1024, 2, CPU)}
    assert found["QPyTorch"] == {"format": "E4M3", "name": "QPyTorch", "elements": 1024, "absent": "not installed"}
    assert found["ours, compiled"]["median_ns_per_element"] > 0


@pytest.mark.slow
def test_a_process_of_its_own_tells_its_first_step_and_its_peak(tmp_path):
    def run(batch: int) -> dict[str, float]:
        return alone.measure(SMALL, batch, "bf16", ["E4M3"], device="cpu", threads=1, cache=tmp_path)

    cold, warm, larger = run(16), run(16), run(64)
    assert warm["first_step_s"] < cold["first_step_s"]
    if cold["peak_mb"] is not None:
        assert cold["peak_mb"] == pytest.approx(warm["peak_mb"], rel=0.05)
        assert cold["state_mb"] < cold["peak_mb"] < larger["peak_mb"] < 500


@pytest.mark.slow
def test_every_contestant_is_measured_beside_the_baseline():
    found = measure(TINY, 2, [Contestant("bf16"), Contestant("E4M3", Recipe.uniform("E4M3"))], 4, CPU)
    assert [result["name"] for result in found] == ["bf16", "E4M3"]
    assert found[0]["over_bf16"] == 1 and found[0]["over_bf16_quartiles"] == [1, 1]
    for result in found:
        assert result["rounds"] == 4 and result["step_ms"] > 0
        assert result["tokens_per_s"] == pytest.approx(2 * 8 / (result["step_ms"] / 1e3), rel=0.05)
