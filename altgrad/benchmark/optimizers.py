"""A step of every arm beside torch's fused AdamW, on the weights of one model: time turn by turn, and peak memory.

The gradients are made up and stay; nothing but the optimizer runs, told their norm as in training, where clipping has
found it. Quantized weights are in the first format of the
session with a scale per tensor, and arms see them as training shows them. Run as a module, it measures the memory of
the arm in its argument, in a process where freed tensors go back at once.
"""

from __future__ import annotations

import dataclasses
import json
import random
import statistics
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from altgrad.benchmark.alone import run_module
from altgrad.config import run_stage

if TYPE_CHECKING:
    import torch

    from altgrad.model import GPTConfig

WARM = 3


def measure(
    config: GPTConfig, fmt: str, name: str, settings: dict[str, Any], rounds: int, device: torch.device, threads: int
) -> dict[str, Any]:
    """Return one arm's result: ``step_ms``, ``over_adamw`` with quartiles, ``state_mb`` and ``peak_mb``.

    Args:
        config: the model's size.
        fmt: the weights' format.
        name: of the arm.
        settings: of `altgrad.optim.Arm`.
        rounds: timed steps of each of the two.
        device: where.
        threads: CPU threads of the process that measures memory.
    """
    plain, arm = _stepper(config, fmt, None, device), _stepper(config, fmt, settings, device)
    for run in (plain, arm):
        for _ in range(WARM):
            _seconds(run, device)
    seconds: dict[str, list[float]] = {"plain": [], "arm": []}
    shuffle = random.Random(0).shuffle
    order = [("plain", plain), ("arm", arm)]
    for _ in range(rounds):
        shuffle(order)
        for key, run in order:
            seconds[key].append(_seconds(run, device))
    low, ratio, high = statistics.quantiles([a / b for a, b in zip(seconds["arm"], seconds["plain"], strict=True)], n=4)
    return {
        "name": name,
        "parameters": sum(p.numel() for group in arm.param_groups for p in group["params"]),
        "step_ms": round(1e3 * statistics.median(seconds["arm"]), 2),
        "adamw_ms": round(1e3 * statistics.median(seconds["plain"]), 2),
        "over_adamw": round(ratio, 3),
        "over_adamw_quartiles": [round(low, 3), round(high, 3)],
        "rounds": rounds,
        **(_memory(arm, device) if device.type == "cuda" else _alone(config, fmt, settings, device, threads)),
    }


def _stepper(
    config: GPTConfig, fmt: str, settings: dict[str, Any] | None, device: torch.device
) -> torch.optim.Optimizer:
    """Return an optimizer whose weights have gradients; without ``settings`` torch's own."""
    import torch

    from altgrad.model import GPT, Recipe, quantize_model
    from altgrad.optim import Arm, build_optimizer
    from altgrad.training.grids import weight_grids

    torch.manual_seed(0)
    model = quantize_model(GPT(config).to(device), Recipe.uniform(fmt))
    for p in model.parameters():
        p.grad = 1e-3 * torch.randn_like(p)
    if settings is None:
        return torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    arm = Arm(**settings)
    return build_optimizer(model, arm, weight_grids(model, on_grid=arm.weights == "quantized"), compiled=True)


def _seconds(optimizer: torch.optim.Optimizer, device: torch.device) -> float:
    from altgrad.benchmark.limits import synchronize
    from altgrad.optim import ArmOptimizer

    step = partial(optimizer.step, norm=1.0) if isinstance(optimizer, ArmOptimizer) else optimizer.step
    synchronize(device)
    started = time.perf_counter()
    step()
    synchronize(device)
    return time.perf_counter() - started


def _memory(optimizer: torch.optim.Optimizer, device: torch.device) -> dict[str, float | None]:
    """Return ``state_mb``, the optimizer's tensors, and ``peak_mb``, what a step takes at most beside weights and
    gradients, in MB of 10^6 bytes. On a CPU only a process of its own can tell the peak."""
    from altgrad.benchmark import memory

    state = memory.tensors_mb(t for entries in optimizer.state.values() for t in entries.values())
    growth = memory.growth_mb(optimizer.step, device)
    return {"state_mb": round(state, 1), "peak_mb": None if growth is None else round(state + growth, 1)}


def _alone(
    config: GPTConfig, fmt: str, settings: dict[str, Any], device: torch.device, threads: int
) -> dict[str, float | None]:
    job = {"config": dataclasses.asdict(config), "fmt": fmt, "settings": settings, "device": device.type,
           "threads": threads}  # fmt: skip
    return run_module("altgrad.benchmark.optimizers", job, f"the memory of {settings}")


def main(arguments: list[str]) -> None:
    """Print what `_memory` returns."""
    from pathlib import Path

    import torch

    from altgrad.model import GPTConfig
    from altgrad.training import machine

    job = json.loads(arguments[0])
    machine.use_compile_cache(machine.compile_cache(Path.cwd()))
    torch.set_num_threads(job["threads"])
    device = torch.device(job["device"])
    optimizer = _stepper(GPTConfig(**job["config"]), job["fmt"], job["settings"], device)
    for _ in range(WARM):
        optimizer.step()
    print(json.dumps(_memory(optimizer, device)))


if __name__ == "__main__":
    run_stage(main)
