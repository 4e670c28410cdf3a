"""The machine that a run uses: device, compiler and its cache, memory, and what the run cost."""

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
from altgrad.common.machine import GPU_SHARE, processor_name, usable_cores
from altgrad.config.schema import Train
from altgrad.model import linear_layers
from altgrad.model.hardware import SWITCH, multiplies_bf16
from altgrad.model.layers import quantizer_of
from altgrad.numerics import loops
from altgrad.optim import ArmOptimizer
from altgrad.optim.sharded import local
from altgrad.optim.state_codec import POWER, SCALE

PEAK = Path("/proc/self/status")
ROLES = {"exp_avg": "m", "momentum_buffer": "m", "exp_avg_sq": "v"}


def make_deterministic() -> None:
    """Configure torch to give the same bits in every run on this machine."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Left on, each new tensor is filled with NaN before it is written: 0.3 ms in a step of `nano`.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_tf32 = False


def choose_compute(setting: str, device: torch.device) -> tuple[str, str | None]:
    """Return the dtype of unquantized products (``"bf16"``, ``"float32"``), and a notice if it is not ``setting``."""
    if setting == "float32" or device.type != "cpu" or multiplies_bf16():
        return setting, None
    return "float32", (
        f"this CPU has no fast bfloat16 instructions (or {SWITCH}=off says so): products are computed in "
        "float32, which takes less time here (train.compute: bf16 keeps its meaning on other machines)"
    )


def keep_to_share(device: torch.device) -> None:
    """Limit this process to its share of a GPU's memory, if it shares the GPU with other processes of a pool."""
    share = os.environ.get(GPU_SHARE)
    if device.type == "cuda" and share:
        torch.cuda.set_per_process_memory_fraction(float(share))  # of the one GPU that it sees


def should_compile(train: Train, device: torch.device) -> tuple[bool, str | None]:
    """Return whether to compile the model, and a notice if a tool is missing, else ``None``."""
    if train.compile == "off":
        return False, None
    missing = None if device.type == "cuda" else missing_tool()
    if missing:
        return False, f"no {missing} found: training runs uncompiled, several times slower; install it for speed"
    return train.compiles, None


def missing_tool() -> str | None:
    """Return the name of a tool that compiling for the CPU needs and this machine lacks, ``None`` if it has all."""
    try:
        loops.compiler()
    except OSError:
        return "C++ compiler (g++ or clang++)"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Python.h (Python's development headers)"
    return None


def compile_cache(root: Path) -> Path:
    """Return the folder of compiled graphs and loops of the project at ``root``: ``root/scratch/compiled``.

    The environment variable ``ALTGRAD_COMPILE_CACHE`` names another folder, which several projects can share.
    """
    return Path(os.environ.get("ALTGRAD_COMPILE_CACHE") or root / "scratch" / "compiled")


def use_compile_cache(folder: Path) -> None:
    """Keep compiled files in ``folder``.

    Each kind of processor has its own folder in it. torch 2.13 names a graph without the vector instructions that it
    was compiled for. A graph of a processor with AVX-512, loaded by one without, computes half of each tensor.
    """
    place = folder / f"{torch.backends.cpu.get_cpu_capability()}-{_processor_digest()}"
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(place)  # importing torch has set a folder of its own already


def _processor_digest() -> str:
    """Return the first eight hex digits of a digest of the processor's name and instructions."""
    return hashlib.sha256(loops.processor().encode()).hexdigest()[:8]


def device_name(device: torch.device) -> str:
    """Return the name of the GPU, or of the CPU with its usable cores: ``"AMD EPYC, 2 cores"``."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{processor_name()}, {usable_cores()} cores"


def forget_peak_memory(device: torch.device) -> bool:
    """Reset the peak of this process's memory to its present use, since a process may train several cells.

    Return ``False`` if the system does not allow it: the peak still covers the whole process.
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
    """Return the share (0 to 1) of the last second or less in which the GPU ran a kernel, as NVML measures it.

    ``None`` on a CPU, without the package nvidia-ml-py, and for a part of a card (MIG).
    """
    if device.type != "cuda":
        return None
    try:
        return torch.cuda.utilization(device) / 100
    except Exception:  # noqa: BLE001 - errors of NVML, torch or an import must not end a run
        return None


def peak_memory_mb(device: torch.device) -> float:
    """Return the peak memory of this process in MB (10^6 bytes) since `forget_peak_memory`.

    It is torch's allocated memory on a GPU, and the resident memory on a CPU.
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
    """Return the class of this machine: a cell has the same bits on all machines of one class.

    A CPU's class names the processor, a digest of its instructions, the dtype of its products, torch's version, and the
    limit of ``ONEDNN_MAX_CPU_ISA`` if it is set. A GPU's class has its name and torch's version.
    """
    if device.type == "cuda":
        return f"{device_name(device)}, torch {torch.__version__}"
    products = "bfloat16" if multiplies_bf16() else "float32"
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA")  # AMX sums products in another order than AVX-512
    limited = f" by {limit} at most" if limit else ""
    return f"{processor_name()} {_processor_digest()}, {products} products{limited}, torch {torch.__version__}"


def used(device: torch.device) -> dict[str, Any]:
    """Return the entries of ``timing.json`` on the machine: device, name, class, peak memory in MB, and versions."""
    return {
        "device": device.type, "machine": device_name(device), "machine_class": machine_class(device),
        "peak_memory_mb": peak_memory_mb(device),
        "versions": {"altgrad": __version__, "python": platform.python_version(), "torch": torch.__version__},
    }  # fmt: skip


def bytes_per_parameter(model: nn.Module, optimizer: ArmOptimizer) -> dict[str, float]:
    """Return this process's bytes per parameter by role, and their sum as ``bytes_per_parameter``.

    ``bytes_masters`` are master weights, which each product quantizes, and ``bytes_weights`` all other weights.
    ``bytes_m`` and ``bytes_v`` are the optimizer's moments with the scales of their codes. ``bytes_other_state`` is the
    rest of its state, such as moments of a reference AdamW. Call it after a step, when gradients are in memory.
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
