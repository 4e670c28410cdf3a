"""Times calls, alternating between several functions, and measures copy bandwidth and matrix product rate."""

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

COPIED_BYTES = 1 << 28
GEMM = {"cpu": (2048, 1024, 1024), "cuda": (8192, 8192, 8192)}  # tokens, inputs, outputs: enough to fill the device
ROUNDS = 15


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one call of ``run``, until the device has finished its work."""
    _synchronize(device)
    began = time.perf_counter()
    run()
    _synchronize(device)
    return time.perf_counter() - began


def in_turn(runs: Mapping[str, Callable[[], object]], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Return the seconds of each function, one time per round; a round calls all of ``runs`` in random order.

    Other load on the machine and the state of the caches thus affect all functions alike.
    """
    taken: dict[str, list[float]] = {name: [] for name in runs}
    chance = random.Random(0)
    for _ in range(rounds):
        for name in chance.sample(list(runs), len(runs)):
            taken[name].append(seconds(runs[name], device))
    return taken


def ratio(name: str, times: Sequence[float], base: Sequence[float]) -> dict[str, Any]:
    """Return ``{name: median, name_quartiles: [low, high]}`` of ``times[i] / base[i]`` over rounds, two at least.

    The quartiles lie within the measured ratios: `statistics`' default method extrapolates beyond two of them.
    """
    ratios = [a / b for a, b in zip(times, base, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return {name: round(median, 3), f"{name}_quartiles": [round(low, 3), round(high, 3)]}


def limits(device: torch.device) -> dict[str, int]:
    """Return the machine's limits: bytes copied per second, and FLOP/s of matrix products in bf16 and float32."""
    return {
        "copy_bytes_per_s": round(copy_bandwidth(device)),
        "bf16_gemm_operations_per_s": round(gemm_rate(torch.bfloat16, device)),
        "fp32_gemm_operations_per_s": round(gemm_rate(torch.float32, device)),
    }


def copy_bandwidth(device: torch.device) -> float:
    """Return the bytes per second of a 256 MiB copy, larger than any cache; read and written bytes both count."""
    source = torch.ones(COPIED_BYTES // 4, device=device)
    target = torch.empty_like(source)
    return 2 * COPIED_BYTES / _median_seconds(lambda: target.copy_(source), device)


def gemm_rate(dtype: torch.dtype, device: torch.device) -> float:
    """Return the FLOP/s of a large matrix product in ``dtype``; a multiply-add counts as two."""
    n, k, m = GEMM[device.type]
    a, b = torch.randn(n, k, device=device).to(dtype), torch.randn(m, k, device=device).to(dtype)
    return 2 * n * k * m / _median_seconds(lambda: a @ b.t(), device)


def _median_seconds(run: Callable[[], object], device: torch.device) -> float:
    taken = [seconds(run, device) for _ in range(ROUNDS + 2)]
    return statistics.median(taken[2:])  # the first ones fill caches and wake threads


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
