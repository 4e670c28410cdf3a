"""One fake quantization beside its peers.

All contestants do ``x -> round(x * s) / s`` or, where they have no scale, ``x -> round(x)`` on the same float32
tensors, one after the other in an order shuffled every round. Beside them stands ``x * s`` alone, one pass over memory,
which nothing can beat.
"""

from __future__ import annotations

import importlib.util
import random
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from altgrad.formats import get_format
from altgrad.numerics.chunked import InPlaceRounder
from altgrad.numerics.constants import format_constants, packed_constants
from altgrad.numerics.quantization import quantize
from altgrad.numerics.rounding import round_to_grid
from altgrad.numerics.scaling import amax, compute_scale

SLOW_LIMIT = 1 << 22  # elements; contestants of tens of nanoseconds per element stop here
ROW = 1024
PEERS = {"ml_dtypes": "ml_dtypes E4M3FN", "gfloat": "gfloat E4M3", "qtorch": "QPyTorch"}  # by module; all optional
ABSENT = "not installed"


class Contestant(NamedTuple):
    """One way to quantize. ``run`` takes (x, output, scale, row_scale); only some use the output."""

    name: str
    run: Callable[[Tensor, Tensor, Tensor, Tensor], object]
    slow: bool = False


def contestants(name: str, device: torch.device) -> list[Contestant]:
    """Return everything to be compared, for one of our formats; others round to their nearest to it.

    Other libraries take part on the CPU only.
    """
    constants = format_constants(name, device)
    rounder = InPlaceRounder(packed_constants(get_format(name)))

    def fused(x: Tensor, scale: Tensor, constants: Tensor) -> Tensor:
        return round_to_grid(x * scale, constants) / scale

    def fused_into(out: Tensor, x: Tensor, scale: Tensor, constants: Tensor) -> None:
        out.copy_(fused(x, scale, constants))

    torch._dynamo.reset()
    compiled, compiled_rows, compiled_into, multiply, native = (
        torch.compile(function, fullgraph=True, dynamic=False)
        for function in (fused, fused, fused_into, torch.mul, _native_round_trip)
    )
    ours = [
        Contestant("ours, compiled", lambda x, out, s, rows: compiled(x, s, constants)),
        Contestant("ours, compiled, into a buffer", lambda x, out, s, rows: compiled_into(out, x, s, constants)),
        Contestant("ours, compiled, row scales", lambda x, out, s, rows: compiled_rows(x, rows, constants)),
        Contestant("ours, eager", lambda x, out, s, rows: quantize(x, name, scale=s)),
        Contestant("ours, eager, in place, no scale", lambda x, out, s, rows: _each_chunk(rounder, out)),
        Contestant("ours, eager, row scales", lambda x, out, s, rows: quantize(x, name, scale=rows)),
    ]
    others = [
        Contestant("x * s, eager", lambda x, out, s, rows: x * s),
        Contestant("x * s, into a buffer", lambda x, out, s, rows: torch.mul(x, s, out=out)),
        Contestant("x * s, compiled", lambda x, out, s, rows: multiply(x, s)),
        Contestant("torch E4M3FN, eager", lambda x, out, s, rows: _native_round_trip(x, s)),
        Contestant("torch E4M3FN, compiled", lambda x, out, s, rows: native(x, s)),
    ]
    return ours + others + (_other_libraries(name) if device.type == "cpu" else [])


def _native_round_trip(x: Tensor, scale: Tensor) -> Tensor:
    return (x * scale).to(torch.float8_e4m3fn).float() / scale


def _each_chunk(rounder: InPlaceRounder, tensor: Tensor) -> None:
    for piece in tensor.view(-1).split(1 << 17):
        rounder(piece)


def _other_libraries(name: str) -> list[Contestant]:
    """Those that are installed. None of them takes a scale."""
    fmt = get_format(name)
    found = []
    if importlib.util.find_spec("ml_dtypes"):
        import ml_dtypes
        import numpy as np

        def cast(x: Tensor, *_: Tensor) -> object:
            return x.numpy().astype(ml_dtypes.float8_e4m3fn).astype(np.float32)

        found.append(Contestant(f"{PEERS['ml_dtypes']}, no scale", cast, slow=True))
    if importlib.util.find_spec("gfloat"):
        import gfloat
        from gfloat.formats import format_info_ocp_e4m3

        def round_ndarray(x: Tensor, *_: Tensor) -> object:
            return gfloat.round_ndarray(format_info_ocp_e4m3, x.numpy(), sat=True)

        found.append(Contestant(f"{PEERS['gfloat']}, no scale", round_ndarray, slow=True))
    if importlib.util.find_spec("qtorch") and fmt.exponent_bits and fmt.mantissa_bits:
        from qtorch.quant import float_quantize

        def simulate(x: Tensor, *_: Tensor) -> object:
            return float_quantize(x, fmt.exponent_bits, fmt.mantissa_bits)

        found.append(Contestant(f"{PEERS['qtorch']} {name}, no scale", simulate, slow=True))
    return found


def measure(format_name: str, size: int, rounds: int, device: torch.device) -> list[dict[str, Any]]:
    """Return a result per contestant for tensors of ``size`` elements, in nanoseconds per element.

    A peer that is not installed has a result too, with ``absent`` instead of numbers.
    """
    found = timed(contestants(format_name, device), size, rounds, device)
    peers = PEERS if device.type == "cpu" else {}
    absent = [name for module, name in peers.items() if importlib.util.find_spec(module) is None]
    found += [{"name": name, "elements": size, "absent": ABSENT} for name in absent]
    return [{"format": format_name, **result} for result in found]


def timed(entries: list[Contestant], size: int, rounds: int, device: torch.device) -> list[dict[str, Any]]:
    """Return one result per contestant: nanoseconds per element as median and quartiles."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(max(1, size // ROW), min(size, ROW), generator=generator).to(device)
    wait = torch.cuda.synchronize if x.is_cuda else lambda: None
    scale = compute_scale(amax(x), "E4M3")
    row_scale = compute_scale(amax(x, "row"), "E4M3")
    output = torch.zeros_like(x)
    entries = [entry for entry in entries if not (entry.slow and size > SLOW_LIMIT)]
    seconds: dict[str, list[float]] = {entry.name: [] for entry in entries}
    for entry in entries:
        entry.run(x, output, scale, row_scale)  # compiles, and warms caches
    order = random.Random(0)
    for _ in range(rounds):
        order.shuffle(entries)  # or some would always find the cache as the same neighbour left it
        for entry in entries:
            wait()
            started = time.perf_counter()
            entry.run(x, output, scale, row_scale)
            wait()
            seconds[entry.name].append(time.perf_counter() - started)
    return [_summary(name, size, times) for name, times in seconds.items()]


def _summary(name: str, size: int, seconds: list[float]) -> dict[str, Any]:
    low, median, high = statistics.quantiles(seconds, n=4)
    figures = {"median": median, "fastest": min(seconds), "lower_quartile": low, "upper_quartile": high}
    return {
        "name": name,
        "elements": size,
        **{f"{figure}_ns_per_element": float(f"{1e9 * value / size:.4g}") for figure, value in figures.items()},
        "rounds": len(seconds),
    }
