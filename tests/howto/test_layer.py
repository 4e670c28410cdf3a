"""A kind of layer is one line, as altgrad/model/README.md says. Oracle: the ``nn.Linear`` that computes the same."""

from __future__ import annotations

import ast
from typing import Any

import pytest
import torch
from torch import nn

from altgrad.model import Recipe, layers, matrix_of, quantize_model
from altgrad.optim import Arm, build_optimizer
from tests.howto.conftest import Sources, blocks

PAGE, HEADING = "model/README.md", "How to add a kind of layer"


@pytest.fixture
def patched(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process know what the patched file knows."""
    project = Sources(tmp_path)
    project.patch(PAGE, HEADING)
    assert project.changed() == {"altgrad/model/layers.py"}
    body = ast.parse((project.folder / "altgrad/model/layers.py").read_text(encoding="utf-8")).body
    (value,) = [n.value for n in body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "TRANSPOSED"]
    monkeypatch.setattr(layers, "TRANSPOSED", ast.literal_eval(value))


def names_of_the_page() -> dict[str, Any]:
    """Return what the page's code leaves, which asserts that its layers are quantized."""
    names: dict[str, Any] = {"__name__": "page"}
    (source,) = blocks(PAGE, "python", HEADING)
    exec(source, names)
    return names


def test_without_the_line_it_is_refused() -> None:
    with pytest.raises(ValueError, match="modules that no recipe reaches: 0.weight .*altgrad/model/layers.py"):
        names_of_the_page()


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("granularity", ["tensor", "row"])
def test_it_is_the_linear_layer_with_its_transpose_to_the_bit_and_steps_as_that(granularity) -> None:
    dense, linear = names_of_the_page()["Dense"](32, 64), nn.Linear(32, 64)
    with torch.no_grad():
        dense.weight.mul_(torch.logspace(0, 2, 64))
        linear.weight.copy_(dense.weight.t())
        linear.bias.copy_(dense.bias.normal_())
    x, found = torch.randn(8, 32), []
    for layer in (dense, linear):
        model = quantize_model(nn.Sequential(layer), Recipe.uniform("E4M3", granularity=granularity))
        optimizer = build_optimizer(model, Arm(lr=1e-2, stiffness="ulp"))
        own = x.clone().requires_grad_()
        y = model(own)
        y.square().sum().backward()
        gradients = [matrix_of(model[0]).shape, y, own.grad, model[0].bias.grad]
        optimizer.step()
        found.append((gradients, matrix_of(model[0]).detach()))
    (first, stepped), (second, expected) = found
    assert first[0] == second[0] and all(torch.equal(a, b) for a, b in zip(first[1:], second[1:], strict=True))
    torch.testing.assert_close(stepped, expected, rtol=1e-5, atol=1e-6)
