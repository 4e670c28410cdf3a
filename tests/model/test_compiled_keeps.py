"""A compiled backward pass writes into nothing that is not its own: weights and inputs are what they were.

With the loops of a CPU and without them, as on a GPU, where all is made of tensor operations that the compiler fuses.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from altgrad.config.recipe import Rule, TensorRecipe
from altgrad.model import Recipe, quantize_model
from altgrad.numerics import operand

KINDS: tuple[dict[str, object], ...] = (
    {"granularity": "block", "scale": "E4M3", "block": 16},
    {"granularity": "block", "scale": "E8M0"},
)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in KINDS))
    rules = []
    for i, kind in enumerate(KINDS):
        of_each = {role: TensorRecipe(format="E2M1", **kind) for role in ("input", "weight", "grad")}
        rules.append(Rule(layers=str(i), **of_each))
    return quantize_model(net, Recipe(rules=rules))


@pytest.mark.long  # every day tests/model/test_quantized_linear.py looks at each compiled layer's
@pytest.mark.parametrize("loops", [True, False], ids=["loops", "tensor operations"])
def test_a_compiled_backward_pass_leaves_weights_and_inputs_as_they_are(
    loops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not loops:
        monkeypatch.setattr(operand, "has_loops", lambda x: False)
    torch._dynamo.reset()
    net = model()
    before = [p.detach().clone() for p in net.parameters()]
    x = torch.randn(64, 64)
    kept = x.clone()
    torch.compile(net, fullgraph=True)(x).square().sum().backward()
    assert torch.equal(x, kept)
    assert all(map(torch.equal, before, net.parameters()))
    torch._dynamo.reset()
