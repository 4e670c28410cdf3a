"""Seconds of calls, several things turn by turn, and how one of them compares with another."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return how long ``run`` takes, until the device has done what it was given."""
    _synchronize(device)
    began = time.perf_counter()
    run()
    _synchronize(device)
    return time.perf_counter() - began


def in_turn(runs: Mapping[str, Callable[[], object]], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Return the seconds of each of ``runs``, taken once a round in an order by chance: what else the machine does, and
    the state that others leave the caches in, meets all alike."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    chance = random.Random(0)
    for _ in range(rounds):
        for name in chance.sample(list(runs), len(runs)):
            found[name].append(seconds(runs[name], device))
    return found


def ratio(name: str, own: Sequence[float], base: Sequence[float]) -> dict[str, Any]:
    """Return the median over rounds of ``own`` over ``base``, called ``name``, with quartiles."""
    low, median, high = statistics.quantiles([a / b for a, b in zip(own, base, strict=True)], n=4)
    return {name: round(median, 3), f"{name}_quartiles": [round(low, 3), round(high, 3)]}


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
