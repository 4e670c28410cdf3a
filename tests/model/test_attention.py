"""Attention's two products in any format.

Oracle: the products in float64 of the operands, each element quantized by `numerics.quantize` under a scale that is
computed here, slice by slice, as the recipe defines it. For whole models: torch's own attention.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from altgrad.config.recipe import LayerRecipe, Recipe, Rule
from altgrad.model import GPT, GPTConfig, account, quantize_model, requantize_model, unquantize_model
from altgrad.model.quantized.attention import Product, QuantizedProduct, attend
from altgrad.numerics import compute_scale, get_format, quantize

BLOCK = {"granularity": "block", "block": 32, "scale": "E8M0"}
RECIPES: dict[str, dict[str, dict[str, Any]]] = {
    "E4M3, E5M2": {"forward": {"format": "E4M3"}, "grad": {"format": "E5M2"}},
    "head": {"forward": {"format": "E4M3", "granularity": "head"}, "grad": {"format": "E5M2", "granularity": "head"}},
    "row": {"forward": {"format": "E4M3", "granularity": "row"}, "grad": {"format": "E5M2", "granularity": "row"}},
    "powers of two": {"forward": {"format": "E3M4", "scale": "E8M0"}, "grad": {"format": "E5M2", "scale": "E8M0"}},
    "MXFP8": {"forward": {"format": "E4M3", **BLOCK}, "grad": {"format": "E5M2", **BLOCK}},
    "table": {"forward": {"format": "NF4"}, "grad": {"format": "TAKUM8", "scale_to": "max"}},
    "rms": {"forward": {"format": "POSIT8"}, "grad": {"format": "POSIT8", "granularity": "row"}},
}
SHAPE_A, SHAPE_B = (2, 3, 20, 72), (2, 3, 72, 24)  # no whole blocks along any sum


def layer_recipe(name: str, pattern: str = "scores", **options: Any) -> LayerRecipe:
    forward, grad = RECIPES[name]["forward"], RECIPES[name]["grad"]
    return Rule(layers=pattern, input=forward, weight=forward, grad=grad, **options).layer


def recipe(name: str = "E4M3, E5M2", *, prefix: str = "*", products: tuple[str, ...] = ("scores", "values")) -> Recipe:
    return Recipe(rules=[layer_recipe(name).on(f"{prefix}.{product}") for product in products])


def factors(probabilities: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return a, b and the gradient of their product; heads, rows and columns of very different magnitudes."""
    torch.manual_seed(0)
    a, b, g = torch.randn(SHAPE_A), torch.randn(SHAPE_B), torch.randn(*SHAPE_A[:-1], SHAPE_B[-1])
    a = a.softmax(-1) if probabilities else a * torch.tensor([1.0, 30.0, 0.01])[:, None, None]
    return a, b * torch.logspace(-2, 2, SHAPE_B[-1]), g * torch.logspace(-3, 3, SHAPE_A[2])[:, None]


def by_definition(t: Tensor, spec: dict[str, Any], dim: int, known: float = 0.0) -> Tensor:
    """Return ``t`` (batch, heads, n, k) as the values that a product over ``dim`` multiplies, in float64."""
    fmt, granularity = get_format(spec["format"]), spec.get("granularity", "tensor")
    fmt = fmt.scaled_to(spec["scale_to"]) if "scale_to" in spec else fmt
    block, options = spec.get("block", 0), {"scale_format": spec.get("scale", "float32")}
    t = t.movedim(dim, -1).contiguous().clone()
    flat = {
        "tensor": lambda: [t.view(-1)], "head": lambda: [t[:, head] for head in range(t.shape[1])],
        "row": lambda: list(t.view(-1, t.shape[-1])),
        "block": lambda: [part for row in t.view(-1, t.shape[-1]) for part in row.split(block)],
    }[granularity]()  # fmt: skip
    result = []
    for part in flat:
        one_scale, of_rms = granularity in ("tensor", "head"), fmt.scale_statistic == "rms"
        own = part.double().square().mean().sqrt().item() if of_rms else part.abs().max().item()
        scale = compute_scale(known if known and one_scale and not of_rms else own, fmt, **options)
        result.append(quantize(part * scale, fmt).double() / scale.double())
    for part, values in zip(flat, result, strict=True):
        part.copy_(values)  # float32 in between: compared at float32's precision
    return t.movedim(-1, dim).double()


@pytest.mark.parametrize("left", [0.0, 1.0], ids=["any", "probabilities"])
@pytest.mark.parametrize("name", RECIPES)
def test_products_are_those_of_the_quantized_operands(name: str, left: float) -> None:
    product = QuantizedProduct(layer_recipe(name), left)
    forward, of_grad = RECIPES[name]["forward"], RECIPES[name]["grad"]
    a, b, g = factors(probabilities=bool(left))
    a, b = a.requires_grad_(), b.requires_grad_()
    y = product(a, b)
    y.backward(g)
    a, b, da, db = a.detach(), b.detach(), a.grad, b.grad
    assert y.dtype == torch.float32 and da is not None and db is not None
    expected = {
        "y": by_definition(a, forward, -1, left) @ by_definition(b, forward, -2),
        "da": by_definition(g, of_grad, -1) @ by_definition(b, forward, -1).mT,
        "db": by_definition(a, forward, -2, left).mT @ by_definition(g, of_grad, -2),
    }
    for key, found in (("y", y), ("da", da), ("db", db)):
        error = (found - expected[key]).abs().amax((-2, -1)) / (expected[key].abs().amax((-2, -1)) + 1e-30)
        assert error.max() < 1e-5, key  # of each head: a wrong scale is wrong by a rounding, 2^-4
    assert not torch.allclose(y.double(), a.double() @ b.double(), rtol=1e-3)


def test_probabilities_have_the_formats_largest_scale_whatever_they_are() -> None:
    """Probabilities below half of E4M3's smallest value over 448 become 0, the others do not."""
    product = QuantizedProduct(layer_recipe("head"), 1.0)
    p = torch.zeros(1, 2, 1, 2)
    p[..., 0], p[..., 1] = 2**-10 / 448 * 1.01, 2**-10 / 448 * 0.99
    assert ((product(p, torch.eye(2).expand(1, 2, 2, 2)) > 0) == torch.tensor([True, False])).all()
    unbounded = QuantizedProduct(layer_recipe("head"))
    assert (unbounded(p, torch.eye(2).expand(1, 2, 2, 2)) > 0).all()


@pytest.mark.parametrize(("name", "options"), [
    *((name, {}) for name in RECIPES), ("E4M3, E5M2", {"scaling": "delayed"}), ("head", {"rounding": "stochastic"}),
])  # fmt: skip
def test_compiled_and_eager_code_give_the_same_bits(name: str, options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    forward, grad = (RECIPES[name][key] | options for key in ("forward", "grad"))
    found = []
    for compiled in (False, True):
        product: Any = QuantizedProduct(Rule(layers="values", input=forward, weight=forward, grad=grad).layer, 1.0)
        run = torch.compile(product, fullgraph=True) if compiled else product
        a, b, g = factors(probabilities=True)
        a, b = a.requires_grad_(), b.requires_grad_()
        for _ in range(2):  # of a random stream, and of a history
            y = run(a * 1, b * 1)
            y.backward(g)
        found.append((y, a.grad, b.grad))
    assert all(map(torch.equal, *found))


def test_a_stochastic_product_is_right_in_the_mean() -> None:
    spec = {"format": "E4M3", "rounding": "stochastic"}
    product = QuantizedProduct(Rule(layers="scores", input=spec, weight=spec, grad=spec).layer)
    a, b, _ = factors()
    several = torch.stack([product(a, b) for _ in range(400)]).double()
    error = (several.mean(0) - a.double() @ b.double()).abs() / (several.std(0) / 20 + 1e-30)
    assert 0.6 < error.mean() < 1.0  # sqrt(2 / pi) = 0.80 of a normal distribution


@pytest.mark.parametrize("options", [{"save": "codes"}, {"gradient": "clipped"}], ids=str)
def test_options_of_layers_give_the_same_products(options: dict[str, Any]) -> None:
    found = []
    for its in ({}, options):
        a, b, g = factors()
        a, b = a.requires_grad_(), b.requires_grad_()
        QuantizedProduct(layer_recipe("E4M3, E5M2", **its))(a, b).backward(g)
        found.append((a.grad, b.grad))
    assert all(map(torch.equal, *found))  # a dynamic scale clips nothing


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_what_is_not_finite_stays_so_within_its_scale(name: str, value: float) -> None:
    product, (a, b, _) = QuantizedProduct(layer_recipe(name)), factors()
    before = product(a, b)
    a[1, 2, 3, 4] = value
    y = product(a, b)
    assert not y[1, 2, 3].isfinite().any()
    if name in ("row", "MXFP8"):
        untouched = torch.ones(y.shape[:-1], dtype=torch.bool)
        untouched[1, 2, 3] = False
        assert torch.equal(y[untouched], before[untouched])
    if name == "head":
        assert torch.equal(y[:, :2], before[:, :2]) and not y[:, 2].isfinite().any()


def test_second_derivatives_are_those_of_the_straight_through_estimator() -> None:
    """With operands that the formats hold exactly, they are those of the plain product."""
    found = []
    for product in (QuantizedProduct(layer_recipe("powers of two")), Product()):
        torch.manual_seed(0)
        a, b, g, u, v = (torch.randint(-2, 3, (2, 3, 4, 4)).float().requires_grad_() for _ in range(5))
        first = torch.autograd.grad(product(a, b), (a, b), g, create_graph=True)
        found.append(torch.autograd.grad(first, (a, b, g), (u, v)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_a_checkpoint_repeats_the_same_roundings() -> None:
    spec = {"format": "E4M3", "rounding": "stochastic"}
    found = []
    for checkpoint in (False, True):
        product = QuantizedProduct(Rule(layers="scores", input=spec, weight=spec, grad=spec).layer)
        a, b, g = factors()
        a, b = a.requires_grad_(), b.requires_grad_()
        y = torch.utils.checkpoint.checkpoint(product, a, b, use_reentrant=False) if checkpoint else product(a, b)
        y.backward(g)
        found.append((y, a.grad, b.grad))
    assert all(map(torch.equal, *found))


# --- attend -----------------------------------------------------------------------------------------------------------


def queries(length: int = 10, width: int = 8) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 3, length, width).requires_grad_() for _ in range(3)]


def causal(length: int) -> Tensor:
    return torch.full((length, length), -torch.inf).triu(1)


def test_with_plain_products_it_is_torchs_attention() -> None:
    found = []
    for by_torch in (True, False):
        q, k, v = queries()
        mask = causal(10)
        if by_torch:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = attend((Product(), Product()), q, k, v, mask, 8**-0.5)
        y.square().sum().backward()
        found.append((y, q.grad, k.grad, v.grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_it_is_a_softmax_between_the_two_products_whatever_autocast_says(name: str, autocast: bool) -> None:
    q, k, v = queries()
    products = QuantizedProduct(layer_recipe(name)), QuantizedProduct(layer_recipe(name), 1.0)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = attend(products, q, k, v, causal(10), 8**-0.5)
    y.sum().backward()
    p = torch.softmax(products[0](q, k.mT) * 8**-0.5 + causal(10), -1)
    assert torch.equal(y, products[1](p, v)) and y.dtype == torch.float32
    assert all(t.grad is not None and t.grad.isfinite().all() for t in (q, k, v))
    assert torch.equal(y[:, :, 0] != 0, products[1](torch.eye(10).expand(2, 3, 10, 10), v)[:, :, 0] != 0)


def test_a_token_is_not_moved_by_later_ones() -> None:
    """With scales of rows, whose own row alone sets them, to the bit."""
    products = QuantizedProduct(layer_recipe("row")), QuantizedProduct(layer_recipe("E4M3, E5M2"), 1.0)
    q, k, v = queries()
    before = attend(products, q, k, v, causal(10), 8**-0.5)
    k = k.detach().clone()
    k[:, :, 6:] *= 100
    assert torch.equal(attend(products, q, k, v, causal(10), 8**-0.5)[:, :, :6], before[:, :, :6])


def test_dropout_keeps_the_mean_and_quantizes_no_more_than_one() -> None:
    """A kept probability of 1 is divided by 1 - dropout after it is quantized, and is not clamped before."""
    product, v = QuantizedProduct(layer_recipe("E4M3, E5M2"), 1.0), torch.ones(1, 2, 1, 4)
    torch.manual_seed(0)
    scores: list[Tensor] = [torch.zeros(1, 2, 1, 4)] * 2
    several = torch.cat([attend((Product(), product), *scores, v, None, 1.0, dropout=0.4) for _ in range(2000)])
    assert several.unique().tolist() == pytest.approx([0, 1 / 0.6])  # of one token, whose probability is 1
    assert several.mean().item() == pytest.approx(1, abs=0.05)


# --- recipes and models -----------------------------------------------------------------------------------------------


def gpt(**changes: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(**{"vocab_size": 50, "layers": 2, "width": 32, "heads": 2, "context": 16} | changes))


TOKENS = torch.randint(0, 50, (3, 16), generator=torch.Generator().manual_seed(1))


def test_only_patterns_that_end_in_the_name_reach_a_product() -> None:
    spec = layer_recipe("E4M3, E5M2")
    for pattern in ("*", "blocks.*", "blocks.*.attn.*", "*values*"):
        model = quantize_model(gpt(), Recipe(rules=[spec.on(pattern, required=False)]))
        assert not account(model).products
    model = quantize_model(gpt(), Recipe(rules=[spec.on("*"), spec.on("blocks.1.attn.scores")]))
    assert [*account(model).products] == ["blocks.1.attn.scores"] and len(account(model).quantized) == 9
    assert "1 products of attention" not in account(model).summary.replace("; 1 product", "")
    with pytest.raises(ValueError, match=r"pattern 'blocks\.7\.attn\.scores' matches no layer"):
        quantize_model(gpt(), Recipe(rules=[spec.on("blocks.7.attn.scores")]))


def test_a_share_is_of_the_products_alone() -> None:
    rules = [Rule(layers="blocks.*.attn.values", last=0.5, input="E4M3")]
    assert [*account(quantize_model(gpt(), Recipe(rules=rules))).products] == ["blocks.1.attn.values"]


def test_a_plain_gpt_has_the_same_weights_and_a_quantized_one_is_close_to_it() -> None:
    model = gpt()
    assert not [key for key in model.state_dict() if "scores" in key or "values" in key]
    plain = model(TOKENS, TOKENS)
    for name, most in (("E4M3, E5M2", 1e-3), ("table", 1e-3)):
        quantize_model(model, recipe(name))
        loss = model(TOKENS, TOKENS)
        assert 0 < abs(loss - plain).item() < most
        unquantize_model(model)
        assert torch.equal(model(TOKENS, TOKENS), plain)
    quantize_model(model, recipe())
    with pytest.raises(ValueError, match="already quantized"):
        quantize_model(model, recipe())
    requantize_model(model, recipe("MXFP8"))
    assert model.blocks[0].attn.scores.recipe == layer_recipe("MXFP8")


@pytest.mark.parametrize("length", [16, 160], ids=["plain products", "fused"])
def test_a_gpt_with_nothing_quantized_in_its_formats_is_the_plain_one(length: int) -> None:
    """Oracle: the unquantized model. Formats of 11 bits of mantissa differ from it by their roundings alone."""
    tokens = torch.randint(0, 50, (2, length), generator=torch.Generator().manual_seed(2))
    fine = {role: {"format": "E5M10"} for role in ("input", "weight", "grad")}
    rules = [Rule(layers=f"blocks.*.attn.{product}", **fine) for product in ("scores", "values")]
    gradients = []
    for quantized in (False, True):
        model = gpt(context=length)
        if quantized:
            quantize_model(model, Recipe(rules=rules))
        model(tokens, tokens).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, grad in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], grad, rtol=1e-2, atol=2e-4 * grad.abs().max().item())


def test_a_gpt_leaves_the_meta_device_with_the_bound_of_probabilities() -> None:
    with torch.device("meta"):
        model = quantize_model(gpt(), recipe())
    model.to_empty(device="cpu")
    history = model.blocks[0].attn.values.quantizer("input").history
    assert history is not None and history.tolist() == [1.0]


E4M3 = {"format": "E4M3"}
HEAD = E4M3 | {"granularity": "head"}
MS_EDEN = {"format": "E2M1", "granularity": "block", "block": 16, "scale": "E4M3", "rounding": "MS-EDEN"}
REFUSED = [
    ({"layers": "*.scores", "input": E4M3 | {"granularity": "tile"}}, "have no granularity tile; change granularity"),
    ({"layers": "scores", "hadamard": 16, "grad": E4M3}, "have no hadamard 16; remove hadamard"),
    ({"layers": "*.values", "torchao": "rowwise"}, "have no torchao rowwise; remove torchao"),
    ({"layers": "*.values", "backend": "native", "input": E4M3, "weight": E4M3, "grad": E4M3}, "no backend native"),
    ({"layers": "*.values", "gradient": "relu", "input": E4M3}, "have no gradient relu"),
    ({"layers": "*.values", "weight": {**E4M3, "virtual": True}}, "have no virtual True; change virtual of weight"),
    ({"layers": "*.values", "grad": MS_EDEN}, "have no rounding MS-EDEN"),
    ({"layers": "*", "input": HEAD}, "granularity head of input is for attention's products, and '\\*' is"),
    ({"layers": "*.values", "save": "codes", "input": HEAD}, "save codes needs granularity tensor, not head"),
    ({"layers": "*.values", "input": HEAD | {"scaling": "delayed"}}, "granularity head needs scaling dynamic"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "words"), REFUSED)
def test_what_products_cannot_have_is_refused_in_a_sentence(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Rule(**settings)


def test_a_linear_layer_of_that_name_has_no_heads() -> None:
    model = nn.Module()
    model.add_module("values", nn.Linear(8, 8))
    with pytest.raises(ValueError, match="granularity head is for attention's products"):
        quantize_model(model, Recipe(rules=[layer_recipe("head").on("values")]))
    assert account(quantize_model(model, Recipe(rules=[layer_recipe("row").on("values")]))).quantized
