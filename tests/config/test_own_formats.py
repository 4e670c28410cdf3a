"""Formats of the user's own in params.yaml: what they become, how a cell's file has them, and mistakes."""

from __future__ import annotations

import pytest

from altgrad.config import Cell, UserError
from altgrad.config.cell import idle_biases
from altgrad.config.recipe import TensorRecipe
from altgrad.formats import Format, get_format
from tests.config.test_resolve import cells

FEW = {"values": [0, 0.1, 0.5, 1], "symmetric": True, "scale_to": "2 of rms"}


def test_values_are_a_format_in_the_grid_and_in_the_cells_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.csv").write_text("0, 1\n2 4\n")
    grid = {"formats": ["few", "read", "POSIT8", "E4M3"], "seeds": [0]}
    found = cells(grid=grid, formats={"few": FEW, "read": {"values": "mine.csv", "symmetric": True}})
    few = found["few-adamw-0-1"]
    assert few.formats["few"] == Format.of_values("few", [0, 0.1, 0.5, 1], symmetric=True, scale_to="2 of rms")
    assert found["read-adamw-0-1"].formats["read"].values.tolist() == [-4, -2, -1, 0, 1, 2, 4]
    for cell in found.values():
        again = Cell.model_validate_json(cell.to_json())
        assert again.formats == cell.formats and again.to_json() == cell.to_json()
    assert '"POSIT8":{"name":"POSIT8"}' in found["POSIT8-adamw-0-1"].to_json().replace(" ", "").replace("\n", "")
    assert "scale_to" not in str(found["E4M3-adamw-0-1"].model_dump(mode="json")["formats"])


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"values": [0, 1, 1]}, "formats.mine: values: 1 and 1, number 2 and 3, are not in ascending order"),
        ({"values": "nowhere.csv"}, "formats.mine: values: there is no file nowhere.csv"),
        ({"values": [0, 1], "ties": "odd"}, "formats.mine.*ties"),
        ({"values": [0, 1], "symetric": True}, "unknown setting 'symetric'; did you mean symmetric?"),
        ({"value": [0, 1]}, "unknown setting 'value'"),
        ({"values": [0, 1]}, "formats.mine: mine is unsigned"),
        ({"values": [0, 1], "symmetric": True, "scale_to": "most"}, "formats.mine: scale_to: expected max"),
    ],
)
def test_a_mistake_is_one_sentence(own, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((UserError, ValueError), match=message):
        cells(grid={"formats": ["mine"], "seeds": [0]}, formats={"mine": own})


def test_scale_to_of_a_recipe_goes_before_the_formats_own():
    assert TensorRecipe(format="POSIT8").format.scale_target == 1
    recipe = TensorRecipe(format="POSIT8", scale_to=16)
    assert (recipe.format.scale_target, recipe.format.scale_statistic) == (16, "amax")
    assert "statistic" not in recipe.scale_options
    assert TensorRecipe(format="E4M3", scale_to="1 of rms").scale_options["statistic"] == "rms"
    with pytest.raises(ValueError, match="scale_to 1 of rms needs scaling dynamic, not delayed"):
        TensorRecipe(format="POSIT8", scaling="delayed")
    with pytest.raises(ValueError, match="is for scales in float32 or E8M0, not E4M3"):
        TensorRecipe(format="HIF8", granularity="block", scale="E4M3")
    with pytest.raises(ValueError, match="scales are in a float format such as E4M3, and POSIT8 is a table"):
        TensorRecipe(format="E2M1", granularity="block", scale="POSIT8")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": {"devices": 2}}, "scale_to 1 of rms of weight is of the rows of one process"),
        ({"grid": {"optimizers": ["adamw_sr_weights"]}}, "weights: quantized holds a scale by the amax"),
        ({"optimizers": {"adamw": {"base": "adamw", "lr": 1e-3, "stiffness": "smooth"}}}, "smooth needs mantissa bits"),
    ],
)
def test_what_a_table_cannot_do_is_refused(changes, message):
    grid = {"formats": ["POSIT8"], "seeds": [0], **changes.pop("grid", {})}
    with pytest.raises((UserError, ValueError), match=message):
        cells(grid=grid, **changes)


def test_a_bias_that_changes_nothing_is_said():
    own = {"low": {"exponent_bits": 4, "mantissa_bits": 3, "bias": 11}}
    found = cells(grid={"formats": ["low", "E4M3", "uniform_block.low"], "seeds": [0, 1]}, formats=own)
    (said,) = idle_biases(found.values()).items()
    assert said[0].startswith("bias 11 of low changes nothing under a float32 scale") and said[1] == ["low"]
    assert get_format("E4M3").bias == 7 and "bias of 7" not in said[0]
