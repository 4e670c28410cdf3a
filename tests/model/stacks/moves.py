"""Moves, copies, checkpoints and graphs of a quantized model."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.model.stacks.setup import (
    INPUTS,
    RECIPES,
    Run,
    passes,
    plain,
    quantized,
    require_same,
)  # fmt: skip


def cast(recipe: str, run: Run) -> None:
    """`model.to(torch.bfloat16)` after quantizing."""
    require_same(
        passes(run(quantized(recipe).to(torch.bfloat16)), torch.bfloat16),
        passes(quantized(recipe, plain().to(torch.bfloat16)), torch.bfloat16),
    )


def meta(recipe: str, run: Run) -> None:
    """Made on the meta device, `to_empty`, then loaded."""
    model = quantized(recipe, plain("meta")).to_empty(device="cpu")
    model.load_state_dict(plain().state_dict())
    require_same(passes(run(model)), passes(quantized(recipe)))


def copies(recipe: str, run: Run) -> None:
    """`copy.deepcopy` and pickle."""
    model = quantized(recipe)
    passes(model)
    made = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    after = passes(model)
    for one in made:
        require_same(passes(run(one)), after)


def average(recipe: str, run: Run) -> None:
    """`AveragedModel` of `torch.optim.swa_utils`: the mean of two states of the weights."""
    model, expected = quantized(recipe), quantized(recipe)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    averaged.update_parameters(model)
    first = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    averaged.update_parameters(model)
    with torch.no_grad():
        for p, q in zip(expected.parameters(), first, strict=True):
            p.copy_(1.5 * q)
    require_same([p.detach() for p in averaged.module.parameters()], [p.detach() for p in expected.parameters()])
    require_same([averaged.eval()(INPUTS[0])], [expected.eval()(INPUTS[0])])


def scaler(recipe: str, run: Run) -> None:
    """float16 autocast with `GradScaler`, whose scale is a power of two."""
    ends = []
    for enabled in (True, False):
        model = run(quantized(recipe))
        optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-10)
        scaling = torch.amp.GradScaler("cpu", init_scale=2.0**4, enabled=enabled)
        for x in INPUTS[:1]:
            with torch.autocast("cpu", torch.float16):
                loss = model(x).float().square().mean()
            scaling.scale(loss).backward()
            scaling.step(optimizer)
            scaling.update()
        ends.append([p.detach() for p in model.parameters()])
    for a, b in zip(*ends, strict=True):  # float16 gradients that are subnormal without the scale
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def plain_checkpoint(recipe: str, run: Run) -> None:
    """A plain checkpoint, strictly, into every recipe, and what a recipe saves into every other one."""
    model = quantized(recipe)
    model.load_state_dict(plain().state_dict())
    for other in RECIPES:
        quantized(other).load_state_dict(model.state_dict())
    require_same(passes(run(model)), passes(quantized(recipe)))


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


def around_each(recipe: str, reentrant: bool = False) -> nn.Sequential:
    return nn.Sequential(*(Checkpointed(layer, reentrant) for layer in quantized(recipe)))


def recomputed(recipe: str, run: Run) -> None:
    """Activation checkpointing, `use_reentrant=False`."""
    require_same(passes(run(around_each(recipe))), passes(quantized(recipe)))


def recomputed_reentrant(recipe: str, run: Run) -> None:
    """Activation checkpointing, `use_reentrant=True`."""
    require_same(passes(run(around_each(recipe, True))), passes(quantized(recipe)))


def nested(recipe: str, run: Run) -> None:
    """A checkpoint inside of another."""
    require_same(passes(run(Checkpointed(around_each(recipe), False))), passes(quantized(recipe)))


def compiled(recipe: str) -> None:
    """`torch.compile(model, fullgraph=True)`."""
    torch._dynamo.reset()
    require_same(passes(torch.compile(quantized(recipe), fullgraph=True)), passes(quantized(recipe)))


def recomputed_in_a_graph(recipe: str) -> None:
    """`torch.compile(model, fullgraph=True)` of a model with checkpoints inside."""
    torch._dynamo.reset()
    found = torch.compile(around_each(recipe), backend="aot_eager", fullgraph=True)
    require_same(passes(found), passes(quantized(recipe)))


def per_sample(recipe: str, run: Run) -> None:
    """Gradients of each sample by `torch.func.vmap(grad(...))`."""
    model = quantized(recipe)
    ran = run(model)
    weights = dict(ran.named_parameters())

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        found: Tensor = torch.func.functional_call(ran, weights, (x[None],)).square().sum()
        return found

    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, INPUTS[0][:4])
    for i in range(4):
        model.zero_grad()
        model(INPUTS[0][i : i + 1]).square().sum().backward()
        require_same([gradients[name][i] for name in weights], [p.grad for p in weights.values()])


def exported(recipe: str) -> None:
    """`torch.export`, of a model in evaluation."""
    model = quantized(recipe).eval()
    program = torch.export.export(model, (INPUTS[0],))
    require_same([program.module()(INPUTS[0])], [model(INPUTS[0])])


def scripted(recipe: str) -> None:
    """`torch.jit.trace`."""
    torch.jit.trace(quantized(recipe).eval(), INPUTS[0])
