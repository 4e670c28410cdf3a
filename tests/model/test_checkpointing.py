"""Activation checkpointing changes no bit: what a layer drew and learnt in a forward pass, its recomputation repeats.

Oracle: the same model without checkpoints.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from altgrad.model import Recipe, quantize_model
from altgrad.model.quantized.linear import QuantizedLinear
from tests.model.stacks.moves import Checkpointed

RECIPES: dict[str, dict[str, object]] = {
    "tensor": {}, "row": {"granularity": "row"}, "stochastic": {"rounding": "stochastic"},
    "stochastic rows": {"rounding": "stochastic", "granularity": "row"}, "delayed": {"scaling": "delayed"},
    "static": {"scaling": "static"}, "delayed, stochastic": {"scaling": "delayed", "rounding": "stochastic"},
}  # fmt: skip
REMEMBERING = ["stochastic", "delayed"]


def plain(recipe: str) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)) for _ in range(3)]
    return quantize_model(nn.Sequential(*blocks), Recipe.uniform("E3M4", grad="E5M2", **RECIPES[recipe]))


def checkpointed(recipe: str, reentrant: bool) -> nn.Sequential:
    model = plain(recipe)
    for i, block in enumerate(model):
        model[i] = Checkpointed(block, reentrant)
    return model


def inputs(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 32, generator=generator) for _ in range(count)]


def state(model: nn.Module) -> list[Tensor]:
    return [t.clone() for p in model.parameters() for t in (p, p.grad) if t is not None] + list(model.buffers())


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(map(torch.equal, state(a), state(b)))


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x.clone().requires_grad_()).square().sum()


def one_after_the_other(model: nn.Module) -> None:
    for x in inputs(3):
        loss(model, x).backward()


def first_in_first_out(model: nn.Module) -> None:
    """As pipeline parallelism has it."""
    for of_one in [loss(model, x) for x in inputs(3)]:
        of_one.backward()


def last_in_first_out(model: nn.Module) -> None:
    for of_one in reversed([loss(model, x) for x in inputs(3)]):
        of_one.backward()


def of_one_loss(model: nn.Module) -> None:
    torch.stack([loss(model, x) for x in inputs(3)]).sum().backward()


def one_discarded(model: nn.Module) -> None:
    losses = [loss(model, x) for x in inputs(3)]
    losses[2].backward()
    losses[0].backward()


def all_layers_twice(model: nn.Module) -> None:
    loss(nn.Sequential(model, model), inputs(1)[0]).backward()


def between_others(model: nn.Module) -> None:
    """Evaluation, and a training pass that nothing is differentiated of."""
    made = loss(model, inputs(1)[0])
    with torch.no_grad():
        model(inputs(2)[1])
    model.eval()
    model(inputs(2)[1])
    model.train()
    made.backward()


def twice_backward(model: nn.Module) -> None:
    made = loss(model, inputs(1)[0])
    made.backward(retain_graph=True)
    made.backward()


def in_bfloat16(model: nn.Module) -> None:
    for x in inputs(2):
        with torch.autocast("cpu", torch.bfloat16):
            made = loss(model, x)
        made.backward()


Use = Callable[[nn.Module], None]
USES: list[Use] = [
    one_after_the_other, first_in_first_out, last_in_first_out, of_one_loss, one_discarded, all_layers_twice,
    between_others, in_bfloat16,
]  # fmt: skip


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_checkpoint_around_each_block_changes_no_bit(recipe: str, reentrant: bool, use: Use) -> None:
    expected, found = plain(recipe), checkpointed(recipe, reentrant)
    use(expected)
    use(found)
    assert same(expected, found)


@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_checkpoint_around_all_of_a_model_that_is_called_twice_changes_no_bit(recipe: str, reentrant: bool) -> None:
    """So the weights are quantized together inside of it, and each layer is in it twice."""
    expected, found = plain(recipe), plain(recipe)
    for x in inputs(3):
        for model in (expected, found):
            model.zero_grad()
        expected(expected(x.clone().requires_grad_())).square().sum().backward()
        twice = nn.Sequential(found, found)
        checkpoint(twice, x.clone().requires_grad_(), use_reentrant=reentrant).square().sum().backward()
        assert same(expected, found)


def test_a_graph_that_is_kept_is_run_again_as_often_as_it_is_asked_for() -> None:
    """A history of gradients goes on with each backward pass, with checkpoints or without; a stream does not."""
    for recipe in ("tensor", "stochastic"):
        expected, found = plain(recipe), checkpointed(recipe, False)
        twice_backward(expected)
        twice_backward(found)
        assert same(expected, found)


@pytest.mark.parametrize("recipe", REMEMBERING)
def test_a_compiled_model_runs_its_checkpoints_in_eager_mode_or_refuses(recipe: str) -> None:
    expected, found = plain(recipe), checkpointed(recipe, False)
    torch._dynamo.reset()
    one_after_the_other(expected)
    one_after_the_other(torch.compile(found, backend="aot_eager"))
    assert same(expected, found)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="cannot repeat stochastic rounding or delayed scaling"):
        loss(torch.compile(checkpointed(recipe, False), backend="aot_eager", fullgraph=True), inputs(1)[0])
    torch._dynamo.reset()


@pytest.mark.parametrize("recipe", ["tensor", "row"])
def test_a_checkpoint_inside_of_another_is_fine_where_nothing_is_remembered(recipe: str) -> None:
    expected, found = plain(recipe), checkpointed(recipe, False)
    loss(expected, inputs(1)[0]).backward()
    loss(Checkpointed(found, False), inputs(1)[0]).backward()
    assert same(expected, found)


def test_what_is_noted_goes_with_its_graph_and_into_no_copy() -> None:
    model = checkpointed("delayed, stochastic", False)
    layer = next(m for m in model.modules() if isinstance(m, QuantizedLinear))
    for x in inputs(20):
        loss(model, x)
    assert len(layer.passes._passes) <= 2
    assert not next(m for m in copy.deepcopy(model).modules() if isinstance(m, QuantizedLinear)).passes._passes
    bare = plain("delayed, stochastic")
    one_after_the_other(bare)
    assert not any(m.passes._passes for m in bare.modules() if isinstance(m, QuantizedLinear))
