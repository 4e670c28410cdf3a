"""Laws of the quantized matrix product.

Oracle: the definition written out in float64 with ``altgrad.numerics.quantize``, which has oracles of
its own (tests/numerics). Where the bound is not zero it is that of the output's roundings to bfloat16,
relative 2^-9 each: the sum's and the result's.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from altgrad.formats import get_format
from altgrad.model import LayerRecipe, QuantizedLinear, Recipe, TensorRecipe
from altgrad.numerics import amax, broadcast_scale, compute_scale, decode, encode_two_level, quantize, rotate_rows
from altgrad.numerics.scaling import broadcast_tiles

pytestmark = pytest.mark.usefixtures("products")

EIGHT_BIT = ["E0M7", "E1M6", "E2M5", "E3M4", "E4M3", "E5M2", "E6M1", "E7M0"]
EXTREMES = ("E0M7", "E4M3", "E7M0")  # no exponent, some of both, no mantissa
TWO_BF16_ROUNDINGS = 2 * 2.0**-8


def layer_of(format: str, *, rows: int = 24, columns: int = 40, grad: str = "E5M2", **options) -> QuantizedLinear:
    generator = torch.Generator().manual_seed(1)
    weight = nn.Parameter(0.1 * torch.randn(rows, columns, generator=generator))
    spec = TensorRecipe(format=get_format(format))
    recipe = LayerRecipe(weight=spec, input=spec, grad=TensorRecipe(format=get_format(grad)), **options)
    return QuantizedLinear(weight, None, recipe)


def on_grid(t: Tensor, spec: TensorRecipe, dim: int) -> Tensor:
    """Return the 2-d t quantized for a sum over dim, dequantized, in float64."""
    t, fmt = t.detach(), spec.format
    if spec.block_scale is not None:
        elements, scales, of_tensor = encode_two_level(t, fmt, spec.scale, block=spec.block, dim=dim)
        blocks = broadcast_scale(decode(scales, spec.scale, torch.float64), t.shape[dim], block=spec.block, dim=dim)
        return decode(elements, fmt, torch.float64) * blocks / of_tensor.double()
    scale = compute_scale(amax(t, spec.granularity, block=spec.block, dim=dim), fmt, scale_format=spec.scale)
    if spec.granularity == "block":
        scale = broadcast_scale(scale, t.shape[dim], block=spec.block, dim=dim)
    if spec.granularity == "tile":
        scale = broadcast_tiles(scale, t.shape, block=spec.block)
    return quantize(t * scale, fmt).double() / scale.double()


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(3, 7, 40, generator=generator), 1e-6 * torch.randn(3, 7, 24, generator=generator)


GRANULARITIES: dict[str, dict[str, object]] = {
    "tensor": {}, "row": {"granularity": "row"},
    "block": {"granularity": "block", "block": 9, "scale": "E8M0"},
    "two levels": {"granularity": "block", "block": 9, "scale": "E4M3"},
    "block, float32": {"granularity": "block", "block": 9},
    "tile": {"granularity": "tile", "block": 9, "scale": "E8M0"},
}  # fmt: skip
CASES = [(name, f) for name in GRANULARITIES for f in (EIGHT_BIT if name == "tensor" else EXTREMES)]


@pytest.mark.parametrize(("granularity", "format"), CASES)
@pytest.mark.parametrize(("accumulate", "bound"), [("float32", 1e-6), ("bf16", TWO_BF16_ROUNDINGS)])
def test_the_three_products_are_those_of_the_definition(granularity, format, accumulate, bound):
    """With scales along the sum of each; 40, 24 and 21 are no multiples of 9."""
    spec, grad_spec = (TensorRecipe(format=get_format(name), **GRANULARITIES[granularity]) for name in (format, "E5M2"))
    recipe = LayerRecipe(weight=spec, input=spec, grad=grad_spec, accumulate=accumulate)
    layer = QuantizedLinear(layer_of(format).weight, None, recipe)
    x, g = inputs()
    x.requires_grad_()
    y = layer(x)
    y.backward(g)
    rows, grads, weight = x.detach().flatten(0, 1), g.flatten(0, 1), layer.weight
    products = {
        "y": (y, on_grid(rows, spec, 1), on_grid(weight, spec, 1).t()),
        "dx": (x.grad, on_grid(grads, grad_spec, 1), on_grid(weight, spec, 0)),
        "dw": (weight.grad, on_grid(grads, grad_spec, 0).t(), on_grid(rows, spec, 0)),
    }
    for name, (found, a, b) in products.items():
        exact = a @ b
        # Roundings of the result are relative to it; the float32 sum's are relative to its summands.
        allowed = bound * exact.abs() + 1e-6 * (a.abs() @ b.abs())
        assert ((found.double().reshape(exact.shape) - exact).abs() <= allowed).all(), name


def test_roles_may_have_different_granularities():
    rows, tensor = (TensorRecipe(format=get_format("E4M3"), granularity=name) for name in ("row", "tensor"))
    weight = nn.Parameter(torch.randn(24, 40, generator=torch.Generator().manual_seed(1)))
    layer = QuantizedLinear(weight, None, LayerRecipe(weight=rows, input=tensor, accumulate="float32"))
    x = inputs()[0].flatten(0, 1)
    exact = on_grid(x, tensor, 1) @ on_grid(weight, rows, 1).t()
    torch.testing.assert_close(layer(x).double(), exact, rtol=1e-5, atol=1e-6)


def test_the_sum_of_exact_products_is_exact():
    """Small integers stay integers in every format that holds them, so nothing at all may be lost."""
    spec = TensorRecipe(format=get_format("E4M3"), scale="E8M0")
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randint(-4, 5, (8, 16), generator=generator).float())
    x = torch.randint(-4, 5, (5, 16), generator=generator).float()
    layer = QuantizedLinear(weight, None, LayerRecipe(weight=spec, input=spec, grad=None, accumulate="float32"))
    assert torch.equal(layer(x), x @ weight.t())


def test_the_output_has_the_dtype_of_the_computation():
    layer, (x, _) = layer_of("E4M3"), inputs()
    assert layer(x).dtype == torch.float32
    assert layer(x.bfloat16()).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    assert layer_of("E4M3", accumulate="float32")(x.bfloat16()).dtype == torch.float32


def test_delayed_scaling_uses_the_amax_of_earlier_steps():
    spec = TensorRecipe(format=get_format("E4M3"), scaling="delayed", history=2)
    layer = QuantizedLinear(nn.Parameter(torch.eye(4)), None, LayerRecipe(input=spec, grad=spec))
    x = torch.full((1, 4), 2.0)
    for factor, largest in [(1, 2.0), (4, 2.0), (1, 8.0), (1, 8.0), (1, 2.0)]:
        remembered = layer.quantizers["input"].remembered_amax()
        used = remembered if remembered > 0 else factor * x.amax()
        assert used == largest
        layer(factor * x).backward(factor * x)
    layer(x)
    assert layer.quantizers["grad"].remembered_amax() == 2.0
    layer.eval()
    layer(100 * x)
    assert layer.quantizers["input"].remembered_amax() == 2.0, "evaluation must leave no trace"


def test_static_scaling_keeps_the_first_amax():
    spec = TensorRecipe(format=get_format("E4M3"), scaling="static")
    layer = QuantizedLinear(nn.Parameter(torch.eye(4)), None, LayerRecipe(input=spec))
    for factor in (1, 5, 0.1):
        layer(torch.full((1, 4), float(factor)))
    assert layer.quantizers["input"].remembered_amax() == 1.0
    assert layer(torch.full((1, 4), 3.0)).amax() == 1.0, "beyond the scale's range values saturate"


@pytest.mark.parametrize("role", ["input", "weight"])
def test_the_clipped_estimator_stops_gradients_where_values_saturate(role):
    spec = TensorRecipe(format=get_format("E4M3"), scaling="static")
    layer = QuantizedLinear(nn.Parameter(torch.eye(4)), None, LayerRecipe(**{role: spec}, gradient="clipped"))
    layer(torch.ones(1, 4))  # the scale is that of an amax of 1 from now on
    t = torch.tensor([[0.5, 3.0, -3.0, 1.0]])
    x = (t if role == "input" else torch.ones(1, 4)).clone().requires_grad_()
    if role == "weight":
        layer.weight.data = torch.diag(t[0])
    layer(x).sum().backward()
    found = x.grad[0] if role == "input" else layer.weight.grad.diagonal()
    assert found.tolist() == [1.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("finer", [{}, {"granularity": "row"}], ids=["tensor", "row"])
def test_the_relu_estimator_is_autograd_of_what_defines_it(finer):
    """A layer that is straight-through, behind what has the values of its argument and the derivative of ReLU."""
    x, g = inputs()
    x[0, 0, :3] = torch.tensor([0.0, -0.0, 1e-20])
    found = []
    for gradient in ("relu", "straight-through"):
        spec = TensorRecipe(format=get_format("E4M3"), **finer)
        recipe = LayerRecipe(weight=spec, input=spec, grad=spec, gradient=gradient)
        layer = QuantizedLinear(layer_of("E4M3").weight, None, recipe)
        own = x.clone().requires_grad_()
        y = layer(own) if gradient == "relu" else layer(own.relu() + (own - own.relu()).detach())
        y.backward(g)
        found.append((y.detach(), own.grad, layer.weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert torch.equal(own.grad != 0, x > 0)


@pytest.mark.parametrize("options", [{}, {"gradient": "clipped"}, {"gradient": "relu"}, {"save": "codes"}], ids=str)
def test_a_gradient_that_nobody_asks_for_changes_no_other(options):
    """Of a frozen weight, and of an input that is data; each alone is what it is with the other."""
    layer, (x, grad) = layer_of("E4M3", **options), inputs()
    both = x.clone().requires_grad_()
    layer(both).backward(grad)
    dw, layer.weight.grad = layer.weight.grad, None
    layer(x).backward(grad)
    assert torch.equal(layer.weight.grad, dw)
    layer.weight.grad = None
    layer.weight.requires_grad_(False)
    alone = x.clone().requires_grad_()
    layer(alone).backward(grad)
    assert torch.equal(alone.grad, both.grad) and layer.weight.grad is None


BLOCK = {"granularity": "block", "scale": "E8M0"}
TWO_LEVEL = {"granularity": "block", "block": 9, "scale": "E5M2"}
FOUR_SIX = {"granularity": "tile", "block": 9, "scale": "E4M3", "scale_rounding": "4/6"}
BY_CHANCE = {"granularity": "block", "block": 16, "scale": "E5M2", "rounding": "stochastic"}
COMPILED = {
    "tensor": ("float32", "float32", {}, {}),
    "relu": ("bfloat16", "float32", {}, {"gradient": "relu"}),
    "codes": ("float32", "bfloat16", {"scaling": "delayed"}, {"save": "codes"}),
    "row, relu": ("bfloat16", "bfloat16", {"granularity": "row"}, {"gradient": "relu"}),
    "block": ("bfloat16", "float32", BLOCK, {}),
    "native": ("bfloat16", "bfloat16", {}, {"backend": "native"}),
    "two levels": ("float32", "bfloat16", TWO_LEVEL, {}),
    "4/6": ("bfloat16", "bfloat16", FOUR_SIX, {"hadamard": 16}),
    "stochastic": ("float32", "float32", BY_CHANCE, {"hadamard": 16}),
}
EVERY_DAY = ("codes", "row, relu", "native", "4/6", "stochastic")  # which have every option of the others
SWAPPED = {"float32": "bfloat16", "bfloat16": "float32"}


@pytest.mark.parametrize(
    ("products", "dtype", "options", "others"),
    [*(pytest.param(*case, id=name, marks=() if name in EVERY_DAY else pytest.mark.long)
       for name, case in COMPILED.items()),
     *(pytest.param(SWAPPED[case[0]], SWAPPED[case[1]], *case[2:], id=f"{name}, swapped",
                    marks=pytest.mark.long) for name, case in COMPILED.items())],
    indirect=["products"],
)  # fmt: skip
def test_compiled_equals_eager_to_the_bit(dtype, options, others):
    """Each option once, with products and inputs of either dtype in turn; and the other way round.

    Neither writes into the input or the weight.
    """
    dtype = getattr(torch, dtype)
    torch._dynamo.reset()
    x, g = inputs()
    found, weight = [], layer_of("E4M3").weight.detach()
    for wrap in (lambda f: f, lambda f: torch.compile(f, fullgraph=True)):
        forward, backward = (TensorRecipe(format=get_format(name), **options) for name in ("E4M3", "E5M2"))
        recipe = LayerRecipe(weight=forward, input=forward, grad=backward, **others)
        layer = QuantizedLinear(layer_of("E4M3").weight, None, recipe)
        run = wrap(layer)
        own = x.to(dtype).requires_grad_()
        for _ in range(2):  # the second with a history
            y = run(own)
            y.backward(g.to(dtype))
        assert torch.equal(own, x.to(dtype)) and torch.equal(layer.weight, weight)
        found.append((y.detach(), own.grad, layer.weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_autocast_changes_no_product_in_float32(compiled):
    """Neither in the backward pass, which torch.compile traces under the forward pass's autocast."""
    torch._dynamo.reset()
    x, g = inputs()
    found = []
    for autocast, inside in ((False, False), (True, False), (True, True))[: 2 if compiled else 3]:
        layer = layer_of("E4M3", accumulate="float32")
        run = torch.compile(layer, fullgraph=True) if compiled and autocast else layer
        own = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = run(own)
            if inside:
                y.backward(g)
        if not inside:
            y.backward(g)
        found.append((y.detach(), own.grad, layer.weight.grad))
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_the_weights_gradient_is_made_of_rotated_operands():
    """That is the definition; and its sum is over 32 tokens, of which the last 11 are zeros."""
    tensor = {"format": "E3M4", "granularity": "block", "block": 16, "scale": "E4M3"}
    recipe = LayerRecipe(input=tensor, weight="E3M4", grad=tensor, accumulate="float32", hadamard=16)
    layer = QuantizedLinear(layer_of("E3M4").weight, None, recipe)
    x, g = inputs()
    x.requires_grad_()
    layer(x).backward(g)
    spec = recipe.input
    a, b = (on_grid(rotate_rows(t.detach().flatten(0, 1)), spec, 0) for t in (g, x))
    found = layer.weight.grad.double()
    assert ((found - a.t() @ b).abs() <= 1e-6 * (a.abs().t() @ b.abs())).all()
    plain = g.flatten(0, 1).double().t() @ x.detach().flatten(0, 1).double()
    assert (found - plain).norm() < 0.03 * plain.norm() and not torch.equal(a, a * 0)
    # The other products know nothing of it.
    other = QuantizedLinear(layer_of("E3M4").weight, None, recipe.model_copy(update={"hadamard": 0}))
    again = x.detach().requires_grad_()
    other(again).backward(g)
    assert torch.equal(again.grad, x.grad) and not torch.equal(other.weight.grad, layer.weight.grad)


# --- what is kept for the backward pass -----------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"scale": "E8M0"}, {"scaling": "delayed"}], ids=str)
@pytest.mark.parametrize("format", EXTREMES)
def test_saved_codes_change_no_bit(format, options):
    ends = []
    for save in ("codes", "operands"):
        layer = QuantizedLinear(
            layer_of(format).weight, None, Recipe.uniform(format, save=save, **options).rules[0].layer
        )
        x, g = inputs()
        for factor in (1.0, 3.0):  # a second step, for delayed scaling
            own = (factor * x).requires_grad_()
            with torch.autocast("cpu", torch.bfloat16):
                y = layer(own)
            y.backward(g.to(y.dtype))
        ends.append((y.detach(), own.grad, layer.weight.grad))
    assert all(map(torch.equal, *ends))


def kept_bytes(module: nn.Module, x: Tensor) -> int:
    """Return the bytes that a forward pass leaves for the backward one, parameters and buffers apart."""
    kept: dict[int, int] = {}
    own = {t.data_ptr() for t in (*module.parameters(), *module.buffers())}

    def keep(t: Tensor) -> Tensor:
        if t.data_ptr() not in own:
            kept[t.data_ptr()] = t.numel() * t.element_size()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), torch.autocast("cpu", torch.bfloat16):
        module(x.requires_grad_())
    return sum(kept.values())


def test_codes_are_half_of_what_bfloat16_keeps():
    """And a fourth of what float32 keeps, since operands in float32 leave the same codes."""
    x, linear = torch.randn(512, 64, dtype=torch.bfloat16), nn.Linear(64, 32, bias=False)
    layer = QuantizedLinear(linear.weight, None, Recipe.uniform("E3M4", save="codes").rules[0].layer)
    assert kept_bytes(linear, x) == 2 * (x.numel() + linear.weight.numel())
    assert kept_bytes(layer, x) == x.numel() + linear.weight.numel() + 2 * 4  # two scales
