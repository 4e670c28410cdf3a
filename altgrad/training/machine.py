"""The machine that a run uses: device, threads, compiler, and what it cost."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import resource
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import nn

from altgrad import __version__
from altgrad.common.threads import GPU_SHARE, processor_name, usable_cores
from altgrad.config.schema import Train
from altgrad.model import linear_layers
from altgrad.model.hardware import SWITCH, multiplies_bf16
from altgrad.model.layers import quantizer_of
from altgrad.numerics.cpu import kernels
from altgrad.optim import ArmOptimizer
from altgrad.optim.sharded import local
from altgrad.optim.state_codec import POWER, SCALE
from altgrad.training.compiled_files import remove_damaged

PEAK = Path("/proc/self/status")
ROLES = {"exp_avg": "m", "momentum_buffer": "m", "exp_avg_sq": "v"}


def make_deterministic() -> None:
    """Ask torch for the same bits in every run on this machine."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Left on, each new tensor is filled with NaN before it is written: 0.3 ms in a step of `nano`.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_tf32 = False


def choose_compute(setting: str, device: torch.device) -> tuple[str, str | None]:
    """Return the dtype of products outside the formats, and a notice when it is not what was asked for."""
    if setting == "float32" or device.type != "cpu" or multiplies_bf16():
        return setting, None
    return "float32", (
        f"this CPU has no fast bfloat16 instructions (or {SWITCH}=off says so): products are computed in "
        "float32, which takes less time here (train.compute: bf16 keeps its meaning on other machines)"
    )


def keep_to_share(device: torch.device) -> None:
    """Hold this process to its part of a GPU's memory, where it shares one with others of a pool."""
    share = os.environ.get(GPU_SHARE)
    if device.type == "cuda" and share:
        torch.cuda.set_per_process_memory_fraction(float(share))  # of the one GPU that it sees


def should_compile(train: Train, device: torch.device) -> tuple[bool, str | None]:
    """Return whether to compile the model, and a notice when that is not what the user may expect."""
    if train.compile == "off":
        return False, None
    missing = None if device.type == "cuda" else missing_tool()
    if missing:
        return False, f"no {missing} found: training runs uncompiled, several times slower; install it for speed"
    return train.compiles, None


def missing_tool() -> str | None:
    """Return what compiling for the CPU lacks on this machine, if anything."""
    try:
        kernels.compiler()
    except OSError:
        return "C++ compiler (g++ or clang++)"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Python.h (Python's development headers)"
    return None


def compile_cache(root: Path) -> Path:
    """Return where the project at ``root`` keeps compiled graphs and loops: ``root/scratch/compiled``.

    ``ALTGRAD_COMPILE_CACHE`` names another folder, for several projects to share.
    """
    return Path(os.environ.get("ALTGRAD_COMPILE_CACHE") or root / "scratch" / "compiled")


def use_compile_cache(folder: Path) -> None:
    """Keep what is compiled in ``folder``, so that every process after the first finds it.

    Each kind of processor has a folder of its own in it. torch 2.13 names a graph without the vector instructions that
    it was compiled for: one of a processor with AVX-512, found by one without, computes half of each tensor. Files that
    were damaged since they were compiled are removed.

    Assigned, not defaulted: importing torch already fills the variable with a place of its own.
    """
    capability = torch.backends.cpu.get_cpu_capability()
    digest = hashlib.sha256(kernels.processor().encode()).hexdigest()[:8]
    place = folder / f"{capability}-{digest}"
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR") != str(place):  # once in a process
        remove_damaged(place)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(place)


def device_name(device: torch.device) -> str:
    """Return the name of the processor that does the work, a CPU's with its cores: ``AMD EPYC, 2 cores``."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{processor_name()}, {usable_cores()} cores"


def forget_peak_memory(device: torch.device) -> bool:
    """Let the peak of this process's memory be what it uses now; a process may train one cell after another.

    Return whether it is: where the system does not allow it, the peak stays that of the whole process.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        PEAK.with_name("clear_refs").write_text("5")
    except OSError:  # Linux alone has it, and a sandbox may forbid it
        return False
    return True


def gpu_busy(device: torch.device) -> float | None:
    """Return the share of the last second, at most, in which a GPU ran a kernel, as NVML has it.

    None on a CPU, and where NVML does not say: without the package nvidia-ml-py, or for a part of a card (MIG).
    """
    if device.type != "cuda":
        return None
    try:
        return torch.cuda.utilization(device) / 100
    except Exception:  # noqa: BLE001 - NVML's own, torch's, and that of an import, none of which may end a run
        return None


def peak_memory_mb(device: torch.device) -> float:
    """Return the peak memory of this process in MB (10^6 bytes): the device's, or resident memory on CPU.

    Since `forget_peak_memory`, but on a CPU where the system cannot forget it.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    if PEAK.exists():
        found = re.search(r"^VmHWM:\s+(\d+) kB$", PEAK.read_text(), re.MULTILINE)
        assert found is not None
        return int(found[1]) * 1024 / 1e6
    unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def machine_class(device: torch.device) -> str:
    """Return what decides a run's bits beside its cell: machines of one class give the same.

    A processor by its name and a digest of its instructions, what its products are computed in, and torch.
    """
    if device.type == "cuda":
        return f"{device_name(device)}, torch {torch.__version__}"
    digest = hashlib.sha256(kernels.processor().encode()).hexdigest()[:8]
    products = "bfloat16" if multiplies_bf16() else "float32"
    return f"{processor_name()} {digest}, {products} products, torch {torch.__version__}"


def used(device: torch.device) -> dict[str, Any]:
    """Return what ``timing.json`` says of the machine: what it is, MB (10^6 bytes) at the most, versions."""
    return {
        "device": device.type, "machine": device_name(device), "machine_class": machine_class(device),
        "peak_memory_mb": peak_memory_mb(device),
        "versions": {"altgrad": __version__, "python": platform.python_version(), "torch": torch.__version__},
    }  # fmt: skip


def bytes_per_parameter(model: nn.Module, optimizer: ArmOptimizer) -> dict[str, float]:
    """Return bytes per parameter, by role, and their sum as ``bytes_per_parameter``; of what this process has.

    ``bytes_masters``: weights in full precision that a product quantizes anew; ``bytes_weights``: all others.
    ``bytes_m`` and ``bytes_v`` have the scales of codes with them, and ``bytes_other_state`` what else an optimizer
    keeps, such as the moments of AdamW beside an arm's. Gradients are there after a step.
    """
    quantized = {layer.weight for layer in linear_layers(model).values() if quantizer_of(layer, "weight") is not None}
    held, count = dict.fromkeys(("weights", "masters", "grads", "m", "v", "other_state"), 0), 0
    for p in model.parameters():
        master = p in quantized and not optimizer.holds(p)
        held["masters" if master else "weights"] += local(p).nbytes
        held["grads"] += 0 if p.grad is None else local(p.grad).nbytes
        count += local(p).numel()
        for name, t in optimizer.state.get(p, {}).items():
            role = ROLES.get(name.removesuffix(SCALE).removesuffix(POWER), "other_state")
            held[role] += local(t).nbytes
    return {f"bytes_{name}": total / count for name, total in held.items()} | {
        "bytes_per_parameter": sum(held.values()) / count
    }
