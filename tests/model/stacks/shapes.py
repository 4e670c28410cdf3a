"""Shapes, dtypes and modes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.model.stacks.setup import (
    INPUTS,
    Run,
    eager,
    passes,
    plain,
    quantized,
    require_same,
)  # fmt: skip


def autocast_off_inside(recipe: str, run: Run) -> None:
    """`autocast(enabled=False)` for a layer inside of a forward pass under autocast."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = quantized(recipe).eval()

        def forward(self, x: Tensor) -> Any:
            x = self.net[1](self.net[0](x))
            with torch.autocast("cpu", enabled=False):
                return self.net[2](x.float())

    with torch.autocast("cpu", torch.bfloat16):
        one, expected = Mixed(), Mixed().net
        y = run(one)(INPUTS[0])
        middle = expected[1](expected[0](INPUTS[0]))
    require_same([y], [expected[2](middle.float())])
    assert y.dtype == torch.float32


def dynamic(recipe: str, run: Run) -> None:
    """Batches of three sizes; compiled with `dynamic=True`."""
    model, expected = quantized(recipe), quantized(recipe)
    ran = model if run is eager else torch.compile(model, backend="aot_eager", dynamic=True)
    for rows in (32, 7, 24):
        for m in (model, expected):
            m.zero_grad()
        ran(INPUTS[0][:rows]).square().sum().backward()
        expected(INPUTS[0][:rows]).square().sum().backward()
        require_same([p.grad for p in model.parameters() if p.ndim == 2],
                     [p.grad for p in expected.parameters() if p.ndim == 2])  # fmt: skip


def shaped(recipe: str, run: Run) -> None:
    """Inputs of one, three and four dimensions, one that is not contiguous, and gradients that are expanded."""
    model, expected = quantized(recipe).eval(), quantized(recipe).eval()
    ran = run(model)
    require_same([ran(INPUTS[0][0])], [expected(INPUTS[0][:1])[0]])
    folded = expected(INPUTS[0])
    require_same([ran(INPUTS[0].view(4, 8, 64)).flatten(0, 1), ran(INPUTS[0].view(2, 2, 8, 64)).flatten(0, 2)],
                 [folded, folded])  # fmt: skip
    require_same([ran(INPUTS[0].t().contiguous().t())], [folded])
    ran(INPUTS[0]).sum().backward()
    expected(INPUTS[0]).backward(torch.ones_like(folded))
    require_same([p.grad for p in model.parameters()], [p.grad for p in expected.parameters()])


def empty(recipe: str, run: Run) -> None:
    """A batch without rows."""
    model = quantized(recipe)
    y = run(model)(INPUTS[0][:0])
    y.sum().backward()
    assert y.shape == (0, 64) and all(not p.grad.any() for p in model.parameters())


def inference(recipe: str, run: Run) -> None:
    """`torch.inference_mode`, then training."""
    model, expected = quantized(recipe), quantized(recipe)
    with torch.inference_mode():
        run(model.eval())(INPUTS[0])
    require_same(passes(run(model.train())), passes(expected))


def frozen(recipe: str, run: Run) -> None:
    """Frozen weights: the input's gradient alone, with the bits that it has beside theirs."""
    model, expected = quantized(recipe).eval(), quantized(recipe).eval()
    model.requires_grad_(False)
    inputs = [INPUTS[0].clone().requires_grad_() for _ in range(2)]
    run(model)(inputs[0]).square().sum().backward()
    expected(inputs[1]).square().sum().backward()
    require_same([inputs[0].grad], [inputs[1].grad])


def default_dtype(recipe: str, run: Run) -> None:
    """`torch.set_default_dtype(torch.float16)`, with parameters and inputs in float32."""
    expected, model = passes(quantized(recipe)), plain()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        require_same(passes(run(quantized(recipe, model))), expected)
    finally:
        torch.set_default_dtype(before)
