"""FSDP2 that gathers weights as codes trains what it trains with weights gathered as they are, to the bit.

Oracle: the same run without `gather_codes`; the bytes are those that torch.distributed is given.
"""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from altgrad.config.recipe import LayerRecipe, TensorRecipe
from altgrad.model import Recipe, quantize_model, unquantize_model
from tests.model import fully_sharded, gathering

Found = dict[int, dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return fully_sharded.Processes(tmp_path_factory.mktemp("processes"), gathering.__name__)


@pytest.mark.parametrize(
    ("count", "case"),
    [*((2, case) for case in (*gathering.OF_TWO, "resumed")),
     *(pytest.param(4, case, marks=pytest.mark.long) for case in (*gathering.CASES, *gathering.COMPILED, "resumed"))],
)  # fmt: skip
def test_codes_train_what_the_weights_themselves_do_to_the_bit(found: Found, count: int, case: str) -> None:
    whole, codes = found[count][case]
    assert len(whole) == len(codes) > 0
    for a, b in zip(whole, codes, strict=True):
        assert torch.equal(a.nan_to_num(7), b.nan_to_num(7)) if isinstance(a, Tensor) else a == b


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.long)])
def test_a_byte_per_weight_and_four_per_scale_are_sent(found: Found, count: int, dtype: torch.dtype) -> None:
    whole, codes = found[count][f"carried {str(dtype).removeprefix('torch.')}"]
    weights, layers, gathers = 64 * 64, 3, 2  # before the forward product and before the backward one
    part = gathers * layers * weights // count
    assert whole["bytes"]["allgather_base"] == part * dtype.itemsize
    assert codes["bytes"]["allgather_base"] == part
    assert codes["bytes"]["allreduce"] == gathers * layers * 4 and codes["calls"]["allreduce"] == gathers * layers
    assert "allreduce" not in whole["bytes"]
    for kind in ("bytes", "calls"):
        assert codes[kind]["reduce_scatter_base"] == whole[kind]["reduce_scatter_base"]
    assert codes["masters"] == {"torch.float32"}


@pytest.mark.long
def test_ways_to_shard_that_codes_do_not_go_with_are_refused_in_a_sentence(found: Found) -> None:
    said = found[4]["refused"]
    assert "call fully_shard without shard_placement_fn, or quantize_model without" in said["placement"]
    assert "with reshard_after_forward True or False, or quantize_model without" in said["part of the processes"]


def made(codes: bool) -> nn.Sequential:
    return quantize_model(gathering.layers(32, 64, 32), Recipe.uniform("E4M3"), gather_codes=codes)


def passed(model: nn.Module) -> list[Tensor]:
    y = model(torch.randn(8, 32, generator=torch.Generator().manual_seed(0)))
    y.square().sum().backward()
    return [y.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def test_a_model_that_is_not_sharded_computes_the_same_and_has_the_same_parameters_and_checkpoint() -> None:
    plain, codes = made(False), made(True)
    held = list(codes.parameters())
    model = gathering.layers(32, 64, 32)
    before = list(model.parameters())
    quantize_model(model, Recipe.uniform("E4M3"), gather_codes=True)
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    saved = io.BytesIO()
    torch.save(codes.state_dict(), saved)
    saved.seek(0)
    state = torch.load(saved, weights_only=True)
    assert state.keys() == plain.state_dict().keys() and {type(t) for t in state.values()} == {Tensor}
    codes.load_state_dict(plain.state_dict())
    for other in (copy.deepcopy(codes), pickle.loads(pickle.dumps(codes)), codes):
        for a, b in zip(passed(other), passed(made(False)), strict=True):
            assert torch.equal(a, b)
    assert all(a is b for a, b in zip(held, codes.parameters(), strict=True))


def test_unquantized_layers_have_plain_parameters_again() -> None:
    model = unquantize_model(made(True))
    assert {type(p) for p in model.parameters()} == {nn.Parameter}


def test_a_weight_that_an_embedding_reads_is_left_as_it_is() -> None:
    model = quantize_model(gathering.Tied(), Recipe.uniform("E4M3"), gather_codes=True)
    assert type(model.head.weight) is nn.Parameter and model.head.weight is model.embedding.weight
    assert type(model.middle.weight) is not nn.Parameter


def test_layers_with_other_recipes_for_one_weight_have_it_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model[1].weight = model[0].weight
    names = {"0": "E4M3", "1": "E3M4"}
    rules = [LayerRecipe(weight=TensorRecipe(format=name)).on(i) for i, name in names.items()]
    quantize_model(model, Recipe(rules=tuple(rules)), gather_codes=True)
    assert type(model[0].weight) is nn.Parameter
