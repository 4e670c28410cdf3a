"""Operands of a quantized product in GB/s, beside a copy on the device and torch's own cast to 8 bits.

An operand's bytes are those that cannot be avoided: the tensor read once, its values written once. Whoever reads it
twice, first for the largest magnitude, so reaches less. Several calls are timed at once, since starting a kernel takes
as long as a small one runs.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from altgrad.benchmark.limits import synchronize
from altgrad.numerics import format_constants, quantize_operands
from altgrad.numerics.tracing import compile_apart

CALLS = 10
COPY = "copy"
STREAM = (0, 0, 1)


class Contestant(NamedTuple):
    """One way to make an operand, and the bytes of an element that it writes."""

    name: str
    run: Callable[[Tensor], object]
    written: int


def contestants(device: torch.device, dtype: torch.dtype) -> list[Contestant]:
    """Return a copy, torch's casts, and ours with each kind of scale; all but the copy compiled."""

    def cast(x: Tensor) -> Tensor:
        return (x * 0.5).to(torch.float8_e4m3fn)

    def cast_to_amax(x: Tensor) -> Tensor:
        return (x * (448.0 / x.abs().amax().float())).to(torch.float8_e4m3fn)

    def ours(
        name: str, what: str, scale_format: str = "float32", *, stochastic: bool = False, float8: bool = False,
        **options: Any,
    ) -> Contestant:  # fmt: skip
        constants = [format_constants(name, device, scale_format=scale_format)]
        streams = [torch.tensor(STREAM, device=device)] if stochastic else []
        granularity = options | ({"scale_format": scale_format} if scale_format != "float32" else {})

        def operand(x: Tensor) -> list[Tensor | None]:
            values, scale = quantize_operands([x], constants, [], streams, dim=1, dtype=dtype, **granularity)[0]
            return [values.to(torch.float8_e4m3fn) if float8 else values, scale]

        return Contestant(what, compile_apart(operand, dynamic=False), 1 if float8 else dtype.itemsize)

    return [
        Contestant(COPY, Tensor.clone, dtype.itemsize),
        Contestant("torch, cast to E4M3", compile_apart(cast, dynamic=False), 1),
        Contestant("torch, amax and cast to E4M3", compile_apart(cast_to_amax, dynamic=False), 1),
        ours("E4M3", "E4M3, a scale per tensor"),
        ours("E4M3", "E4M3, a scale per tensor, to float8", float8=True),
        ours("E3M4", "E3M4, a scale per tensor"),
        ours("E4M3", "E4M3, a scale per row", granularity="row"),
        ours("E4M3", "E4M3, blocks of 32 (MXFP8)", "E8M0", granularity="block", block=32),
        ours("E2M1", "E2M1, two-level blocks of 16 (NVFP4)", "E4M3", granularity="block", block=16),
        ours("E4M3", "E4M3, a scale per tensor, stochastic", stochastic=True),
    ]


def measure(shape: tuple[int, int], rounds: int, device: torch.device) -> list[dict[str, Any]]:
    """Return a row per contestant for a bfloat16 tensor of ``shape``: ms of a call, GB/s, and its share of a copy's.

    ``over_copy`` is the median over rounds of the contestant's GB/s over those of the copy in the same round, with
    quartiles. One that fails has its error in ``absent``.
    """
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
    found: dict[str, list[float]] = {}
    bytes_of: dict[str, int] = {}
    absent: list[dict[str, Any]] = []
    entries = []
    for entry in contestants(device, torch.bfloat16):
        try:
            _seconds(entry, x, device)
        except Exception as error:  # noqa: BLE001 - whatever a compiler or device has against one, the others go on
            why = f"failed: {str(error).splitlines()[0]}"
            absent.append({"name": entry.name, "elements": x.numel(), "absent": why})
            continue
        entries.append(entry)
        found[entry.name], bytes_of[entry.name] = [], x.numel() * (x.element_size() + entry.written)
    order = random.Random(0)
    for _ in range(rounds):
        for entry in order.sample(entries, len(entries)):
            found[entry.name].append(_seconds(entry, x, device))
    rows = []
    for name, seconds in found.items():
        shares = [bytes_of[name] / s * c / bytes_of[COPY] for s, c in zip(seconds, found[COPY], strict=True)]
        low, share, high = statistics.quantiles(shares, n=4)
        median = statistics.median(seconds)
        rows.append({
            "name": name, "elements": x.numel(), "call_ms": float(f"{1e3 * median:.4g}"),
            "gb_per_s": float(f"{bytes_of[name] / median / 1e9:.4g}"), "over_copy": round(share, 3),
            "over_copy_quartiles": [round(low, 3), round(high, 3)], "rounds": rounds,
        })  # fmt: skip
    return rows + absent


def _seconds(entry: Contestant, x: Tensor, device: torch.device) -> float:
    synchronize(device)
    began = time.perf_counter()
    for _ in range(CALLS):
        entry.run(x)
    synchronize(device)
    return (time.perf_counter() - began) / CALLS
