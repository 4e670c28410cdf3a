"""Gradients: that are not finite, of gradients, inside of others, and added up."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.model.stacks.setup import (
    INPUTS,
    Run,
    plain,
    quantized,
    require_same,
)  # fmt: skip


def overflowing(recipe: str, run: Run) -> None:
    """An overflow in float16: `GradScaler` halves its scale and skips the step."""
    ends = []
    for model in (plain(), quantized(recipe)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaling = torch.amp.GradScaler("cpu", init_scale=2.0**20)
        weights = list(model.parameters())
        before = [p.detach().clone() for p in weights]
        with torch.autocast("cpu", torch.float16):
            loss = run(model)(INPUTS[0]).float().square().sum() * 1e4
        assert loss.isfinite()  # so that it is the gradient that overflows
        scaling.scale(loss).backward()
        scaling.step(optimizer)
        scaling.update()
        ends.append((scaling.get_scale(), [torch.equal(a, b) for a, b in zip(before, weights, strict=True)]))
    assert ends[0] == ends[1] == (2.0**19, [True] * 4)


def infinite(recipe: str, run: Run) -> None:
    """An infinity in an input: all that torch's own layers make not finite, and the next step as ever."""
    x = INPUTS[0].clone()
    x[3, 5] = torch.inf
    model = quantized(recipe)
    ran = run(model)
    y = ran(x.requires_grad_())
    y.square().sum().backward()
    assert not y[3].isfinite().any() and not model[0].weight.grad.isfinite().all()
    assert all(buffer.isfinite().all() for buffer in model.buffers()) and ran(INPUTS[1]).isfinite().all()


def require_alike(found: Any, expected: Any) -> None:
    """Tensors with the direction of torch's own, but for what rounding to 2 and 3 bits of mantissa turns them."""
    for a, b in zip(found, expected, strict=True):
        assert torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0) > 0.97


def penalised(recipe: str, run: Run) -> None:
    """A gradient penalty, `create_graph=True`, with a residual path: as of torch's own layers, but for rounding."""
    ends = []
    for model in (plain(), quantized(recipe)):
        x = INPUTS[0].clone().requires_grad_()
        y = run(model)(x) + x
        (g,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        (g.norm(dim=1) - 1).square().mean().backward()
        ends.append([p.grad for p in model.parameters() if p.ndim == 2])
    require_alike(*ends)


def hessian(recipe: str, run: Run) -> None:
    """A Hessian-vector product by two backward passes: as of torch's own layers, but for rounding."""
    ends = []
    for model in (plain(), quantized(recipe)):
        weights = [p for p in model.parameters() if p.ndim == 2]
        torch.manual_seed(3)
        vectors = [torch.randn_like(p) for p in weights]
        gradients = torch.autograd.grad(run(model)(INPUTS[0]).square().mean(), weights, create_graph=True)
        along = sum((g * v).sum() for g, v in zip(gradients, vectors, strict=True))
        ends.append(torch.autograd.grad(along, weights))
    require_alike(*ends)


def forces(recipe: str, run: Run) -> None:
    """`enable_grad` inside of a forward pass, `no_grad` around it."""

    class Forces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = quantized(recipe)

        def forward(self, x: Tensor) -> Any:
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                return torch.autograd.grad(self.net(x).square().sum(), x)[0]

    expected = Forces()(INPUTS[0])
    with torch.no_grad():
        require_same([run(Forces())(INPUTS[0])], [expected])


def accumulated(recipe: str, run: Run) -> None:
    """Gradients of several passes that add up, beside their sum."""
    model, one = quantized(recipe), quantized(recipe)
    ran, total = run(model), [torch.zeros_like(p) for p in one.parameters()]
    for x in INPUTS:
        ran(x).square().sum().backward()
        one.zero_grad()
        one(x).square().sum().backward()
        total = [t + p.grad for t, p in zip(total, one.parameters(), strict=True)]
    found = [p.grad for p in model.parameters()]
    require_same([g for g in found if g.ndim == 2], [t for t in total if t.ndim == 2])


def twice_backward(recipe: str, run: Run) -> None:
    """`backward(retain_graph=True)` twice: the same gradient again, with the same random numbers."""
    model = quantized(recipe)
    loss = run(model)(INPUTS[0]).square().sum()
    found = []
    for _ in range(2):
        model.zero_grad()
        loss.backward(retain_graph=True)
        found.append([p.grad.clone() for p in model.parameters()])
    require_same(*found)


def offloaded_activations(recipe: str, run: Run) -> None:
    """`torch.autograd.graph.save_on_cpu` around the forward pass."""
    model, expected = quantized(recipe), quantized(recipe)
    with torch.autograd.graph.save_on_cpu():
        loss = run(model)(INPUTS[0]).square().sum()
    loss.backward()
    expected(INPUTS[0]).square().sum().backward()
    require_same([p.grad for p in model.parameters() if p.ndim == 2],
                 [p.grad for p in expected.parameters() if p.ndim == 2])  # fmt: skip


def forward_mode(recipe: str, run: Run) -> None:
    """`torch.autograd.forward_ad`."""
    model = run(quantized(recipe).eval())
    with torch.autograd.forward_ad.dual_level():
        model(torch.autograd.forward_ad.make_dual(INPUTS[0], INPUTS[1]))
