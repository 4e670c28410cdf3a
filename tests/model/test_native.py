"""The native backend, ``torch._scaled_mm``, against the emulated one and against torchao.

Oracle: each other, and float64 products of the operands. The operands are the same to the bit, so the bounds are
those of rounding analysis: u = 2^-24 for each of the float32 roundings of a sum of n products (Higham 2002,
eq. 3.5) and of the scales, 2^-8 for each rounding to bfloat16, of which the emulated product has up to two on
CPU and the native one has one. torch emulates the operator on CPU; on a GPU the same tests run on its FP8 units.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from altgrad.formats import get_format
from altgrad.model import LayerRecipe, QuantizedLinear, Recipe, TensorRecipe
from altgrad.model.quantized.operand import Operand

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
    ],
)
def test_what_hardware_cannot_multiply_is_refused(changes, message):
    recipe = Recipe.uniform("E4M3").rules[0].layer.but(**changes)
    with pytest.raises(ValueError, match=message):
        recipe.but(backend="native")
