"""One fake quantization beside its peers: the contestants of ``altgrad.numerics.check.bench`` at a few sizes."""

from __future__ import annotations

from typing import Any

import torch

from altgrad.numerics.check import bench

ABSENT = "not installed"


def measure(format_name: str, size: int, rounds: int, device: torch.device) -> list[dict[str, Any]]:
    """Return a result per contestant for tensors of ``size`` elements, in nanoseconds per element.

    A peer that is not installed has a result too, with ``absent`` instead of numbers.
    """
    found = bench.measure(bench.contestants(format_name, device), size, rounds, device)
    for name in bench.absent_peers() if device.type == "cpu" else ():
        found.append({"name": name, "elements": size, "absent": ABSENT})
    return [{"format": format_name, **result} for result in found]
