"""Layers whose operands are rounded by chance. Oracles: rounding to nearest, exact products, means over many draws."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from altgrad.model import Recipe, quantize_model
from altgrad.model.quantized.operand import Operand
from altgrad.model.quantized.quantizer import Quantizer

NEAREST = {"format": "E2M1"}
BY_CHANCE = NEAREST | {"rounding": "stochastic"}
ROLES = ("weight", "input", "grad")
DRAWS = 3000


def recipe(*by_chance: str, **options: object) -> Recipe:
    tensors = {role: (BY_CHANCE if role in by_chance else NEAREST) | options for role in ROLES}
    return Recipe(rules=[{"layers": "*", "accumulate": "float32", **tensors}])


def model_of(found: Recipe, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(0)
    return quantize_model(nn.Sequential(nn.Linear(24, 16), nn.Linear(16, 32)), found, seed=seed)


def x_of() -> Tensor:
    return torch.randn(20, 24, generator=torch.Generator().manual_seed(1))


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    direction = torch.randn(20, 32, generator=torch.Generator().manual_seed(2))
    return list(torch.autograd.grad((model(x) * direction).sum(), [layer.weight for layer in model]))


@pytest.mark.parametrize("role", ROLES)
def test_each_role_rounds_by_chance_where_its_recipe_says_so(role: str) -> None:
    x, nearest, model = x_of(), model_of(recipe()), model_of(recipe(role))
    outputs = [model(x) for _ in range(3)]
    assert all(torch.equal(y, nearest(x)) for y in outputs) == (role == "grad")
    assert torch.equal(outputs[0], outputs[1]) == (role == "grad")
    assert not torch.equal(gradients(model, x)[0], gradients(model, x)[0])


@pytest.mark.parametrize("options", [{}, {"granularity": "row"}, {"granularity": "block", "scale": "E8M0"}], ids=str)
def test_evaluation_rounds_to_nearest_and_draws_nothing(options: dict[str, str]) -> None:
    x, model = x_of(), model_of(recipe(*ROLES, **options)).eval()
    before = copy.deepcopy(model.state_dict())
    assert torch.equal(model(x), model_of(recipe(**options)).eval()(x))
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def ms_eden() -> Recipe:
    block = {"format": "E2M1", "granularity": "block", "block": 16, "scale": "E4M3"}
    options = {"accumulate": "float32", "weight": NEAREST, "input": block}
    return Recipe(rules=[{"layers": "*", "grad": block | {"rounding": "MS-EDEN"}, **options}])


def test_ms_eden_rounds_both_backward_products_anew_and_right_on_average() -> None:
    """On average they are the products of the forward pass's operands with the gradient that nothing rounds."""
    model, draws = model_of(ms_eden())[1], 400
    hidden = torch.randn(20, 16, generator=torch.Generator().manual_seed(3), requires_grad=True)
    direction = torch.randn(20, 32, generator=torch.Generator().manual_seed(2))

    def both(layer: nn.Module) -> tuple[Tensor, ...]:
        return torch.autograd.grad((layer(hidden) * direction).sum(), [hidden, layer.weight])

    rule = ms_eden().rules[0]
    exact = both(model_of(Recipe(rules=[rule.model_copy(update={"grad": None, "input": rule.weight})]))[1])[0]
    values, scale = model.quantizer("input").state(False), model.quantizer("input").scaling
    operand = Operand.of(hidden, scale, values, 1, torch.float32)
    exact = (exact, direction.t() @ (operand.values / operand.scale))
    drawn = [both(model) for _ in range(draws)]
    for found, of_all in zip(map(torch.stack, zip(*drawn, strict=True)), exact, strict=True):
        off = (found.mean(0) - of_all) / (found.std(0) / draws**0.5)
        assert off.square().mean() < 1.5 and off.abs().max() < 5
    assert torch.equal(model.eval()(hidden), model_of(ms_eden())[1].eval()(hidden))


def test_ms_eden_rounds_the_two_backward_products_independently() -> None:
    """Where both are one product: of a symmetric gradient, and of an input that is the weight."""
    torch.manual_seed(4)
    weight, half, rule = torch.randn(128, 128), torch.randn(128, 128), ms_eden().rules[0]

    def both(**of_grad: None) -> Tensor:
        found = Recipe(rules=[rule.model_copy(update={"input": rule.weight, **of_grad})])
        layer = quantize_model(nn.Sequential(nn.Linear(128, 128, bias=False)), found, seed=3)[0]
        with torch.no_grad():
            layer.weight.copy_(weight)
        x, loss = weight.clone().requires_grad_(), lambda x: (layer(x) * (half + half.t())).sum()
        return torch.stack([t.flatten() for _ in range(4) for t in torch.autograd.grad(loss(x), [x, layer.weight])])

    exact = both(grad=None)
    assert torch.allclose(exact[0], exact[1], rtol=1e-4, atol=1e-3)
    apart = torch.corrcoef(both() - exact).fill_diagonal_(0)
    assert apart.abs().max() < 0.1  # neither of two products in a step nor of two steps


def test_gradients_are_right_on_average() -> None:
    """By chance the mean is that of a gradient which nothing rounds, and to nearest it is not."""
    x = x_of()
    unrounded = Recipe(rules=[{"layers": "*", "accumulate": "float32", "weight": NEAREST, "input": NEAREST}])
    exact = gradients(model_of(unrounded), x)[1].double()
    model = model_of(recipe("grad"))
    found = torch.stack([gradients(model, x)[1] for _ in range(DRAWS)]).double()
    error = found.std(0) / DRAWS**0.5
    far = 5 * error + 1e-4 * exact.abs().max()
    assert ((found.mean(0) - exact).abs() <= far).all()
    assert ((gradients(model_of(recipe()), x)[1] - exact).abs() > far).double().mean() > 0.5


@pytest.mark.parametrize(
    "found", [recipe(*ROLES), pytest.param(ms_eden(), marks=pytest.mark.long)], ids=["stochastic", "MS-EDEN"]
)
def test_a_compiled_graph_draws_what_eager_mode_does(found: Recipe) -> None:
    """In the backward pass too, and where that comes after other forward passes."""
    x, eager, layer = x_of().requires_grad_(), model_of(found)[0], model_of(found)[0]
    compiled = torch.compile(layer, dynamic=False)
    direction = torch.randn(20, 16, generator=torch.Generator().manual_seed(2))

    def gradients_of(loss: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss, [x, weight])

    expected = [gradients_of((eager(x) * direction).sum(), eager.weight) for _ in range(3)]
    losses = [(compiled(x) * direction).sum() for _ in range(3)]
    for loss, both in zip(losses, expected, strict=True):
        ours = gradients_of(loss, layer.weight)
        assert all(torch.equal(a, b) for a, b in zip(ours, both, strict=True))
    assert not torch.equal(expected[0][1], expected[1][1])


def test_every_tensor_has_numbers_of_its_own_and_the_seed_changes_them_all() -> None:
    streams = [q.stream for q in model_of(recipe(*ROLES), seed=7).modules() if isinstance(q, Quantizer)]
    assert [stream[0].item() for stream in streams] == [7] * 6
    assert len({stream[1].item() for stream in streams}) == 6
    assert min(stream[1].item() for stream in streams) >= 1 << 31  # apart from those of an optimizer's tensors
    x = x_of()
    assert torch.equal(model_of(recipe("input"), seed=7)(x), model_of(recipe("input"), seed=7)(x))
    assert not torch.equal(model_of(recipe("input"), seed=7)(x), model_of(recipe("input"), seed=8)(x))


def test_a_loaded_model_goes_on_with_the_numbers_that_come_next() -> None:
    x, model = x_of(), model_of(recipe(*ROLES))
    gradients(model, x)
    other = model_of(recipe(*ROLES), seed=1)
    other.load_state_dict(model.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, x), gradients(other, x), strict=True))


def test_processes_draw_for_their_rows_by_themselves_and_for_weights_alike(monkeypatch):
    """Errors of two ranks on the same rows are independent; the first rank's are those of a process by itself."""
    found: dict[int | None, dict[str, Tensor]] = {}
    for rank in (None, 0, 1, 2):
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda rank=rank: rank is not None)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        torch.manual_seed(0)
        layer = quantize_model(nn.Sequential(nn.Linear(64, 64)), recipe(*ROLES))[0]
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        y = layer(x)
        y.backward(torch.randn(64, 64, generator=torch.Generator().manual_seed(2)))
        scaling, source = layer.settings(torch.float32).weight, layer.operand_state("weight")
        operand = Operand.of(layer.weight, scaling, source, 1, torch.float32)
        found[rank] = {"y": y.detach(), "dx": x.grad, "dw": layer.weight.grad, "weight": operand.values}
    for what, t in found[None].items():
        assert torch.equal(found[0][what], t)
        assert torch.equal(found[1][what], t) == (what == "weight")
    mean = sum(found[rank]["y"] for rank in (0, 1, 2)) / 3
    errors = torch.stack([(found[rank]["y"] - mean).flatten() for rank in (0, 1, 2)])
    # Of three independent errors, less their mean, any two have a correlation of -1/2; of equal ones nothing is left.
    assert torch.allclose(torch.corrcoef(errors)[~torch.eye(3, dtype=torch.bool)], torch.tensor(-0.5), atol=0.1)
