"""Laws of the loop's parts, each against a case small enough to work out by hand."""

from __future__ import annotations

import itertools
import math
import shutil

import pytest
import torch

from altgrad.config import UserError
from altgrad.config.schema import Train, learning_rate
from altgrad.formats import get_format
from altgrad.model import GPT, GPTConfig, Recipe, TensorRecipe, hardware, quantize_model
from altgrad.model.quantized.quantizer import Quantizer
from altgrad.optim import Arm, build_optimizer
from altgrad.training import checkpoint, machine
from altgrad.training.checkpoint import RowLog
from altgrad.training.monitor import Measurement, TensorMonitor, first_nonfinite, tensor_statistics
from altgrad.training.records import float_copy
from altgrad.training.trainer import probe_steps

# --- schedule --------------------------------------------------------------------------------------


def rates(steps: int, warmup: float, final: float) -> list[float]:
    return [learning_rate(s, peak=2.0, steps=steps, warmup=warmup, final=final) for s in range(1, steps + 1)]


def test_the_rate_rises_linearly_then_falls_along_a_cosine():
    found = rates(100, 0.1, 0.1)
    assert found[:10] == pytest.approx([0.2 * i for i in range(1, 11)])
    assert found[-1] == pytest.approx(0.2)
    assert found[54] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))  # half-way down: step 10 + 45
    assert all(a >= b for a, b in itertools.pairwise(found[9:]))


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0.0), (1, 1.0), (10, 1.0), (10, 0.0)])
def test_extreme_schedules_stay_between_zero_and_the_peak(steps, warmup):
    assert all(0 < lr <= 2.0 for lr in rates(steps, warmup, 0.1))


# --- monitor ---------------------------------------------------------------------------------------


def test_tensor_statistics_by_hand():
    """E4M3, amax 448 so scale 1: 1e-4 underflows (smallest 2^-9), 17 rounds to 16, 300 to 288."""
    t = torch.tensor([448.0, 1e-4, 17.0, 300.0, 0.0])
    found = tensor_statistics(t, Quantizer(TensorRecipe(format=get_format("E4M3"))))
    noise, signal = 1e-8 + 1 + 144, 448.0**2 + 1e-8 + 17**2 + 300.0**2
    assert found["amax"] == 448 and found["scale"] == 1 and found["nonfinite"] == 0
    assert found["underflow_frac"] == pytest.approx(1 / 4)
    assert found["overflow_frac"] == 0
    assert found["sqnr_db"] == pytest.approx(10 * math.log10(signal / noise))


def test_nonfinite_elements_are_counted_and_left_out():
    found = tensor_statistics(torch.tensor([1.0, math.nan, -math.inf, -2.0]), None)
    assert found == {"amax": 2.0, "nonfinite": 2.0}


def test_a_remembered_scale_shows_overflow():
    quantizer = Quantizer(TensorRecipe(format=get_format("E4M3"), scaling="static"))
    quantizer.history.fill_(1.0)
    assert tensor_statistics(torch.tensor([0.5, 2.0, 3.0, 1.0]), quantizer)["overflow_frac"] == 0.5


def small_model() -> GPT:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=50, layers=1, width=16, heads=2, context=8))
    return quantize_model(model, Recipe.uniform("E4M3", scaling="delayed"))


def test_the_instrumented_pass_touches_nothing():
    model = small_model()
    tokens = torch.randint(0, 50, (2, 8))
    model(tokens, tokens).backward()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    gradients = [p.grad.clone() for p in model.parameters()]
    state, hooks = torch.get_rng_state(), [dict(module._forward_hooks) for module in model.modules()]
    rows = TensorMonitor(model, {"blocks.0": model.blocks[0]}).observe(3, lambda: model(tokens, tokens))
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    assert all(torch.equal(g, p.grad) for g, p in zip(gradients, model.parameters(), strict=True))
    assert torch.equal(state, torch.get_rng_state())
    assert all(module.training for module in model.modules())
    seen = {(row.layer, row.role) for row in rows}
    assert {("blocks.0.mlp.up", role) for role in ("input", "weight", "grad")} <= seen
    assert ("blocks.0", "output") in seen
    assert [dict(module._forward_hooks) for module in model.modules()] == hooks


def test_the_first_nonfinite_tensor_is_the_first_computed():
    def row(layer, role, value):
        return Measurement(1, layer, role, "nonfinite", value)

    assert first_nonfinite([row("a", "input", 0.0), row("a", "grad", 1.0), row("b", "grad", 1.0)]) == "b grad"
    assert first_nonfinite([row("a", "grad", 1.0), row("b", "input", 2.0)]) == "b input"
    tied = [row("a", "input", 1.0), row("a", "weight", 0.0), row("head", "weight", 1.0)]
    assert first_nonfinite(tied) == "head weight"
    assert first_nonfinite([row("a", "input", 0.0)]) is None


# --- checkpoints -----------------------------------------------------------------------------------


def test_a_new_checkpoint_is_never_the_one_that_is_removed(tmp_path):
    for step in (100, 200):
        checkpoint.save(tmp_path, step, {"a": torch.ones(2)}, {})
        (tmp_path / f"step-{step:08d}.safetensors").write_bytes(b"damaged")
    assert checkpoint.load_newest(tmp_path)[0] is None
    checkpoint.save(tmp_path, 30, {"a": torch.ones(2)}, {"b": 1})
    found, problems = checkpoint.load_newest(tmp_path)
    assert found.step == 30 and found.state == {"b": 1} and not problems


# --- probes, records, machine, optimizer -----------------------------------------------------------


def test_probe_steps_are_evenly_spaced_and_include_both_ends():
    assert probe_steps(300, 3) == [0, 150, 300]
    assert probe_steps(300, 1) == [300]
    assert probe_steps(1, 5) == [0, 1]


def test_the_float_copy_is_the_same_model_without_rounding():
    model = small_model()
    plain = GPT(model.config)
    plain.load_state_dict(model.state_dict(), strict=False)
    tokens = torch.randint(0, 50, (2, 8))
    assert torch.equal(float_copy(model)(tokens), plain(tokens))


def test_a_log_resumes_after_its_step_and_drops_a_cut_off_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    log = RowLog(path, None)
    log.extend([[1, 0.5], [2, math.nan], [3, 0.1]])
    log.close()
    with open(path, "a") as file:
        file.write("[4, 0.")
    assert RowLog(path, 2).rows() == [[1, 0.5], [2, None]]
    assert RowLog(path, None).rows() == []


def test_cuda_without_cuda_is_one_sentence(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="no CUDA device"):
        hardware.select_device("cuda")
    assert hardware.select_device("auto").type == "cpu"


def test_without_a_compiler_training_runs_uncompiled_and_says_so(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    compiled, notice = machine.should_compile(Train(compile="on"), torch.device("cpu"))
    assert not compiled and "g++" in notice
    assert machine.should_compile(Train(compile="off"), torch.device("cpu")) == (False, None)


def test_a_cpu_without_bfloat16_computes_in_float32_and_says_so(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setenv(hardware.SWITCH, "off")
    compute, notice = machine.choose_compute("bf16", cpu)
    assert compute == "float32" and "no fast bfloat16 instructions" in notice
    monkeypatch.setenv(hardware.SWITCH, "on")
    assert machine.choose_compute("bf16", cpu) == ("bf16", None)
    assert machine.choose_compute("float32", cpu) == ("float32", None)


@pytest.mark.usefixtures("compiler")
def test_compiling_waits_until_it_pays():
    cpu = torch.device("cpu")
    assert machine.should_compile(Train(steps=1000), cpu)[0]
    assert not machine.should_compile(Train(steps=10), cpu)[0]
    assert machine.should_compile(Train(steps=10, compile="on"), cpu)[0]


def test_only_matrices_decay_and_a_tied_weight_is_updated_once():
    model = small_model()
    optimizer = build_optimizer(model, Arm(lr=0.1, decay=0.05, plain_decay=0.02))
    *decayed, others = optimizer.param_groups
    assert [group["weight_decay"] * group["lr"] for group in decayed] == pytest.approx([0.05, 0.02])
    assert others["weight_decay"] == 0
    matrices = [p for group in decayed for p in group["params"]]
    assert all(p.ndim == 2 for p in matrices) and all(p.ndim == 1 for p in others["params"])
    everything = [*matrices, *others["params"]]
    assert len({id(p) for p in everything}) == len(everything) == len(list(model.parameters()))
