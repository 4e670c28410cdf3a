"""A complete proof of rounding: every float32 input, in every deterministic mode.

    python -m altgrad.numerics.prove --formats E3M4 E7M0 --modes nearest-even

Rounding is a monotone step function. If it is right at each of its decision points and at the float32 numbers next to
them, and never steps back in between, then it is right everywhere. So two things are checked for a format and mode:

1. At every value of the format, every midpoint between two, and their float32 neighbours, of both signs, the result is
   that of exact fractions (`altgrad.numerics.reference`).
2. Over all 2^32 bit patterns, in order of magnitude: the result's magnitude never decreases, its sign is the input's
   (+0 for a format without -0), and NaN gives NaN.

The paths are eager, compiled, and the loops of a CPU or kernels of a GPU (`kernels`), which round to nearest even and
saturate. The result is written as JSON.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from altgrad.common.console import called, while_read
from altgrad.common.files import write_record
from altgrad.common.machine import environment
from altgrad.formats import FloatFormat, Format, get_format
from altgrad.formats.format import in_float32
from altgrad.formats.tables import TableFormat
from altgrad.numerics import gpu_launch, loops
from altgrad.numerics.constants import TARGET, format_constants
from altgrad.numerics.operand import quantize_operand
from altgrad.numerics.quantization import quantize, require_holds
from altgrad.numerics.reference import grid, round_scalar
from altgrad.numerics.rounding import OVERFLOW_POLICIES, ROUNDING_MODES, round_to_grid

Rounder = Callable[[Tensor], Tensor]

MODES = tuple(mode for mode in ROUNDING_MODES if mode != "stochastic")
PATHS = ("eager", "compiled", "kernels")
DEFAULT_FORMATS = tuple(f"E{e}M{7 - e}" for e in range(8))

MAGNITUDE_PATTERNS = 1 << 31
_INFINITY = 0x7F800000
_CHUNKS = {"cpu": 1 << 18, "cuda": 1 << 25}  # patterns at a time: a few buffers of 1 MiB, or what fills a GPU


def decision_points(fmt: Format, stride: int = 1) -> Tensor:
    """Return the points where the result of rounding may change, as float32, of both signs.

    These are each value of the format and each midpoint between two, up to the first value past the range, a table's
    thresholds, their float32 neighbours, and the extremes of float32. ``stride`` n keeps only every n-th value, and
    those at either end.
    """
    if isinstance(fmt, TableFormat):
        middles = [(below + above) / 2 for below, above in pairwise(fmt.table)]
        return _around([*fmt.table, *fmt.limits, *middles])
    assert isinstance(fmt, FloatFormat)
    values = grid(fmt)
    count = len(values) - 1
    kept = sorted({*range(0, count, stride), *range(min(4, count)), count - 1})
    points = [point for i in kept for point in (values[i], (values[i] + values[i + 1]) / 2)] + [values[-1]]
    return _around(list(map(float, points)))


def _around(points: list[float]) -> Tensor:
    """Return the points that float32 can hold and their neighbours, of both signs."""
    largest = float(np.finfo(np.float32).max)
    near = np.array([point for point in points if abs(point) <= largest], dtype=np.float32)
    infinity = np.float32(np.inf)
    extremes = np.array([0.0, 1e-45, largest, infinity], dtype=np.float32)
    around = np.concatenate([near, np.nextafter(near, infinity), np.nextafter(near, -infinity), extremes])
    return torch.from_numpy(np.concatenate([around, -around]))


def rounder(fmt: Format, mode: str, overflow: str, path: str, device: torch.device | str = "cpu") -> Rounder:
    """Return the rounding function of ``path``, one of `PATHS`, as training calls it on float32 tensors."""
    if path == "eager":
        return lambda x: quantize(x, fmt, rounding=mode, overflow=overflow)
    if path == "kernels":
        packed = format_constants(fmt, device)
        one = packed[TARGET].reshape(1)  # amax = scaling target, so the scale is 1

        def by_kernels(x: Tensor) -> Tensor:
            # One Inf or NaN makes a whole operand NaN, so `round_to_grid` rounds elements that are not finite.
            finite = x.isfinite()
            found = quantize_operand(torch.where(finite, x, 0)[None], packed, one, dtype=torch.float32).values[0]
            return torch.where(finite, found, round_to_grid(x, packed))

        return by_kernels
    torch._dynamo.reset()
    if _in_kernels(fmt, mode, overflow):
        constants = format_constants(fmt, device)
        compiled = torch.compile(round_to_grid, fullgraph=True)
        return lambda x: compiled(x, constants)
    return torch.compile(lambda x: quantize(x, fmt, rounding=mode, overflow=overflow), fullgraph=True)


def check_decision_points(
    round_: Rounder, fmt: Format, mode: str, overflow: str, device: torch.device | str = "cpu"
) -> tuple[int, list[str]]:
    """Compare ``round_`` with exact fractions; return the number of points checked, and a line for each mismatch."""
    points = decision_points(fmt)
    actual = round_(points.to(device)).cpu().double()
    expected = torch.tensor([round_scalar(x, fmt, mode, overflow) for x in points.tolist()], dtype=torch.float64)
    if isinstance(fmt, TableFormat) and overflow == "saturate":  # where TAKUM8 has values beyond float32
        expected = expected.clamp(*in_float32(fmt.values, fmt.thresholds)[0][[0, -1]].tolist())
    same = (actual.view(torch.int64) == expected.view(torch.int64)) | (actual.isnan() & expected.isnan())
    wrong = ~same
    lines = [
        f"{x!r} gives {a!r}, exactly {e!r}"
        for x, a, e in zip(points[wrong].tolist(), actual[wrong].tolist(), expected[wrong].tolist(), strict=True)
    ]
    return len(points), lines


def check_order(
    round_: Rounder,
    fmt: Format,
    magnitudes: range = range(MAGNITUDE_PATTERNS),
    progress: tqdm | None = None,
    device: torch.device | str = "cpu",
) -> tuple[int, list[str]]:
    """Check order, sign and NaN over bit patterns; return the number of patterns, and a line for each violation.

    Args:
        round_: the function under proof.
        fmt: its format.
        magnitudes: the magnitude patterns to sweep with either sign, step 1; all by default.
        progress: bar to advance by the number of patterns done; None: no bar.
        device: device to round on.
    """
    lines = []
    chunk = _CHUNKS[torch.device(device).type]
    offsets = torch.arange(chunk, dtype=torch.int32, device=device)
    for sign in (0, 1):
        for first in range(magnitudes.start, magnitudes.stop, chunk - 1):
            # The last pattern of a chunk is the first of the next, so that the step is compared too.
            stop = min(first + chunk, magnitudes.stop)
            pattern = offsets[: stop - first] + (first - (sign << 31))
            rounded = round_(pattern.view(torch.float32))
            if stop > _INFINITY or _suspicious(pattern, rounded.view(torch.int32)):
                lines += _violations(pattern.cpu(), rounded.cpu(), fmt)
            if progress is not None:
                progress.update(min(chunk - 1, magnitudes.stop - first))
    return 2 * len(magnitudes), lines


def _suspicious(pattern: Tensor, result: Tensor) -> bool:
    """Whether a magnitude steps back or a sign changes. NaN and a missing -0 do so too: `_violations` decides."""
    magnitude = result & 0x7FFFFFFF
    return bool((magnitude[1:] < magnitude[:-1]).any() or ((pattern ^ result) < 0).any())


def _violations(pattern: Tensor, rounded: Tensor, fmt: Format) -> list[str]:
    """Return a line for each kind of violation in one sequence of ascending magnitudes."""
    result = rounded.view(torch.int32)
    magnitude = result & 0x7FFFFFFF
    wrong_sign = (pattern ^ result) < 0
    if not fmt.has_negative_zero:
        wrong_sign = torch.where(magnitude == 0, result != 0, wrong_sign)
    input_is_nan = (pattern & 0x7FFFFFFF) > _INFINITY
    result_is_nan = magnitude > _INFINITY
    # NaN has no payload to compare and ends the order, as it does in the overflow policy.
    magnitude = magnitude.masked_fill(result_is_nan, 0x7FFFFFFF)
    kinds = {
        "steps back": torch.cat([magnitude[1:] < magnitude[:-1], torch.zeros(1, dtype=torch.bool)]),
        "loses NaN": input_is_nan & ~result_is_nan,
        "has the wrong sign": wrong_sign & ~result_is_nan,
    }
    lines = []
    for kind, where in kinds.items():
        count = int(where.count_nonzero())
        if count:
            example = int(pattern[where][0]) & 0xFFFFFFFF
            lines.append(f"{count} times from 0x{example:08x}: {kind}")
    return lines


def prove(
    fmt: Format,
    mode: str,
    overflow: str,
    path: str,
    magnitudes: range = range(MAGNITUDE_PATTERNS),
    progress: tqdm | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, Any]:
    """Return the result of one proof: what was checked, mismatches with examples, and seconds."""
    started = time.perf_counter()
    round_ = rounder(fmt, mode, overflow, path, device)
    points, wrong_points = check_decision_points(round_, fmt, mode, overflow, device)
    patterns, violations = check_order(round_, fmt, magnitudes, progress, device)
    return {
        "format": fmt.name,
        "mode": mode,
        "overflow": overflow,
        "path": path,
        "decision_points": points,
        "patterns": patterns,
        "mismatches": len(wrong_points) + len(violations),
        "examples": (wrong_points + violations)[:5],
        "seconds": round(time.perf_counter() - started, 1),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Prove the formats and modes asked for and write the record; return 1 after any mismatch, else 0."""
    parser = argparse.ArgumentParser(prog=called("numerics.prove"), description=__doc__.split("\n")[0])
    parser.add_argument(
        "--formats", nargs="+", type=_provable_format, default=DEFAULT_FORMATS, metavar="FORMAT",
        help="default: the eight formats of 8 bits",
    )  # fmt: skip
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES, help="of rounding; default: all")
    parser.add_argument(
        "--overflow", nargs="+", choices=OVERFLOW_POLICIES, default=("saturate",),
        help="what becomes of values beyond the largest; default: saturate",
    )  # fmt: skip
    parser.add_argument("--paths", nargs="+", choices=PATHS, help="implementations; default: all that the device has")
    parser.add_argument("--device", choices=tuple(_CHUNKS), default="cpu", help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="default: 1; more help on an idle machine")
    parser.add_argument(
        "--output", type=Path, default=Path("reports/numerics_proof.json"), metavar="FILE", help="default: %(default)s"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    on_gpu = options.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        parser.error("--device cuda: this torch sees no CUDA device; leave it out to prove the CPU's paths")
    paths = options.paths or PATHS
    if "kernels" in paths and not (gpu_launch if on_gpu else loops).available():
        what = "Triton" if on_gpu else "a C++ compiler"
        parser.error(f"--paths kernels needs {what}; name the others to prove those")

    cases = [
        (get_format(fmt), mode, overflow, path)
        for fmt in options.formats
        for mode in options.modes
        for overflow in options.overflow
        for path in paths
        if path != "kernels" or _in_kernels(get_format(fmt), mode, overflow)
    ]
    record = {**environment("altgrad.numerics.prove", arguments), "results": []}
    if on_gpu:
        record["device"] = torch.cuda.get_device_name()
    total = 2 * MAGNITUDE_PATTERNS * len(cases)
    with tqdm(total=total, unit="pattern", unit_scale=True, mininterval=1) as progress:
        for fmt, mode, overflow, path in cases:
            progress.set_description(f"{fmt.name} {mode} {path}")
            result = prove(fmt, mode, overflow, path, progress=progress, device=options.device)
            record["results"].append(result)
            write_record(options.output, record)
            for line in result["examples"]:
                progress.write(f"{fmt.name} {mode} {overflow} {path}: {line}")
    wrong = sum(result["mismatches"] for result in record["results"])
    print(f"{len(cases)} proofs, {wrong} mismatches; written to {options.output}")
    return int(wrong > 0)


def _in_kernels(fmt: Format, mode: str, overflow: str) -> bool:
    return mode == "nearest-even" and overflow == "saturate" and fmt.rounds_in_float32


def _provable_format(name: str) -> Format:
    try:
        fmt = get_format(name)
        require_holds(name, torch.float32, fmt)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not fmt.signed:
        raise argparse.ArgumentTypeError(f"{fmt} has no negative numbers to sweep")
    return fmt


if __name__ == "__main__":
    with while_read():
        sys.exit(main())
