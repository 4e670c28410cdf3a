"""Seconds of calls, of several things turn by turn, their ratio, and the limits of the machine."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

COPIED_BYTES = 1 << 28
GEMM = {"cpu": (2048, 1024, 1024), "cuda": (8192, 8192, 8192)}  # tokens, inputs, outputs: what fills the device
ROUNDS = 15


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return how long ``run`` takes, until the device has done its work."""
    _synchronize(device)
    began = time.perf_counter()
    run()
    _synchronize(device)
    return time.perf_counter() - began


def in_turn(runs: Mapping[str, Callable[[], object]], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Return the seconds of each of ``runs``, taken once a round in a random order.

    What else the machine does, and the state in which one leaves the caches, so affects all alike.
    """
    taken: dict[str, list[float]] = {name: [] for name in runs}
    chance = random.Random(0)
    for _ in range(rounds):
        for name in chance.sample(list(runs), len(runs)):
            taken[name].append(seconds(runs[name], device))
    return taken


def ratio(name: str, times: Sequence[float], base: Sequence[float]) -> dict[str, Any]:
    """Return the median over rounds of ``times`` over ``base``, called ``name``, with quartiles."""
    low, median, high = statistics.quantiles([a / b for a, b in zip(times, base, strict=True)], n=4)
    return {name: round(median, 3), f"{name}_quartiles": [round(low, 3), round(high, 3)]}


def limits(device: torch.device) -> dict[str, int]:
    """Return bytes copied and floating-point operations of matrix products per second, as the record has them."""
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
    """Return floating-point operations per second of one large matrix product; a multiply-add counts as two."""
    n, k, m = GEMM[device.type]
    a, b = torch.randn(n, k, device=device).to(dtype), torch.randn(m, k, device=device).to(dtype)
    return 2 * n * k * m / _median_seconds(lambda: a @ b.t(), device)


def _median_seconds(run: Callable[[], object], device: torch.device) -> float:
    taken = [seconds(run, device) for _ in range(ROUNDS + 2)]
    return statistics.median(taken[2:])  # the first ones fill caches and wake threads


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
