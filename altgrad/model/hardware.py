"""The device that a setting selects, and which products its hardware computes itself.

A CPU with fast bfloat16 instructions computes operands and products in bfloat16, other CPUs in float32. For tests, set
the environment variable ``ALTGRAD_CPU_BF16`` to ``on`` or ``off`` to choose one of the two; ``auto`` or unset looks at
the instructions. Both are right on every machine, but ``on`` is several times slower where instructions are missing.
Child processes inherit the variable. The names of results contain neither the variable nor the processor.

Compiled graphs on disk are named after their operations, so the two choices never share a graph. A loaded graph keeps
its choice: call ``torch.compiler.reset()`` after changing the variable within a process.
"""

import os
from functools import cache

import torch

from altgrad.common.errors import UserError
from altgrad.numerics.compile_utils import constant_in_graphs

SWITCH = "ALTGRAD_CPU_BF16"
CHOICES = {"auto": None, "": None, "on": True, "off": False}
#: Kind of scales -> the first CUDA compute capability with such products in torch, and the next one without them.
CAPABILITIES = {
    "one scale": ((8, 9), None), "rows": ((9, 0), None),
    "blocks of 128": ((9, 0), (10, 0)), "MXFP8": ((10, 0), None), "NVFP4": ((10, 0), None),
}  # fmt: skip


def select_device(setting: str) -> torch.device:
    """Return the device for ``auto``, ``cpu`` or ``cuda``; raise :class:`UserError` for cuda without CUDA."""
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
    """Return whether this CPU multiplies bfloat16 faster than float32; ``ALTGRAD_CPU_BF16`` can override the answer.

    AMX-BF16, ARM's BF16 and AMD's AVX512-BF16 instructions count as fast. Without any, bfloat16 is several times
    slower. Intel's AVX512-BF16 alone, as where a virtual machine hides AMX, has half of float32's rate (80 to 90
    against 150 to 170 Gflop/s on a core of a Xeon of 2023, oneDNN 3.12). Nothing is timed: a cell's loss would then
    depend on how busy the machine is. Callers take every GPU as fast.

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
    instructions = {name for name, present in has.items() if name.endswith("bf16") and present}
    intel = str(has.get("cpu_name", "")).startswith("Intel")
    return bool(instructions - {"avx512_bf16"} if intel else instructions)


def has_products(scales: str, device: torch.device) -> bool:
    """Return whether ``device`` has FP8 or FP4 units for products with ``scales``, a key of `CAPABILITIES`."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    first, beyond = CAPABILITIES[scales]
    capability = torch.cuda.get_device_capability(device)
    return capability >= first and (beyond is None or capability < beyond)
