"""Where a quantizer counts an overflow, and what its scale remembers. Oracle: float32's neighbours, and arithmetic."""

from __future__ import annotations

import pytest
import torch

from altgrad.formats import get_format
from altgrad.model import TensorRecipe
from altgrad.model.quantized.quantizer import Quantizer, ScaleSpec
from altgrad.numerics import compute_scale, format_constants
from altgrad.numerics.rounding import overflows

FORMATS = ["E0M7", "E2M5", "E3M4", "E4M3", "E5M2", "E7M0", "E4M3FNUZ", "E2M1"]


@pytest.mark.parametrize("name", FORMATS)
def test_an_overflow_begins_two_roundings_above_the_largest_value(name: str) -> None:
    edge = torch.tensor(get_format(name).max * (1 + 2.0**-22))
    beyond = torch.nextafter(edge, torch.tensor(torch.inf))
    points = torch.tensor([edge, beyond, -edge, -beyond, torch.inf, -torch.inf, 0.0, torch.nan])
    assert overflows(points, format_constants(name)).tolist() == [False, True, False, True, True, True, False, False]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", ["float32", "E8M0"])
def test_a_tensors_amax_at_its_own_scale_is_no_overflow(name: str, dtype: str) -> None:
    amax = torch.rand(100_000, generator=torch.Generator().manual_seed(0)) + 2.0**-20
    scaled = amax * compute_scale(amax, name, scale_format=dtype)
    assert not overflows(scaled, format_constants(name)).any()


@pytest.mark.parametrize(
    ("scaling", "length", "learns"), [("dynamic", None, "nothing"), ("static", 1, "first"), ("delayed", 5, "each")]
)
def test_what_is_remembered_follows_the_scaling(scaling: str, length: int | None, learns: str) -> None:
    remembered = {"history": length} if scaling == "delayed" else {}
    quantizer = Quantizer(TensorRecipe(format=get_format("E3M4"), scaling=scaling, **remembered))
    assert quantizer.learns == learns
    if length is None:
        assert quantizer.history is None and quantizer.remembered_amax() is None
    else:
        assert torch.equal(quantizer.history, torch.zeros(length)) and quantizer.remembered_amax() == 0
        assert "history" in quantizer.state_dict()  # resumed with the model
    assert "constants" not in quantizer.state_dict()


@pytest.mark.parametrize(("reduce", "amax"), [("max", 8.0), ("most-recent", 2.0)])
def test_a_history_sets_the_scale_as_its_recipe_reduces_it(reduce: str, amax: float) -> None:
    quantizer = Quantizer(TensorRecipe(format=get_format("E3M4"), scaling="delayed", history=3, reduce=reduce))
    quantizer.history.copy_(torch.tensor([2.0, 8.0, 4.0]))
    assert quantizer.remembered_amax() == amax
    assert quantizer.scales(torch.full((2, 3), 100.0)) == compute_scale(amax, "E3M4")
    assert ScaleSpec.of(quantizer.recipe, native=False).method == reduce


@pytest.mark.parametrize(
    "options",
    [
        *({"granularity": "row"}, {"granularity": "block", "scale": "E4M3"}),
        *({"scaling": "static"}, {"scaling": "delayed"}),
    ],
)
def test_only_one_scale_of_the_tensors_own_can_be_held(options: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="granularity: tensor and scaling: dynamic"):
        Quantizer(TensorRecipe(format=get_format("E3M4"), **options)).hold()


def test_a_held_scale_no_longer_follows_the_tensor() -> None:
    quantizer = Quantizer(TensorRecipe(format=get_format("E3M4")))
    t = torch.tensor([[1.0, -3.0]])
    assert quantizer.scales(t) == compute_scale(3.0, "E3M4")
    held = quantizer.hold()
    assert held.shape == (1,) and quantizer.scales(t) == compute_scale(3.0, "E3M4")  # until its optimizer sets one
    held.fill_(0.5)
    assert quantizer.scales(t) == compute_scale(0.5, "E3M4")
    assert "history" not in quantizer.state_dict()  # which is the optimizer's to save
