"""Laws of what a run proposes next. Oracle: params.yaml, resolved as stage `grid` does."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from altgrad.common.files import read_yaml
from altgrad.config import Resolver, load_params, write_grid
from altgrad.reporting.load import Study, load_study
from altgrad.reporting.report import proposal

PARAMS = Path(__file__).parents[2] / "params.yaml"
FIVE = [0, 1, 2, 3, 4]
LONGER = 4 * read_yaml(PARAMS)["train"]["steps"]


def resolved(params: dict[str, Any], folder: Path) -> Study:
    """Return the study of a grid of which nothing is trained."""
    (folder / "params.yaml").write_text(json.dumps(params))
    resolver = Resolver(load_params(folder / "params.yaml"))
    shutil.rmtree(folder / "data", ignore_errors=True)
    write_grid(list(resolver.cells()), resolver.selected(), folder / "data/grid")
    (folder / "data/tokens").mkdir()
    (folder / "data/tokens/meta.json").write_text("{}")
    return load_study(folder / "data")


def followed(grid: dict[str, Any], folder: Path, times: int) -> list[str]:
    """Return what is proposed, one after another, each with the ones before it in the settings."""
    params, found = read_yaml(PARAMS), []
    params["grid"] |= grid
    for _ in range(times):
        command = shlex.split(proposal(resolved(params, folder)))
        assert command[:4] == ["dvc", "exp", "run", "-S"]
        name, _, value = command[4].partition("=")
        section, setting = name.split(".")
        value = YAML(typ="safe").load(value)
        assert params[section][setting] != value, "what has just been run"
        params[section][setting] = value
        found.append(command[4])
    return found


def test_the_baseline_comes_first_then_seeds_then_the_control_then_length(tmp_path: Path) -> None:
    grid = {"formats": ["E4M3"], "optimizers": ["adamw", "spacing_scaled"], "seeds": [1, 7]}
    assert followed(grid, tmp_path, 5) == [
        "grid.formats=[bf16,E4M3]", "grid.seeds=[1,7,0,2,3]", "grid.formats=[bf16,E4M3,virtual.E4M3]",
        f"train.steps={LONGER}",
        f"train.steps={4 * LONGER}",
    ]  # fmt: skip


@pytest.mark.parametrize("grid", [
    {},  # params.yaml's own, where E1M6 alone has no control: its spacing is everywhere the same
    {"optimizers": ["adamw"]}, {"optimizers": ["adamw", "spacing_shuffled"]},
    {"formats": ["bf16", "MXFP8", "uniform_row.E3M4"], "optimizers": ["adamw", "spacing_scaled"]},
    {"formats": ["bf16"]},
], ids=["default", "no spacing", "a control alone", "no control to be had", "bf16"])  # fmt: skip
def test_a_control_is_proposed_only_where_there_is_one_to_ask(grid: dict[str, Any], tmp_path: Path) -> None:
    assert followed({"formats": ["bf16", "E4M3"], "seeds": FIVE} | grid if grid else {}, tmp_path, 1) == [
        f"train.steps={LONGER}"
    ]


@pytest.mark.parametrize(("names", "shown"), [([], False), (["one"], False), (["two", "one", "none"], True)])
def test_two_experiments_at_hand_are_compared(names: list[str], shown: bool, tmp_path: Path) -> None:
    said = proposal(resolved(read_yaml(PARAMS), tmp_path), names)
    assert ("dvc plots diff one two" in said) == shown and ("plots" in said) == shown
