"""Where our layer and torchao's do the same, and by how much they may differ where they do not.

Oracle: torchao 0.18 itself, its casts for the operands and its emulated products for the results. Operands are
compared as codes, so to the bit. Results are compared with the bounds of rounding analysis, u = 2^-24 in
float32: a sum of n products in any order is within n u of the sum of magnitudes (Higham 2002, eq. 3.5);
torchao divides both operands by their scales first (2 u more), we scale the sum (2 u). Where results are
bfloat16, each rounding to it adds 2^-8 of the result: one in torchao, up to two in ours.

Two differences are known, and each has a test of its own here:

- torchao takes the floor of a float32 log2 to round scales to powers of two, and log2 rounds up just below one:
  up to 19 ulps above 1.75 x 2^k, an amax gets twice our scale. bfloat16 tensors never have such an amax.
- torchao clamps amax at 1e-12 and lets Inf and NaN through; our scale of a zero, Inf or NaN is 1.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from altgrad.formats import get_format
from altgrad.model import LayerRecipe, QuantizedLinear, Recipe, TensorRecipe
from altgrad.model.torchao import torchao_linear
from altgrad.numerics import amax, compute_scale, encode, quantize

DTYPES = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}
ROWS, INPUTS, OUTPUTS = 64, 48, 32
U32, U_BF16 = 2.0**-24, 2.0**-8
FP32_SUMS = 2 * max(ROWS, INPUTS, OUTPUTS) + 4  # in u; two sums, four roundings


def normal(*shape: int, seed: int, std: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    return (std * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def torchao_cast(x: Tensor, format: str, dim: int | None, rounded: bool) -> tuple[Tensor, Tensor]:
    """Return torchao's scale and codes (uint8) of x; dim is what the product sums over, None for one scale."""
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig

    granularity = ScalingGranularity.TENSORWISE if dim is None else ScalingGranularity.AXISWISE
    cast = hp_tensor_to_float8_dynamic(
        x, DTYPES[format], LinearMMConfig(), scaling_granularity=granularity, axiswise_dim=dim,
        round_scales_to_power_of_2=rounded,
    )  # fmt: skip
    return cast._scale, cast._data.view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("rounded", [False, True], ids=["float32-scale", "E8M0-scale"])
@pytest.mark.parametrize("dim", [None, 0, -1])
@pytest.mark.parametrize("format", DTYPES)
def test_operands_are_the_same_to_the_bit(format, dim, rounded, dtype):
    for seed, std in enumerate([1e-9, 1e-3, 1.0, 1e6]):
        x = normal(96, 80, seed=seed, std=std, dtype=dtype)
        x[0, :3] = torch.tensor([0.0, -0.0, 1e-3 * std], dtype=dtype)
        largest = amax(x) if dim is None else amax(x, "row", dim=dim)
        scale = compute_scale(largest, torch.finfo(DTYPES[format]).max, scale_format="E8M0" if rounded else "float32")
        their_scale, their_codes = torchao_cast(x, format, dim, rounded)
        assert torch.equal(scale, their_scale)
        assert torch.equal(encode(quantize(x.float() * scale, format), format).to(torch.uint8), their_codes)


def pair(recipe: LayerRecipe, torchao: str) -> tuple[QuantizedLinear, nn.Module]:
    """Return our layer and torchao's, with equal weights of their own."""
    weight = normal(OUTPUTS, INPUTS, seed=1, std=0.02)
    ours = QuantizedLinear(nn.Parameter(weight.clone()), None, recipe)
    linear = nn.Linear(INPUTS, OUTPUTS, bias=False)
    linear.weight = nn.Parameter(weight.clone())
    return ours, torchao_linear(linear, LayerRecipe(torchao=torchao))


def products(layer: nn.Module, bf16: bool) -> dict[str, Tensor]:
    """Return output and both gradients, for a bfloat16 input under autocast or for a float32 one without."""
    dtype = torch.bfloat16 if bf16 else torch.float32
    x = normal(2, ROWS // 2, INPUTS, seed=2, dtype=dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        y = layer(x)
    y.backward(normal(*y.shape, seed=3, std=1e-6, dtype=dtype))
    return {"y": y.detach().flatten(0, 1), "dx": x.grad.flatten(0, 1), "dw": layer.weight.grad}


def magnitudes(layer: QuantizedLinear) -> dict[str, Tensor]:
    """Return the products of the absolute factors, which float32 sums are accurate to."""
    factors = copy_without_quantization(layer)
    x = normal(ROWS, INPUTS, seed=2).abs().requires_grad_()
    y = x @ factors.t()
    y.backward(normal(2, ROWS // 2, OUTPUTS, seed=3, std=1e-6).flatten(0, 1).abs())
    return {"y": y.detach(), "dx": x.grad, "dw": factors.grad}


def copy_without_quantization(layer: QuantizedLinear) -> Tensor:
    return layer.weight.detach().abs().clone().requires_grad_()


UNIFORM = Recipe.uniform("E4M3").rules[0].layer
ROW = TensorRecipe(format=get_format("E4M3"), granularity="row", scale="E8M0")
CASES = {"tensorwise": UNIFORM, "rowwise": LayerRecipe(weight=ROW, input=ROW, grad=ROW)}


@pytest.mark.parametrize("name", CASES)
def test_float32_results_differ_by_the_roundings_of_the_sums_alone(name):
    """A single operand on another rung would differ by 2^-4 of its products, 10^4 times the bound."""
    ours, theirs = pair(CASES[name].but(accumulate="float32"), name)
    found, expected, magnitude = products(ours, False), products(theirs, False), magnitudes(ours)
    for product, value in found.items():
        assert value.dtype == expected[product].dtype == torch.float32
        # Rounding to 8 bits makes a factor larger by 2^-3 at most.
        bound = FP32_SUMS * U32 * 1.27 * magnitude[product]
        assert ((value - expected[product]).abs() <= bound).all(), product


@pytest.mark.parametrize("name", CASES)
def test_bf16_results_differ_by_three_roundings(name):
    ours, theirs = pair(CASES[name], name)
    found, expected, magnitude = products(ours, True), products(theirs, True), magnitudes(ours)
    assert found["y"].dtype == expected["y"].dtype == torch.bfloat16
    for product, value in found.items():
        bound = 3.05 * U_BF16 * expected[product].abs() + FP32_SUMS * U32 * 1.27 * magnitude[product]
        assert ((value.float() - expected[product].float()).abs() <= bound).all(), product


def test_rowwise_with_gw_hp_quantizes_two_of_the_three_products():
    """Forward as rowwise; one scale for the weight against the gradient; the weight's gradient not quantized."""
    _, theirs = pair(CASES["rowwise"], "rowwise_with_gw_hp")
    _, rowwise = pair(CASES["rowwise"], "rowwise")
    found = products(theirs, False)
    assert torch.equal(found["y"], products(rowwise, False)["y"])
    x, g = normal(ROWS, INPUTS, seed=2), normal(2, ROWS // 2, OUTPUTS, seed=3, std=1e-6).flatten(0, 1)
    torch.testing.assert_close(found["dw"], g.t() @ x, rtol=0, atol=FP32_SUMS * U32 * (g.abs().t() @ x.abs()).max())
    fmt, weight = get_format("E4M3"), theirs.weight.detach()
    factors = []
    for t, granularity in ((g, "row"), (weight, "tensor")):
        scale = compute_scale(amax(t, granularity), fmt, scale_format="E8M0")
        factors.append(quantize(t * scale, fmt) / scale)
    g_q, w_q = factors
    bound = FP32_SUMS * U32 * (g_q.abs() @ w_q.abs())
    assert ((found["dx"] - g_q @ w_q).abs() <= bound).all()


# --- the known differences ---------------------------------------------------------------------------


def test_scales_rounded_to_powers_of_two_differ_just_above_seven_quarters_of_one():
    from torchao.float8.float8_utils import amax_to_scale

    seven_quarters = 1.75 * torch.exp2(torch.arange(-35.0, 30.0))
    offsets = torch.arange(-64, 65, dtype=torch.int32)
    largest = (seven_quarters.view(torch.int32)[None] + offsets[:, None]).view(torch.float32)
    ratio = amax_to_scale(largest, torch.float8_e4m3fn, True) / compute_scale(largest, "E4M3", scale_format="E8M0")
    differ = offsets[(ratio != 1).any(dim=1)]
    assert differ.min() == 1 and differ.max() == 19 and set(ratio.unique().tolist()) == {1.0, 2.0}
    # Nothing is lost by it: what exceeds the largest value does so by less than half a step, and rounds to it.
    assert (largest[1:] * amax_to_scale(largest[1:], torch.float8_e4m3fn, True)).max() < 448 * (1 + 2.0**-18)


def test_every_bfloat16_amax_gives_the_same_power_of_two():
    from torchao.float8.float8_utils import amax_to_scale

    largest = torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    largest = largest[(largest >= 1e-12) & (largest < 1e30)]
    for rounded in (False, True):
        theirs = amax_to_scale(largest, torch.float8_e4m3fn, rounded)
        assert torch.equal(theirs, compute_scale(largest, "E4M3", scale_format="E8M0" if rounded else "float32"))


def test_degenerate_tensors_get_other_scales():
    from torchao.float8.float8_utils import amax_to_scale

    largest = torch.tensor([0.0, 1e-13, torch.inf, torch.nan])
    theirs, ours = amax_to_scale(largest, torch.float8_e4m3fn), compute_scale(largest, "E4M3")
    assert theirs[:2].tolist() == [pytest.approx(448e12)] * 2 and theirs[2] == 0 and theirs[3].isnan()
    assert ours[0] == 1 and ours[2:].isnan().all() and ours[1].item() == pytest.approx(448e13)
