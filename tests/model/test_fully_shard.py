"""FSDP2: processes that have parts of the weights and of the batch train what one process trains.

Oracle: one process with the whole batch, without torch.distributed. Steps of optimizers on the same gradients are the
same to the bit. Where processes sum gradients, sums are rounded in another order: by float32's last digits, of which a
rounding to the format can make a whole spacing, but rarely.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.model import fully_sharded, stacks

Found = dict[int, dict[str, Any]]
COUNTS = [2, pytest.param(4, marks=pytest.mark.long)]


@pytest.fixture(autouse=True)
def products(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the processes multiply."""
    for name, value in fully_sharded.PRODUCTS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return fully_sharded.Processes(tmp_path_factory.mktemp("processes"))


@pytest.mark.parametrize("recipe", fully_sharded.RECIPES)
@pytest.mark.parametrize("count", COUNTS)
def test_sharded_layers_train_as_one_process_with_the_whole_batch(found: Found, count: int, recipe: str) -> None:
    one, several = fully_sharded.trained(fully_sharded.model_of(recipe)), found[count]["trained"][recipe]
    assert several["losses"] == pytest.approx(one["losses"], rel=2e-6)
    for a, b in zip(one["gradients"], several["gradients"], strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6 * a.abs().max().item())
    assert one["state"].keys() == several["state"].keys()
    for name, t in one["state"].items():
        own = count if "grad.history" in name else 1  # the loss of each process, of which FSDP2 takes the mean
        torch.testing.assert_close(several["state"][name], t * own, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("count", "name"),
    [*((2, name) for name in fully_sharded.EVERY_DAY),
     *(pytest.param(4, name, marks=pytest.mark.long) for name in fully_sharded.STEPPED)],
)  # fmt: skip
def test_every_arm_steps_its_parts_as_one_process_to_the_bit(found: Found, count: int, name: str) -> None:
    one = fully_sharded.stepped(fully_sharded.model_of("tensor"), fully_sharded.arm_of(name))["weights"]
    for weight, expected in one.items():
        assert torch.equal(found[count]["stepped"][name][weight], expected), weight


@pytest.mark.parametrize("name", fully_sharded.REPLACED)
def test_an_optimizer_goes_on_with_shards_that_are_put_in_its_parameters_places(found: Found, name: str) -> None:
    one = fully_sharded.stepped(fully_sharded.model_of("tensor"), fully_sharded.arm_of(name))["weights"]
    for weight, expected in one.items():
        assert torch.equal(found[2]["replaced"][name][weight], expected), weight


@pytest.mark.parametrize("recipe", fully_sharded.RECIPES)
@pytest.mark.parametrize("count", COUNTS)
def test_what_two_processes_saved_goes_on_in_as_many_as_there_are(found: Found, count: int, recipe: str) -> None:
    arm = fully_sharded.arm_of(fully_sharded.RESUMED)
    expected = fully_sharded.stepped(fully_sharded.model_of(recipe), arm)["weights"]
    for weight, t in found[count]["saved"][recipe].items():
        assert torch.equal(t, expected[weight]), weight


@pytest.mark.long
@pytest.mark.parametrize("what", stacks.OF_PROCESSES.values())
def test_the_page_of_stacks_says_so(found: Found, what: str) -> None:
    cells = [stacks.cell_of_processes(found, what, recipe) for recipe in stacks.RECIPES]
    said = next(said for said, name in stacks.OF_PROCESSES.items() if name == what)
    assert f"| {said} | {' | '.join(cells)} |" in stacks.PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("count", COUNTS)
def test_a_gradient_that_is_not_finite_in_one_process_stops_the_step_of_all(found: Found, count: int) -> None:
    assert found[count]["skipped"] == (1, True)


def test_what_is_split_otherwise_is_refused_in_a_sentence(found: Found) -> None:
    said = found[2]["refused"]
    for first in ("fully_shard", "tensor parallel"):
        assert "quantize the model first, and shard it then by fully_shard" in said[f"{first}, then quantized"]
    for name, words in fully_sharded.REFUSED.items():
        assert words in said[name]
