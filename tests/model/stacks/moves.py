"""Moves, copies, checkpoints and graphs of a quantized model; and who writes its weights, and when."""

from __future__ import annotations

import copy
import pickle
import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from tests.model.stacks.setup import INPUTS, RECIPES, Run, eager, passes, plain, quantized, require_same


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


# --- who writes a weight --------------------------------------------------------------------------------------------


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
