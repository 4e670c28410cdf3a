"""Peak memory of a training step, in MB of 10^6 bytes; this package's README says what counts.

The high-water mark is that of `altgrad.training.machine`, set back before: without that it would start at the size of
the process that started this one.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterable

import torch

from altgrad.benchmark.steps import Step
from altgrad.training import machine

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
    _give_back_free_pages()
    if not machine.forget_peak_memory(device):
        return None
    before = machine.peak_memory_mb(device)  # which is now what there is
    for _ in range(STEPS):
        run()
    return machine.peak_memory_mb(device) - before


def _give_back_free_pages() -> None:
    """Ask the C library for its free pages, which would otherwise be used again without counting as growth."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)
