"""A GPU's kernels have the definition's bits, in Triton's interpreter, and compile to instructions that keep them.

A process of its own runs the tests of this file under the interpreter, which changes what a kernel is, and another one
the compiler: neither shares a process with torch's own, which looks for Triton. Oracles: `operand_definition`; the
instructions' names. On a GPU `tests/gpu` compares with the CPU.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from altgrad.formats import get_format
from altgrad.numerics import (
    amax,
    decode,
    format_constants,
    ms_eden,
    operand,
    quantize_operand,
)
from altgrad.numerics import gpu_launch as launch
from altgrad.numerics.constants import FOUR_OVER_SIX, LEARNS, SCALE_RULES, TARGET, TWO_LEVEL
from altgrad.numerics.ms_eden import CLIP, ROOM, ms_eden_by_tensors, ms_eden_pair, random_signs
from altgrad.numerics.operand import signs_on
from altgrad.numerics.operand_definition import (
    FLOAT8,
    ONE_SCALE,
    PACKED,
    ROWS,
    filled_up,
    quantize_by_tensors,
    rotate_by_tensors,
)
from altgrad.numerics.scaling import scaling_amax
from tests.numerics.numerics_oracles import name_of, same, spread, unusual
from tests.numerics.test_operand import FORMATS
from tests.numerics.test_tables import OWN, points

ROOT = Path(__file__).parents[2]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TABLES = [*map(get_format, ("POSIT8", "HIF8", "TAKUM8", "LNS8", "NF4")), OWN[0], OWN[1]]
STREAM, NOTHING = torch.tensor([3, 4, 5]), torch.empty(0)
GUARD = 64
NAN = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)  # as GPUs make it: to round it would carry

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton: see CONTRIBUTING.md")
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in a process with Triton's interpreter")
apart = pytest.mark.skipif(INTERPRETED, reason="is that process")


def in_a_process(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    return done.stdout


@apart
def test_kernels_in_the_interpreter():
    code = f"import sys, pytest; sys.exit(pytest.main(['-p', 'no:cacheprovider', '-p', 'no:xdist', {__file__!r}]))"
    assert " passed" in in_a_process(code, TRITON_INTERPRET="1")


COMPILED = """
import re, sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from altgrad.numerics import gpu_kernels as kernels
from altgrad.numerics import ms_eden
from altgrad.numerics.ms_eden import CLIP, ROOM

POINTERS = {"x": "*i16", "y": "*i16", "grid": "*fp32", "amaxes": "*i32", "amax": "*i32", "known": "*fp32",
            "over": "*fp32", "signs": "*fp32", "stream": "*i64", "scales": "*fp32", "scale": "*fp32", "blocks": "*u8",
            "found": "*i32"}

def instructions(kernel, to="*i16", **constants):
    kinds = {name: "constexpr" if name in constants else POINTERS.get(name, "i32") for name in kernel.arg_names}
    kinds = {name: to if name == "y" else kind for name, kind in kinds.items()}
    sixteenths = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(kinds.values()) if kind != "constexpr"}
    source = ASTSource(kernel, kinds, constexprs=constants, attrs=sixteenths)
    made = compile(source, GPUTarget("cuda", 90, 32), {"num_warps": 4, "enable_fp_fusion": False})
    print(*sorted(set(re.findall(r"\\n\\s+(?:@%p\\d+ )?([a-z][a-z0-9_.]+)", made.asm["ptx"]))))

found = {"column_stride": 1, "HAS_OVER": False, "LOG": 0, "HAS_KNOWN": False, "H": 1, "G": 4096}
instructions(kernels.find_amax, OF="all", **found)
amax, groups, levels = kernels.round_at_amax, kernels.round_groups, kernels.round_two_level
for kernel, to, h, g, w, by_columns, rule, draws, log, more in (
    (amax, "*i16", 1, 4096, 1, False, 0, False, 0, {"OF": "all"}),
    (amax, "*i16", 1, 4096, 1, False, 0, False, 0, {"OF": "all", "TABLE": 7}),
    (groups, "*i16", 1, 64, 32, False, 4, False, 0, {"KEEPS": False, "TABLE": 7}),
    (groups, "*i16", 1, 64, 32, False, 3, True, 0, {"KEEPS": False}),
    (levels, "*i16", 16, 8, 16, False, 6, False, 0, {"PAIRS": -1}),
    (levels, "*i16", 16, 256, 1, False, 5, True, 4, {"PAIRS": -1}),
    (amax, "*u8", 64, 64, 1, True, 0, False, 0, {"OF": "column"}),
    (groups, "*u8", 1, 32, 128, False, 0, False, 0, {"KEEPS": True}),
    (levels, "*u8", 1, 256, 16, False, 5, False, 0, {"PAIRS": 1}),
    (levels, "*u8", 16, 256, 1, True, 6, True, 4, {"PAIRS": 0}),
):
    given = {"DRAWS": draws, "ALIGNED": True, "LOG": log, "RULE": rule, "HAS_KNOWN": False, "H": h, "G": g}
    given |= ({} if kernel is levels else {"TABLE": 0}) | more
    if kernel is not amax:
        given |= {"W": w} | {name: 1 for name, length in (("high", h), ("wide", w)) if length == 1}  # as launches do
    instructions(kernel, to, column_stride=1, **{"y_row_stride" if by_columns else "y_column_stride": 1}, **given)
instructions(kernels.round_ms_eden, column_stride=1, CLIP=CLIP, ROOM=ROOM, HAS_OVER=True, LOG=7, HIGH=16, G=32)
"""


@apart
def test_what_is_compiled_for_a_gpu_fuses_nothing_and_divides_exactly():
    """Without one: for compute capability 9.0. Neighbours in memory are read and written as such."""
    amaxes, *rounding = in_a_process(COMPILED, TRITON_INTERPRET="0").splitlines()
    assert "atom.global" in amaxes and len(rounding) == 11
    for i, names in enumerate(rounding):
        used = names.split()
        assert not [name for name in used if re.match(r"fma|mad.*f\d|div.*(approx|full)|.*\.ftz", name)]
        packed = i in (8, 9)  # whose blocks have 8 bytes
        assert any(re.match(rf"st\.global\.v{2 if packed else 4}", name) for name in used)


# --- in the interpreter --------------------------------------------------------------------------------------------


def by_kernels(
    x: Tensor, constants: Tensor, known: Tensor | None, block: int, dim: int, rule: int, dtype: torch.dtype,
    stream: Tensor | None, first: int, signs: Tensor = NOTHING, by_columns: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return what `quantize_by_tensors` does; what lies beside the values in memory stays."""
    shape = torch.Size((filled_up(x.shape[0], max(signs.numel(), 1)), x.shape[1]))
    memory = torch.full((shape.numel() + 2 * GUARD,), 7.0).to(dtype)
    values = memory[GUARD:-GUARD].view(shape)
    values = values.view(shape[::-1]).t() if by_columns else values
    if known is not None:
        largest = amax(x, "row", dim=dim) if block == ROWS else amax(x)
        known = scaling_amax(known, largest)  # as `quantize_operand` does before
    turns = signs if signs.numel() else None
    scale = launch._quantize(x, turns, values, None, constants, known, stream, first, block, dim, rule)
    assert (memory[:GUARD].float() == 7).all() and (memory[-GUARD:].float() == 7).all()
    return values, scale


@interpreted
@pytest.mark.parametrize("fmt", [*map(get_format, [*FORMATS, "binary8p1f"]), *TABLES], ids=name_of)
def test_every_boundary_is_rounded_as_defined(fmt):
    """Of every format, in both dtypes, and by chance; with zeros of both signs, subnormals and what saturates.

    And as the amax of a column, where rules of scales have boundaries; with NaN and infinities.
    """
    constants, x, is_table = format_constants(fmt), points(fmt)[None], fmt in TABLES
    holds = torch.bfloat16 if not is_table or fmt.fits(8, -133, 127) else torch.float32
    at_one = constants[TARGET].clone()  # an amax of the target: scale 1
    for known, source, dtype, stream in (
        (at_one, x, torch.float32, None), (at_one, x.bfloat16(), holds, None), (at_one, x, torch.float32, STREAM),
        (torch.tensor(1e-30), x, holds, None),  # some products are infinite
    ):  # fmt: skip
        if is_table and stream is not None:
            continue
        arguments = (source[source.isfinite()][None], constants, known, ONE_SCALE, 1, 0, dtype, stream, 64)
        found, expected = by_kernels(*arguments), quantize_by_tensors(*arguments)
        assert all(map(same, found, expected)) and found[0].isfinite().all(), (dtype, stream)
    for rule in ("rceil", "even"):
        arguments = (x, constants, None, ROWS, 0, SCALE_RULES.index(rule), torch.float32, None, 0)
        assert all(map(same, by_kernels(*arguments), quantize_by_tensors(*arguments))), rule


@interpreted
@pytest.mark.parametrize("block", [ONE_SCALE, ROWS, 16, 5, -16, -7])
def test_kernels_are_the_definition_to_the_bit(block):
    """Of every rule, along both dimensions, with a last block that is shorter and numbers that begin anywhere."""
    rules = [*range(len(SCALE_RULES)), *([] if block in (ONE_SCALE, ROWS) else [TWO_LEVEL, FOUR_OVER_SIX])]
    kinds = ["as drawn", "tiny", "nan", "huge", "inf", "zero"]
    for i, rule in enumerate(rules):
        for dim, shape in ((0, (19, 5)), (1, (3, 43))):
            name, kind = FORMATS[(2 * i + dim) % len(FORMATS)], kinds[(i + 3 * dim) % len(kinds)]
            constants = format_constants(name, scale_format="E4M3" if rule >= TWO_LEVEL else "float32")
            x = unusual(spread(shape, i), kind)
            x = torch.where(x.isnan(), NAN, x)
            known = None if i % 2 else torch.tensor(3.0)
            other_way = (x.t().contiguous().t().bfloat16(), torch.float32, None)
            source, dtype, stream = other_way if (i + dim + block) % 2 else (x, torch.bfloat16, STREAM)
            arguments = (source, constants, known, block, dim, rule, dtype, stream, 11)
            found, expected = by_kernels(*arguments), quantize_by_tensors(*arguments)
            assert all(map(same, found, expected)), (name, kind, rule, dim, dtype)


@interpreted
@pytest.mark.parametrize("block", [ONE_SCALE, ROWS, 16, 5, -16, -7])
@pytest.mark.parametrize("fmt", TABLES, ids=name_of)
def test_tables_are_looked_up_to_the_bit(fmt, block):
    """Of every rule, along both dimensions, from both dtypes; of rotated rows, and before a scale's constants."""
    kinds = ["as drawn", "tiny", "nan", "huge", "inf", "zero"]
    for i, rule in enumerate(range(len(SCALE_RULES))):
        for dim, shape in ((0, (37, 5)), (1, (3, 43))):
            constants = format_constants(fmt, scale_format="E4M3" if i % 2 else "float32")
            x = unusual(spread(shape, i), kinds[(i + 3 * dim) % len(kinds)])
            x = torch.where(x.isnan(), NAN, x)
            known = None if i % 2 else torch.tensor(3.0)
            source, dtype = (x.t().contiguous().t().bfloat16(), torch.float32) if (i + dim) % 2 else (x, torch.bfloat16)
            dtype = dtype if fmt.fits(8, -133, 127) else torch.float32
            signs = signs_on(torch.device("cpu")) if rule == 3 and dim == 0 else NOTHING
            turned = rotate_by_tensors(source, signs) if signs.numel() else source
            arguments = (constants, known, block, dim, rule, dtype, None, 11)
            found, expected = by_kernels(source, *arguments, signs), quantize_by_tensors(turned, *arguments)
            assert all(map(same, found, expected)), (rule, dim, dtype)


@interpreted
@pytest.mark.parametrize("case", ["rows of 64", "one row", "tiles", "strips", "long rows", "rows in parts"])
def test_tiles_of_other_shapes_have_the_same_bits(case):
    """Random numbers without waste, more groups and rows than a program has, and rows that no program holds."""
    shape, block, dim, rule, stream = {
        "rows of 64": ((3, 128), ROWS, 1, 0, STREAM), "one row": ((1, 5000), ONE_SCALE, 1, 0, STREAM),
        "tiles": ((32, 128), -16, 1, TWO_LEVEL, STREAM), "strips": ((2, 4500), 16, 1, 3, STREAM),
        "long rows": ((2, 8500), ROWS, 1, 0, None), "rows in parts": ((70, 600), ROWS, 0, 0, None),
    }[case]  # fmt: skip
    x, constants = spread(shape), format_constants("E4M3", scale_format="E4M3" if rule == TWO_LEVEL else "float32")
    arguments = (x, constants, None, block, dim, rule, torch.bfloat16, stream, 128)
    assert all(map(same, by_kernels(*arguments), quantize_by_tensors(*arguments)))


@interpreted
@pytest.mark.parametrize("block", [ONE_SCALE, ROWS, 16, 32, 5, -16])
def test_what_is_rotated_first_has_the_bits_of_both_definitions(block):
    """Of rows that do not fill the last 16, in either order of memory; rounded to nearest and by chance."""
    rules = [0, 3, *([] if block in (ONE_SCALE, ROWS) else [TWO_LEVEL, FOUR_OVER_SIX])]
    for i, (rule, kind) in enumerate(zip(rules * 2, ["as drawn", "nan", "tiny", "zero", "huge", "inf"], strict=False)):
        constants = format_constants("E2M1", scale_format="E4M3" if rule >= TWO_LEVEL else "float32")
        x, signs = unusual(spread((37, 21), i), kind), signs_on(torch.device("cpu"))
        source, stream = (x.t().contiguous().t().bfloat16(), None) if i % 2 else (x, STREAM)
        arguments = (constants, None, block, 0, rule, torch.bfloat16, stream, 64)
        found = by_kernels(source, *arguments, signs)
        expected = quantize_by_tensors(rotate_by_tensors(source, signs), *arguments)
        assert all(map(same, found, expected)), (rule, kind)


@interpreted
@pytest.mark.parametrize("name", FLOAT8)
def test_float8_is_that_of_torchs_cast(name):
    """By rows and by columns of memory; every value of the format, with NaN, and -0. Blocks keep their scales."""
    x = torch.cat([decode(torch.arange(256), name), torch.tensor([torch.inf, 1e-45, -1e-39, 3e38])])[None]
    x = torch.cat([x, spread((18, 260))])
    constants, one = format_constants(name), format_constants(name)[TARGET].clone()  # scale 1
    kinds = [(ONE_SCALE, 1, None), (ROWS, 1, None), (ROWS, 0, STREAM), (ROWS, 0, None)]
    kinds += [(32, 1, None), (32, 0, STREAM), (5, 0, None), (128, 1, STREAM), (-16, 1, None)]
    for i, (block, dim, stream) in enumerate(kinds):
        known, rule = one if block == ONE_SCALE else None, 3 * (i % 2)
        arguments = (x.bfloat16() if dim else x, constants, known, block, dim, rule, FLOAT8[name], stream, 11)
        found, expected = by_kernels(*arguments, by_columns=dim == 0), quantize_by_tensors(*arguments)
        assert same(found[0].float(), expected[0].float()) and same(found[1], expected[1]), (block, dim)


@interpreted
@pytest.mark.parametrize("rule", [TWO_LEVEL, FOUR_OVER_SIX])
@pytest.mark.parametrize("block", [16, -16])
def test_packed_codes_and_scales_are_those_of_the_definition(block, rule):
    """Of sizes that fill no block, along both dimensions, rotated too; no byte of them is left as it was."""
    constants = format_constants("E2M1", scale_format="E4M3")
    kinds = ["as drawn", "nan", "tiny", "zero", "huge", "inf"]
    for i, (kind, dim) in enumerate(zip(kinds * 2, [0, 1, 1, 0] * 3, strict=True)):
        signs = signs_on(torch.device("cpu")) if dim == 0 and i % 3 == 0 else NOTHING
        x = unusual(spread((37, 45), i), kind)
        x = torch.where(x.isnan(), NAN, x)
        x, stream = (x.t().contiguous().t().bfloat16(), None) if i % 2 else (x, STREAM)
        turned = rotate_by_tensors(x, signs) if signs.numel() > 0 else x
        expected = quantize_by_tensors(turned, constants, None, block, dim, rule, PACKED, stream, 64)
        values, blocks = torch.full_like(expected[0], 0x55), torch.full(expected[2].shape, 0x55).to(torch.uint8)
        options = (constants, None, stream, 64, block, dim, rule)
        scale = launch._quantize(x, signs if signs.numel() else None, values, blocks, *options)
        for found, right in zip((values, scale, blocks), expected, strict=True):
            assert same(found, right), (kind, dim)


@interpreted
@pytest.mark.parametrize("over", [None, 3.7])
@pytest.mark.parametrize(("fmt", "block"), [("E2M1", 16), ("E2M3", 128)])
def test_ms_eden_has_the_bits_of_its_definition(fmt, block, over):
    """Of blocks of zeros, tiny and huge ones, and one with an Inf and a NaN, rows that do not fill the last 128."""
    x, constants, signs = spread((300, 21), 2, 6.0), format_constants(fmt, scale_format="E4M3"), random_signs(STREAM, 1)
    x[:128, 3], x[128:256, 4] = 0, -0.0
    x[:, 5:7] *= torch.tensor([1e-30, 1e4])
    divisor = None if over is None else torch.tensor(over)
    for source, dtype in ((x.t().contiguous().t().bfloat16(), torch.float32), (x, torch.bfloat16)):
        x[3, 1], x[290, 2] = torch.inf, torch.nan  # of the second
        values = torch.empty(384, 21, dtype=dtype)
        scale = launch.ms_eden_into(source, divisor, signs, values, constants, STREAM, 77, block, CLIP, ROOM)
        turned = rotate_by_tensors(source if over is None else source.float() / over, signs)
        expected, of_expected = ms_eden_by_tensors(turned, constants, STREAM, 77, block)
        assert same(values, expected.to(dtype)) and same(scale, of_expected)


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the CPU taken for a GPU: its operators run the kernels in place of the loops."""
    monkeypatch.setattr(launch, "DEVICE", "cpu")
    monkeypatch.setattr(launch, "_failures", [])
    monkeypatch.setattr(operand, "has_loops", lambda t: False)
    for name in ("quantize_into", "quantize_in_place"):
        monkeypatch.setattr(torch.ops.altgrad, name, operand.ON_GPU[name])


def defined(monkeypatch: pytest.MonkeyPatch, *arguments: Any, **options: Any) -> operand.Quantized:
    with monkeypatch.context() as patch:
        patch.setattr(launch, "DEVICE", "cuda")
        return quantize_operand(*arguments, **options)


@interpreted
@pytest.mark.usefixtures("on_a_gpu")
def test_operands_of_a_gpu_are_made_by_kernels(monkeypatch):
    """What a history remembers of each row or of all sets the scale, and it learns; where the tensor is, or beside."""
    constants, x = format_constants("E4M3"), spread((3, 40))
    calls = []
    inner = launch._quantize
    monkeypatch.setattr(launch, "_quantize", lambda *a: calls.append(a) or inner(*a))
    for granularity, learns, history in (
        ("tensor", "each", torch.tensor([0.0, 2.0])), ("tensor", "each", torch.zeros(2)),
        ("tensor", "first", torch.zeros(1)), ("row", "nothing", torch.tensor([[[1.0], [0.0], [9.0]]])),
    ):  # fmt: skip
        assert learns in LEARNS
        options: dict[str, Any] = {"granularity": granularity, "learns": learns, "dtype": torch.float32}
        ours, theirs, own = history.clone(), history.clone(), x.clone()
        expected = defined(monkeypatch, x, constants, theirs, **options)
        found = quantize_operand(own, constants, ours, overwrite=True, **options)
        assert found.values is own and same(own, expected.values) and same(found.scale, expected.scale)
        assert torch.equal(ours, theirs)
    assert len(calls) == 4
    for granularity, dim, step in (("row", 1, (40, 1)), ("row", 0, (1, 3)), ("tensor", 1, (40, 1))):  # as products want
        options = {"granularity": granularity, "dim": dim, "dtype": torch.float8_e4m3fn}
        expected = defined(monkeypatch, x, constants, **options)
        found = quantize_operand(x, constants, **options)
        assert same(found.values, expected.values) and same(found.scale, expected.scale)
        assert found.values.stride() == step


@interpreted
@pytest.mark.usefixtures("on_a_gpu")
def test_kernels_round_to_tables_where_they_can(monkeypatch):
    """To nearest, by the amax, with one level of scales and a look-up. All else takes tensor operations."""
    calls: list[Any] = []
    inner = launch._quantize
    monkeypatch.setattr(launch, "_quantize", lambda *a: calls.append(a) or inner(*a))
    x, rows = spread((64, 40)), {"granularity": "row"}
    for fmt, stream, options, takes in (
        ("POSIT8", None, {}, True), (TABLES[-1], None, rows, True), ("HIF8", None, rows | {"dim": 0}, True),
        ("LNS8", None, {"granularity": "block", "scale_format": "E8M0", "scale_rounding": "even"}, True),
        ("NF4", None, {"granularity": "tile", "history": None}, True),
        ("POSIT8", None, {"history": torch.tensor([3.0]), "learns": "first"}, True),
        ("POSIT8", STREAM, {}, False), ("POSIT8", None, {"statistic": "rms"}, False), (OWN[2], None, {}, False),
        ("POSIT8", None, {"granularity": "block", "block": 16, "scale_format": "E4M3"}, False),
        ("POSIT8", None, {"dtype": torch.float8_e4m3fn}, False),
    ):  # fmt: skip
        calls.clear()
        more: dict[str, Any] = {"dtype": torch.float32, "stream": stream} | options
        constants = format_constants(fmt, scale_format=more.get("scale_format", "float32"))
        expected, found = defined(monkeypatch, x, constants, **more), quantize_operand(x, constants, **more)
        assert same(found.values.float(), expected.values.float()), (fmt, options)
        assert found.scale is None or same(found.scale, expected.scale), (fmt, options)
        assert len(calls) == takes and not launch._failures, (fmt, options)
    constants, signs = format_constants("POSIT8", scale_format="E4M3"), random_signs(STREAM, 0)
    values, _ = ms_eden.rotated_ms_eden(x, None, signs, constants, STREAM, 0, 16, torch.float32)
    assert same(values, ms_eden_by_tensors(rotate_by_tensors(x, signs), constants, STREAM, 0, 16)[0])


@interpreted
@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "traced"])
def test_rotated_operands_of_a_gpu_are_made_by_kernels(monkeypatch, compiled):
    """A graph knows of their shapes, and that they are written to."""
    nvfp4: dict[str, Any] = {"granularity": "block", "block": 16, "dim": 0, "scale_format": "E4M3"}
    packed = nvfp4 | {"dtype": PACKED}
    constants, x, over = format_constants("E2M1", scale_format="E4M3"), spread((37, 20)), torch.tensor(3.7)
    cases = {
        "rotated": lambda: tuple(quantize_operand(x, constants, None, STREAM, rotate=True, **nvfp4)),
        "packed": lambda: tuple(quantize_operand(x, constants, None, STREAM, rotate=True, **packed)),
        "packed rows": lambda: tuple(quantize_operand(x, constants, **(packed | {"dim": 1}))),
        "pair": lambda: ms_eden_pair(x, x.bfloat16(), constants, STREAM, 1, dtype=torch.bfloat16, over=over),
    }
    with torch.library._scoped_library("altgrad", "IMPL") as library:
        library.impl("rotate_and_quantize_into", operand.ON_GPU["rotate_and_quantize_into"], "CPU")
        library.impl("rotated_ms_eden_into", ms_eden._rotated_into, "CPU")
        for name, make in cases.items():
            with monkeypatch.context() as patch:
                patch.setattr(launch, "DEVICE", "cuda")
                expected = make()
            found = (torch.compile(make, backend="aot_eager", fullgraph=True) if compiled else make)()
            pairs = zip(tree_leaves(found), tree_leaves(expected), strict=True)
            assert all(same(a, b) for a, b in pairs) and not launch._failures, name


@interpreted
@pytest.mark.usefixtures("on_a_gpu")
def test_a_kernel_that_fails_says_so_once_and_the_bits_are_the_same(monkeypatch):
    x, constants = spread((3, 40)), format_constants("E4M3")
    expected = defined(monkeypatch, x, constants)

    def has_no_memory(*_: Any) -> Tensor:
        raise torch.OutOfMemoryError("none left")

    def fails(*_: Any) -> Tensor:
        raise RuntimeError("no such instruction")

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):  # a smaller batch may do
        patch.setattr(launch, "_quantize", has_no_memory)
        quantize_operand(x, constants)

    monkeypatch.setattr(launch, "_quantize", fails)
    assert launch.takes_kernels(x, torch.float32, ROWS)
    with pytest.warns(UserWarning, match="not in use, training is slower: no such instruction"):
        found = quantize_operand(x, constants)
    assert same(found.values, expected.values) and not launch.takes_kernels(x, torch.float32, ROWS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert same(quantize_operand(x, constants).values, expected.values)


@interpreted
def test_kernels_are_for_what_they_can_do(monkeypatch):
    x = torch.zeros(2, 3)
    assert not launch.takes_kernels(x, torch.float32, ROWS)  # the CPU has loops
    monkeypatch.setattr(launch, "DEVICE", "cpu")
    for block, takes in ((ONE_SCALE, True), (16, True), (-128, True), (-129, False), (launch.LARGEST + 1, False)):
        assert launch.takes_kernels(x, torch.bfloat16, block) == takes, block
    assert not launch.takes_kernels(x, torch.float16, ROWS)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    takes = [launch.takes_kernels(x, torch.bfloat16, *case) for case in ((ONE_SCALE,), (ONE_SCALE, True), (ROWS,))]
    assert takes == [False, True, True]
