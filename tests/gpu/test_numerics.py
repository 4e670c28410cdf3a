"""A GPU's roundings, scales and random numbers are the CPU's to the bit, eager and compiled."""

from __future__ import annotations

import warnings
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from altgrad.formats import get_format
from altgrad.model import QuantizedLinear, Recipe
from altgrad.model.hardware import CAPABILITIES, has_products
from altgrad.model.quantized.native import native_product
from altgrad.model.quantized.operand import Operand
from altgrad.numerics import amax, format_constants, quantize, quantize_operand, uniform
from altgrad.numerics import gpu_launch as launch
from altgrad.numerics.constants import FOUR_OVER_SIX, TWO_LEVEL
from altgrad.numerics.ms_eden import ms_eden_pair
from altgrad.numerics.operand import decode_operand, encode_operand, has_loops, quantize_by_operator
from altgrad.numerics.operand_definition import ONE_SCALE, PACKED, ROWS, quantize_by_tensors
from altgrad.numerics.prove import check_decision_points, check_order, rounder
from altgrad.numerics.rounding import ROUNDING_MODES
from altgrad.numerics.scaling import scaling_amax
from altgrad.numerics.two_level import per_element
from tests.model.test_native import OF_BLOCKS
from tests.numerics.numerics_oracles import same

STREAM = torch.tensor([3, 4, 5])
SCALINGS = {
    "tensor": {},
    "row": {"granularity": "row"},
    "MX blocks": {"granularity": "block", "block": 32, "scale_format": "E8M0"},
    "two levels": {"granularity": "block", "block": 16, "scale_format": "E4M3"},
}
COMPILED = [False, True] if torch.cuda.is_available() else [False]  # a graph of a CPU has other tests


def wide() -> Tensor:
    """Return values over many binades, and a row of zeros."""
    x = torch.randn(96, 160, generator=torch.Generator().manual_seed(0)).mul(3.0).exp() - 1
    x[5] = 0.0
    return x


def operands(
    x: Tensor, name: str, scaling: dict[str, Any], dim: int, device: torch.device | str, compiled: bool,
    streams: bool = False, history: Tensor | None = None, dtype: torch.dtype = torch.float32,
) -> list[Tensor]:  # fmt: skip
    """Return the values and, where there is one, the scale and the history after it."""
    constants = format_constants(name, device, scale_format=scaling.get("scale_format", "float32"))
    history = None if history is None else history.clone().to(device)
    stream = torch.tensor([3, 1, 7], device=device) if streams else None

    def run(x: Tensor) -> list[Tensor]:
        options = scaling | {"dim": dim, "dtype": dtype, "learns": "nothing" if history is None else "each"}
        found = quantize_operand(x, constants, history, stream, **options)
        return [found.values] if found.scale is None else [found.values, found.scale]

    found = (torch.compile(run, dynamic=False) if compiled else run)(x.to(device))
    return found if history is None else [*found, history]


@pytest.mark.parametrize("compiled", COMPILED, ids=["eager", "compiled"][: len(COMPILED)])
@pytest.mark.parametrize("streams", [False, True], ids=["nearest", "by chance"])
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_operands_have_the_bits_of_the_cpu(device, formats, scaling, streams, compiled):
    torch._dynamo.reset()
    cases = [(name, dim) for name in (*formats, "E2M1") for dim in (0, 1)]
    history, bfloat16 = {"history": torch.tensor([3.0, 50.0, 0.0])}, {"dtype": torch.bfloat16}
    cases = [(*case, more) for case in cases for more in ({}, *([] if scaling else (history, bfloat16)))]
    for name, dim, more in cases:
        x = wide().to(more.get("dtype", torch.float32))
        found = operands(x, name, scaling, dim, device, compiled, streams, **more)
        expected = operands(x, name, scaling, dim, "cpu", False, streams, **more)
        assert len(found) == len(expected), name
        for a, b in zip(found, expected, strict=True):
            assert same(a.cpu(), b), f"{name}, dim {dim}: {(a.cpu() != b).sum()} of {b.numel()}"


@pytest.mark.parametrize("block", [ONE_SCALE, ROWS, 16, 5, -16, -128])
def test_kernels_have_the_bits_of_tensor_operations_on_the_cpu(device, block):
    """Of odd sizes and unusual elements, with every way to a scale; a CPU rehearses it with its loops."""
    if device.type == "cuda" and find_spec("triton") is None:
        pytest.skip("needs Triton")
    memory = wide()
    memory[::7, ::5], memory[1::9, ::4], memory[2, 3] = 1e-40, -0.0, torch.inf
    rules = [0, 3, 4, *([] if block in (ONE_SCALE, ROWS) else [TWO_LEVEL, FOUR_OVER_SIX])]
    for i, (rule, dim) in enumerate(product(rules, (0, 1))):
        for name, dtypes, stream in (
            ("E4M3", (torch.bfloat16, torch.bfloat16), None), ("E7M0", (torch.float32, torch.float32), None),
            ("E2M1", (torch.float32, torch.bfloat16), torch.tensor([3, 4, 5])),
            ("POSIT8", (torch.bfloat16, torch.bfloat16), None), ("NF4", (torch.float32, torch.float32), None),
        ):  # fmt: skip
            if rule >= TWO_LEVEL and name in ("POSIT8", "NF4"):
                continue  # `quantize_operand` does not start kernels for it
            constants = format_constants(name, scale_format="E4M3" if rule >= TWO_LEVEL else "float32")
            known = torch.tensor(3.0) if i % 2 and block != ROWS else None
            part = slice(None) if i % 3 else slice(1, 158)
            x, there = (t.to(dtypes[0])[:, part] for t in (memory, memory.to(device)))
            if known is not None and device.type == "cuda":  # as `quantize_operand` does before
                known = scaling_amax(known, amax(x))
            given = [None if t is None else t.to(device) for t in (constants, known, stream)]
            assert has_loops(there) if device.type == "cpu" else launch.takes_kernels(there, dtypes[1], block)
            with warnings.catch_warnings():
                warnings.simplefilter("error", UserWarning)  # a kernel that cannot be made says why
                found = quantize_by_operator(there, *given[:2], block, dim, rule, dtypes[1], given[2], 11)
            expected = quantize_by_tensors(x, constants, known, block, dim, rule, dtypes[1], stream, 11)
            assert all(same(a.cpu(), b) for a, b in zip(found, expected, strict=True)), (name, rule, dim)


@pytest.mark.parametrize("compiled", COMPILED, ids=["eager", "compiled"][: len(COMPILED)])
def test_rotated_and_float8_operands_and_ms_eden_have_the_bits_of_the_cpu(device, compiled):
    """Rows that fill no group of 16 or 128, and a transposed tensor; float8 by rows and by columns, and of blocks."""
    torch._dynamo.reset()
    nvfp4: dict[str, Any] = {"granularity": "block", "block": 16, "dim": 0, "scale_format": "E4M3", "rotate": True}

    def made(x: Tensor, two: Tensor, one: Tensor, stream: Tensor) -> list[Tensor | None]:
        over = two[:1].squeeze()  # any scale
        turned = [quantize_operand(x, two, None, draws, **nvfp4) for draws in (None, stream)]
        pair = ms_eden_pair(x.t(), x.t().bfloat16(), two, stream, 1, dtype=torch.bfloat16, over=over)
        kinds = ({"granularity": "row"}, {"granularity": "block", "scale_format": "E8M0"},
                 {"granularity": "tile", "block": 128})  # fmt: skip
        packed = [
            quantize_operand(x, two, **(nvfp4 | {"dtype": PACKED, "granularity": kind} | along))
            for along in ({}, {"dim": 1, "rotate": False}) for kind in ("block", "tile")
        ]  # fmt: skip
        rows = [
            quantize_operand(x, one, dim=dim, dtype=torch.float8_e4m3fn, **kind)
            for kind in kinds for dim in (0, 1)
        ]  # fmt: skip
        return [t for found in (*turned, *pair, *rows, *packed) for t in found]

    given = [wide()[:90], format_constants("E2M1", scale_format="E4M3"), format_constants("E4M3"), STREAM]
    found = (torch.compile(made, dynamic=False) if compiled else made)(*(t.to(device) for t in given))
    assert not launch._failures
    for i, (a, b) in enumerate(zip(found, made(*given), strict=True)):
        assert same(a.cpu(), b), i


@pytest.mark.parametrize("scales", CAPABILITIES)
def test_products_by_fp8_units_are_those_of_codes_and_scales(device, scales):
    """But for the sum, whose bits a unit leaves off: 14 of Hopper's stay, says DeepSeek-V3 (arXiv:2412.19437)."""
    of_blocks = {"blocks of 128": OF_BLOCKS["tiles"], "MXFP8": OF_BLOCKS["MXFP8"], "NVFP4": OF_BLOCKS["NVFP4"]}
    if not has_products(scales, device) and (device.type == "cuda" or scales in of_blocks):
        pytest.skip(f"no products of {scales} on this {device.type}")
    granularity = "tensor" if scales == "one scale" else "row"
    uniform = Recipe.uniform("E4M3", granularity=granularity).rules[0].layer
    recipe = of_blocks.get(scales, uniform).but(backend="native")
    x, w = (torch.randn(n, 900, generator=torch.Generator().manual_seed(n)).to(device) for n in (200, 300))
    layer, factors, values = QuantizedLinear(nn.Parameter(w), None, recipe), [], []
    for role, t in (("input", x), ("weight", w)):
        quantizer = layer.quantizers[role]
        factors.append(operand := Operand.of(t, quantizer.scaling, quantizer.state(False), 1, torch.bfloat16))
        kind, scale = recipe.tensors()[role], operand.scale.double()
        if scales == "NVFP4":
            plain = Operand.of(t, replace(quantizer.scaling, hardware=None), quantizer.state(False), 1, torch.float32)
            values.append(plain.values.double() / scale)
            continue
        if kind.keeps_scales:
            scale = per_element(scale, t.shape, granularity=kind.granularity, block=kind.block, dim=1)
        values.append(operand.values.double() / scale)
        assert (values[-1] - t).abs().max() < 0.3
    found = native_product(factors[0], factors[1].t(), torch.float32)
    off = (found - values[0] @ values[1].t()).abs()
    rounded = 2**-8 * found.abs() if scales == "rows" else 0
    assert (off <= 2**-10 * (values[0].abs() @ values[1].abs().t()) + rounded).all()


def test_codes_are_the_same_bytes(device, formats):
    for name in formats:
        constants = format_constants(name)
        values = quantize_operand(wide(), constants, dtype=torch.float32).values
        expected = encode_operand(values, constants)
        found = encode_operand(values.to(device), constants.to(device))
        assert torch.equal(found.cpu(), expected), name
        decoded = decode_operand(found, constants.to(device)).cpu()
        assert same(decoded, decode_operand(expected, constants)), name


@pytest.mark.parametrize("mode", ROUNDING_MODES)
def test_every_mode_has_the_bits_of_the_cpu(device, formats, mode):
    x = torch.cat([wide().flatten(), torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan")])])
    for name in formats:
        for overflow in ("saturate", "overflow"):
            options = [
                {"rounding": mode, "overflow": overflow}
                | ({"generator": torch.Generator().manual_seed(1)} if mode == "stochastic" else {})
                for _ in range(2)
            ]
            found = quantize(x.to(device), name, **options[0]).cpu()
            assert same(found, quantize(x, name, **options[1])), (name, overflow)


def test_random_numbers_are_a_function_of_their_place_alone(device):
    stream = torch.tensor([5, 2, 9])
    draw = lambda which: uniform(torch.Size((700, 130)), which, first=77)  # noqa: E731 # twice, and compiled
    expected = draw(stream)
    for compiled in COMPILED:
        assert torch.equal((torch.compile(draw) if compiled else draw)(stream.to(device)).cpu(), expected)


@pytest.mark.parametrize("path", ["eager", "kernels", "compiled"][: 1 + len(COMPILED)])
def test_rounding_is_right_around_every_decision(device, formats, path):
    """The proof, of which ``python -m altgrad.numerics.prove --device cuda`` does the whole."""
    around_one = range(0x3F7F0000, 0x3F810000)
    for name in formats:
        fmt = get_format(name)
        round_ = rounder(fmt, "nearest-even", "saturate", path, device)
        points, wrong = check_decision_points(round_, fmt, "nearest-even", "saturate", device)
        assert points and not wrong
        assert check_order(round_, fmt, around_one, device=device) == (2 * len(around_one), []), name
