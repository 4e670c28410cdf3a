"""The machine that a run uses: device, threads, compiler, and what it cost."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import resource
import shutil
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._dynamo.types import GuardFilterEntry

from altgrad import __version__
from altgrad.config import UserError
from altgrad.config.process import usable_cores
from altgrad.config.schema import Train
from altgrad.model.hardware import SWITCH, multiplies_bf16
from altgrad.numerics.cpu import kernels

COMPILE_PAYS_AFTER = 100  # steps; below, compiling takes longer than it saves


def select_device(setting: str) -> torch.device:
    """Return the device for ``auto``, ``cpu`` or ``cuda``; :class:`UserError` for cuda without CUDA."""
    if setting == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "params.yaml: train.device is cuda, but this torch sees no CUDA device; "
            "set it to auto or cpu, or install a CUDA build of torch and its driver"
        )
    if setting == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda")


def use_threads(setting: int) -> int:
    """Set and return the number of CPU threads; 0 means one per core that this process may use."""
    count = setting or min(torch.get_num_threads(), usable_cores())
    torch.set_num_threads(count)
    return count


def make_deterministic() -> None:
    """Ask torch for the same bits in every run on this machine."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Left on, each new tensor is filled with NaN before it is written: 0.3 ms in a step of `nano`.
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_tf32 = False


def choose_compute(setting: str, device: torch.device) -> tuple[str, str | None]:
    """Return the dtype of products outside the formats, and a notice when it is not what was asked for."""
    if setting == "fp32" or multiplies_bf16(device.type):
        return setting, None
    return "fp32", (
        f"this CPU has no bfloat16 instructions (or {SWITCH}=off says so) and would take several times longer with "
        "them emulated: products are computed in float32 (train.compute: bf16 keeps its meaning on other machines)"
    )


def compile_model(model: nn.Module) -> Callable[..., Tensor]:
    """Return ``model`` compiled for the shapes that it is called with, and for training and evaluation.

    Before each call torch checks what the graph was made for, one attribute of the model after the other: 0.5 ms in
    a step of `nano` in an 8-bit format. Nothing changes them but ``train()`` and ``eval()``, so that is all that is
    checked; graphs are shared with no other model. Nor does the graph check the sizes of what it reads.

    On a CPU the graph is C++ throughout. Called from Python, operators find their code gone from the caches after a
    product of matrices, 26 us each instead of 3, and a step has a hundred: `nano` wins 1 % in bf16 and 2 % in an 8-bit
    format, for a sixth more time in the compiler.
    """
    device = next(model.parameters()).device.type

    def depends_on(guards: Sequence[GuardFilterEntry]) -> list[bool]:
        outside = torch.compiler.skip_guard_on_all_nn_modules_unsafe(guards)
        return [kept or guard.name.endswith(".training") for guard, kept in zip(guards, outside, strict=True)]

    def call(*inputs: Tensor) -> Tensor:
        return model(*inputs)  # with its hooks, which would be graphs of their own were it compiled itself

    calls = {"cpp_wrapper": device == "cpu", "cpp_wrapper_build_separate": device == "cpu"}
    options = {"guard_filter_fn": depends_on, "size_asserts": False, **calls}
    return torch.compile(call, dynamic=False, isolate_recompiles=True, options=options)


def should_compile(train: Train, device: torch.device) -> tuple[bool, str | None]:
    """Return whether to compile the model, and a notice when that is not what the user may expect.

    ``auto`` compiles when a compiler is there and the run is long enough to win the time back.
    """
    if train.compile == "off":
        return False, None
    missing = None if device.type == "cuda" else missing_tool()
    if missing:
        return False, f"no {missing} found: training runs uncompiled, several times slower; install it for speed"
    return train.compile == "on" or train.steps >= COMPILE_PAYS_AFTER, None


def missing_tool() -> str | None:
    """Return what compiling for the CPU lacks on this machine, if anything."""
    compilers = [name for name in (os.environ.get("CXX"), "g++", "clang++") if name]
    if not any(shutil.which(name) for name in compilers):
        return "C++ compiler (g++ or clang++)"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Python.h (Python's development headers)"
    return None


def compile_cache(root: Path) -> Path:
    """Return where the project at ``root`` keeps compiled graphs and loops: ``root/scratch/compiled``.

    ``ALTGRAD_COMPILE_CACHE`` names another folder, for several projects to share: loops in C++ take half a minute.
    """
    return Path(os.environ.get("ALTGRAD_COMPILE_CACHE") or root / "scratch" / "compiled")


def use_compile_cache(folder: Path) -> None:
    """Keep what is compiled in ``folder``, so that every process after the first finds it.

    Each kind of processor has a folder of its own in it. torch 2.13 names a graph without the vector instructions that
    it was compiled for: one of a processor with AVX-512, found by one without, computes half of each tensor.

    Assigned, not defaulted: importing torch already fills the variable with a place of its own.
    """
    capability = torch.backends.cpu.get_cpu_capability()
    digest = hashlib.sha256(kernels.processor().encode()).hexdigest()[:8]
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / f"{capability}-{digest}")
    # The quantized product is a pure function of its arguments, which is what caching it asks for, and those of leaving
    # autocast are in the graph.
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
    switches = ("torch.amp.autocast_mode._enter_autocast", "torch.amp.autocast_mode._exit_autocast")
    torch._inductor.config.unsafe_marked_cacheable_functions = dict.fromkeys(switches, torch.__version__)


def is_interactive() -> bool:
    """Return whether a person watches standard error, so that a progress bar may redraw itself."""
    return sys.stderr.isatty()


def processor_name() -> str:
    """Return the CPU's model name and core count, such as ``AMD EPYC, 2 cores``."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
        name = found[1] if found else name
    return f"{name}, {usable_cores()} cores"


def device_name(device: torch.device) -> str:
    """Return the name of the processor that does the work."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()


def peak_memory_mb(device: torch.device) -> float:
    """Return the peak memory of this process in MB (10^6 bytes): the device's, or resident memory on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def versions() -> dict[str, str]:
    """Return the versions that a result depends on."""
    return {"altgrad": __version__, "python": platform.python_version(), "torch": torch.__version__}
