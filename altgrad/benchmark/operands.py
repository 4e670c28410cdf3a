"""Operands of a quantized product in GB/s, beside a copy on the device and torch's own cast to 8 bits.

An operand's bytes are those that cannot be avoided: the tensor read once, its values written once. Whoever reads it
twice, first for the largest magnitude, so reaches less. Several calls are timed at once, since starting a kernel takes
as long as a small one runs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from altgrad.benchmark.timing import in_turn, ratio, seconds
from altgrad.numerics import format_constants, quantize_operands, scale_rule
from altgrad.numerics.compile_utils import compile_apart
from altgrad.numerics.gpu_launch import takes_kernels
from altgrad.numerics.ms_eden import random_signs, rotated_ms_eden
from altgrad.numerics.operand_definition import PACKED, block_code, quantize_by_tensors
from altgrad.numerics.operators import quantize_by_operator

CALLS = 10
COPY = "copy"
STREAM = (0, 0, 1)
Way = Callable[..., tuple[Tensor, ...]]


class Contestant(NamedTuple):
    """One way to make an operand, and the bytes of an element that it writes."""

    name: str
    run: Callable[[Tensor], object]
    written: float


def by_kernels(
    x: Tensor, constants: Tensor, known: Tensor | None, block: int, dim: int, rule: int, dtype: torch.dtype,
    stream: Tensor | None, first: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Do what `quantize_by_tensors` does, by the GPU's kernels."""
    if not takes_kernels(x, dtype, block):
        raise RuntimeError("needs a GPU and Triton")
    return quantize_by_operator(x, constants, known, block, dim, rule, dtype, stream, first)


def contestants(device: torch.device, dtype: torch.dtype) -> list[Contestant]:
    """Return a copy, torch's casts, and ours with each kind of scale; compiled but for the copy, kernels and MS-EDEN.

    Ours is what training makes of a tensor, by kernels or by tensor operations (`gpu_launch`), and the other way.
    """

    def cast(x: Tensor) -> Tensor:
        return (x * 0.5).to(torch.float8_e4m3fn)

    def cast_to_amax(x: Tensor) -> Tensor:
        return (x * (448.0 / x.abs().amax().float())).to(torch.float8_e4m3fn)

    def ours(
        name: str, what: str, scale_format: str = "float32", *, by: Way | None = None, stochastic: bool = False,
        dtype: torch.dtype = dtype, granularity: str = "tensor", block: int = 32, dim: int = 1, rotate: bool = False,
    ) -> Contestant:  # fmt: skip
        constants = [format_constants(name, device, scale_format=scale_format)]
        streams = [torch.tensor(STREAM, device=device)] if stochastic else []
        rule = scale_rule(scale_format, "rceil", granularity)
        stream, code = streams[0] if streams else None, block_code(granularity, block)
        told = (constants[0], None, code, dim, rule, dtype, stream, 0)
        options: Any = {
            "granularity": granularity, "block": block, "scale_format": scale_format, "dtype": dtype, "dim": dim,
            "rotate": rotate,
        }  # fmt: skip

        def operand(x: Tensor) -> tuple[Tensor | None, ...]:
            return by(x, *told) if by else quantize_operands([x], constants, [], streams, **options)[0]

        run = operand if by is by_kernels else compile_apart(operand, dynamic=False)
        return Contestant(what, run, 0.5 if dtype == PACKED else dtype.itemsize)

    float8, stream = torch.float8_e4m3fn, torch.tensor(STREAM, device=device)
    eden = (random_signs(stream, 0), format_constants("E2M1", device, scale_format="E4M3"), stream, 0, 16, dtype)

    return [
        Contestant(COPY, Tensor.clone, dtype.itemsize),
        Contestant("torch, cast to E4M3", compile_apart(cast, dynamic=False), 1),
        Contestant("torch, amax and cast to E4M3", compile_apart(cast_to_amax, dynamic=False), 1),
        ours("E4M3", "E4M3, a scale per tensor"),
        ours("E4M3", "E4M3, a scale per tensor, to float8", dtype=float8),
        ours("E4M3", "E4M3, a scale per row, to float8", dtype=float8, granularity="row"),
        ours("E4M3", "E4M3, a scale per column, to float8 by columns", dtype=float8, granularity="row", dim=0),
        *(
            ours("E4M3", f"E4M3, {what}, to float8", scale, dtype=float8, granularity=kind, block=size)
            for what, scale, kind, size in (
                ("blocks of 128", "float32", "block", 128),
                ("tiles of 128", "float32", "tile", 128),
                ("blocks of 32 (MXFP8)", "E8M0", "block", 32),
            )
        ),
        ours("E3M4", "E3M4, a scale per tensor"),
        ours("E4M3", "E4M3, a scale per tensor, by kernels", by=by_kernels),
        *(
            ours(name, what + said, scale, by=by, **options)
            for name, what, scale, options in (
                ("E4M3", "E4M3, a scale per row", "float32", {"granularity": "row"}),
                ("E4M3", "E4M3, blocks of 32 (MXFP8)", "E8M0", {"granularity": "block"}),
                ("E2M1", "E2M1, two-level blocks of 16 (NVFP4)", "E4M3", {"granularity": "block", "block": 16}),
                ("E4M3", "E4M3, a scale per tensor, stochastic", "float32", {"stochastic": True}),
            )
            for by, said in ((None, ""), (quantize_by_tensors, ", by tensor operations"))
        ),
        ours(
            "E2M1",
            "E2M1, NVFP4 along columns, rotated, stochastic",
            "E4M3",
            granularity="block",
            block=16,
            dim=0,
            rotate=True,
            stochastic=True,
        ),
        ours(
            "E2M1",
            "E2M1, NVFP4, to codes of 4 bits",
            "E4M3",
            granularity="block",
            block=16,
            dtype=PACKED,
        ),
        Contestant("E2M1, MS-EDEN", lambda x: rotated_ms_eden(x, None, *eden), dtype.itemsize),
    ]


def measure(
    shape: tuple[int, int], rounds: int, device: torch.device, only: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """Return a row per contestant for a bfloat16 tensor of ``shape``: ms of a call, GB/s, and its share of a copy's.

    ``only`` names those that take part, a copy among them; all by default.

    ``over_copy`` is the median over rounds of the contestant's GB/s over those of the copy in the same round, with
    quartiles. One that fails has its error in ``absent``.
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
    found = {name: [s / CALLS / bytes_of[name] for s in each] for name, each in taken.items()}  # seconds of a byte
    rows = []
    for name, each in found.items():
        median = statistics.median(each)
        rows.append({
            "name": name, "elements": x.numel(), "call_ms": float(f"{1e3 * median * bytes_of[name]:.4g}"),
            "gb_per_s": float(f"{1 / median / 1e9:.4g}"), **ratio("over_copy", found[COPY], each), "rounds": rounds,
        })  # fmt: skip
    return rows + absent


def _calls(entry: Contestant, x: Tensor) -> None:
    for _ in range(CALLS):
        entry.run(x)
