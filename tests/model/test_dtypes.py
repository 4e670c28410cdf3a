"""Casts, late memory and torch's default dtype change no bit of a quantized model.

Oracles: the same done to the plain model first; the layers and the transformer under float32. STACKS.md has more.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from altgrad.model import GPT, GPTConfig, Recipe, quantize_model
from altgrad.model.quantized.quantizer import Quantizer
from tests.default_dtype import OTHERS, default_dtype, require_same_bits

BLOCK = {"granularity": "block", "block": 16, "scale": "E4M3"}
E2M1 = {"format": "E2M1", **BLOCK}


def of_all(**options: object) -> dict[str, Any]:
    return dict.fromkeys(("weight", "input", "grad"), {"format": "E4M3"} | options)


RECIPES: dict[str, dict[str, Any]] = {
    "tensor": of_all(), "row": of_all(granularity="row"), "float32 blocks": of_all(granularity="block"),
    "MXFP8": {"weight": "MXFP8", "input": "MXFP8", "grad": "MXFP8"},
    "NVFP4": {"weight": "NVFP4_16x16", "input": "NVFP4", "grad": E2M1 | {"rounding": "stochastic"}, "hadamard": 16},
    "4/6": {"weight": E2M1 | {"scale_rounding": "4/6"}, "input": "NVFP4", "grad": "NVFP4"},
    "MS-EDEN": {"weight": "NVFP4_16x16", "input": "NVFP4", "grad": E2M1 | {"rounding": "MS-EDEN"}},
    "delayed": of_all(scaling="delayed"), "static": of_all(scaling="static"),
    "stochastic": of_all(rounding="stochastic"), "native": of_all() | {"grad": "E5M2", "backend": "native"},
    "codes": of_all() | {"save": "codes"}, "clipped": of_all() | {"gradient": "clipped"},
    "relu": of_all() | {"gradient": "relu", "accumulate": "float32"},
}  # fmt: skip
GENERATOR = torch.Generator().manual_seed(0)
WEIGHTS = [torch.randn(shape, generator=GENERATOR, dtype=torch.float32) / 8 for shape in ((96, 64), (32, 96))]
INPUTS = [torch.randn(48, 64, generator=GENERATOR, dtype=torch.float32) for _ in range(3)]


def plain(device: str = "cpu") -> nn.Sequential:
    with torch.device(device):
        model = nn.Sequential(nn.Linear(64, 96, dtype=torch.float32), nn.GELU(), nn.Linear(96, 32, dtype=torch.float32))
    for layer, weight in zip((model[0], model[2]), WEIGHTS, strict=True):
        layer.weight.data.copy_(weight)
        layer.bias.data.zero_()
    return model


def quantized(recipe: str, model: Any = None) -> Any:
    model = plain() if model is None else model
    return quantize_model(model, Recipe(rules=[{"layers": "*", **RECIPES[recipe]}]), seed=3)


def passes(model: Any, dtype: torch.dtype = torch.float32, *, autocast: bool = False) -> list[Tensor]:
    """Return outputs, gradients and buffers of passes in training, and the output of one in evaluation."""
    found = []
    for x in (t.to(dtype, copy=True).requires_grad_() for t in INPUTS):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = model(x)
        y.float().square().sum().backward()
        found += [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]
    found += [b.clone() for module in model.modules() if isinstance(module, Quantizer) for b in module.buffers()]
    return [*found, model.eval()(INPUTS[0].to(dtype)).detach()]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(torch.equal(a, b) and a.dtype == b.dtype and bool(a.isfinite().all()) for a, b in pairs)


@pytest.mark.parametrize("swap", [False, True], ids=["", "swapped"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("recipe", ["tensor", "MXFP8", "NVFP4", "delayed"])
def test_a_cast_after_is_a_cast_before(recipe: str, dtype: torch.dtype, swap: bool) -> None:
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        model = quantized(recipe).to(dtype)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert same(passes(model, dtype), passes(quantized(recipe, plain().to(dtype)), dtype))


@pytest.mark.parametrize("recipe", ["delayed", "stochastic"])
def test_what_was_learnt_outlives_a_cast_there_and_back(recipe: str) -> None:
    model, still = quantized(recipe), quantized(recipe)
    passes(model), passes(still)
    model.to(torch.bfloat16).to(torch.float32)
    model.load_state_dict(still.state_dict())  # weights, which the cast has rounded
    assert same(passes(model.train()), passes(still.train()))


@pytest.mark.parametrize("order", ["filled, then empty", "given"])  # STACKS.md has the other
@pytest.mark.parametrize("recipe", ["NVFP4", "delayed"])
def test_a_model_that_gets_its_memory_later(recipe: str, order: str) -> None:
    model = quantized(recipe, plain("cpu" if order == "filled, then empty" else "meta"))
    if order == "filled, then empty":
        model.to_empty(device="cpu")
    model.load_state_dict(plain().state_dict(), assign=order == "given")
    assert same(passes(model), passes(quantized(recipe)))


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", ["float16", "float64"])  # narrower and wider
def test_a_default_dtype_changes_no_bit_of_a_layer(dtype: str, recipe: str, autocast: bool, products: str) -> None:
    require_same_bits(lambda: passes(quantized(recipe), autocast=autocast), OTHERS[dtype])


@pytest.mark.parametrize("labels", [(), (1.7, 0.9)], ids=["tokens", "labels"])
@pytest.mark.parametrize("dtype", OTHERS)
def test_the_gpt_computes_the_same_with_the_same_parameters(dtype: str, labels: tuple[float, ...]) -> None:
    config = GPTConfig(vocab_size=64, context=24, layers=1, heads=2, width=32, labels=labels)
    torch.manual_seed(0)
    state = GPT(config).float().state_dict()
    tokens = torch.randint(1, 64, (4, 24), generator=torch.Generator().manual_seed(1))
    targets = torch.ones(4, len(labels), dtype=torch.float32) if labels else tokens

    def made() -> list[Tensor]:
        model = GPT(config)
        model.load_state_dict(state, assign=True)
        loss = model(tokens, targets)
        loss.backward()
        return [loss, *(p.grad for p in model.parameters())]

    require_same_bits(made, OTHERS[dtype])


def test_a_model_that_quantizes_itself_is_built_under_a_default_dtype() -> None:
    """As transformers' ``from_pretrained(dtype=torch.bfloat16)`` does: the parameters have the default dtype."""
    with default_dtype(torch.bfloat16):
        model = quantize_model(nn.Sequential(nn.Linear(64, 32)), Recipe.uniform("E4M3"))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 32)).bfloat16()
    plain.load_state_dict(model.state_dict())
    x = torch.randn(8, 64).bfloat16()
    assert torch.equal(model(x), quantize_model(plain, Recipe.uniform("E4M3"))(x))
