"""What the processor at hand multiplies by itself."""

from __future__ import annotations

from functools import cache

import torch


@torch.compiler.assume_constant_result
def multiplies_bf16(device_type: str) -> bool:
    """Whether products of bfloat16 run at their own speed there, rather than in a slow emulation.

    Of GPUs that is taken for granted. On CPUs it takes AVX512-BF16, AMX-BF16 or ARM's BF16 instructions;
    without them a product of bfloat16 matrices is several times slower than one of float32.
    """
    return device_type != "cpu" or _cpu_multiplies_bf16()


@cache
def _cpu_multiplies_bf16() -> bool:
    return any(has for name, has in torch.cpu.get_capabilities().items() if name.endswith("bf16"))
