"""Who writes a weight, and when."""

from __future__ import annotations

import copy
import tempfile

import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from tests.model.stacks.setup import (
    INPUTS,
    Run,
    eager,
    quantized,
    require_same,
)  # fmt: skip


def written_by_a_hook(recipe: str, run: Run) -> None:
    """A hook before a layer's forward pass writes its weight: `prune`, max-norm, weight noise."""
    model, expected = quantized(recipe), quantized(recipe)
    torch.manual_seed(2)
    prune.random_unstructured(model[0], "weight", 0.5)
    prune.custom_from_mask(expected[0], "weight", model[0].weight_mask)
    prune.remove(expected[0], "weight")
    with torch.no_grad():
        require_same([run(model)(x) for x in INPUTS], [expected(x) for x in INPUTS])


def parametrized(recipe: str, run: Run) -> None:
    """`torch.nn.utils.parametrizations.weight_norm`: a weight that is computed when it is read."""
    model, expected = quantized(recipe), quantized(recipe)
    parametrizations.weight_norm(model[0])
    with torch.no_grad():
        model[0].parametrizations.weight.original0.mul_(2.0)
        expected[0].weight.copy_(model[0].weight)
        require_same([run(model)(x) for x in INPUTS], [expected(x) for x in INPUTS])
    run(model)(INPUTS[0]).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def functional(recipe: str, run: Run) -> None:
    """`torch.func.functional_call` with other weights."""
    model, other = quantized(recipe).eval(), quantized(recipe).eval()
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(-3.0)
        ran, weights = run(model), dict(other.named_parameters())
        named = {name: weights[name.removeprefix("_orig_mod.")] for name, _ in ran.named_parameters()}
        require_same([torch.func.functional_call(ran, named, (INPUTS[0],))], [other(INPUTS[0])])


def offloaded(recipe: str, run: Run) -> None:
    """accelerate's `dispatch_model` with a layer on disk."""
    from accelerate import dispatch_model

    places = {"0": "cpu", "1": "cpu", "2": "disk"}
    with tempfile.TemporaryDirectory() as folder:
        model = dispatch_model(
            quantized(recipe).eval(), places, main_device="cpu", offload_dir=folder, force_hooks=True
        )
        expected = quantized(recipe).eval()
        with torch.no_grad():
            require_same([run(model)(x) for x in INPUTS], [expected(x) for x in INPUTS])


def shared(recipe: str, run: Run) -> None:
    """One layer at two places of a forward pass, beside a layer of its own at each with the same weight."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 64)
    twice = quantized(recipe, nn.Sequential(layer, nn.ReLU(), layer)).eval()
    apart = quantized(recipe, nn.Sequential(copy.deepcopy(layer), nn.ReLU(), copy.deepcopy(layer))).eval()
    run(twice)(INPUTS[0]).square().sum().backward()
    apart(INPUTS[0]).square().sum().backward()
    torch.testing.assert_close(layer.weight.grad, apart[0].weight.grad + apart[2].weight.grad, rtol=1e-6, atol=1e-6)


def stepped_in_backward(recipe: str, run: Run) -> None:
    """An optimizer in the backward pass, by `register_post_accumulate_grad_hook`."""
    ends = []
    for inside in (True, False):
        model = quantized(recipe)
        ran = run(model) if inside else model
        optimizers = {p: torch.optim.SGD([p], lr=0.01) for p in model.parameters()}
        if inside:
            for p, optimizer in optimizers.items():
                p.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
        for x in INPUTS:
            ran(x).square().mean().backward()
            for optimizer in optimizers.values():
                _ = None if inside else optimizer.step()
                optimizer.zero_grad()
        ends.append([p.detach() for p in model.parameters() if p.ndim == 2])
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-7 if run is not eager else 0)


def stepped_too_early(recipe: str, run: Run) -> None:
    """A step of the optimizer between forward and backward pass: torch's error, as from its own layers."""
    model = run(quantized(recipe))
    loss = model(INPUTS[0]).square().sum()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2.0)
    try:
        loss.backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    else:
        # A graph keeps what its own backward pass reads: the operands, which are those of the forward pass.
        assert run is not eager
        found = [p.grad for p in model.parameters() if p.ndim == 2]
        one = quantized(recipe)
        one(INPUTS[0]).square().sum().backward()
        require_same(found, [p.grad for p in one.parameters() if p.ndim == 2])
