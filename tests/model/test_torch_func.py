"""Quantized layers under `torch.func`. Oracle: the layers by themselves, one sample or one model after the other.

What is between them is exact (relu, no bias), so that a batch of it has the bits of its parts.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, stack_module_state, vmap

from altgrad.model import Recipe, hardware, quantize_model

RECIPES: dict[str, dict[str, Any]] = {
    "tensor": {}, "row": {"granularity": "row"}, "block": {"granularity": "block", "block": 16, "scale": "E8M0"},
    "two-level": {"granularity": "block", "block": 16, "scale": "E4M3"}, "codes": {"save": "codes"},
    "clipped": {"gradient": "clipped"}, "relu": {"gradient": "relu"}, "float32": {"accumulate": "float32"},
}  # fmt: skip


@pytest.fixture(params=[True, False], ids=["bf16", "float32"], autouse=True)
def operands(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operands in either dtype."""
    monkeypatch.setenv(hardware.SWITCH, "on" if request.param else "off")


def model(seed: int = 0, **options: Any) -> nn.Module:
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Linear(32, 48, bias=False), nn.ReLU(), nn.Linear(48, 8, bias=False))
    return quantize_model(layers, Recipe.uniform("E4M3", grad="E5M2", **options))


def samples(n: int = 5) -> Tensor:
    """Return n samples of six rows whose magnitudes differ, so that scales of their own show."""
    torch.manual_seed(1)
    return torch.randn(n, 6, 32) * torch.logspace(-2, 2, n)[:, None, None]


def loss(m: nn.Module, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
    return functional_call(m, parameters, (x,)).square().mean()


def by_autograd(m: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Return the gradients of an ordinary step, that of ``x`` among them."""
    m.zero_grad()
    x = x.clone().requires_grad_()
    m(x).square().mean().backward()
    return {"x": x.grad} | {name: p.grad.clone() for name, p in m.named_parameters()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_of_samples_by_vmap_are_those_of_a_loop_to_the_bit(recipe: str) -> None:
    m, xs = model(**RECIPES[recipe]), samples()
    each = vmap(grad(lambda p, x: loss(m, p, x), argnums=(0, 1)), in_dims=(None, 0))
    found, of_x = each(dict(m.named_parameters()), xs)
    for i, x in enumerate(xs):
        assert_equal({"x": of_x[i]} | {name: g[i] for name, g in found.items()}, by_autograd(m, x))
    one, of_one = grad(lambda p, x: loss(m, p, x), argnums=(0, 1))(dict(m.named_parameters()), x)
    assert_equal({"x": of_one} | one, by_autograd(m, x))


@pytest.mark.parametrize("recipe", RECIPES)
def test_models_of_several_seeds_by_vmap_are_those_of_a_loop_to_the_bit(recipe: str) -> None:
    models, x = [model(seed, **RECIPES[recipe]) for seed in range(3)], samples()[0]
    parameters, buffers = stack_module_state(models)
    found, outputs = vmap(
        lambda p, b: (grad(lambda p: loss(models[0], p | b, x))(p), functional_call(models[0], p | b, (x,)))
    )(parameters, buffers)
    for i, m in enumerate(models):
        assert torch.equal(outputs[i], m(x))
        expected = by_autograd(m, x)
        assert_equal({name: g[i] for name, g in found.items()} | {"x": expected["x"]}, expected)


def test_any_dimension_may_be_the_batch_and_backward_goes_through_vmap() -> None:
    m, xs = model(), samples()
    last = xs.permute(1, 2, 0).clone().requires_grad_()
    outputs = vmap(m, in_dims=2, out_dims=1)(last)
    outputs.square().mean(dim=(0, 2)).sum().backward()
    for i, x in enumerate(xs):
        assert torch.equal(outputs[:, i], m(x))
        assert torch.equal(last.grad[..., i], by_autograd(m, x)["x"])


def test_a_jacobian_is_that_of_its_rows() -> None:
    """Its products are of each output's own incoming gradient, with the scales of that."""
    m, x = model(), samples()[0][:1]
    found = jacrev(m)(x)
    for i in range(8):
        leaf = x.clone().requires_grad_()
        m(leaf)[0, i].backward()
        assert torch.equal(found[0, i], leaf.grad)


def test_autocast_is_that_of_the_call() -> None:
    m, xs = model(), samples()
    with torch.autocast("cpu", torch.bfloat16):
        found = vmap(m)(xs)
        assert found.dtype == torch.bfloat16 and torch.equal(found, torch.stack([m(x) for x in xs]))


@pytest.mark.parametrize(
    ("options", "words"),
    [({"rounding": "stochastic"}, "no rounding: stochastic while"), ({"scaling": "delayed"}, "no scaling: delayed"),
     ({"scaling": "static"}, "no scaling: static while")],
)  # fmt: skip
def test_what_changes_with_every_call_is_refused_while_training_alone(options: dict[str, Any], words: str) -> None:
    m, xs = model(**options), samples()
    with pytest.raises(NotImplementedError, match=f"{words}.*or call model.eval") as error:
        vmap(m)(xs)
    assert "\n" not in str(error.value)
    m(xs[0])  # a history of its own
    before = {name: t.clone() for name, t in m.state_dict().items()}
    m.eval()
    assert torch.equal(vmap(m)(xs), torch.stack([m(x) for x in xs]))
    assert all(torch.equal(t, before[name]) for name, t in m.state_dict().items())


def test_forward_mode_and_second_derivatives_are_refused_in_a_sentence() -> None:
    m, x = model(), samples()[0]
    with pytest.raises(NotImplementedError, match=r"no forward mode .*; take .*, torch\.func\.vjp or jacrev$"):
        jvp(m, (x,), (x,))
    for second in (lambda: jacrev(grad(lambda x: m(x).sum()))(x), lambda: hessian(lambda x: m(x).sum())(x)):
        with pytest.raises(NotImplementedError) as error:
            second()
        assert "\n" not in str(error.value) and "take " in str(error.value)
