"""Quantized layers made and called under another default dtype of torch: the bits that they have under float32."""

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
RECIPES: dict[str, dict[str, Any]] = {
    "tensor": {"weight": "E4M3", "input": "E4M3", "grad": "E5M2"},
    "row": {role: {"format": "E4M3", "granularity": "row"} for role in ("weight", "input", "grad")},
    "float32 blocks": {role: {"format": "E4M3", "granularity": "block"} for role in ("weight", "input", "grad")},
    "MXFP8": {"weight": "MXFP8", "input": "MXFP8", "grad": "MXFP8"},
    "NVFP4": {"weight": "NVFP4_16x16", "input": "NVFP4", "grad": E2M1 | {"rounding": "stochastic"}, "hadamard": 16},
    "4/6": {"weight": E2M1 | {"scale_rounding": "4/6"}, "input": "NVFP4", "grad": "NVFP4"},
    "MS-EDEN": {"weight": "NVFP4_16x16", "input": "NVFP4", "grad": E2M1 | {"rounding": "MS-EDEN"}},
    "delayed": {role: {"format": "E4M3", "scaling": "delayed"} for role in ("weight", "input", "grad")},
    "static": {role: {"format": "E4M3", "scaling": "static"} for role in ("weight", "input", "grad")},
    "stochastic": {role: {"format": "E4M3", "rounding": "stochastic"} for role in ("weight", "input", "grad")},
    "native": {"weight": "E4M3", "input": "E4M3", "grad": "E5M2", "backend": "native"},
    "codes": {"weight": "E4M3", "input": "E4M3", "grad": "E5M2", "save": "codes"},
    "clipped": {"weight": "E4M3", "input": "E4M3", "grad": "E5M2", "gradient": "clipped"},
    "relu": {"weight": "E4M3", "input": "E4M3", "grad": "E5M2", "gradient": "relu", "accumulate": "float32"},
}
GENERATOR = torch.Generator().manual_seed(0)
WEIGHTS = [torch.randn(shape, generator=GENERATOR, dtype=torch.float32) / 8 for shape in ((96, 64), (32, 96))]
INPUTS = [torch.randn(48, 64, generator=GENERATOR, dtype=torch.float32) for _ in range(3)]


def model_of(recipe: str) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(64, 96, dtype=torch.float32), nn.GELU(), nn.Linear(96, 32, dtype=torch.float32))
    for layer, weight in zip((model[0], model[2]), WEIGHTS, strict=True):
        layer.weight.data.copy_(weight)
        layer.bias.data.zero_()
    return quantize_model(model, Recipe(rules=[{"layers": "*", **RECIPES[recipe]}]), seed=3)


def passes(model: Any, *, autocast: bool = False) -> list[Tensor]:
    """Return outputs, gradients and buffers of passes in training, and the output of one in evaluation."""
    found = []
    for x in (t.clone().requires_grad_() for t in INPUTS):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = model(x)
        y.float().square().sum().backward()
        found += [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    found += [b.clone() for module in model.modules() if isinstance(module, Quantizer) for b in module.buffers()]
    return [*found, model.eval()(INPUTS[0]).detach()]


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", ["float16", "float64"])  # narrower and wider
def test_a_default_dtype_changes_no_bit_of_a_layer(dtype: str, recipe: str, autocast: bool, products: str) -> None:
    require_same_bits(lambda: passes(model_of(recipe), autocast=autocast), OTHERS[dtype])


def test_nor_of_a_compiled_one() -> None:
    torch.compiler.reset()  # each dtype, mode and recipe has a graph
    require_same_bits(lambda: passes(torch.compile(model_of("NVFP4"), fullgraph=True)), torch.float16)


@pytest.mark.parametrize("dtype", OTHERS)
def test_a_layer_that_gets_its_memory_under_a_default_dtype_is_the_same(dtype: str) -> None:
    def made() -> list[Tensor]:
        with torch.device("meta"):
            model = model_of("delayed")
        model.to_empty(device="cpu")
        model.load_state_dict(state, strict=False)
        return passes(model)

    state = model_of("delayed").state_dict()
    require_same_bits(made, OTHERS[dtype])


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
