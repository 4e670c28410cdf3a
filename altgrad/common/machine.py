"""The machine: its cores and processor, the record of it beside a result, and settings made before torch is loaded.

The settings say how idle threads wait and whether freed memory is kept. They change the time of a training step and
nothing else. With torch 2.13 on two cores the compiled bf16 step of the ``nano`` model took 78 instead of 94 ms.
"""

import ctypes
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

GPU_SHARE = "ALTGRAD_GPU_SHARE"  # environment variable: the share of a GPU's memory that this process may use

# Iterations for which an idle thread of GCC's OpenMP runtime spins, some 40 us here: the next of a step's thousand
# parallel loops finds its threads awake. Beside a busy neighbour a spinning thread delays the thread that it waits for:
# a step then takes 1.1 times as long as with half as many iterations, and with four times as many 1.6 times as long.
SPIN_COUNT = "2000"

# Options of glibc's mallopt. By default it returns a step's large blocks to the kernel, which clears every page of them
# again in the next step: 17 thousand page faults. 32 MiB is the largest threshold that it accepts.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT_BLOCK = 32 << 20


def usable_cores() -> int:
    """Return the number of logical cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor_line(*fields: str) -> str:
    """Return the first line of /proc/cpuinfo that begins with one of ``fields``, or else Python's processor name."""
    listing = Path("/proc/cpuinfo")
    lines = listing.read_text().splitlines() if listing.exists() else []
    return next((line for line in lines if line.startswith(fields)), platform.processor() or platform.machine())


def processor_name() -> str:
    """Return the processor's name, or its architecture where the system does not give the name."""
    return processor_line("model name").split(":", 1)[-1].strip()


def environment(module: str, arguments: Sequence[str] | None) -> dict[str, Any]:
    """Return, by name, the command, commit (None without git), versions, processor, threads and the machine's load.

    Args:
        module: the module that was run with ``python -m``.
        arguments: the module's arguments; None: the arguments of this process.
    """
    import torch  # slow to load, and most commands do not need it

    return {
        "command": " ".join(["python -m", module, *(sys.argv[1:] if arguments is None else arguments)]),
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain", "--", ".")),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "processor": processor_name(),
        "vector_instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


def _git(*arguments: str) -> str | None:
    try:
        folder = Path(__file__).parents[1]  # the whole package
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def settle_process() -> None:
    """Let idle OpenMP threads spin briefly and glibc keep freed memory, unless environment variables set this."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    if platform.libc_ver()[0] == "glibc" and not any(name.startswith("MALLOC_") for name in os.environ):
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, KEPT_BLOCK)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
