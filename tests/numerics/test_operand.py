"""The operators of a training step: the C++ loops, the tensor operations and the slow definitions agree to the bit.

Oracles: `round_to_grid` and `compute_scale`, which have oracles of their own, and `torch.library.opcheck` for what
autograd and the compiler are told.
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
    operators,
    quantize_operand,
    quantize_operands,
    round_to_grid,
    rung,
    update_amax_history,
)
from altgrad.numerics.constants import SCALE_RULES
from altgrad.numerics.operand_definition import (
    ONE_SCALE,
    ROWS,
    decode_by_tensors,
    encode_by_tensors,
    quantize_by_tensors,
)

FORMATS = ["E0M7", "E1M6", "E2M5", "E3M4", "E4M3", "E5M2", "E6M1", "E7M0", "E4M3FNUZ", "E5M2FNUZ", "E2M1"]
BF16 = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).reshape(256, 256)


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


def same(a: Tensor, b: Tensor) -> bool:
    """Whether dtype, shape, values, signs of zero and places of NaN agree."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    a, b = a.float(), b.float()
    numbers = ~a.isnan()
    bits = torch.equal(a[numbers].view(torch.int32), b[numbers].view(torch.int32))
    return torch.equal(a.isnan(), b.isnan()) and bits


RULES = ("float32", "rceil")  # tests/numerics/test_groups.py has them all
CASES = [
    *[("tensor", 1, rule, remembered) for rule in RULES for remembered in (None, 3e-3)],
    *[("row", dim, rule, None) for dim in (0, 1) for rule in RULES],
    *[("block", dim, "rceil", None) for dim in (0, 1)],
]


def test_loops_are_looked_for_once(monkeypatch):
    """Every operand asks for them."""
    first = loops.available()
    monkeypatch.delattr(loops, "_library")
    assert loops.available() is first


@pytest.mark.parametrize("name", FORMATS)
def test_loops_and_tensor_operations_agree_to_the_bit(name):
    assert loops.available(), "no C++ compiler: nothing to compare"
    constants = format_constants(name)
    inputs = [BF16, wide(77, 300), wide(33, 65).t(), torch.zeros(3, 5), around_boundaries(name)]
    inputs += [torch.where(BF16.isfinite(), BF16, 0)[:, :100]]
    for x in inputs:
        for granularity, dim, rule, remembered in CASES:
            for dtype in (torch.float32, torch.bfloat16):
                known = torch.tensor(remembered or 0.0)
                block = {"tensor": ONE_SCALE, "row": ROWS, "block": 32}[granularity]
                arguments = (x, constants, known, block, dim, SCALE_RULES.index(rule), dtype)
                found = torch.ops.altgrad.quantize_operand(*arguments)
                expected = quantize_by_tensors(*arguments)
                assert all(map(same, found, expected)), (granularity, dim, rule, remembered, dtype, x.dtype)


def agree(x: Tensor, constants: Tensor, dim: int, block: int, rule: str, remembered: Tensor) -> bool:
    """Whether the loops and the tensor operations make the same of ``x``, in both dtypes of the values."""
    arguments = (x, constants, remembered, block, dim, SCALE_RULES.index(rule))
    dtypes = (torch.float32, torch.bfloat16)
    return all(
        all(map(same, operators._quantize_operand(*arguments, dtype), quantize_by_tensors(*arguments, dtype)))
        for dtype in dtypes
    )


# Without an exponent, without a mantissa, with both, and others; in the last one even exponents have odd codes.
@pytest.mark.parametrize("name", ["E0M7", "E7M0", "E4M3", "E5M2FNUZ", "E2M1", "binary8p1f"])
def test_shortcuts_of_the_loops_are_taken_only_where_they_change_nothing(name):
    """Tensors without clamping, blocks without scaling, pairs: near the limits of float32 and with unusual elements."""
    constants, none = format_constants(name), torch.tensor(0.0)
    ordinary = torch.randn(70, 37, generator=torch.Generator().manual_seed(0))
    unusual = ordinary.clone()
    unusual[3, 5], unusual[40, 36], unusual[41, 0] = torch.inf, torch.nan, 0.0
    points = around_boundaries(name).flatten()
    edges = torch.cat([points, points[: -len(points) % 37]]).view(-1, 37)
    several = [(dim, block, "rceil", none) for dim in (0, 1) for block in (ROWS, 32, 7)]
    several += [(dim, ROWS, "float32", none) for dim in (0, 1)]
    for exponent in (-140, -120, -60, 0, 60, 125):
        known = [none, torch.tensor(2.0**exponent), torch.tensor(2.0 ** (exponent - 6))]
        cases = several + [(1, ONE_SCALE, rule, amax) for rule in ("float32", "rceil") for amax in known]
        for x in (ordinary, unusual, edges):
            for scaled in (x * 2.0**exponent, (x * 2.0**exponent).bfloat16()):
                for case in cases:
                    assert agree(scaled, constants, *case), (exponent, scaled.dtype, case)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("granularity, block", [("tensor", 1), ("row", 1), ("block", 32), ("block", 48), ("block", 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_that_take_the_place_of_their_tensor_are_the_same(granularity, block, dtype):
    constants = format_constants("E2M5")
    for shape in ((9, 96), (1031, 300)):  # by one thread, and in unequal parts by several
        for dim in (0, 1):
            x = wide(*shape).to(dtype)
            options = {"granularity": granularity, "block": block, "dim": dim, "scale_format": "E8M0"}
            expected = by_tensors([x], [constants], dtype=dtype, **options)[0]
            (found,) = quantize_operands([x], [constants], dtype=dtype, overwrite=True, **options)
            assert found.values is x
            assert agrees(found, expected)
            other = {torch.float32: torch.bfloat16, torch.bfloat16: torch.float32}[dtype]
            assert quantize_operands([x], [constants], dtype=other, overwrite=True, **options)[0].values is not x


def by_tensors(*arguments: Any, **options: Any) -> list[operand.Quantized]:
    """Return what `quantize_operands` makes of tensor operations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operand, "has_loops", lambda t: False)
        return quantize_operands(*arguments, **options)


def agrees(a: operand.Quantized, b: operand.Quantized) -> bool:
    scales = a.scale is b.scale is None or same(a.scale, b.scale)
    return same(a.values, b.values) and scales


def of_all_sizes(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return tensors shorter and longer than what a thread takes at a time, in one case an empty one."""
    return [wide(n, k).to(dtype) for n, k in ((3, 5), (300, 1000), (1, 1), (0, 4), (257, 255), (700, 93))]


@pytest.mark.parametrize("granularity", ["tensor", "row", "block"])
@pytest.mark.parametrize("dim", [0, 1])
def test_tensors_together_get_what_each_gets_alone(granularity, dim):
    for dtype in (torch.float32, torch.bfloat16):
        xs = of_all_sizes(dtype) if granularity == "tensor" else [x for x in of_all_sizes(dtype) if len(x)]
        constants = [format_constants(FORMATS[i]) for i in range(len(xs))]
        options = {"granularity": granularity, "dim": dim, "scale_format": "E8M0"}
        together = quantize_operands(xs, constants, **options)
        alone = [quantize_operands([x], [c], **options)[0] for x, c in zip(xs, constants, strict=True)]
        assert all(map(agrees, together, alone))
        (in_place,) = quantize_operands([xs[1].clone()], constants[1:2], dtype=dtype, overwrite=True, **options)
        assert agrees(in_place, quantize_operands(xs[1:2], constants[1:2], dtype=dtype, **options)[0])


@pytest.mark.parametrize("method", ["max", "most-recent"])
@pytest.mark.parametrize("learns", operators.LEARNS)
def test_a_history_sets_the_scale_and_learns_as_its_definition_says(method, learns):
    """Against `amax_from_history` and `update_amax_history`, which have oracles of their own, for loops and tensors."""
    length = 1 if learns == "first" else 3
    seen: list[list[Tensor]] = []
    for run in (quantize_operands, by_tensors):
        histories = [torch.zeros(length) for _ in of_all_sizes()]
        seen.append([])
        for factor in (1.0, 8.0, 0.25, torch.inf, 1.0, 0.5):
            xs = [x * factor for x in of_all_sizes()]
            used = [amax_from_history(history, method).clone() for history in histories]
            expected = [history.clone() for history in histories]
            if learns == "each":
                expected = [update_amax_history(h, amax(x)) for h, x in zip(histories, xs, strict=True)]
            elif learns == "first":
                kept = [h > 0 or not amax(x).isfinite() for h, x in zip(histories, xs, strict=True)]
                pairs = zip(histories, xs, kept, strict=True)
                expected = [h.clone() if keep else amax(x).reshape(1) for h, x, keep in pairs]
            constants = [format_constants("E3M4")] * len(xs)
            found = run(xs, constants, histories, method=method, learns=learns)
            for x, known, operand_found in zip(xs, used, found, strict=True):
                largest = known if known > 0 and amax(x).isfinite() else amax(x)
                assert same(operand_found.scale, compute_scale(largest, "E3M4"))
            assert all(same(h, e) for h, e in zip(histories, expected, strict=True))
            seen[-1] += [part for pair in found for part in pair]
    assert all(map(same, *seen))


@pytest.mark.parametrize("name", FORMATS)
def test_every_bfloat16_and_every_boundary_is_rounded_to_the_quantization_grid(name):
    constants = format_constants(name)
    target = torch.tensor(get_format(name).scale_target)  # an amax of the target: scale 1
    for x in (BF16, around_boundaries(name)):
        finite = x[x.isfinite()][None]
        found = quantize_operand(finite, constants, target, dtype=torch.float32)
        assert found.scale == 1
        assert same(found.values, round_to_grid(finite.float(), constants))


def test_scales_are_those_of_compute_scale():
    x = wide(40, 70)
    constants = format_constants("E3M4")
    for scale_dtype in ("float32", "E8M0"):
        found = quantize_operand(x, constants, scale_format=scale_dtype)
        assert torch.equal(found.scale, compute_scale(amax(x), "E3M4", scale_format=scale_dtype))
        for dim in (0, 1):
            rows = quantize_operand(x, constants, granularity="row", dim=dim, scale_format=scale_dtype)
            assert torch.equal(rows.scale, compute_scale(amax(x, "row", dim=dim), "E3M4", scale_format=scale_dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_codes_are_rungs_and_give_every_value_back(name, dtype):
    values = torch.tensor(get_format(name).values, dtype=torch.float64).to(dtype)[None]
    constants = format_constants(name)
    for encode, decode in (
        (encode_operand, decode_operand),
        (encode_by_tensors, decode_by_tensors),
    ):
        codes = encode(values, constants)
        steps = rung(values, name)
        assert torch.equal(codes.int() & 0x7F, steps.abs())
        assert torch.equal(codes >= 0x80, steps < 0)
        assert torch.equal(decode(codes, constants, dtype), values)
        nan = torch.full((1, 3), torch.nan, dtype=dtype)
        assert decode(encode(nan, constants), constants, dtype).isnan().all()


@pytest.mark.usefixtures("compiler")
def test_operators_keep_what_they_promise_to_autograd_and_the_compiler():
    x = torch.randn(40, 64, requires_grad=True)
    constants, ours = format_constants("E4M3"), torch.ops.altgrad
    for block, dim in ((ONE_SCALE, 1), (ROWS, 0), (ROWS, 1), (32, 0)):
        options = (block, dim, True)
        arguments = (x, constants, torch.tensor(0.0), *options, torch.bfloat16)
        torch.library.opcheck(ours.quantize_operand, arguments)
        plain, values = x.detach(), x.detach().bfloat16()
        for histories in ([], [torch.ones(3)]) if block == ONE_SCALE else ([],):
            rest = (histories, [], 0, True, 1, *options)
            torch.library.opcheck(ours.quantize_in_place, (values.clone(), constants, *rest))
            torch.library.opcheck(ours.quantize_into, (plain, values, constants, *rest))
            two = [[plain, 2 * plain], [values, values.clone()], [constants, constants.clone()]]
            rest = (histories + [torch.zeros(3) for _ in histories], *rest[1:])
            torch.library.opcheck(ours.quantize_each_into, (*two, *rest))
    values = quantize_operand(x.detach(), constants).values
    codes = encode_operand(values, constants)
    torch.library.opcheck(torch.ops.altgrad.encode_operand, (values, constants))
    torch.library.opcheck(torch.ops.altgrad.decode_operand, (codes, constants, torch.bfloat16))


def test_the_gradient_is_that_of_scaling_alone():
    x = torch.randn(6, 64, requires_grad=True)
    incoming = torch.randn(6, 64)
    for granularity, scale_format in (("tensor", "E8M0"), ("row", "E8M0"), ("block", "E8M0"), ("block", "E4M3")):
        constants = format_constants("E4M3", scale_format=scale_format)
        options = {"granularity": granularity, "scale_format": scale_format, "dtype": torch.float32}
        found = quantize_operand(x, constants, **options)
        (grad,) = torch.autograd.grad(found.values, x, incoming)
        assert torch.equal(grad, incoming if found.scale is None else incoming * found.scale)


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


IN_A_PROCESS = """
import sys, torch, warnings
from altgrad.numerics import format_constants, quantize_operand
from altgrad.numerics import loops
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
    assert left == [".sha256"] * len(loops.SOURCES) + [".so"] * len(loops.SOURCES)  # and nothing half-built


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_memory_does_not_grow_with_calls():
    """Both happened: torch 2.13 leaks strings and optional tensors of stable operators, and glibc splits its heap."""
    constants, history = format_constants("E4M3"), torch.ones(4)
    for shape, calls, bound in (((16, 16), 60_000, 4e6), ((256, 1024), 300, 40e6)):
        for granularity, histories in (("tensor", [history]), ("tensor", []), ("row", [])):
            x = torch.randn(shape)
            for _ in range(20):
                quantize_operands([x], [constants], histories, learns="each", granularity=granularity)
            before = resident_bytes()
            for _ in range(calls // 3):
                quantize_operands([x], [constants], histories, learns="each", granularity=granularity)
            assert resident_bytes() - before < bound / 3
