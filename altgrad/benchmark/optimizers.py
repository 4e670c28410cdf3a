"""Measures an optimizer's step on the weights of one model: time beside torch's fused AdamW, and peak memory.

Only the optimizers run, on fixed random gradients. They are given the gradients' norm, which clipping computes in
training. Quantized weights have a scale per tensor.
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import torch
from torch import nn

from altgrad.benchmark import steps
from altgrad.benchmark.timing import in_turn, ratio
from altgrad.model import GPT, GPTConfig, Recipe, quantize_model
from altgrad.optim import Arm, build_optimizer
from altgrad.optim.update_gpu import Kernels
from altgrad.training.machine import bytes_per_parameter

WARM = 3


def measure(
    config: GPTConfig, fmt: str, name: str, settings: dict[str, Any], rounds: int, device: torch.device
) -> dict[str, Any]:
    """Time an optimizer; return milliseconds, time ratios with quartiles, MB, and bytes per parameter.

    ``over_adamw`` is its time over that of torch's fused AdamW. ``over_rule``, only for an optimizer with a GPU kernel,
    is the kernel's time over that of the compiled rule. ``state_mb`` counts the optimizer's tensors. ``peak_mb`` adds
    the most that a step allocates besides; it is None if the system does not report it. MB are 10^6 bytes.

    Args:
        config: the model's size.
        fmt: the weights' format.
        name: name of the optimizer, for the result.
        settings: the arguments of `altgrad.optim.Arm`.
        rounds: number of timed steps of each optimizer.
        device: the device of the model.
    """
    (_, plain), (model, arm) = (_stepper(config, fmt, of, device) for of in (None, settings))
    runs = {"plain": plain.step, "arm": partial(arm.step, norm=1.0)}
    if any(isinstance(loops, Kernels) for loops in arm._loops.values()):
        _, by_rule = _stepper(config, fmt, settings, device)
        by_rule._loops.clear()  # so that the compiled rule steps all weights
        runs["rule"] = partial(by_rule.step, norm=1.0)
    for run in WARM * list(runs.values()):
        run()
    seconds = in_turn(runs, rounds, device)
    state = steps.tensors_mb(t for tensors in arm.state.values() for t in tensors.values())
    growth = steps.growth_mb(arm.step, device)
    return {
        "name": name,
        "parameters": sum(p.numel() for group in arm.param_groups for p in group["params"]),
        "step_ms": round(1e3 * statistics.median(seconds["arm"]), 2),
        "adamw_ms": round(1e3 * statistics.median(seconds["plain"]), 2),
        **ratio("over_adamw", seconds["arm"], seconds["plain"]),
        **(ratio("over_rule", seconds["arm"], seconds["rule"]) if "rule" in seconds else {}),
        "rounds": rounds,
        **{role: round(count, 3) for role, count in bytes_per_parameter(model, arm).items()},
        "state_mb": round(state, 1), "peak_mb": None if growth is None else round(state + growth, 1),
    }  # fmt: skip


def _stepper(
    config: GPTConfig, fmt: str, settings: dict[str, Any] | None, device: torch.device
) -> tuple[nn.Module, Any]:
    """Return a model with random gradients, and its optimizer: torch's fused AdamW if ``settings`` is None."""
    torch.manual_seed(0)
    model = quantize_model(GPT(config).to(device), Recipe.uniform(fmt))
    if settings is None:
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    else:
        optimizer = build_optimizer(model, Arm(**settings), compiled=True)
    for p in model.parameters():  # only now: weights that are stored as codes have become other tensors
        p.grad = 1e-3 * torch.randn(p.shape, device=p.device)
    return model, optimizer
