"""Laws of a grid of several models. Oracles: grids of one of the models, DVC's own list of stages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from altgrad.common.errors import UserError
from altgrad.config import Params, Resolver, load_params, write_grid
from tests.config.test_resolve import PROJECT, SHIPPED

MODELS = ["nano", "gpt-50m"]
GRID = {"formats": ["bf16", "E4M3"], "optimizers": ["adamw", "muon"], "seeds": [0, 1], "lr_scales": [1, 1e-5]}
TINY = {"layers": 1, "width": 32, "heads": 2, "context": 16}


def written(**changes: Any) -> dict[str, Any]:
    """Return the content of params.yaml with a small grid and ``changes`` of its sections."""
    content = YAML(typ="safe").load(PROJECT / "params.yaml")
    grid = content["grid"] | GRID | changes.pop("grid", {})
    return content | changes | {"grid": grid}


def resolver(**changes: Any) -> Resolver:
    return Resolver(Params.model_validate(written(**changes)))


def files(made: Resolver, folder: Path) -> dict[str, bytes]:
    write_grid(list(made.cells()), made.selected(), folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_without_further_models_no_file_has_a_word_of_them_and_with_them_the_same_cells_stay(tmp_path):
    content = written()
    del content["grid"]["models"]
    absent = files(Resolver(Params.model_validate(content)), tmp_path / "absent")
    assert files(resolver(), tmp_path / "one") == absent
    assert b"model_name" not in b"".join(absent.values())
    assert "models" not in json.loads(absent["index.json"])["params"]["grid"]
    several = files(resolver(grid={"models": MODELS}), tmp_path / "several")
    assert len(several) == 3 * len(absent) - 2
    assert all(several[name] == content for name, content in absent.items() if name != "index.json")


@pytest.mark.parametrize("model", MODELS)
def test_a_cell_of_a_further_model_is_that_of_a_grid_of_this_model_alone(model):
    alone = list(resolver(model=model).cells())
    found = [cell for cell in resolver(grid={"models": MODELS}).cells() if cell.model_name == model]
    assert [cell.key for cell in found] == [f"{cell.key}-{model}" for cell in alone]
    named = [{"key": cell.key.removesuffix(f"-{model}"), "model_name": None} for cell in found]
    assert [cell.model_copy(update=names) for cell, names in zip(found, named, strict=True)] == alone


def test_dvc_takes_the_keys_of_all_models_in_the_order_of_the_cells(tmp_path):
    content = written(grid={"models": MODELS})
    with open(tmp_path / "params.yaml", "w") as file:
        YAML().dump(content, file)
    (tmp_path / "dvc.yaml").write_text((PROJECT / "dvc.yaml").read_text())

    def dvc(*arguments: str) -> str:
        command = [sys.executable, "-m", "dvc", *arguments]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    dvc("init", "--quiet", "--no-scm")
    listed = [name.partition("@") for name in dvc("stage", "list", "--name-only").split()]
    keys = [cell.key for cell in Resolver(Params.model_validate(content)).cells()]
    for stage in ("train", "diagnose"):
        assert [key for name, _, key in listed if name in (stage, f"{stage}_models")] == keys


def test_an_override_of_a_model_is_the_widest_and_gives_it_its_own_steps_and_rate():
    overrides = {
        "nano": {"train": {"steps": 7, "clip": 0.7}, "arm": {"lr": 0.5}}, "E4M3": {"train": {"clip": 0.4}},
        "pico": {"train": {"steps": 5}}, "bf16-muon-1-1e-05-nano": {"train": {"steps": 9}},
    }  # fmt: skip
    made = resolver(grid={"models": MODELS}, overrides=overrides)
    assert made.idle() == []
    for cell in made.cells():
        of_nano = cell.model_name == "nano"
        steps = {"nano": 7, None: 5, "gpt-50m": SHIPPED.train.steps}[cell.model_name]
        assert cell.train.steps == (9 if cell.key == "bf16-muon-1-1e-05-nano" else steps)
        assert (cell.arm.lr == 0.5) == of_nano
        assert cell.train.clip == (0.4 if cell.format == "E4M3" else 0.7 if of_nano else SHIPPED.train.clip)


def test_an_override_of_a_model_that_the_grid_lacks_is_named_and_stays():
    assert resolver(overrides={"micro": {"train": {"steps": 7}}}).idle() == ["overrides.micro"]


def test_a_cell_takes_the_threads_of_the_model_that_has_most():
    models = {"one": TINY | {"threads": 1}, "four": TINY | {"threads": 4}}
    assert Params.model_validate(written(model="one", models=models, grid={"models": ["four"]})).cell_takes == (4, 1)


@pytest.mark.parametrize(("changes", "said"), [
    ({"grid": {"models": ["nan"]}}, "grid.models[0]: 'nan' is not in models; did you mean nano or moe-nano?"),
    ({"grid": {"models": ["nano", "nano"]}}, "models lists nano twice; remove one"),
    ({"grid": {"models": ["micro", "pico"]}}, "grid.models[1]: the grid has pico already, by model; remove it here"),
    ({"grid": {"models": ["a b"]}, "models": {"a b": TINY}}, "must be 1 to 40 letters"),
    ({"grid": {"models": ["adamw"]}, "models": {"adamw": TINY}}, "models.adamw: a format, recipe or arm has that name"),
    ({"grid": {"models": ["E4M3"]}, "models": {"E4M3": TINY}}, "models.E4M3: a format, recipe or arm has that name"),
    ({"overrides": {"nan": {"train": {"steps": 7}}}}, "no format, recipe, arm, model or cell; did you mean nano"),
    ({"overrides": {"bf16-adamw-0-1-nan": {}}, "grid": {"models": ["nano"]}}, "did you mean bf16-adamw-0-1-nano"),
    ({"overrides": {"bf16-adamw-0-1.0-nano": {}}, "grid": {"models": ["nano"]}}, "as bf16-adamw-0-1-nano"),
    ({"overrides": {"tiny": {"model": {"heads": 3}}}, "models": {"tiny": TINY}, "grid": {"models": ["tiny"]}},
     "overrides.tiny.model: width 32 is not divisible by heads 3"),
])  # fmt: skip
def test_a_mistake_is_said_in_a_sentence(changes, said, tmp_path):
    with open(tmp_path / "params.yaml", "w") as file:
        YAML().dump(written(**changes), file)
    with pytest.raises(UserError) as refused:
        Resolver(load_params(tmp_path / "params.yaml"))
    assert said in str(refused.value)


def test_weights_to_start_from_that_do_not_fit_a_further_model_name_it(tmp_path):
    config = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 16, "vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"")
    models = {"fits": TINY | {"bias": True, "gelu": "tanh"}, "wide": TINY | {"width": 64, "bias": True, "gelu": "tanh"}}
    content = written(model="fits", models=models, start=str(tmp_path), grid={"models": ["wide"]})
    with pytest.raises(UserError, match=r"has width 32, and the model 64.*of grid\.models: wide"):
        Resolver(Params.model_validate(content))
