"""Operands by C++ loops have the bits of the tensor operations that define them; and what the operators promise.

Oracles: `quantize_by_tensors`; `round_to_grid` and `compute_scale`, which have oracles of their own; what lies beside a
tensor in memory; and `torch.library.opcheck` for what autograd and the compiler are told.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from altgrad.formats import get_format
from altgrad.numerics import (
    amax,
    amax_from_history,
    compute_scale,
    decode_operand,
    encode_operand,
    format_constants,
    loops,
    operand,
    quantize_operand,
    round_to_grid,
    rung,
    update_amax_history,
)
from altgrad.numerics.constants import FOUR_OVER_SIX, LEARNS, SCALE_RULES, TWO_LEVEL
from altgrad.numerics.operand import quantize_by_operator
from altgrad.numerics.operand_definition import (
    ONE_SCALE,
    ROWS,
    decode_by_tensors,
    encode_by_tensors,
    quantize_by_tensors,
)
from tests.numerics.numerics_oracles import same, spread, unusual

FORMATS = ["E0M7", "E1M6", "E2M5", "E3M4", "E4M3", "E5M2", "E6M1", "E7M0", "E4M3FNUZ", "E5M2FNUZ", "E2M1"]
BF16 = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).reshape(256, 256)
DTYPES = (torch.float32, torch.bfloat16)
RCEIL = SCALE_RULES.index("rceil")
STREAM, NONE = torch.tensor([3, 4, 5]), torch.tensor(0.0)


def wide(rows: int, columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    exponents = torch.randint(-90, 60, (rows, columns), generator=generator)
    return torch.randn(rows, columns, generator=generator) * torch.exp2(exponents.float())


def around_boundaries(name: str) -> Tensor:
    """Return every value, every midpoint, and the float32 on either side of each, of both signs."""
    values = torch.tensor(get_format(name).values, dtype=torch.float64)
    points = torch.cat([values, (values[1:] + values[:-1]) / 2]).float()
    beside = [torch.nextafter(points, torch.tensor(toward)) for toward in (torch.inf, -torch.inf)]
    return torch.cat([points, *beside])[None]


@pytest.fixture(autouse=True, scope="module")
def built_loops():
    assert loops.available(), "no C++ compiler: nothing to compare"


# --- path x operand x format -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_every_bfloat16_and_every_boundary_is_rounded_as_defined(name):
    constants = format_constants(name)
    inputs = [BF16, wide(77, 300), wide(33, 65).t(), torch.zeros(3, 5), around_boundaries(name)]
    cases = [(ONE_SCALE, 1, rule, known) for rule in (0, RCEIL) for known in (0.0, 3e-3)]
    cases += [(ROWS, dim, rule, 0.0) for dim in (0, 1) for rule in (0, RCEIL)]
    cases += [(32, dim, RCEIL, 0.0) for dim in (0, 1)]
    for x in [*inputs, torch.where(BF16.isfinite(), BF16, 0)[:, :100]]:
        for block, dim, rule, known in cases:
            for dtype in DTYPES:
                arguments = (x, constants, torch.tensor(known), block, dim, rule, dtype)
                found = quantize_by_operator(*arguments)
                assert all(map(same, found, quantize_by_tensors(*arguments))), (block, dim, rule, known, dtype, x.dtype)
    target = torch.tensor(get_format(name).scale_target)  # an amax of the target: scale 1
    for x in (BF16, around_boundaries(name)):
        finite = x[x.isfinite()][None]
        found = quantize_operand(finite, constants, target[None], dtype=torch.float32)
        assert found.scale == 1 and same(found.values, round_to_grid(finite.float(), constants))


@pytest.mark.parametrize("stream", [None, STREAM], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("block", [ONE_SCALE, ROWS, 16, 5, -16, -7, 128, -128])
def test_every_rule_and_granularity_has_the_bits_of_the_definition(block, stream):
    rules = [*range(len(SCALE_RULES)), *([] if block in (ONE_SCALE, ROWS) else [TWO_LEVEL, FOUR_OVER_SIX])]
    cases = [("E2M1", "as drawn"), ("E4M3", "tiny"), ("E3M0", "nan"), ("E5M2", "huge"), ("E0M7", "inf"),
             ("E7M0", "as drawn"), ("E2M3", "zero")]  # fmt: skip
    for seed, (name, kind) in enumerate(cases):
        for rule in rules:
            constants = format_constants(name, scale_format="E4M3" if rule >= TWO_LEVEL else "float32")
            for dim, shape, source, target in (
                (0, (37, 83), torch.float32, torch.float32),
                (1, (37, 83), torch.bfloat16, torch.float32),
                (1, (3, 130), torch.float32, torch.bfloat16),
            ):
                x = unusual(spread(shape, seed), kind).to(source)
                known = None if block == ROWS else torch.tensor(3.0 if seed % 2 else 0.0)
                arguments = (constants, known, block, dim, rule, target, stream, 11)
                defined = quantize_by_tensors(x, *arguments)
                for overwrite in (False, True):  # where x was, if it has the values' dtype
                    found = quantize_by_operator(x.clone(), *arguments, overwrite)
                    assert all(map(same, found, defined)), (name, kind, rule, dim)


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("block", [ONE_SCALE, ROWS, 16, 48, 7])
def test_what_is_unusual_is_noticed_wherever_it_stands_alone(block, rule):
    """Alone in the first row or column, in one in the middle and in the last, and under rules that saturate.

    Else it hides: loops that look at some of the groups would round the others without a limit.
    """
    constants = format_constants("E4M3")
    for dim, shape in ((0, (37, 150)), (1, (150, 37))):
        for place in (0, shape[1 - dim] // 2, shape[1 - dim] - 1):
            for value in (1.99, torch.inf, -torch.inf, torch.nan, 3e38, 1e-40):
                x = torch.ones(shape)  # whose scale is exact: none but `value` saturates by the rule floor
                x.select(1 - dim, place)[shape[dim] // 2] = value
                arguments = (x, constants, NONE, block, dim, SCALE_RULES.index(rule), torch.float32)
                found = quantize_by_operator(*arguments)
                assert all(map(same, found, quantize_by_tensors(*arguments))), (dim, place, value)


# Without an exponent, without a mantissa, with both, and others; in the last one even exponents have odd codes.
@pytest.mark.parametrize("name", ["E0M7", "E7M0", "E4M3", "E5M2FNUZ", "E2M1", "binary8p1f"])
def test_shortcuts_of_the_loops_are_taken_only_where_they_change_nothing(name):
    """Tensors without clamping, blocks without scaling, pairs: near the limits of float32 and with unusual elements."""
    constants = format_constants(name)
    ordinary = torch.randn(70, 37, generator=torch.Generator().manual_seed(0))
    odd = ordinary.clone()
    odd[3, 5], odd[40, 36], odd[41, 0] = torch.inf, torch.nan, 0.0
    points = around_boundaries(name).flatten()
    edges = torch.cat([points, points[: -len(points) % 37]]).view(-1, 37)
    several = [(block, dim, RCEIL, NONE) for dim in (0, 1) for block in (ROWS, 32, 7)]
    several += [(ROWS, dim, 0, NONE) for dim in (0, 1)]
    for exponent in (-140, -120, -60, 0, 60, 125):
        amaxes = [NONE, torch.tensor(2.0**exponent), torch.tensor(2.0 ** (exponent - 6))]
        cases = several + [(ONE_SCALE, 1, rule, known) for rule in (0, RCEIL) for known in amaxes]
        for x in (ordinary, odd, edges):
            for scaled in (x * 2.0**exponent, (x * 2.0**exponent).bfloat16()):
                for block, dim, rule, known in cases:
                    for dtype in DTYPES:
                        arguments = (scaled, constants, known, block, dim, rule, dtype)
                        found = quantize_by_operator(*arguments)
                        assert all(map(same, found, quantize_by_tensors(*arguments))), (exponent, block, dim, rule)


def by_tensors(*arguments: Any, **options: Any) -> operand.Quantized:
    """Return the operand of `quantize_operand`, made by tensor operations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operand, "has_loops", lambda t: False)
        return quantize_operand(*arguments, **options)


def agrees(a: operand.Quantized, b: operand.Quantized) -> bool:
    scales = a.scale is b.scale is None or same(a.scale, b.scale)
    return same(a.values, b.values) and scales


@pytest.mark.parametrize("granularity, block", [("tensor", 1), ("row", 1), ("block", 32), ("block", 48), ("block", 5)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_take_the_place_of_their_tensor_and_of_nothing_beside_it(granularity, block, dtype):
    constants, guard = format_constants("E2M5"), 256
    for shape in ((9, 96), (1031, 300), (1, 7), (3, 8193)):  # by one thread, and in unequal parts by several
        for dim in (0, 1):
            memory = wide(1, shape[0] * shape[1] + 2 * guard)[0].to(dtype)
            before, x = memory.clone(), memory[guard:-guard].view(shape)
            options = {"granularity": granularity, "block": block, "dim": dim, "scale_format": "E8M0"}
            expected = by_tensors(x.clone(), constants, dtype=dtype, **options)
            found = quantize_operand(x, constants, dtype=dtype, overwrite=True, **options)
            assert found.values is x and agrees(found, expected)
            assert torch.equal(memory[:guard], before[:guard]) and torch.equal(memory[-guard:], before[-guard:])
            other = DTYPES[dtype == torch.float32]
            assert quantize_operand(x, constants, dtype=other, overwrite=True, **options).values is not x


def of_all_sizes() -> list[Tensor]:
    """Return tensors shorter and longer than what a thread takes at a time, in one case an empty one."""
    return [wide(n, k) for n, k in ((3, 5), (300, 1000), (1, 1), (0, 4), (257, 255), (700, 93))]


@pytest.mark.parametrize("streams", [False, True], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("method", ["max", "most-recent"])
@pytest.mark.parametrize("learns", LEARNS)
def test_a_history_sets_the_scale_and_learns_as_its_definition_says(method, learns, streams):
    """Against `amax_from_history` and `update_amax_history`, which have oracles of their own, for loops and tensors."""
    draws, constants = STREAM if streams else None, format_constants("E3M4")
    seen: list[list[Tensor]] = []
    for run in (quantize_operand, by_tensors):
        histories = [torch.zeros(1 if learns == "first" else 3) for _ in of_all_sizes()]
        seen.append([])
        for factor in (1.0, 8.0, 0.25, torch.inf, 1.0, 0.5):
            xs = [x * factor for x in of_all_sizes()]
            used = [amax_from_history(history, method).clone() for history in histories]
            expected = [history.clone() for history in histories]
            if learns == "each":
                expected = [update_amax_history(h, amax(x)) for h, x in zip(histories, xs, strict=True)]
            elif learns == "first":
                expected = [
                    h.clone() if h > 0 or not amax(x).isfinite() else amax(x).reshape(1)
                    for h, x in zip(histories, xs, strict=True)
                ]
            for x, history, known in zip(xs, histories, used, strict=True):
                largest = known if known > 0 and amax(x).isfinite() else amax(x)
                found = run(x, constants, history, draws, method=method, learns=learns)
                assert same(found.scale, compute_scale(largest, "E3M4"))
                seen[-1] += found
            assert all(same(h, e) for h, e in zip(histories, expected, strict=True))
    assert all(map(same, *seen))


@pytest.mark.parametrize("name", ["E4M3", "E2M1", "E3M0", "E5M2"])
@pytest.mark.parametrize("scale_format", ["float32", "E8M0", "E4M3"])
def test_a_tile_has_one_scale_and_the_values_of_both_products(name, scale_format):
    x, constants = spread((40, 56)), format_constants(name, scale_format=scale_format)
    options = {"granularity": "tile", "block": 16, "scale_format": scale_format, "dtype": torch.float32}
    forward, backward = (quantize_operand(x, constants, dim=dim, **options) for dim in (1, 0))
    assert same(forward.values, backward.values)
    flipped = quantize_operand(x.t().contiguous(), constants, **options)
    assert same(flipped.values.t(), forward.values)
    for top in range(0, 40, 16):  # and no tile reads another
        for left in range(0, 56, 16):
            tile = x[top : top + 16, left : left + 16].contiguous()
            if scale_format != "E4M3":
                alone = quantize_operand(tile, constants, **options).values
                assert same(alone, forward.values[top : top + 16, left : left + 16])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_codes_are_rungs_and_give_every_value_back(name, dtype):
    values = torch.tensor(get_format(name).values, dtype=torch.float64).to(dtype)[None]
    constants, steps = format_constants(name), rung(values, name)
    for encode, decode in ((encode_operand, decode_operand), (encode_by_tensors, decode_by_tensors)):
        codes = encode(values, constants)
        assert torch.equal(codes.int() & 0x7F, steps.abs()) and torch.equal(codes >= 0x80, steps < 0)
        assert torch.equal(decode(codes, constants, dtype), values)
        nan = torch.full((1, 3), torch.nan, dtype=dtype)
        assert decode(encode(nan, constants), constants, dtype).isnan().all()


# --- what torch is told ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("compiler")
def test_operators_keep_what_they_promise_to_autograd_and_the_compiler():
    x, ours = torch.randn(40, 64), torch.ops.altgrad
    for block, dim, rule, streams in (
        (ONE_SCALE, 1, 1, []), (ONE_SCALE, 1, 0, [STREAM]), (ROWS, 0, 1, []), (ROWS, 1, 1, []), (32, 0, 1, []),
        (16, 0, TWO_LEVEL, []), (16, 1, TWO_LEVEL, [STREAM]),
    ):  # fmt: skip
        constants = format_constants("E4M3", scale_format="E4M3" if rule == TWO_LEVEL else "float32")
        values = x.bfloat16()
        for histories in ([], [torch.ones(3)]) if block == ONE_SCALE else ([],):
            how = (0, True, 1, block, dim, rule)
            torch.library.opcheck(ours.quantize_in_place, (values.clone(), constants, histories, streams, *how))
            torch.library.opcheck(ours.quantize_into, (x, values, constants, histories, streams, *how))
    constants = format_constants("E4M3")
    values = quantize_operand(x, constants).values
    torch.library.opcheck(ours.encode_operand, (values, constants))
    torch.library.opcheck(ours.decode_operand, (encode_operand(values, constants), constants, torch.bfloat16))


def test_compiled_and_eager_agree_to_the_bit():
    """Behind an operation of torch's that is exact: its others, gelu say, give other bits compiled than eager."""

    def both(x: Tensor, constants: Tensor) -> tuple[Tensor, ...]:
        found = quantize_operand(torch.nn.functional.leaky_relu(x, 0.25), constants)
        codes = encode_operand(found.values, constants)
        return *found, codes, decode_operand(codes, constants)

    x = wide(64, 96)
    compiled = torch.compile(both, dynamic=False)
    for name in ("E4M3", "E7M0"):
        constants = format_constants(name)
        assert all(map(same, compiled(x, constants), both(x, constants)))


# --- building and memory ---------------------------------------------------------------------------------------------


def test_loops_are_looked_for_once(monkeypatch):
    """Every operand asks for them."""
    first = loops.available()
    monkeypatch.delattr(loops, "_library")
    assert loops.available() is first


IN_A_PROCESS = """
import sys, torch, warnings
from altgrad.numerics import format_constants, loops, quantize_operand
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    found = quantize_operand(torch.linspace(-3, 3, 4096).reshape(64, 64), format_constants("E4M3"))
print(loops.available(), found.values.double().sum().item(), found.scale.item(), len(seen))
"""


def run_with(**environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", IN_A_PROCESS], env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_processes_that_build_at_once_and_one_without_a_compiler_compute_the_same(tmp_path):
    together = [run_with(TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache")) for _ in range(2)]
    without = run_with(TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "none"), PATH="/nowhere", CXX="")
    printed = [process.communicate()[0].split() for process in (*together, without)]
    assert printed[0] == printed[1] == ["True", *printed[2][1:3], "0"]
    assert printed[2][0] == "False" and printed[2][3] == "1"  # with a warning
    left = sorted(path.suffix for path in (tmp_path / "cache" / "altgrad").iterdir())
    assert left == [".sha256", ".so"]  # and nothing half-built


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_memory_does_not_grow_with_calls():
    """Both happened: torch 2.13 leaks strings and optional tensors of stable operators, and glibc splits its heap."""
    constants = format_constants("E4M3")
    for shape, calls, bound in (((16, 16), 60_000, 4e6), ((256, 1024), 300, 40e6)):
        for granularity, history in (("tensor", torch.ones(4)), ("tensor", None), ("row", None)):
            x = torch.randn(shape)
            for _ in range(20):
                quantize_operand(x, constants, history, learns="each", granularity=granularity)
            before = resident_bytes()
            for _ in range(calls // 3):
                quantize_operand(x, constants, history, learns="each", granularity=granularity)
            assert resident_bytes() - before < bound / 3
