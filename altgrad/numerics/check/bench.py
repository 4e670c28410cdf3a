"""How fast one fake-quantization is, beside what others offer.

    python -m altgrad.numerics.check.bench

All contestants do ``x -> round(x * s) / s`` or, where they have no scale, ``x -> round(x)`` on the same
float32 tensors, one after the other in an order shuffled every round, so that whatever else the machine
does meets all of them alike. Reported are median and quartiles over the rounds. Beside them stands
``x * s`` alone, one pass over memory, which nothing can beat.

Peak memory is the growth of the process's resident high-water mark over one call (Linux only).
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from altgrad.console import while_read
from altgrad.formats import get_format
from altgrad.numerics.check.records import environment, write_record
from altgrad.numerics.chunked import InPlaceRounder
from altgrad.numerics.constants import format_constants, packed_constants
from altgrad.numerics.quantization import quantize
from altgrad.numerics.rounding import round_to_grid
from altgrad.numerics.scaling import amax, compute_scale

SIZES = tuple(1 << exponent for exponent in (12, 16, 18, 20, 22, 24, 26))
SLOW_LIMIT = 1 << 22  # elements; contestants of tens of nanoseconds per element stop here
ROW = 1024
PEERS = {"ml_dtypes": "ml_dtypes E4M3FN", "gfloat": "gfloat E4M3", "qtorch": "QPyTorch"}  # by module; all optional


class Contestant(NamedTuple):
    """One way to quantize. ``run`` takes (x, output, scale, row_scale); only some use the output."""

    name: str
    run: Callable[[Tensor, Tensor, Tensor, Tensor], object]
    slow: bool = False


def contestants(name: str, device: torch.device | str = "cpu") -> list[Contestant]:
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
    return ours + others + (_other_libraries(name) if torch.device(device).type == "cpu" else [])


def absent_peers() -> list[str]:
    """Return the other libraries that are not installed, by the names that they would be compared under."""
    return [name for module, name in PEERS.items() if importlib.util.find_spec(module) is None]


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


def measure(
    entries: list[Contestant], size: int, rounds: int, device: torch.device | str = "cpu"
) -> list[dict[str, Any]]:
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


def extra_memory(run: Callable[[], object], input_bytes: int) -> float | None:
    """Return peak extra memory of a call as a multiple of its input, or None where it cannot be told."""
    status, clear = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not (status.exists() and clear.exists()):
        return None

    def kilobytes(field: str) -> int:
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith(field))

    clear.write_text("5")  # resets the high-water mark
    before = kilobytes("VmRSS")
    run()
    return round((kilobytes("VmHWM") - before) * 1024 / input_bytes, 2)


def ratios(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return, per size, how the figures that matter stand to each other."""
    medians = {(r["name"], r["elements"]): r["median_ns_per_element"] for r in results}
    rows = []
    for size in sorted({size for _, size in medians}):
        native, ours = medians["torch E4M3FN, eager", size], medians["ours, compiled", size]
        rows.append(
            {
                "elements": size,
                "native_over_compiled": round(native / ours, 2),
                "compiled_over_multiply": round(ours / medians["x * s, compiled", size], 2),
                "eager_over_native": round(medians["ours, eager", size] / native, 2),
            }
        )
    return rows


def table(results: list[dict[str, Any]]) -> str:
    """Return median nanoseconds per element, contestants by sizes."""
    sizes = sorted({result["elements"] for result in results})
    names = list(dict.fromkeys(result["name"] for result in results))
    medians = {(r["name"], r["elements"]): r["median_ns_per_element"] for r in results}
    lines = ["median ns per element".ljust(34) + "".join(f"{_size(size):>9}" for size in sizes)]
    for name in names:
        cells = [medians.get((name, size)) for size in sizes]
        lines.append(name.ljust(34) + "".join(f"{'-' if cell is None else f'{cell:.3g}':>9}" for cell in cells))
    return "\n".join(lines)


def _size(elements: int) -> str:
    return f"{elements >> 20}M" if elements >= 1 << 20 else f"{elements >> 10}K"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the record, print the table."""
    parser = argparse.ArgumentParser(prog="python -m altgrad.numerics.check.bench", description=__doc__.split("\n")[0])
    parser.add_argument("--format", default="E3M4", help="the format of our own contestants")
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, metavar="ELEMENTS")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path, default=Path("reports/numerics_bench.json"))
    options = parser.parse_args(arguments)

    torch.set_num_threads(options.threads)
    results = []
    for size in options.sizes:
        results += measure(contestants(options.format), size, options.rounds)
    x = torch.randn(max(options.sizes))
    memory = extra_memory(lambda: quantize(x, options.format, scale=2.0), x.numel() * x.element_size())
    record = {
        **environment("altgrad.numerics.check.bench", arguments),
        "format": options.format,
        "results": results,
        "ratios": ratios(results),
        "eager_peak_extra_memory_over_input": memory,
    }
    write_record(options.output, record)
    print(table(results))
    for row in record["ratios"]:
        print(", ".join(f"{key.replace('_', ' ')} {value}" for key, value in row.items()))
    print(f"peak extra memory of eager over the input: {memory}; written to {options.output}")
    return 0


if __name__ == "__main__":
    with while_read():
        sys.exit(main())
