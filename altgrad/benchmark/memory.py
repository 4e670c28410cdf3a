"""Peak memory of a training step, in MB of 10^6 bytes; this package's README says what counts.

On the CPU the high-water mark is the kernel's ``VmHWM``, which can be set back; ``ru_maxrss`` cannot, and starts at the
size of the process that started this one.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from altgrad.benchmark.steps import Step

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
STEPS = 3
MB = 1e6


def state_mb(step: Step) -> float:
    """Return the MB of parameters, buffers and optimizer state; each tensor counts once."""
    tensors = [*step.model.parameters(), *step.model.buffers()]
    for state in step.optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return tensors_mb(tensors)


def tensors_mb(tensors: Iterable[torch.Tensor]) -> float:
    """Return the MB that tensors take; those that share storage count once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values()) / MB


def peak_mb(step: Step) -> float | None:
    """Return the MB held at most during three more steps, state included; None where the system does not tell.

    ``step`` must have run before, so that it is compiled and the optimizer has its state.
    """
    step.optimizer.zero_grad(set_to_none=True)
    growth = growth_mb(step, step.device)
    return None if growth is None else state_mb(step) + growth


def growth_mb(run: Callable[[], object], device: torch.device) -> float | None:
    """Return the MB that three calls of ``run`` take at most beyond what is there; None where that is not told."""
    gc.collect()

    def repeat() -> None:
        for _ in range(STEPS):
            run()

    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        repeat()
        torch.cuda.synchronize(device)
        return (torch.cuda.max_memory_allocated(device) - before) / MB
    growth = _resident_growth(repeat)
    return None if growth is None else growth / MB


def _resident_growth(run: Callable[[], None]) -> int | None:
    """Return by how many bytes the resident set grows at most while ``run`` runs (Linux)."""
    _give_back_free_pages()
    try:
        CLEAR.write_text("5")  # sets the high-water mark back to what is resident now
    except OSError:
        return None
    before = _bytes_of("VmRSS")
    run()
    return max(0, _bytes_of("VmHWM") - before)


def _give_back_free_pages() -> None:
    """Ask the C library for its free pages, which would otherwise be used again without counting as growth."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)


def _bytes_of(field: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field + ":"))
    return 1024 * int(line.split()[1])
