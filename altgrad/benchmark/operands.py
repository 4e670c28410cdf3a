"""Measures how fast operands of quantized products are made, in GB/s, beside a copy and torch's casts to 8 bits.

Bytes count the unavoidable traffic: the tensor read once and the values written once. A method that reads the tensor
twice, first for its amax, therefore has fewer GB/s. `CALLS` calls are timed together, since launching a kernel takes
as long as a small kernel runs.
"""

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from altgrad.benchmark.timing import in_turn, ratio, seconds
from altgrad.numerics import format_constants, quantize_operand, scale_rule
from altgrad.numerics.compile_utils import compile_apart
from altgrad.numerics.gpu_launch import takes_kernels
from altgrad.numerics.ms_eden import random_signs, rotated_ms_eden
from altgrad.numerics.operand import quantize_by_operator
from altgrad.numerics.operand_definition import PACKED, block_code, quantize_by_tensors

CALLS = 10
COPY = "copy"
STREAM = (0, 0, 1)
MX: dict[str, Any] = {"granularity": "block", "scale_format": "E8M0"}
NV: dict[str, Any] = {"granularity": "block", "block": 16, "scale_format": "E4M3"}


class OperandMaker(NamedTuple):
    """A way to make an operand: its name, its function, and ``written``, the bytes written per element."""

    name: str
    run: Callable[[Tensor], object]
    written: float


def by_kernels(
    x: Tensor, constants: Tensor, known: Tensor | None, block: int, dim: int, rule: int, dtype: torch.dtype,
    stream: Tensor | None, first: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the operand as `quantize_by_tensors` does, made by GPU kernels; ``RuntimeError`` without these kernels."""
    if not takes_kernels(x, dtype, block):
        raise RuntimeError("needs a GPU and Triton")
    return quantize_by_operator(x, constants, known, block, dim, rule, dtype, stream, first)


def contestants(device: torch.device, dtype: torch.dtype) -> list[OperandMaker]:
    """Return the ways to compare: a copy, torch's casts, and this package's quantization with each kind of scale.

    All but the copy, the kernels and MS-EDEN are compiled. Quantization runs as in training, where `gpu_launch` picks
    kernels or tensor operations. Names with "by kernels" or "by tensor operations" force one of the two.
    """
    float8, stream = torch.float8_e4m3fn, torch.tensor(STREAM, device=device)

    def cast(x: Tensor) -> Tensor:
        return (x * 0.5).to(float8)

    def cast_to_amax(x: Tensor) -> Tensor:
        return (x * (448.0 / x.abs().amax().float())).to(float8)

    def ours(
        fmt: str, what: str, *, by: Callable[..., tuple[Tensor, ...]] | None = None, stochastic: bool = False,
        **settings: Any,
    ) -> OperandMaker:  # fmt: skip
        options: dict[str, Any] = {"granularity": "tensor", "block": 32, "scale_format": "float32", "dim": 1}
        options |= {"dtype": dtype} | settings
        constants = format_constants(fmt, device, scale_format=options["scale_format"])
        rule = scale_rule(options["scale_format"], "rceil", options["granularity"])
        code, draws = block_code(options["granularity"], options["block"]), stream if stochastic else None
        arguments = (constants, None, code, options["dim"], rule, options["dtype"], draws, 0)

        def operand(x: Tensor) -> tuple[Tensor | None, ...]:
            return by(x, *arguments) if by else quantize_operand(x, constants, None, draws, **options)

        run = operand if by is by_kernels else compile_apart(operand, dynamic=False)
        return OperandMaker(f"{fmt}, {what}", run, 0.5 if options["dtype"] == PACKED else options["dtype"].itemsize)

    two_ways: list[tuple[str, str, dict[str, Any]]] = [
        ("E4M3", "a scale per row", {"granularity": "row"}),
        ("E4M3", "blocks of 32 (MXFP8)", MX),
        ("E2M1", "two-level blocks of 16 (NVFP4)", NV),
        ("E4M3", "a scale per tensor, stochastic", {"stochastic": True}),
    ]
    eden = (random_signs(stream, 0), format_constants("E2M1", device, scale_format="E4M3"), stream, 0, 16, dtype)
    return [
        OperandMaker(COPY, Tensor.clone, dtype.itemsize),
        OperandMaker("torch, cast to E4M3", compile_apart(cast, dynamic=False), 1),
        OperandMaker("torch, amax and cast to E4M3", compile_apart(cast_to_amax, dynamic=False), 1),
        ours("E4M3", "a scale per tensor"),
        ours("E4M3", "a scale per tensor, to float8", dtype=float8),
        ours("E4M3", "a scale per row, to float8", dtype=float8, granularity="row"),
        ours("E4M3", "a scale per column, to float8 by columns", dtype=float8, granularity="row", dim=0),
        ours("E4M3", "blocks of 128, to float8", dtype=float8, granularity="block", block=128),
        ours("E4M3", "tiles of 128, to float8", dtype=float8, granularity="tile", block=128),
        ours("E4M3", "blocks of 32 (MXFP8), to float8", dtype=float8, **MX),
        ours("E3M4", "a scale per tensor"),
        ours("POSIT8", "a scale per tensor"),
        ours("POSIT8", "a scale per tensor by its rms", statistic="rms"),
        ours("E4M3", "a scale per tensor, by kernels", by=by_kernels),
        *(
            ours(fmt, what + said, by=by, **settings)
            for fmt, what, settings in two_ways
            for by, said in ((None, ""), (quantize_by_tensors, ", by tensor operations"))
        ),
        ours("E2M1", "NVFP4 along columns, rotated, stochastic", dim=0, rotate=True, stochastic=True, **NV),
        ours("E2M1", "NVFP4, to codes of 4 bits", dtype=PACKED, **NV),
        OperandMaker("E2M1, MS-EDEN", lambda x: rotated_ms_eden(x, None, *eden), dtype.itemsize),
    ]


def measure(
    shape: tuple[int, int], rounds: int, device: torch.device, only: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """Return a row per contestant, timed on a bfloat16 tensor of ``shape``: ``call_ms``, ``gb_per_s``, ``over_copy``.

    ``over_copy`` is the contestant's GB/s over the copy's in the same round, the median over ``rounds``, with
    quartiles. The row of a contestant that fails has its error in ``absent`` instead. ``only`` lists the names of the
    contestants to time, with ``"copy"`` among them; None means all.
    """
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
    runs: dict[str, Callable[[], None]] = {}
    bytes_of: dict[str, float] = {}
    absent: list[dict[str, Any]] = []
    for entry in contestants(device, torch.bfloat16):
        if only is not None and entry.name not in only:
            continue
        run = partial(_calls, entry, x)
        try:
            seconds(run, device)
        except Exception as error:  # noqa: BLE001 - whatever a compiler or device has against one, the others go on
            why = f"failed: {str(error).splitlines()[0]}"
            absent.append({"name": entry.name, "elements": x.numel(), "absent": why})
            continue
        runs[entry.name], bytes_of[entry.name] = run, x.numel() * (x.element_size() + entry.written)
    taken = in_turn(runs, rounds, device)
    per_byte = {name: [s / CALLS / bytes_of[name] for s in times] for name, times in taken.items()}
    rows = []
    for name, times in per_byte.items():
        median = statistics.median(times)
        rows.append({
            "name": name, "elements": x.numel(), "call_ms": float(f"{1e3 * median * bytes_of[name]:.4g}"),
            "gb_per_s": float(f"{1 / median / 1e9:.4g}"), **ratio("over_copy", per_byte[COPY], times), "rounds": rounds,
        })  # fmt: skip
    return rows + absent


def _calls(entry: OperandMaker, x: Tensor) -> None:
    for _ in range(CALLS):
        entry.run(x)
