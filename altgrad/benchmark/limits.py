"""What the machine could do at best, measured on the spot: the scale for everything else."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from altgrad.benchmark.timing import seconds

COPIED_BYTES = 1 << 28
GEMM = {"cpu": (2048, 1024, 1024), "cuda": (8192, 8192, 8192)}  # tokens, inputs, outputs: what fills the device
ROUNDS = 15


def measure(device: torch.device) -> dict[str, int]:
    """Return the limits as the record has them."""
    return {
        "copy_bytes_per_s": round(copy_bandwidth(device)),
        "bf16_gemm_operations_per_s": round(gemm_rate(torch.bfloat16, device)),
        "fp32_gemm_operations_per_s": round(gemm_rate(torch.float32, device)),
    }


def copy_bandwidth(device: torch.device) -> float:
    """Return bytes read and written per second by copying 256 MiB, far more than any cache."""
    source = torch.ones(COPIED_BYTES // 4, device=device)
    target = torch.empty_like(source)
    return 2 * COPIED_BYTES / _median_seconds(lambda: target.copy_(source), device)


def gemm_rate(dtype: torch.dtype, device: torch.device) -> float:
    """Return floating-point operations per second of one large matrix product, a multiply-add counted as two."""
    n, k, m = GEMM[device.type]
    a, b = torch.randn(n, k, device=device).to(dtype), torch.randn(m, k, device=device).to(dtype)
    return 2 * n * k * m / _median_seconds(lambda: a @ b.t(), device)


def _median_seconds(run: Callable[[], object], device: torch.device) -> float:
    taken = [seconds(run, device) for _ in range(ROUNDS + 2)]
    return statistics.median(taken[2:])  # the first ones fill caches and wake threads
