"""The device that a setting means, and what the processor at hand multiplies by itself.

A CPU with fast bfloat16 instructions and one without go two ways through a training step: operands and products in
bfloat16, or in float32. ``ALTGRAD_CPU_BF16`` chooses one: ``on`` or ``off`` whatever the CPU has, ``auto`` (or unset)
by its instructions. Both are right on every machine, so that each can be tested there; forced ``on``, products are
emulated where the instructions are missing, and several times slower. Processes inherit the variable. It stands for a
machine: results do not carry it in their name, as they do not carry the processor's.

Compiled graphs on disk are named after their operations, which differ. One that is loaded keeps the way that it was
made for; call ``torch.compiler.reset()`` after changing the variable within a process.
"""

from __future__ import annotations

import os
from functools import cache

import torch

from altgrad.common.errors import UserError
from altgrad.numerics.compile_utils import constant_in_graphs

SWITCH = "ALTGRAD_CPU_BF16"
CHOICES = {"auto": None, "": None, "on": True, "off": False}


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


@constant_in_graphs
def multiplies_bf16() -> bool:
    """Whether products of bfloat16 are faster on this CPU than those of float32; of GPUs that is taken for granted.

    It takes AMX-BF16, ARM's BF16 or AMD's AVX512-BF16 instructions, or the variable says so; without any a product of
    bfloat16 matrices is several times slower than one of float32. Intel's AVX512-BF16 alone, as where a virtual machine
    hides AMX, gives half of float32's rate (80 to 90 against 150 to 170 Gflop/s on a core of a Xeon of 2023, oneDNN
    3.12). It is not timed at hand, since the same cell would then have one loss or another as the machine is busy.

    Raises `UserError` if the variable is none of ``on``, ``off`` and ``auto``.
    """
    chosen = os.environ.get(SWITCH, "auto")
    if chosen not in CHOICES:
        raise UserError(f"{SWITCH} is {chosen!r}; set it to on, off or auto, or unset it")
    forced = CHOICES[chosen]
    return _is_faster() if forced is None else forced


@cache
def _is_faster() -> bool:
    has = torch.cpu.get_capabilities()
    found = {name for name, there in has.items() if name.endswith("bf16") and there}
    return bool(found - {"avx512_bf16"} if str(has.get("cpu_name", "")).startswith("Intel") else found)
