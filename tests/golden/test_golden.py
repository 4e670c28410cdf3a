"""Results are to the bit what they were: a few runs of the golden file, where this machine's class has one.

The oracle is the committed file; `make golden` compares all of it. What a digest depends on is shown on files whose
values are known.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import save_file

from altgrad.common.files import read_json
from tests.golden.record import difference, machine_class, path_of
from tests.golden.runs import digest, make_inputs, results, runs

#: Most kinds of state between them: spacing, two levels and a transform, codes, random numbers, a signal, a switch.
QUICK = (
    "spacings/E3M4-spacing_scaled-0-1", "recipes/NVFP4-adamw-0-1", "resumed/by_chance.E4M3-eco_3_bytes-0-1",
    "resumed_switch/changing.E4M3-adamw-0-1", "adapters/MXFP4-adamw-0-1",
)  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("golden")
    make_inputs(root)
    return root


@pytest.mark.parametrize("name", QUICK)
def test_a_run_has_the_committed_bits(root, name):
    path = path_of(machine_class())
    if not path.exists():
        pytest.skip(f"no golden file for machines of this class, {machine_class()}")
    (run,) = runs(root, name)
    assert difference(name, read_json(path)["runs"][name], results(run, root)) == ""


def test_a_file_has_its_classs_name_and_this_classs_has_the_runs_of_the_grid(root):
    here = path_of(machine_class())
    for path in here.parent.iterdir():
        content = read_json(path)
        assert path == path_of(content["class"])
        assert path != here or sorted(content["runs"]) == sorted(run.name for run in runs(root, "*"))


def write_json(path: Path, value: float, again: bool) -> None:
    content = {"loss": value, "steps": 3, "cell_sha256": str(again)}
    path.write_text(json.dumps(dict(reversed(content.items())) if again else content, indent=again))


def write_parquet(path: Path, value: float, again: bool) -> None:
    frame = pd.DataFrame({"step": [1, 2], "role": ["weight", None], "value": [value, math.nan]})
    frame.to_parquet(path, compression="gzip" if again else None)


def write_tensors(path: Path, value: float, again: bool) -> None:
    tensors = {"a": torch.tensor([[value], [-0.0]], dtype=torch.float64), "b": torch.tensor(1, dtype=torch.uint8)}
    save_file(dict(reversed(tensors.items())) if again else tensors, path, {"format": "pt"} if again else None)


def write_csv(path: Path, value: float, again: bool) -> None:
    path.write_text(f"step,loss\n1,{value}\n")


@pytest.mark.parametrize("write", [write_json, write_parquet, write_tensors, write_csv])
def test_a_digest_is_that_of_the_values_to_the_last_bit(tmp_path, write):
    found = []
    for value, again in ((1.0, False), (1.0, True), (math.nextafter(1, 2), False)):
        path = tmp_path / f"{again}{value}.{write.__name__.removeprefix('write_').replace('tensors', 'safetensors')}"
        write(path, value, again)
        found.append(digest(path))
    assert found[0] == found[1] != found[2]


def test_what_differs_is_named_by_run_and_file():
    then = {"val_loss": 1.0, "a": "0", "b": "1", "c": "2"}
    assert difference("arms/x", then, then) == "" and difference("arms/x", {}, then) == "arms/x: is new"
    found = difference("arms/x", then, {"val_loss": 2.0, "a": "0", "b": "9", "d": "3"})
    assert found == "arms/x: differs: b; missing: c; new: d; val_loss 1.0 is now 2.0"
