"""What a machine is taken for, its notices, and its compile cache. Oracle: the variables."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from altgrad.config import UserError
from altgrad.config.schema import Train
from altgrad.model import hardware
from altgrad.model.hardware import SWITCH, multiplies_bf16
from altgrad.numerics import loops
from altgrad.training import machine
from altgrad.training.machine import choose_compute

CPU = torch.device("cpu")


def test_a_cpu_is_taken_for_what_it_is_unless_the_variable_says_otherwise(monkeypatch):
    monkeypatch.delenv(SWITCH, raising=False)
    own = multiplies_bf16()
    for value, expected in {"auto": own, "": own, "on": True, "off": False}.items():
        monkeypatch.setenv(SWITCH, value)
        compute, notice = choose_compute("bf16", CPU)
        assert multiplies_bf16() is expected and compute == ("bf16" if expected else "float32")
        assert expected or "no fast bfloat16 instructions" in notice
        assert choose_compute("float32", CPU) == ("float32", None)
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


def test_cuda_without_cuda_is_one_sentence(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="no CUDA device"):
        hardware.select_device("cuda")
    assert hardware.select_device("auto").type == "cpu"


def test_how_busy_a_gpu_is_ends_no_run(monkeypatch):
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 87)
    assert machine.gpu_busy(torch.device("cuda")) == 0.87 and machine.gpu_busy(CPU) is None
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: __import__("no_such_module"))
    assert machine.gpu_busy(torch.device("cuda")) is None


def test_a_peak_is_forgotten_by_what_the_kernel_asks_for_and_told_where_a_sandbox_keeps_it(monkeypatch, tmp_path):
    """The kernel's file cannot be written in a sandbox; a folder in its place cannot be either."""
    monkeypatch.setattr(machine, "PEAK", tmp_path / "status")
    machine.PEAK.write_text("VmHWM:\t    2000 kB\n")
    assert machine.forget_peak_memory(CPU) and (tmp_path / "clear_refs").read_text() == "5"
    (tmp_path / "clear_refs").unlink()
    (tmp_path / "clear_refs").mkdir()
    assert not machine.forget_peak_memory(CPU) and machine.peak_memory_mb(CPU) == 2.048


# --- compiling -------------------------------------------------------------------------------------


def test_without_a_compiler_training_runs_uncompiled_and_says_so(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    compiled, notice = machine.should_compile(Train(compile="on"), CPU)
    assert not compiled and "g++" in notice
    assert machine.should_compile(Train(compile="off"), CPU) == (False, None)


@pytest.mark.usefixtures("compiler")
def test_compiling_waits_until_it_pays():
    assert machine.should_compile(Train(steps=1000), CPU)[0]
    assert not machine.should_compile(Train(steps=10), CPU)[0]
    assert machine.should_compile(Train(steps=10, compile="on"), CPU)[0]


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
    for more in ({}, {"ATEN_CPU_CAPABILITY": "avx2"}):
        environment = {**os.environ, "FOLDER": str(tmp_path), **more}
        command = [sys.executable, "-c", COMPILED]
        assert subprocess.run(command, env=environment, capture_output=True, check=True).stdout == b"True\n"
    assert len(list(tmp_path.iterdir())) == 2
