"""The native backend, ``torch._scaled_mm``, against the emulated one.

Oracle: each other, and float64 products of the operands. The operands are the same to the bit, so the bounds are
those of rounding analysis: u = 2^-24 for each of the float32 roundings of a sum of n products (Higham 2002,
eq. 3.5) and of the scales, 2^-8 for each rounding to bfloat16, of which the emulated product has up to two on
CPU and the native one has one. torch emulates the operator on CPU; on a GPU the same tests run on its FP8 units.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

from altgrad.config import UserError
from altgrad.formats import get_format
from altgrad.model import LayerRecipe, QuantizedLinear, Recipe, TensorRecipe, hardware
from altgrad.model.quantized import native
from altgrad.model.quantized.operand import Operand
from altgrad.numerics import decode, format_constants, quantize_operand, rotate_rows
from altgrad.numerics.operand_definition import PACKED
from altgrad.numerics.two_level import per_element

E4M3 = get_format("E4M3")
ROWS_OF_128 = TensorRecipe(format=E4M3, granularity="block", block=128)
TILES_OF_128 = TensorRecipe(format=E4M3, granularity="tile", block=128)
POWERS = ROWS_OF_128.but(scale="E8M0")
MXFP8 = TensorRecipe(format=E4M3, granularity="block", scale="E8M0")
NVFP4 = TensorRecipe(format=get_format("E2M1"), granularity="block", block=16, scale="E4M3")
FOUR_OVER_SIX, NVFP4_TILES = NVFP4.but(scale_rounding="4/6"), NVFP4.but(granularity="tile")
U32, U_BF16 = 2.0**-24, 2.0**-8


def layers(recipe: LayerRecipe, inputs: int, outputs: int) -> dict[str, QuantizedLinear]:
    weight = 0.02 * torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(1))
    return {
        backend: QuantizedLinear(nn.Parameter(weight.clone()), None, recipe.but(backend=backend))
        for backend in ("emulated", "native")
    }


def products(layer: QuantizedLinear, rows: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(rows, layer.in_features, generator=generator).bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    y.backward(1e-6 * torch.randn(rows, layer.out_features, generator=generator).to(y.dtype))
    return {"y": y.detach().float(), "dx": x.grad.float(), "dw": layer.weight.grad}


def magnitudes(layer: QuantizedLinear, rows: int) -> dict[str, Tensor]:
    """Return the products of absolute factors, which float32 sums are accurate to."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(rows, layer.in_features, generator=generator).bfloat16().float().abs()
    g = 1e-6 * torch.randn(rows, layer.out_features, generator=generator).abs()
    w = layer.weight.detach().abs()
    return {"y": x @ w.t(), "dx": g @ w, "dw": g.t() @ x}


@pytest.mark.parametrize("formats", [("E4M3", "E5M2"), ("E4M3", "E4M3"), ("E5M2", "E4M3")], ids="-".join)
@pytest.mark.parametrize("granularity", ["tensor", "row"])
@pytest.mark.parametrize("shape", [(64, 48, 32), (50, 40, 24), (7, 3, 5)], ids=["whole", "padded", "tiny"])
def test_native_and_emulated_products_differ_by_their_roundings_alone(shape, granularity, formats):
    rows, inputs, outputs = shape
    forward, grad = formats
    weight = TensorRecipe(format=get_format("E4M3"), granularity=granularity)
    x = TensorRecipe(format=get_format(forward), granularity=granularity)
    recipe = LayerRecipe(weight=weight, input=x, grad=TensorRecipe(format=get_format(grad), granularity=granularity))
    pair = layers(recipe, inputs, outputs)
    found, expected = (products(pair[backend], rows) for backend in ("native", "emulated"))
    magnitude = magnitudes(pair["native"], rows)
    for product, value in found.items():
        sums = (2 * max(shape) + 8) * U32 * 1.27 * magnitude[product]  # rounding to 8 bits adds 2^-3 at most
        bound = 3.05 * U_BF16 * expected[product].abs() + sums
        assert ((value - expected[product]).abs() <= bound).all(), product


@pytest.mark.parametrize("granularity", ["tensor", "row"])
def test_native_operands_are_the_emulated_ones_to_the_bit(granularity):
    recipe = Recipe.uniform("E4M3", granularity=granularity).rules[0].layer
    t = torch.randn(33, 47)
    for role in ("weight", "input", "grad"):
        emulated, native = (
            layer.quantizers[role] for layer in layers(recipe, 47, 33).values()
        )  # in the order emulated, native
        for dim in (0, 1):
            a, b = (Operand.of(t, q.scaling, q.state(False), dim, torch.bfloat16) for q in (emulated, native))
            assert b.values.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
            assert torch.equal(a.values.float(), b.values.float()) and torch.equal(a.scale, b.scale)


def test_rotated_operands_are_multiplied_too():
    pair = layers(Recipe.uniform("E4M3").rules[0].layer.but(hadamard=16), 48, 32)
    found, expected = (products(pair[backend], 50)["dw"] for backend in ("native", "emulated"))
    generator = torch.Generator().manual_seed(2)
    x, g = (rotate_rows(torch.randn(50, size, generator=generator)).abs() for size in (48, 32))
    bound = 3.05 * U_BF16 * expected.abs() + 136 * U32 * 1.27 * 1e-6 * (g.t() @ x)
    assert ((found - expected).abs() <= bound).all()


def test_eight_bits_are_what_a_native_layer_keeps_for_its_backward_pass():
    kept: list[Tensor] = []
    layer = layers(Recipe.uniform("E4M3").rules[0].layer, 64, 32)["native"]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(torch.randn(16, 64))
    assert {t.dtype for t in kept if t.ndim == 2 and t is not layer.weight} == {torch.float8_e4m3fn}


# --- blocks: on a CPU torch has no such product, so that one by the definition takes its place ----------------------

OF_BLOCKS = {
    "MXFP8": LayerRecipe(weight=MXFP8, input=MXFP8, grad=MXFP8),
    "tiles": LayerRecipe(weight=TILES_OF_128, input=ROWS_OF_128, grad=ROWS_OF_128),
    "rows of 128": LayerRecipe(weight=ROWS_OF_128, input=ROWS_OF_128, grad=ROWS_OF_128),
    "powers of two": LayerRecipe(weight=TILES_OF_128, input=POWERS, grad=POWERS),
    "NVFP4": LayerRecipe(weight=NVFP4, input=NVFP4, grad=NVFP4),
    "NVFP4 as published": LayerRecipe(
        weight=NVFP4_TILES, input=FOUR_OVER_SIX, grad=NVFP4.but(rounding="stochastic"), hadamard=16
    ),
}


def factors(codes: Tensor, scale: Tensor, kind: ScalingType) -> Tensor:
    """Return the values (n, k) that ``codes`` stand for, float64, by what cuBLAS says of the scales' layout in memory.

    "Scaling Factors Layouts" of its manual; ``scale`` is read by its storage alone.
    """
    stored = torch.as_strided(scale, (scale.numel(),), (1,)).double()
    if kind == ScalingType.BlockWise1x16:  # two elements in a byte, the first in its lower bits
        memory = torch.as_strided(codes.view(torch.uint8), codes.shape, (codes.shape[1], 1))
        codes = decode(torch.stack([memory & 15, memory >> 4], dim=2).flatten(1), "E2M1")
    n, k = codes.shape
    i, j = torch.meshgrid(torch.arange(n), torch.arange(k), indexing="ij")
    if kind == ScalingType.BlockWise1x128:
        at = j // 128 * n + i
    elif kind == ScalingType.BlockWise128x128:
        at = i // 128 * (-(-k // 512) * 4) + j // 128
    else:
        size = 16 if kind == ScalingType.BlockWise1x16 else 32
        block, tiles = j // size, -(-k // (4 * size))
        at = (i // 128 * tiles + block // 4) * 512 + i % 32 * 16 + i % 128 // 32 * 4 + block % 4
    return codes.double() * stored[at]


class Calls(NamedTuple):
    """The products that were asked for: kinds of scales and dtypes, and the products of the factors' magnitudes."""

    kinds: list[tuple[ScalingType, ScalingType, torch.dtype]]
    magnitudes: list[Tensor]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Have the products of blocks computed by their definition, if torch's own checks for CUDA let them pass."""
    made = Calls([], [])

    def product(a: Tensor, b: Tensor, scales_a: list[Tensor], kinds_a: Any, scales_b: list[Tensor], kinds_b: Any,
                *swizzles: Any, output_dtype: torch.dtype) -> Tensor:  # fmt: skip
        made.kinds.append((kinds_a[0], kinds_b[0], output_dtype))
        mx, nv = ScalingType.BlockWise1x32, ScalingType.BlockWise1x16
        swizzle = [SwizzleType.SWIZZLE_32_4_4 if kinds_a[0] in (mx, nv) else SwizzleType.NO_SWIZZLE]
        swizzle += [SwizzleType.NO_SWIZZLE] * (kinds_a[0] == nv)
        assert swizzles == (swizzle, swizzle)
        assert kinds_a[1:] == kinds_b[1:] == [ScalingType.TensorWise] * (kinds_a[0] == nv)
        with FakeTensorMode():
            on_gpu = [[torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda") for t in each]
                      for each in ((a, b), scales_a, scales_b)]  # fmt: skip
            checked = scaled_mm(*on_gpu[0], on_gpu[1], kinds_a, on_gpu[2], kinds_b, *swizzles,
                                output_dtype=output_dtype)  # fmt: skip
        left, right = factors(a, scales_a[0], kinds_a[0]), factors(b.t(), scales_b[0], kinds_b[0]).t()
        for of_tensor in (*scales_a[1:], *scales_b[1:]):
            left = left * of_tensor.double()
        found = left @ right
        made.magnitudes.append(left.abs() @ right.abs())
        assert found.shape == checked.shape and output_dtype == checked.dtype
        return found.to(output_dtype)

    monkeypatch.setattr(native, "scaled_mm", product)
    monkeypatch.setattr(native, "has_products", lambda *_: True)
    return made


@pytest.mark.parametrize("shape", [(256, 640, 384), (150, 200, 130), (5, 300, 3)], ids=["whole", "padded", "tiny"])
@pytest.mark.parametrize("name", OF_BLOCKS)
def test_products_of_blocks_differ_from_emulated_ones_by_their_roundings_alone(calls, name, shape):
    rows, inputs, outputs = shape
    pair = layers(OF_BLOCKS[name], inputs, outputs)
    found, expected = (products(pair[backend], rows) for backend in ("native", "emulated"))
    # A sum of one block has a scale per row and column, which other units have.
    magnitude = magnitudes(pair["native"], rows) | dict(zip(found, calls.magnitudes, strict=False))
    for product, value in found.items():
        sums = (2 * max(shape) + 8) * U32 * 1.27 * magnitude[product][: value.shape[0], : value.shape[1]]
        bound = 3.05 * U_BF16 * expected[product].abs() + sums
        assert ((value - expected[product]).abs() <= bound).all(), product
    if rows > 128:  # else the sum over tokens has one block
        one, tile = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
        mx, nv = ScalingType.BlockWise1x32, ScalingType.BlockWise1x16
        second = {"MXFP8": mx, "rows of 128": one, "NVFP4": nv, "NVFP4 as published": nv}.get(name, tile)
        first = second if second in (mx, nv) else one
        assert calls.kinds == [*[(first, second, torch.bfloat16)] * 2, (first, first, torch.float32)]


@pytest.mark.parametrize("name", [name for name in OF_BLOCKS if "NVFP4" not in name])
def test_codes_over_their_scales_are_the_emulated_operands(name):
    t = torch.randn(150, 300, generator=torch.Generator().manual_seed(3)) * 2.0 ** torch.arange(-60, 60, 0.4)
    emulated, coded = layers(OF_BLOCKS[name], 300, 150).values()
    for role in ("weight", "input", "grad"):
        for dim in (0, 1):
            options = {key: emulated.quantizers[role].scaling.options[key] for key in ("granularity", "block")}
            a, b = (Operand.of(t, q.scaling, q.state(False), dim, torch.float32)
                    for q in (layer.quantizers[role] for layer in (emulated, coded)))  # fmt: skip
            assert b.values.dtype == torch.float8_e4m3fn and b.values.float().abs().max() <= 448
            scale = per_element(b.scale, t.shape, dim=dim, **options)
            assert torch.equal(a.values, (b.values.double() / scale.double()).float())


@pytest.mark.parametrize("granularity", ["block", "tile"])
@pytest.mark.parametrize("rounding", ["rceil", "4/6"])
def test_packed_codes_times_their_scales_are_the_emulated_operands(granularity, rounding):
    """Along both dimensions, of sizes that fill no block; with a NaN or Inf all scales are NaN, which E2M1 has not."""
    t = torch.randn(37, 83, generator=torch.Generator().manual_seed(3)) * 2.0 ** torch.arange(-60, 60, 1.45)
    t[20, 30:], t[1, 1] = 0.0, -0.0
    constants = format_constants("E2M1", scale_format="E4M3")
    options = {"granularity": granularity, "block": 16, "scale_format": "E4M3", "scale_rounding": rounding}
    for dim in (0, 1):
        plain, packed = (
            quantize_operand(t, constants, dim=dim, dtype=dtype, **options) for dtype in (torch.float32, PACKED)
        )
        along = packed.values if dim else packed.values.t()
        assert along.is_contiguous() and torch.equal(plain.scale, packed.scale)
        codes = torch.stack([along & 15, along >> 4], dim=2).flatten(1)
        values = decode(codes, "E2M1") if dim else decode(codes, "E2M1").t()
        scales = packed.blocks.view(torch.float8_e4m3fn).float()
        scales = per_element(scales, t.shape, granularity=granularity, block=16, dim=dim)
        assert torch.equal(values[:37, :83] * scales, plain.values)
        for unusual in (torch.inf, torch.nan):
            damaged = t.clone()
            damaged[30, 7] = unusual
            packed = quantize_operand(damaged, constants, dim=dim, dtype=PACKED, **options)
            assert packed.scale.isnan() and (packed.blocks & 0x7F == 0x7F).all()


@pytest.mark.parametrize("name", ["MXFP8", "tiles", "NVFP4", "NVFP4 as published"])
def test_compiled_products_of_blocks_are_those_of_eager_mode(calls, name):
    layer = layers(OF_BLOCKS[name], 200, 130)["native"]
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x, found = torch.randn(150, 200), []
    for call in (layer, compiled):
        layer.weight.grad, own = None, x.clone().requires_grad_()
        layer.quantizers["grad"].count_from(1, 2)
        y = call(own)
        y.backward(torch.full_like(y, 1e-3) * y.detach())
        found.append((y.detach(), own.grad, layer.weight.grad))
    assert len(calls.kinds) == 6 and all(map(torch.equal, *found))


@pytest.mark.parametrize(("name", "where"), [
    ("MXFP8", "10.0 and above .Blackwell."), ("NVFP4", "10.0 and above .Blackwell."), ("tiles", "9.0 .Hopper."),
])  # fmt: skip
def test_a_device_without_products_of_blocks_says_so(name, where):
    layer = layers(OF_BLOCKS[name], 200, 130)["native"]
    with pytest.raises(UserError, match=f"{where}, and this is a CPU; take backend emulated"):
        layer(torch.randn(150, 200))


def test_which_gpu_has_which_products(monkeypatch):
    """As torch 2.13's ScaledBlas.cpp asks of a device, and torchao of rows."""
    of = {(8, 0): "", (8, 9): "one scale", (9, 0): "one scale, rows, blocks of 128",
          (10, 0): "one scale, rows, MXFP8, NVFP4", (12, 0): "one scale, rows, MXFP8, NVFP4"}  # fmt: skip
    for capability, expected in of.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        found = [scales for scales in hardware.CAPABILITIES if hardware.has_products(scales, torch.device("cuda"))]
        assert ", ".join(found) == expected
    assert not hardware.has_products("rows", torch.device("cpu"))
