"""What callers write, with the types that they get: the type checker reads this file (`make lint`), pytest runs it.

`assert_type` fails in the checker where a public function returns anything else, `Any` included. A comment
``type: ignore`` stands where the checker must find a mistake: it fails where it finds none.
"""

from __future__ import annotations

from typing import assert_type

import pytest
import torch
from torch import Tensor, nn

from altgrad.formats import FloatFormat, Format, UnknownFormatError, format_names, get_format
from altgrad.model import GPT, GPTConfig, LayerRecipe, QuantizedLinear, Recipe, layer_recipe, quantize_model
from altgrad.numerics import amax, compute_scale, decode, encode, format_constants, quantize, rung, ulp
from altgrad.optim import Arm, ArmOptimizer, FormatManifold, build_optimizer, stiffness


def test_a_format_has_numbers() -> None:
    e3m4 = get_format("E3M4")
    assert_type(e3m4, Format)
    assert isinstance(e3m4, FloatFormat)
    assert_type(e3m4.bias, int)
    assert_type(e3m4.emin + e3m4.bits, int)
    assert_type(e3m4.max, float)
    assert_type(e3m4.nan_code, int | None)
    assert "E3M4" in format_names() and e3m4.bias == 3
    assert FloatFormat("mine", exponent_bits=4, mantissa_bits=3).bias == 7
    with pytest.raises(UnknownFormatError):
        get_format("E3M4x")


def test_tensors_give_tensors() -> None:
    x = torch.tensor([0.1, 1.03, -7.7, 40.0])
    scale = compute_scale(amax(x), "E3M4")
    assert_type(scale, Tensor)
    assert_type(quantize(x, get_format("E3M4"), scale=scale, rounding="toward-zero"), Tensor)
    assert_type(quantize(x, format_constants("E3M4"), scale=2.0), Tensor)
    codes = encode(x, "E3M4")
    assert_type(decode(codes, "E3M4"), Tensor)
    assert_type(rung(x, "E3M4"), Tensor)
    assert_type(ulp(x, "E3M4"), Tensor)
    assert torch.equal(decode(codes, "E3M4"), quantize(x, "E3M4"))


def test_a_model_keeps_its_class_and_gets_an_optimizer() -> None:
    model = quantize_model(nn.Sequential(nn.Linear(16, 16)), Recipe.uniform("E3M4", grad="E5M2"))
    assert_type(model, nn.Sequential)
    assert isinstance(model[0], QuantizedLinear)
    assert_type(layer_recipe(model[0]), LayerRecipe | None)
    optimizer = build_optimizer(model, Arm(lr=1e-2, stiffness="ulp"))
    assert_type(optimizer, ArmOptimizer)
    assert_type(optimizer.step(lambda: torch.ones(())), Tensor)
    gpt = quantize_model(GPT(GPTConfig(context=8, vocab_size=16, layers=1, heads=1, width=16)), Recipe.uniform("E4M3"))
    assert_type(gpt, GPT)


def test_geometry_is_made_of_tensors() -> None:
    assert_type(stiffness(torch.ones(3), "E3M4", scale=torch.tensor(1.0)), Tensor)
    assert_type(FormatManifold("E3M4").egrad2rgrad(torch.ones(3), torch.ones(3)), Tensor)


def test_mistakes_are_found_by_the_checker_and_by_the_functions() -> None:
    with pytest.raises((TypeError, ValueError, AttributeError)):
        quantize([0.1], "E3M4")  # type: ignore[arg-type]
    with pytest.raises((TypeError, ValueError, AttributeError)):
        FloatFormat("mine", exponent_bits="4", mantissa_bits=3)  # type: ignore[arg-type]
    with pytest.raises((TypeError, ValueError)):
        Recipe.uniform("E3M4", gradient_format="E5M2").rules[0].layer.format_names(1)  # type: ignore[call-arg]
