"""``save: codes``: half of what bfloat16 keeps for the backward pass, and the same results.

Oracle: the same layer with ``save: operands``.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from altgrad.model import QuantizedLinear, Recipe

pytestmark = pytest.mark.usefixtures("products")

FORMATS = ["E0M7", "E1M6", "E2M5", "E3M4", "E4M3", "E5M2", "E6M1", "E7M0"]


def layer(format: str, save: str, **options: str) -> QuantizedLinear:
    weight = 0.02 * torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    return QuantizedLinear(nn.Parameter(weight), None, Recipe.uniform(format, save=save, **options).rules[0].layer)


def step(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    module.zero_grad()
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(y.dtype))
    return y.detach(), x.grad, module.weight.grad


@pytest.mark.parametrize("options", [{}, {"scale": "E8M0"}, {"scaling": "delayed"}], ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_results_are_the_same(format, options):
    x = torch.randn(48, 64, generator=torch.Generator().manual_seed(2))
    codes, operands = layer(format, "codes", **options), layer(format, "operands", **options)
    for scale in (1.0, 3.0):  # a second step, for delayed scaling
        assert all(map(torch.equal, step(codes, scale * x), step(operands, scale * x)))


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


@pytest.mark.parametrize("format", FORMATS)
def test_half_of_what_bfloat16_keeps_is_kept(format):
    """And a fourth of what float32 keeps, since operands in float32 leave the same codes."""
    x = torch.randn(512, 64, dtype=torch.bfloat16)
    linear = nn.Linear(64, 32, bias=False)
    scales = 2 * 4
    assert kept_bytes(linear, x) == 2 * (x.numel() + linear.weight.numel())
    assert kept_bytes(layer(format, "codes"), x) == x.numel() + linear.weight.numel() + scales


def test_codes_are_refused_where_they_cannot_serve():
    with pytest.raises(ValueError, match="save codes needs granularity tensor, not row"):
        Recipe.uniform("E4M3", granularity="row", save="codes")
    with pytest.raises(ValueError, match="at most 8 bits, and FP16 has more"):
        Recipe.uniform("E5M10", save="codes")


def test_nan_is_not_hidden_by_its_code():
    x = torch.ones(16, 64)
    x[0, 0] = torch.nan
    y, _, dw = step(layer("E3M4", "codes"), x)
    assert y[0].isnan().all() and dw[:, 0].isnan().all()
