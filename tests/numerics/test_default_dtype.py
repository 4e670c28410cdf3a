"""Rounding, codes, scales and sums under another default dtype of torch: the bits that they have under float32."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

from altgrad import numerics
from altgrad.formats import get_format
from altgrad.numerics import operand_definition, sums
from altgrad.numerics.ms_eden import ms_eden_by_tensors, ms_eden_pair, random_signs
from altgrad.numerics.operand_definition import block_code, quantize_by_tensors
from altgrad.numerics.scaling import scale_rule
from tests.default_dtype import OTHERS, require_same_bits

FORMATS = ("E4M3", "E5M2", "E3M4", "E0M7", "E7M0", "E2M1")
_GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(96, 48, generator=_GENERATOR, dtype=torch.float32)
X = X * (4 * torch.randn(96, 48, generator=_GENERATOR, dtype=torch.float32)).exp2()
X[0, 0], X[3] = 0.0, 0.0
AMAX = X.abs().max()
SIGNS = torch.where(torch.arange(16) % 3 == 0, -torch.ones(16, dtype=torch.float32), 1)
STREAM = torch.tensor([3, 4, 5])
HISTORY = torch.tensor([0.5, 3.0, torch.inf, 0.0], dtype=torch.float32)
RULES = [("float32", "rceil"), *(("E8M0", rule) for rule in ("floor", "ceil", "rceil", "even"))]
SCALINGS = [
    *({"granularity": kind, "scale_format": scale, "scale_rounding": rule}
      for kind, (scale, rule) in product(("tensor", "row", "block", "tile"), RULES)),
    *({"granularity": kind, "block": 16, "scale_format": "E4M3", "scale_rounding": rule}
      for kind in ("block", "tile") for rule in ("rceil", "4/6")),
]  # fmt: skip


def constants(fmt: str = "E4M3", scale_format: str = "float32") -> torch.Tensor:
    return numerics.format_constants(fmt, scale_format=scale_format)


def of_formats(*functions: str) -> list[Any]:
    """Return what functions of (x, format) return for each format."""
    scaled = {fmt: X * numerics.compute_scale(AMAX, fmt) for fmt in FORMATS}
    return [getattr(numerics, name)(scaled[fmt], fmt) for name in functions for fmt in FORMATS]


def quantized() -> list[Any]:
    found = []
    for fmt, mode, overflow in product(FORMATS, numerics.ROUNDING_MODES, numerics.OVERFLOW_POLICIES):
        for x, scale in ((X, 0.7), (X.bfloat16(), None), (X.double(), torch.tensor(0.7, dtype=torch.float64))):
            options: dict[str, Any] = {"rounding": mode, "overflow": overflow}
            generator = torch.Generator().manual_seed(1)
            found.append(numerics.quantize(x, fmt, scale=scale, generator=generator, **options))
    for gradient in ("straight-through", "clipped", "relu"):
        x = X.clone().requires_grad_()
        numerics.quantize(x, "E4M3", scale=4.0, gradient=gradient).sum().backward()
        found.append(x.grad)
    return found


def operands() -> list[Any]:
    found: list[Any] = []
    for options in SCALINGS:
        known = constants("E2M1" if options["scale_format"] == "E4M3" else "E4M3", options["scale_format"])
        block = block_code(options["granularity"], options.get("block", 32))
        rule = scale_rule(options["scale_format"], options["scale_rounding"], options["granularity"])
        for dim, stream, dtype in product((0, 1), (None, STREAM), (torch.bfloat16, torch.float32)):
            found.append(numerics.quantize_operand(X, known, None, stream, **options, dim=dim, dtype=dtype))
            found.append(quantize_by_tensors(X, known, None, block, dim, rule, dtype, stream))
        found += [numerics.operand_scale(X, known, dim=dim, **options) for dim in (0, 1)]
    for learns in ("nothing", "each", "first"):
        history = HISTORY.clone()
        found += [numerics.quantize_operand(X, constants(), history, learns=learns), history]
    for fmt in FORMATS:
        found.append(numerics.decode_operand(torch.arange(1, 64, dtype=torch.uint8), constants(fmt), torch.float32))
        values = numerics.quantize(X * numerics.compute_scale(AMAX, fmt), fmt)
        found.append(numerics.encode_operand(values, constants(fmt)))
    return found


def scales() -> list[Any]:
    found: list[Any] = [numerics.compute_scale(1.03, 448.0), numerics.decode_mx_scale(torch.arange(256))]
    for fmt, amax, (scale, rule) in product(FORMATS, (1.03, 3, X.abs().amax(1), X.double().abs().amax(0)), RULES):
        found.append(numerics.compute_scale(amax, fmt, scale_format=scale, scale_rounding=rule))
    found += [numerics.amax(X, kind, dim=dim) for kind in ("tensor", "row", "block", "tile") for dim in (0, 1)]
    found += [numerics.amax_from_history(HISTORY, how) for how in ("max", "most-recent")]
    found += [numerics.scale_from_amax(AMAX, constants(fmt)) for fmt in FORMATS]
    found.append(numerics.encode_mx_scale(torch.tensor([0.25, 1.0, 8.0], dtype=torch.float32)))
    return [*found, numerics.broadcast_scale(X[:, :2].abs(), 48), numerics.update_amax_history(HISTORY, AMAX)]


def two_levels() -> list[Any]:
    stored = [numerics.encode_two_level(X, "E2M1", dim=dim) for dim in (0, 1)]
    return [*stored, *(numerics.decode_two_level(s, "E2M1", dim=dim) for dim, s in enumerate(stored))]


def kernels() -> list[Any]:
    found: list[Any] = [constants("E4M3", "E4M3"), numerics.refined_constants(get_format("E4M3"), 256)]
    for known in map(constants, FORMATS):
        draws = numerics.uniform(X.shape, STREAM, 3)
        found += [numerics.round_to_grid(X, known), numerics.round_to_grid_stochastic(X, known, draws), draws]
        found += [numerics.coordinate(X, known), numerics.at_coordinate(X, known)]
        found.append(numerics.grid_spacing(X.abs().clamp(max=known[0]), known))
    found += [numerics.rotate_rows(X), operand_definition.rotate_by_tensors(X, SIGNS), numerics.permutation(300, 5, 1)]
    found += [numerics.decode(torch.arange(1 << get_format(fmt).bits), fmt) for fmt in FORMATS]
    known, x = constants("E2M1", "E4M3"), X.repeat(2, 1)[:128]
    found += [random_signs(STREAM, 1), ms_eden_by_tensors(x, known, STREAM, 7)]
    return [*found, ms_eden_pair(x, x[:, :32], known, STREAM, 0, dtype=torch.bfloat16)]


def monitors() -> list[Any]:
    before, after = (numerics.compute_scale(AMAX * factor, "E4M3") for factor in (1.0, 0.45))
    step = (X, X * 1.03, X * 1.05, -X, before, after, constants(), 1)
    return [
        sums.magnitudes(X), sums.excess_kurtosis(X), sums.rounding_sums(X, constants(), granularity="row"),
        sums.rounding_sums(X, constants()),
        sums.block_statistics(X, constants("E2M1"), block=32),
        sums.block_statistics(X, constants("E2M1", "E4M3"), block=16, scale_format="E4M3"),
        sums.update_sums(*step),
    ]  # fmt: skip


CASES: dict[str, Callable[[], Any]] = {
    "quantize": quantized, "operands": operands, "scales": scales, "two levels": two_levels, "kernels": kernels,
    "codes": lambda: of_formats("encode", "rung", "ulp", "neighbours"), "monitors": monitors,
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", OTHERS)
def test_a_default_dtype_changes_no_bit(name: str, dtype: str) -> None:
    require_same_bits(CASES[name], OTHERS[dtype])


@pytest.mark.parametrize("dtype", OTHERS)
def test_nor_one_of_a_compiled_graph(dtype: str) -> None:
    def rounded(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q = numerics.quantize_operand(x, constants(), dtype=torch.float32)
        y = numerics.quantize(x, "E5M2", scale=0.7, rounding="nearest-away")
        return q.values, q.scale, y, numerics.uniform(x.shape, STREAM)

    require_same_bits(lambda: torch.compile(rounded, fullgraph=True)(X), OTHERS[dtype])
