"""The native backend, ``torch._scaled_mm``, against the emulated one and against torchao.

Oracle: each other, and float64 products of the operands. The operands are the same to the bit, so the bounds are
those of rounding analysis: u = 2^-24 for each of the float32 roundings of a sum of n products (Higham 2002,
eq. 3.5) and of the scales, 2^-8 for each rounding to bfloat16, of which the emulated product has up to two on
CPU and the native one has one. torch emulates the operator on CPU; on a GPU the same tests run on its FP8 units.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

from altgrad.config import UserError
from altgrad.formats import get_format
from altgrad.model import LayerRecipe, QuantizedLinear, Recipe, TensorRecipe
from altgrad.model.quantized import native
from altgrad.model.quantized.operand import Operand
from altgrad.numerics.two_level import per_element

E4M3 = get_format("E4M3")
ROWS_OF_128 = TensorRecipe(E4M3, granularity="block", block=128)
TILES_OF_128 = TensorRecipe(E4M3, granularity="tile", block=128)
POWERS = ROWS_OF_128.but(scale="E8M0")
MXFP8 = TensorRecipe(E4M3, granularity="block", scale="E8M0")
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
    weight = TensorRecipe(get_format("E4M3"), granularity=granularity)
    x = TensorRecipe(get_format(forward), granularity=granularity)
    recipe = LayerRecipe(weight, x, TensorRecipe(get_format(grad), granularity=granularity))
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
            a, b = (Operand.of(t, q.scaling, q.source(False), dim, torch.bfloat16) for q in (emulated, native))
            assert b.values.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
            assert torch.equal(a.values.float(), b.values.float()) and torch.equal(a.scale, b.scale)


def test_native_and_torchao_agree():
    from altgrad.model.torchao import torchao_linear

    recipe = Recipe.uniform("E4M3").rules[0].layer
    native = layers(recipe, 48, 32)["native"]
    linear = nn.Linear(48, 32, bias=False)
    linear.weight = nn.Parameter(native.weight.detach().clone())
    found, expected = products(native, 64), products(torchao_linear(linear, LayerRecipe(torchao="tensorwise")), 64)
    magnitude = magnitudes(native, 64)
    for product, value in found.items():
        bound = 2.05 * U_BF16 * expected[product].abs() + 140 * U32 * 1.27 * magnitude[product]
        assert ((value - expected[product]).abs() <= bound).all(), product


def test_eight_bits_are_what_a_native_layer_keeps_for_its_backward_pass():
    kept: list[Tensor] = []
    layer = layers(Recipe.uniform("E4M3").rules[0].layer, 64, 32)["native"]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(torch.randn(16, 64))
    assert {t.dtype for t in kept if t.ndim == 2} == {torch.float8_e4m3fn}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input": None}, "input is not quantized"),
        ({"weight": TensorRecipe(get_format("E3M4"))}, "weight is E3M4"),
        ({"weight": TensorRecipe(get_format("E5M2"))}, "no product of E5M2 and E5M2, which grad and weight both are"),
        ({"grad": TensorRecipe(get_format("E5M2"), granularity="row")}, "one granularity"),
        ({"save": "codes"}, "leave out save codes"),
        ({"weight": MXFP8, "input": MXFP8}, "one granularity"),
        ({"weight": TILES_OF_128, "input": TILES_OF_128, "grad": ROWS_OF_128}, "one granularity"),
        ({"weight": MXFP8.but(scale="float32"), "input": MXFP8, "grad": MXFP8}, "one granularity"),
        ({"weight": MXFP8, "input": MXFP8, "grad": MXFP8.but(format="E5M2")}, "blocks in E4M3 alone; grad is E5M2"),
    ],
)
def test_what_hardware_cannot_multiply_is_refused(changes, message):
    recipe = Recipe.uniform("E4M3").rules[0].layer.but(**changes)
    with pytest.raises(ValueError, match=message):
        recipe.but(backend="native")


# --- blocks: on a CPU torch has no such product, so that one by the definition takes its place ----------------------

OF_BLOCKS = {
    "MXFP8": LayerRecipe(MXFP8, MXFP8, MXFP8),
    "tiles": LayerRecipe(TILES_OF_128, ROWS_OF_128, ROWS_OF_128),
    "rows of 128": LayerRecipe(ROWS_OF_128, ROWS_OF_128, ROWS_OF_128),
    "powers of two": LayerRecipe(TILES_OF_128, POWERS, POWERS),
}


def factors(codes: Tensor, scale: Tensor, kind: ScalingType) -> Tensor:
    """Return the values (n, k) that ``codes`` stand for, float64, by what cuBLAS says of the scales' layout in memory.

    "Scaling Factors Layouts" of its manual; ``scale`` is read by its storage alone.
    """
    (n, k), stored = codes.shape, torch.as_strided(scale, (scale.numel(),), (1,)).double()
    i, j = torch.meshgrid(torch.arange(n), torch.arange(k), indexing="ij")
    if kind == ScalingType.BlockWise1x128:
        at = j // 128 * n + i
    elif kind == ScalingType.BlockWise128x128:
        at = i // 128 * (-(-k // 512) * 4) + j // 128
    else:
        block, tiles = j // 32, -(-k // 128)
        at = (i // 128 * tiles + block // 4) * 512 + i % 32 * 16 + i % 128 // 32 * 4 + block % 4
    return codes.double() * stored[at]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[ScalingType, ScalingType, torch.dtype]]:
    """Have the products of blocks computed by their definition, if torch's own checks for CUDA let them pass."""
    kinds: list[tuple[ScalingType, ScalingType, torch.dtype]] = []

    def product(a: Tensor, b: Tensor, scale_a: Tensor, kind_a: Any, scale_b: Tensor, kind_b: Any, *swizzles: Any,
                output_dtype: torch.dtype) -> Tensor:  # fmt: skip
        kinds.append((kind_a, kind_b, output_dtype))
        swizzle = SwizzleType.SWIZZLE_32_4_4 if kind_a == ScalingType.BlockWise1x32 else SwizzleType.NO_SWIZZLE
        assert swizzles == (swizzle, swizzle)
        with FakeTensorMode():
            on_gpu = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda")
                      for t in (a, b, scale_a, scale_b)]  # fmt: skip
            checked = scaled_mm(on_gpu[0], on_gpu[1], on_gpu[2], kind_a, on_gpu[3], kind_b, *swizzles,
                                output_dtype=output_dtype)  # fmt: skip
        found = (factors(a, scale_a, kind_a) @ factors(b.t(), scale_b, kind_b).t()).to(output_dtype)
        assert found.shape == checked.shape and found.dtype == checked.dtype
        return found

    monkeypatch.setattr(native, "scaled_mm", product)
    monkeypatch.setattr(native, "has_products", lambda *_: True)
    return kinds


@pytest.mark.parametrize("shape", [(256, 640, 384), (150, 200, 130), (5, 300, 3)], ids=["whole", "padded", "tiny"])
@pytest.mark.parametrize("name", OF_BLOCKS)
def test_products_of_blocks_differ_from_emulated_ones_by_their_roundings_alone(calls, name, shape):
    rows, inputs, outputs = shape
    pair = layers(OF_BLOCKS[name], inputs, outputs)
    found, expected = (products(pair[backend], rows) for backend in ("native", "emulated"))
    magnitude = magnitudes(pair["native"], rows)
    for product, value in found.items():
        sums = (2 * max(shape) + 8) * U32 * 1.27 * magnitude[product]
        bound = 3.05 * U_BF16 * expected[product].abs() + sums
        assert ((value - expected[product]).abs() <= bound).all(), product
    if rows > 128:  # else the sum over tokens has one block
        one, tile = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
        second = {"MXFP8": ScalingType.BlockWise1x32, "rows of 128": one}.get(name, tile)
        first = ScalingType.BlockWise1x32 if name == "MXFP8" else one
        assert calls == [*[(first, second, torch.bfloat16)] * 2, (first, first, torch.float32)]


@pytest.mark.parametrize("name", OF_BLOCKS)
def test_codes_over_their_scales_are_the_emulated_operands(name):
    t = torch.randn(150, 300, generator=torch.Generator().manual_seed(3)) * 2.0 ** torch.arange(-60, 60, 0.4)
    emulated, coded = layers(OF_BLOCKS[name], 300, 150).values()
    for role in ("weight", "input", "grad"):
        for dim in (0, 1):
            options = {key: emulated.quantizers[role].scaling.options[key] for key in ("granularity", "block")}
            a, b = (Operand.of(t, q.scaling, q.source(False), dim, torch.float32)
                    for q in (layer.quantizers[role] for layer in (emulated, coded)))  # fmt: skip
            assert b.values.dtype == torch.float8_e4m3fn and b.values.float().abs().max() <= 448
            scale = per_element(b.scale, t.shape, dim=dim, **options)
            assert torch.equal(a.values, (b.values.double() / scale.double()).float())


def test_scales_are_swizzled_as_torchao_does():
    from torchao.prototype.mx_formats.utils import to_blocked

    for n, blocks in ((128, 4), (300, 9), (5, 1)):
        scales = torch.randint(255, (n, blocks), dtype=torch.uint8, generator=torch.Generator().manual_seed(n))
        assert torch.equal(native.swizzled(scales), to_blocked(scales).flatten())


@pytest.mark.parametrize("name", ["MXFP8", "tiles"])
def test_compiled_products_of_blocks_are_those_of_eager_mode(calls, name):
    layer = layers(OF_BLOCKS[name], 200, 130)["native"]
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x, found = torch.randn(150, 200), []
    for call in (layer, compiled):
        layer.weight.grad, own = None, x.clone().requires_grad_()
        y = call(own)
        y.backward(torch.full_like(y, 1e-3) * y.detach())
        found.append((y.detach(), own.grad, layer.weight.grad))
    assert len(calls) == 6 and all(map(torch.equal, *found))


@pytest.mark.parametrize(("name", "where"), [("MXFP8", "10.0 and above .Blackwell."), ("tiles", "9.0 .Hopper.")])
def test_a_device_without_products_of_blocks_says_so(name, where):
    layer = layers(OF_BLOCKS[name], 200, 130)["native"]
    with pytest.raises(UserError, match=f"{where}, and this is a CPU; take backend emulated"):
        layer(torch.randn(150, 200))


def test_which_gpu_has_which_products(monkeypatch):
    """As torch 2.13's ScaledBlas.cpp asks of a device, and torchao of rows."""
    of = {(8, 0): "", (8, 9): "one scale", (9, 0): "one scale, rows, blocks of 128",
          (10, 0): "one scale, rows, MXFP8", (12, 0): "one scale, rows, MXFP8"}  # fmt: skip
    for capability, expected in of.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        found = [scales for scales in native.CAPABILITIES if native.has_products(scales, torch.device("cuda"))]
        assert ", ".join(found) == expected
    assert not native.has_products("rows", torch.device("cpu"))
