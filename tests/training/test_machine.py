"""What a machine is taken for, and what a compiled model still notices.

That is little: most of what torch would check before each call is not checked.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from altgrad.config import UserError
from altgrad.model import GPT, GPTConfig, Recipe, hardware, quantize_model
from altgrad.model.hardware import SWITCH, multiplies_bf16
from altgrad.model.quantized.quantizer import Quantizer
from altgrad.numerics import loops
from altgrad.training import machine
from altgrad.training.graphs import compile_model
from altgrad.training.machine import choose_compute, compile_cache

CONFIG = GPTConfig(vocab_size=61, layers=1, width=16, heads=2, context=8)
TOKENS = torch.randint(0, 61, (2, 4, 8), generator=torch.Generator().manual_seed(3))


def model(**settings: str) -> GPT:
    torch.manual_seed(0)
    return quantize_model(GPT(CONFIG), Recipe.uniform("E4M3", **settings))


def histories(gpt: GPT) -> torch.Tensor:
    return torch.stack([module.history for module in gpt.modules() if isinstance(module, Quantizer)])


@pytest.mark.slow  # seven graphs are compiled
def test_evaluation_leaves_the_scales_of_a_compiled_model_alone():
    gpt = model(scaling="delayed")
    compiled = compile_model(gpt)
    compiled(*TOKENS).backward()
    compiled(*TOKENS).backward()
    trained = histories(gpt).clone()
    gpt.eval()
    compiled(*TOKENS)
    with torch.no_grad():
        compiled(*TOKENS)
    assert torch.equal(histories(gpt), trained)
    gpt.train()
    compiled(*TOKENS)
    assert not torch.equal(histories(gpt), trained)


@pytest.mark.slow
@pytest.mark.usefixtures("products")
def test_models_of_other_recipes_and_other_shapes_get_graphs_of_their_own():
    per_tensor, per_row = model(), model(granularity="row")
    compiled = compile_model(per_tensor)
    losses = [compiled(*TOKENS), compile_model(per_row)(*TOKENS), compiled(*TOKENS[:, :2])]
    expected = [per_tensor(*TOKENS), per_row(*TOKENS), per_tensor(*TOKENS[:, :2])]
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=0)
    assert losses[0] != losses[1]


def printed_with(code: str, **environment: str) -> list[str]:
    """Return the words that a process prints that runs ``code``."""
    environment = {**os.environ, **environment}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()


def test_a_cpu_is_taken_for_what_it_is_unless_the_variable_says_otherwise(monkeypatch):
    monkeypatch.delenv(SWITCH, raising=False)
    own = multiplies_bf16()
    for value, expected in {"auto": own, "": own, "on": True, "off": False}.items():
        monkeypatch.setenv(SWITCH, value)
        assert choose_compute("bf16", torch.device("cpu"))[0] == ("bf16" if expected else "float32")
        assert multiplies_bf16() is expected
    assert choose_compute("bf16", torch.device("cuda")) == ("bf16", None)
    monkeypatch.setenv(SWITCH, "no")
    with pytest.raises(UserError, match=f"{SWITCH} is 'no'; set it to on, off or auto"):
        multiplies_bf16()


@pytest.mark.parametrize(("cpu", "faster"), [
    ({"cpu_name": "AMD EPYC", "avx512_bf16": True}, True),
    ({"cpu_name": "Intel Xeon", "avx512_bf16": True, "amx_bf16": False}, False),
    ({"cpu_name": "Intel Xeon", "avx512_bf16": True, "amx_bf16": True}, True),
    ({"cpu_name": "Intel Xeon", "avx512_f": True}, False),
    ({"arm_bf16": True}, True),
    ({"arm_bf16": False}, False),
])  # fmt: skip
def test_bfloat16_is_taken_where_it_is_faster(monkeypatch, cpu, faster):
    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: cpu)
    hardware._is_faster.cache_clear()
    assert multiplies_bf16() is faster
    monkeypatch.undo()
    hardware._is_faster.cache_clear()


def test_how_busy_a_gpu_is_ends_no_run(monkeypatch):
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 87)
    assert machine.gpu_busy(torch.device("cuda")) == 0.87 and machine.gpu_busy(torch.device("cpu")) is None

    def raises(device):
        raise ModuleNotFoundError("pynvml")

    monkeypatch.setattr(torch.cuda, "utilization", raises)
    assert machine.gpu_busy(torch.device("cuda")) is None


def test_a_peak_that_a_sandbox_keeps_is_still_told(monkeypatch, tmp_path):
    """The kernel's file cannot be written there; a folder in its place cannot be either."""
    monkeypatch.setattr(machine, "PEAK", tmp_path / "status")
    machine.PEAK.write_text("VmHWM:\t    2000 kB\n")
    (tmp_path / "clear_refs").mkdir()
    machine.forget_peak_memory(torch.device("cpu"))
    assert machine.peak_memory_mb(torch.device("cpu")) == 2.048


def test_a_peak_is_forgotten_by_what_the_kernel_asks_for(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "PEAK", tmp_path / "status")
    machine.PEAK.touch()
    machine.forget_peak_memory(torch.device("cpu"))
    assert (tmp_path / "clear_refs").read_text() == "5"


def test_projects_can_share_what_is_compiled(monkeypatch):
    monkeypatch.delenv("ALTGRAD_COMPILE_CACHE")
    assert compile_cache(Path("project")) == Path("project/scratch/compiled")
    monkeypatch.setenv("ALTGRAD_COMPILE_CACHE", "/shared")
    assert compile_cache(Path("project")) == Path("/shared")


@pytest.mark.parametrize("march", ["", "x86-64-v3", "x86-64-v2"])
def test_what_is_compiled_for_another_processor_is_kept_apart(monkeypatch, tmp_path, march):
    """The compiler is told of it; without the variable it is told of this machine."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    folders, commands = [], []

    def run(command: list[str], **options: object) -> None:
        commands.append(command)
        raise OSError("recorded")

    monkeypatch.setattr(loops.subprocess, "run", run)
    for name in ("x86-64-v4", march):
        monkeypatch.setenv(loops.MARCH, name)
        machine.use_compile_cache(tmp_path)
        folders.append(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        with pytest.warns(UserWarning, match="recorded"):
            loops.load.__wrapped__(loops.SOURCES[0])
    assert folders[0] != folders[1]
    flags = loops.processor_flags(platform.machine(), platform.system(), march or "native")
    assert commands[1][1 : 1 + len(flags)] == flags
    made = [Path(command[command.index("-o") + 1]) for command in commands]
    assert made[0].name != made[1].name and made[1].is_relative_to(folders[1])


def test_each_processor_is_named_in_its_compilers_words():
    """Those of ARM know no vector width and Clang no native architecture; Apple's default is its own processors."""
    flags = loops.processor_flags
    assert flags("x86_64", "Linux", "native") == ["-march=native", "-mprefer-vector-width=512"]
    assert flags("aarch64", "Linux", "native") == ["-mcpu=native"]
    assert flags("arm64", "Darwin", "native") == []
    assert flags("aarch64", "Linux", "armv8.2-a") == ["-march=armv8.2-a"]


COMPILED = """
import os, torch
from pathlib import Path
from altgrad.training.machine import use_compile_cache
use_compile_cache(Path(os.environ["FOLDER"]))
x = torch.randn(48, 64)
print(torch.equal(torch.compile(lambda x: (2 * x + 1).relu(), dynamic=False)(x), (2 * x + 1).relu()))
"""


@pytest.mark.slow
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="needs AVX-512 to be without it")
def test_a_cache_filled_with_other_instructions_is_not_used(tmp_path):
    """In one folder for both, the second would print False: a graph for AVX-512 built without it does half the work."""
    assert printed_with(COMPILED, FOLDER=str(tmp_path)) == ["True"]
    assert printed_with(COMPILED, FOLDER=str(tmp_path), ATEN_CPU_CAPABILITY="avx2") == ["True"]
    assert len(list(tmp_path.iterdir())) == 2
