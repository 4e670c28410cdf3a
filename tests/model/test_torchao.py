"""torchao's layers as baselines: what surgery does with them, and where they agree with ours.

Oracle: torchao 0.18 itself, its casts for the operands and its emulated products for the results. Operands are
compared as codes, so to the bit. Results are compared with the bounds of rounding analysis, u = 2^-24 in
float32: a sum of n products in any order is within n u of the sum of magnitudes (Higham 2002, eq. 3.5);
torchao divides both operands by their scales first (2 u more), we scale the sum (2 u). Where results are
bfloat16, each rounding to it adds 2^-8 of the result: one in torchao, up to two in ours.

Not compared: torchao's floor of a float32 log2 gives a float32 amax up to 19 ulps above 1.75 x 2^k twice our scale,
which no bfloat16 tensor has; it clamps amax at 1e-12, and our scale of a zero is 1.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from altgrad.config.recipe import TORCHAO_RECIPES
from altgrad.formats import get_format
from altgrad.model import (
    GPT,
    GPTConfig,
    LayerRecipe,
    QuantizedLinear,
    Recipe,
    TensorRecipe,
    layer_recipe,
    linear_layers,
    quantize_model,
)
from altgrad.model.torchao import tensor_recipes, torchao_linear
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
    factors = layer.weight.detach().abs().clone().requires_grad_()
    x = normal(ROWS, INPUTS, seed=2).abs().requires_grad_()
    y = x @ factors.t()
    y.backward(normal(2, ROWS // 2, OUTPUTS, seed=3, std=1e-6).flatten(0, 1).abs())
    return {"y": y.detach(), "dx": x.grad, "dw": factors.grad}


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


def test_every_bfloat16_amax_gives_the_same_power_of_two():
    from torchao.float8.float8_utils import amax_to_scale

    largest = torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    largest = largest[(largest >= 1e-12) & (largest < 1e30)]
    for rounded in (False, True):
        theirs = amax_to_scale(largest, torch.float8_e4m3fn, rounded)
        assert torch.equal(theirs, compute_scale(largest, "E4M3", scale_format="E8M0" if rounded else "float32"))


# --- surgery ---------------------------------------------------------------------------------------

CONFIG = GPTConfig(vocab_size=97, layers=1, width=32, heads=2, context=16)


def blocks(name: str) -> Recipe:
    return Recipe(rules=(LayerRecipe(torchao=name).on("blocks.*"),))


def model() -> GPT:
    torch.manual_seed(0)
    return GPT(CONFIG)


def loss_of(gpt: GPT, autocast: bool = True) -> torch.Tensor:
    tokens = torch.randint(0, 97, (4, 17), generator=torch.Generator().manual_seed(5))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return gpt(tokens[:, :-1], tokens[:, 1:])


@pytest.mark.parametrize("name", TORCHAO_RECIPES)
def test_torchao_gets_the_matched_layers_with_their_parameters(name):
    gpt = model()
    parameters, head, states = dict(gpt.named_parameters()), gpt.head, set(gpt.state_dict())
    quantize_model(gpt.eval(), blocks(name))
    assert dict(gpt.named_parameters()) == parameters and set(gpt.state_dict()) == states
    assert gpt.head is head and gpt.head.weight is gpt.tokens.weight and layer_recipe(head) is None
    layers = linear_layers(gpt)
    assert set(layers) == set(linear_layers(model()))
    changed = [layer for layer_name, layer in layers.items() if layer_name != "head"]
    assert all(type(layer).__name__ == "Float8Linear" and not layer.training for layer in changed)
    assert all(layer_recipe(layer) == LayerRecipe(torchao=name) for layer in changed)
    for autocast in (True, False):
        loss_of(gpt.train(), autocast).backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in gpt.parameters())


def test_torchao_and_our_layers_share_a_model():
    e3m4 = LayerRecipe(weight=TensorRecipe(format=get_format("E3M4")))
    gpt = quantize_model(model(), Recipe(rules=(*blocks("rowwise").rules, e3m4.on("blocks.*.mlp.*"), e3m4.on("head"))))
    ours = {name for name, layer in linear_layers(gpt).items() if isinstance(layer, QuantizedLinear)}
    assert ours == {"blocks.0.mlp.up", "blocks.0.mlp.down", "head"}
    loss_of(gpt).backward()


@pytest.mark.parametrize("name", TORCHAO_RECIPES)
def test_a_recipe_says_what_torchao_does(name):
    recipe = LayerRecipe(torchao=name)
    assert recipe.tensors() == tensor_recipes(name)
    grad = "E5M2" if name == "tensorwise" else "E4M3"
    assert recipe.format_names() == {"weight": "E4M3", "input": "E4M3", "grad": grad}


def test_a_torchao_that_does_something_else_is_refused(monkeypatch):
    monkeypatch.setitem(TORCHAO_RECIPES, "tensorwise", TORCHAO_RECIPES["rowwise"])
    with pytest.raises(ValueError, match="this torchao's recipe tensorwise quantizes to"):
        quantize_model(model(), blocks("tensorwise"))
