"""Rounding, codes, scales and sums under another default dtype of torch: the bits that they have under float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch

from altgrad import numerics
from altgrad.formats import get_format
from altgrad.numerics import operand_definition, sums
from altgrad.numerics.constants import FOUR_OVER_SIX, TWO_LEVEL
from altgrad.numerics.ms_eden import ms_eden_by_tensors, ms_eden_pair, random_signs
from altgrad.numerics.operand_definition import block_code, quantize_by_tensors
from altgrad.numerics.scaling import scale_rule
from altgrad.numerics.sums import block_statistics, update_sums, update_sums_by_tensors
from tests.default_dtype import OTHERS, require_same_bits

FORMATS = ("E4M3", "E5M2", "E3M4", "E0M7", "E7M0", "E2M1")
_GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(96, 48, generator=_GENERATOR, dtype=torch.float32)
X = X * (4 * torch.randn(96, 48, generator=_GENERATOR, dtype=torch.float32)).exp2()
X[0, 0], X[3] = 0.0, 0.0
SIGNS = torch.where(torch.arange(16) % 3 == 0, -torch.ones(16, dtype=torch.float32), 1)
STREAM = torch.tensor([3, 4, 5])
HISTORY = torch.tensor([0.5, 3.0, torch.inf, 0.0], dtype=torch.float32)
CHOICES = {
    **{f"{kind} {scale} {rule}": {"granularity": kind, "scale_format": scale, "scale_rounding": rule}
       for kind, (scale, rule) in product(("tensor", "row", "block", "tile"), (
           ("float32", "rceil"), ("E8M0", "floor"), ("E8M0", "ceil"), ("E8M0", "rceil"), ("E8M0", "even")))},
    **{f"{kind} E4M3 {rule}": {"granularity": kind, "block": 16, "scale_format": "E4M3", "scale_rounding": rule}
       for kind in ("block", "tile") for rule in ("rceil", "4/6")},
}  # fmt: skip


def constants(fmt: str = "E4M3", scale_format: str = "float32") -> torch.Tensor:
    return numerics.format_constants(fmt, scale_format=scale_format)


def scaled(fmt: str) -> torch.Tensor:
    return X * numerics.compute_scale(X.abs().max(), fmt)


def quantized() -> Iterator[Any]:
    for fmt, mode, overflow in product(FORMATS, numerics.ROUNDING_MODES, numerics.OVERFLOW_POLICIES):
        for x, scale in ((X, 0.7), (X.bfloat16(), None), (X.double(), torch.tensor(0.7, dtype=torch.float64))):
            generator = torch.Generator().manual_seed(1)
            options: dict[str, Any] = {"rounding": mode, "overflow": overflow, "generator": generator}
            yield numerics.quantize(x, fmt, scale=scale, **options)
    for gradient in ("straight-through", "clipped", "relu"):
        x = X.clone().requires_grad_()
        numerics.quantize(x, "E4M3", scale=4.0, gradient=gradient).sum().backward()
        yield x.grad


def operands() -> Iterator[Any]:
    for options in CHOICES.values():
        known = constants("E2M1" if options["scale_format"] == "E4M3" else "E4M3", options["scale_format"])
        for dim, streams, dtype in product((0, 1), ([], [STREAM]), (torch.bfloat16, torch.float32)):
            if streams and options["scale_rounding"] == "4/6":
                continue
            call: dict[str, Any] = {**options, "dim": dim, "dtype": dtype}
            yield numerics.quantize_operands([X], [known], streams=streams, **call)
            block = block_code(options["granularity"], options.get("block", 32))
            rule = scale_rule(options["scale_format"], options["scale_rounding"], options["granularity"])
            stream = streams[0] if streams else None
            yield quantize_by_tensors(X, known, None, block, dim, rule, dtype, stream)
    for learns in ("nothing", "each", "first"):
        history = HISTORY.clone()
        yield numerics.quantize_operands([X], [constants()], [history], learns=learns), history


def operand_scales() -> Iterator[Any]:
    for options in CHOICES.values():
        known = constants("E2M1" if options["scale_format"] == "E4M3" else "E4M3", options["scale_format"])
        for dim in (0, 1):
            yield numerics.operand_scale(X, known, dim=dim, **options)


def scales() -> Iterator[Any]:
    for fmt, amax in product(FORMATS, (1.03, 3, X.abs().amax(1), X.double().abs().amax(0))):
        for scale, rule in (("float32", "rceil"), *(("E8M0", rule) for rule in ("floor", "ceil", "rceil", "even"))):
            yield numerics.compute_scale(amax, fmt, scale_format=scale, scale_rounding=rule)
    yield numerics.compute_scale(1.03, 448.0)


def two_levels() -> Iterator[Any]:
    for block, dim in product((16, 32), (0, 1)):
        stored = numerics.encode_two_level(X, "E2M1", block=block, dim=dim)
        yield stored, numerics.decode_two_level(stored, "E2M1", block=block, dim=dim)


def each(of_format: Callable[[str], Any]) -> Callable[[], list[Any]]:
    return lambda: [of_format(fmt) for fmt in FORMATS]


def update_of(by: Callable[..., Any]) -> Any:
    scale = [numerics.compute_scale(X.abs().max() * factor, "E4M3") for factor in (1.0, 0.45)]
    return by(X, X * 1.03, X * 1.05, -X, *scale, constants(), 1)


def ms_eden() -> Iterator[Any]:
    known, x = constants("E2M1", "E4M3"), X.repeat(2, 1)[:128]
    yield random_signs(STREAM, 1), ms_eden_by_tensors(x, known, STREAM, 7)
    yield ms_eden_pair(x, x[:, :32], known, STREAM, 0, dtype=torch.bfloat16)


CASES: dict[str, Callable[[], Any]] = {
    "amax": lambda: [numerics.amax(X, kind, dim=dim) for kind in ("tensor", "row", "block", "tile") for dim in (0, 1)],
    "amax_from_history": lambda: [numerics.amax_from_history(HISTORY, how) for how in ("max", "most-recent")],
    "at_coordinate": each(lambda fmt: numerics.at_coordinate(X, constants(fmt))),
    "broadcast_scale": lambda: numerics.broadcast_scale(X[:, :2].abs(), 48, block=32),
    "compute_scale": lambda: list(scales()),
    "coordinate": each(lambda fmt: numerics.coordinate(scaled(fmt), constants(fmt))),
    "decode": each(lambda fmt: numerics.decode(torch.arange(1 << get_format(fmt).bits), fmt)),
    "decode_mx_scale": lambda: numerics.decode_mx_scale(torch.arange(256)),
    "decode_operand": each(lambda fmt: numerics.decode_operand(
        torch.arange(1, 64, dtype=torch.uint8), constants(fmt), torch.float32)),
    "decode_two_level": lambda: list(two_levels()),
    "encode": each(lambda fmt: numerics.encode(scaled(fmt), fmt)),
    "encode_mx_scale": lambda: numerics.encode_mx_scale(torch.tensor([0.25, 1.0, 8.0], dtype=torch.float32)),
    "encode_operand": each(lambda fmt: numerics.encode_operand(numerics.quantize(scaled(fmt), fmt), constants(fmt))),
    "encode_two_level": lambda: list(two_levels()),
    "format_constants": each(lambda fmt: (constants(fmt), constants(fmt, "E4M3"))),
    "get_format": each(lambda fmt: numerics.get_format(fmt).name),
    "grid_spacing": each(lambda fmt: numerics.grid_spacing(scaled(fmt).abs(), constants(fmt))),
    "neighbours": each(lambda fmt: numerics.neighbours(scaled(fmt), fmt)),
    "operand_scale": lambda: list(operand_scales()),
    "permutation": lambda: numerics.permutation(300, 5, 1),
    "quantize": lambda: list(quantized()),
    "quantize_operand": lambda: [
        numerics.quantize_operand(X, constants(), dim=dim, dtype=dtype)
        for dim in (0, 1) for dtype in (torch.bfloat16, torch.float32)],
    "quantize_operands": lambda: list(operands()),
    "refined_constants": lambda: numerics.refined_constants(get_format("E4M3"), 256),
    "refined_format": lambda: numerics.refined_format(get_format("E4M3"), 256).name,
    "rotate_rows": lambda: (numerics.rotate_rows(X), operand_definition.rotate_by_tensors(X, SIGNS)),
    "round_to_grid": each(lambda fmt: numerics.round_to_grid(scaled(fmt), constants(fmt))),
    "round_to_grid_stochastic": each(lambda fmt: numerics.round_to_grid_stochastic(
        scaled(fmt), constants(fmt), numerics.uniform(X.shape, STREAM))),
    "rung": each(lambda fmt: numerics.rung(scaled(fmt), fmt)),
    "scale_from_amax": each(lambda fmt: numerics.scale_from_amax(X.abs().max(), constants(fmt))),
    "scale_from_history": each(lambda fmt: numerics.scale_from_history(HISTORY, fmt)),
    "scale_rule": lambda: numerics.scale_rule("E8M0", "even"),
    "ulp": each(lambda fmt: numerics.ulp(scaled(fmt), fmt)),
    "uniform": lambda: numerics.uniform(X.shape, STREAM, 3),
    "update_amax_history": lambda: numerics.update_amax_history(HISTORY, X.abs().max()),
    "block_statistics": lambda: [
        block_statistics(X, constants("E2M1"), block=32), block_statistics(
            X, constants("E2M1", "E4M3"), block=16, scale_format="E4M3")],
    "ms_eden": lambda: list(ms_eden()),
    "sums": lambda: (
        sums.magnitudes(X), sums.excess_kurtosis(X), sums.rounding_sums(X, constants(), granularity="row"),
        sums.rounding_sums(X, constants()), sums.magnitudes_by_tensors(X), sums.central_moments_by_tensors(X),
        sums.rounding_sums_by_tensors(X, constants(), numerics.compute_scale(X.abs().max(), "E4M3"))),
    "update_sums": lambda: (update_of(update_sums), update_of(update_sums_by_tensors)),
}  # fmt: skip
NO_FUNCTIONS = {"OVERFLOW_POLICIES", "ROUNDING_MODES", "Format", "TwoLevel"}


def test_every_public_function_is_looked_at() -> None:
    assert set(numerics.__all__) - NO_FUNCTIONS <= CASES.keys()
    assert {TWO_LEVEL, FOUR_OVER_SIX} <= {
        scale_rule(o["scale_format"], o["scale_rounding"], o["granularity"]) for o in CHOICES.values()
    }


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
