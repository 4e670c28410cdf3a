"""No product is rounded more than its layer says, whichever dtype the operands go in.

Oracles: torch's own casts, and products of numbers so few that float64 and powers of two give them exactly.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx
from torch._inductor.fx_passes import joint_graph
from torch.nn.functional import cross_entropy

from altgrad.formats import FloatFormat, Format, format_names, get_format
from altgrad.model import LayerRecipe, QuantizedLinear, TensorRecipe, hardware
from altgrad.model.quantized.linear import exact_in_bfloat16


@pytest.fixture(params=[True, False], ids=["bf16 instructions", "none"])
def either_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """A CPU with bfloat16 instructions and one without."""
    monkeypatch.setenv(hardware.SWITCH, "on" if request.param else "off")
    return request.param


def spec(name: str, **options: str) -> TensorRecipe:
    return TensorRecipe(format=get_format(name), scale="E8M0", **options)


def layer_of(master: Tensor, **recipe: object) -> QuantizedLinear:
    return QuantizedLinear(nn.Parameter(master), None, LayerRecipe(**recipe))


TWO_LEVEL = TensorRecipe(format="E3M4", granularity="block", block=16, scale="E4M3")
# Last significand, smallest value and largest value inside and outside of bfloat16's: 8 bits, 2^-133 and 2^128.
EDGES = [
    *[(FloatFormat("significand", 4, m, bias=0), m <= 7) for m in (6, 7, 8, 9)],
    *[(FloatFormat("smallest", 4, 7, bias=bias), bias <= 127) for bias in (126, 127, 128)],
    *[(FloatFormat("largest", 4, 2, bias=bias), bias >= -112) for bias in (-111, -112, -113)],
]


@pytest.mark.parametrize("fmt", [*(fmt for fmt, _ in EDGES), *map(get_format, format_names())], ids=str)
def test_exactness_in_bfloat16_is_judged_as_the_cast_judges_it(fmt: Format) -> None:
    """Up to the last bit, binade and value, and of every format that there is."""
    values = torch.tensor(fmt.values, dtype=torch.float64)
    exact = torch.equal(values.bfloat16().double(), values)
    exact = exact or fmt.name == "TAKUM8"  # of whose values those that no bfloat16 is rounded to do not count
    assert exact_in_bfloat16(fmt) == exact == dict(EDGES).get(fmt, exact)


def test_operands_are_in_bfloat16_where_that_loses_nothing_and_is_fast(either_cpu: bool) -> None:
    """All three quantized, or what is not in bfloat16 anyway; and every format exact."""
    weight = torch.randn(4, 8)
    quantized = {role: spec("E4M3") for role in ("weight", "input", "grad")}
    cases = [
        (quantized, torch.float32, True),
        (quantized, torch.bfloat16, True),
        ({"weight": spec("E4M3")}, torch.float32, False),
        ({"weight": spec("E4M3")}, torch.bfloat16, True),
        (dict.fromkeys(quantized, TWO_LEVEL.but(format="E2M1")), torch.bfloat16, True),  # and every value times scale
        (dict.fromkeys(quantized, TWO_LEVEL), torch.bfloat16, False),
        (quantized | {"grad": spec("E5M10")}, torch.float32, False),
        (quantized | {"grad": spec("E5M10")}, torch.bfloat16, False),
    ]
    for recipe, compute, low in cases:
        expected = torch.bfloat16 if low and either_cpu else torch.float32
        assert layer_of(weight, **recipe).settings(compute).operand_dtype == expected, (recipe, compute)


@pytest.mark.usefixtures("either_cpu")
def test_a_tensor_that_is_not_quantized_keeps_its_float32() -> None:
    layer = layer_of(torch.tensor([[1.0], [-2.0]]), weight=spec("E4M3"))
    x = torch.tensor([[1 + 2.0**-20]])
    assert torch.equal(layer(x), torch.tensor([[1 + 2.0**-20, -2 - 2.0**-19]]))


@pytest.mark.usefixtures("either_cpu")
def test_a_format_too_fine_for_bfloat16_is_rounded_to_it_once_under_autocast() -> None:
    """Eleven significand bits each: of operands cast to bfloat16 the product would be another one."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (1 + torch.randint(0, 1024, (32, 1), generator=generator) / 1024 for _ in range(2))
    layer = layer_of(weight, weight=spec("E5M10"), input=spec("E5M10"))
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(x)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, (x.double() @ weight.double().t()).float().bfloat16())


@pytest.mark.usefixtures("either_cpu")
@pytest.mark.parametrize("accumulate", ["bf16", "float32"])
def test_scales_whose_product_leaves_float32_do_not_lose_the_result(accumulate: str) -> None:
    """Two tensors near 2^-65: their scales multiply to about 2^144, which the result, near 2^-130, is divided by."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randint(-3, 4, shape, generator=generator).float() for shape in ((5, 8), (6, 8)))
    grad = torch.randint(-3, 4, (5, 6), generator=generator).float()
    tiny = 2.0**-65
    layer = layer_of(weight * tiny, weight=spec("E4M3"), input=spec("E4M3"), grad=spec("E4M3"), accumulate=accumulate)
    own = (x * tiny).requires_grad_()
    y = layer(own)
    y.backward(grad * tiny)
    for found, expected in ((y, x @ weight.t()), (own.grad, grad @ weight), (layer.weight.grad, grad.t() @ x)):
        assert expected.any() and torch.equal(found.detach().double(), expected.double() * tiny**2)


@pytest.mark.parametrize(
    ("either_cpu", "autocast", "granularity"),
    [(True, True, "tensor"), (True, False, "tensor"), (False, False, "row")], indirect=["either_cpu"],
)  # fmt: skip
def test_the_compiler_does_not_move_a_products_scale_behind_the_softmax(
    autocast: bool, granularity: str, either_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Inductor does for ``softmax(y * scale)``: that rounds elsewhere than eager mode and takes thrice as long."""
    moved = []

    def recorded(scaled: Tensor, stable: Tensor, *arguments: object) -> Tensor:
        moved.append(True)
        return original(scaled, stable, *arguments)

    original = joint_graph._preserve_scaled_softmax_nonfinite_semantics
    monkeypatch.setattr(joint_graph, "_preserve_scaled_softmax_nonfinite_semantics", recorded)
    tensor = TensorRecipe(format=get_format("E4M3"), granularity=granularity)
    head = layer_of(torch.randn(32, 16), weight=tensor, grad=tensor)
    x, targets, scale = torch.randn(8, 16), torch.arange(8), torch.tensor(0.3)

    def run_as_it_is(graph: torch.fx.GraphModule, inputs: list[Tensor], **options: object) -> Callable[..., object]:
        return make_boxed_func(graph)  # the compiler's passes are over; C++ is not made

    def passes_only(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        return compile_fx(graph, inputs, inner_compile=run_as_it_is)

    def loss(logits_of) -> None:
        torch._dynamo.reset()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), config.patch(force_disable_caches=True):
            made = torch.compile(lambda x: cross_entropy(logits_of(x).float(), targets), backend=passes_only)
            made(x).backward()

    loss(head)
    assert not moved
    x.requires_grad_()
    loss(lambda x: x * scale)
    assert moved  # the compiler still does it to others
