"""Laws of adapters on frozen weights.

Oracles: the model without them, and autograd of W + alpha / rank * B A in float64. Whole runs are classifiers.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.func import functional_call

from altgrad.common.files import read_json
from altgrad.config import Cell, UserError
from altgrad.config.models import Lora, Model, cell_model
from altgrad.config.params import validated
from altgrad.config.recipe import Recipe, Rule
from altgrad.diagnostics import evaluated
from altgrad.model import GPT, linear_layers, quantize_model
from altgrad.model.gpt import GPTConfig
from altgrad.model.layers import adapter_of, add_adapters
from altgrad.numerics import amax, compute_scale, get_format, quantize
from tests.training.conftest import VOCABULARY, diagnosed, resumed, trained
from tests.training.test_classify import cell_of

LORA = Lora(rank=4, alpha=6)
TOKENS, TARGETS = torch.randint(0, 40, (2, 3, 12), generator=torch.Generator().manual_seed(1))
RECIPES = {
    "bf16": Recipe(rules=()),
    "E2M1 weights": Recipe(rules=(Rule(layers="blocks.*", weight="E2M1"),)),
    "E4M3": Recipe.uniform("E4M3"),
    "MXFP4": Recipe(rules=(Rule(layers="*", weight="MXFP4", input="MXFP4", grad="MXFP4"),)),
}


def models(recipe: str) -> tuple[GPT, GPT]:
    """Return a quantized model, and the same with adapters."""
    found = []
    for lora in (None, LORA):
        torch.manual_seed(0)
        model = GPT(GPTConfig(40, layers=2, width=32, heads=2, context=12))
        found.append(quantize_model(model, RECIPES[recipe]))
        if lora is not None:
            add_adapters(model, lora)
    return found[0], found[1]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_model_begins_as_the_frozen_quantized_one_to_the_bit(recipe: str) -> None:
    plain, adapted = models(recipe)
    assert torch.equal(plain(TOKENS, TARGETS), adapted(TOKENS, TARGETS))
    trained = [name for name, p in adapted.named_parameters() if p.requires_grad]
    assert len(trained) == 16 and all(".lora." in name for name in trained)


@pytest.mark.parametrize(("recipe", "dtype", "rtol"), [
    ("bf16", torch.float64, 1e-9), ("E2M1 weights", torch.float32, 1e-3),
])  # fmt: skip
def test_gradients_are_those_of_the_sum_of_weights(recipe: str, dtype: torch.dtype, rtol: float) -> None:
    plain, adapted = (model.to(dtype) for model in models(recipe))
    layers = {name: layer for name, layer in linear_layers(adapted).items() if adapter_of(layer)}
    wide, whole = {}, {}
    for name, layer in layers.items():
        adapter, weight = adapter_of(layer), layer.weight.detach()
        torch.nn.init.normal_(adapter.b, std=0.3)
        if recipe != "bf16":
            fmt = get_format("E2M1")
            weight = quantize(weight, fmt, scale=compute_scale(amax(weight), fmt))
        wide[name] = [p.detach().double().requires_grad_() for p in (adapter.a, adapter.b)]
        whole[f"{name}.weight"] = weight.double() + LORA.alpha / LORA.rank * wide[name][1] @ wide[name][0]
    reference = GPT(plain.config).double()
    kept = {name: p.detach().double() for name, p in plain.named_parameters() if name not in whole}
    loss = functional_call(reference, kept | whole, (TOKENS, TARGETS))
    expected = torch.autograd.grad(loss, [p for pair in wide.values() for p in pair])
    found = adapted(TOKENS, TARGETS)
    assert found.item() == pytest.approx(loss.item(), rel=rtol)
    found.backward()
    got = [p.grad for layer in layers.values() for p in (adapter_of(layer).a, adapter_of(layer).b)]
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=rtol, atol=rtol * b.abs().max().item())
    assert all(layer.weight.grad is None for layer in layers.values())


@pytest.fixture
def cell(tmp_path: Path) -> Cell:
    """Return a cell with adapters that starts from weights, four steps long."""
    torch.manual_seed(1)
    save_file(
        dict(GPT(GPTConfig(VOCABULARY, layers=1, width=16, heads=2, context=16)).named_parameters()),
        tmp_path / "model.safetensors",
    )
    sizes = cell_model(Model(layers=1, width=16, heads=2, context=16), str(tmp_path))
    made = cell_of().model_dump()
    changes = {"model": sizes, "lora": LORA.model_dump(), "train": made["train"] | {"steps": 4}}
    return validated(Cell, made | changes, "cell")


def test_a_run_moves_adapters_and_head_alone_and_resumes_and_is_measured(
    cell: Cell, documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tmp_path / "whole/out"
    assert trained(cell, documents, whole.parent) == resumed(cell, documents, tmp_path / "cut", monkeypatch, 2)
    began, ended = (load_file(folder / "model.safetensors") for folder in (tmp_path, whole))
    assert all(torch.equal(ended[name], t) for name, t in began.items())
    added = {name: t for name, t in ended.items() if name not in began and name != "label_weights"}
    assert added.pop("head.weight").any() and len(added) == 8 and all(t.any() for t in added.values())
    metrics = read_json(whole / "metrics.json")
    found = evaluated.quantized(cell, whole, documents, ["E2M1"])
    assert found[evaluated.AS_TRAINED] == pytest.approx(metrics["val_loss"], rel=1e-6)
    assert diagnosed(cell, whole, tmp_path, documents)[0]["status"] == "ok"


@pytest.mark.parametrize(("change", "words"), [
    ({"model": {"start": None}}, "lora adapts weights that do not change; name those to begin with in start"),
    ({"arm": {"stiffness": "ulp"}}, "lora leaves adamw no weight that it could act on"),
    ({"train": {"devices": 2}}, "lora is for one process"),
    ({"rules": [{"layers": "*", "weight": {"format": "E4M3", "rounding": "stochastic"}}]}, "lora keeps the codes"),
    ({"lora": {"rank": 0}}, "rank"),
])  # fmt: skip
def test_what_does_not_go_with_it_is_said(cell: Cell, change: dict, words: str) -> None:
    content = cell.model_dump()
    for name, value in change.items():
        content[name] = content[name] | value if isinstance(value, dict) else value
    with pytest.raises(UserError, match=words):
        validated(Cell, content, "cell")
