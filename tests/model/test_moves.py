"""A quantized model that is cast, moved or filled later is what it would be, had it been quantized afterwards.

Oracle: the same done to the plain model first. Recipes of each kind of scale, and those that remember.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from altgrad.model import Recipe, quantize_model
from altgrad.model.quantized.quantizer import Quantizer

RECIPES: dict[str, Callable[[], Recipe]] = {
    "tensor": lambda: Recipe.uniform("E3M4"),
    "row": lambda: Recipe.uniform("E4M3", granularity="row"),
    "block": lambda: Recipe.uniform("E4M3", granularity="block", scale="E8M0", block=32),
    "two-level": lambda: Recipe.uniform("E2M1", grad="E2M1", granularity="block", scale="E4M3", block=16),
    "delayed": lambda: Recipe.uniform("E3M4", scaling="delayed"),
    "stochastic": lambda: Recipe.uniform("E3M4", rounding="stochastic"),
}
DTYPES = (torch.bfloat16, torch.float16, torch.float64)


def plain(device: str = "cpu") -> nn.Sequential:
    torch.manual_seed(0)
    with torch.device(device):
        return nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 64))


def passes(model: nn.Module, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return outputs and gradients of some training steps."""
    found = []
    for i in range(3):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(i)).to(dtype).requires_grad_()
        model.zero_grad()
        y = model(x)
        y.float().square().sum().backward()
        found += [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]
    return found


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(torch.equal(a, b) and a.dtype == b.dtype and bool(a.isfinite().all()) for a, b in pairs)


@pytest.mark.parametrize("swap", [False, True], ids=["", "swapped"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_cast_after_is_a_cast_before(recipe: str, dtype: torch.dtype, swap: bool) -> None:
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        model = quantize_model(plain(), RECIPES[recipe]()).to(dtype)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert same(passes(model, dtype), passes(quantize_model(plain().to(dtype), RECIPES[recipe]()), dtype))


@pytest.mark.parametrize("recipe", ["delayed", "stochastic"])
def test_what_was_learnt_outlives_a_cast_there_and_back(recipe: str) -> None:
    model, still = (quantize_model(plain(), RECIPES[recipe]()) for _ in range(2))
    passes(model), passes(still)
    model.to(torch.bfloat16).to(torch.float32)
    model.load_state_dict(still.state_dict())  # weights, which the cast has rounded
    assert same(passes(model), passes(still))
    dtypes = {b.dtype for m in model.modules() if isinstance(m, Quantizer) for b in m.buffers()}
    assert dtypes <= {torch.float32, torch.int64}


@pytest.mark.parametrize("order", ["filled, then empty", "empty, then filled", "given"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_model_that_gets_its_memory_later(recipe: str, order: str) -> None:
    weights, expected = plain().state_dict(), passes(quantize_model(plain(), RECIPES[recipe]()))
    if order == "empty, then filled":
        model = quantize_model(plain("meta"), RECIPES[recipe](), seed=0).to_empty(device="cpu")
    elif order == "filled, then empty":
        model = quantize_model(plain(), RECIPES[recipe]()).to_empty(device="cpu")
    else:
        model = quantize_model(plain("meta"), RECIPES[recipe]())
    model.load_state_dict(weights, assign=order == "given")
    assert same(passes(model), expected)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_checkpoint_that_lacks_a_weight_or_has_another_is_refused(recipe: str) -> None:
    model = quantize_model(plain(), RECIPES[recipe]())
    with pytest.raises(RuntimeError, match="Missing key.*weight"):
        model.load_state_dict({"0.bias": plain()[0].bias})
    with pytest.raises(RuntimeError, match="Unexpected key.*0.other"):
        model.load_state_dict(plain().state_dict() | {"0.other": torch.zeros(1)})
