"""Laws of what a grid takes of the disk. Oracles: the model itself, and a file system that is told what is free.

`tests/pipeline/test_links.py` compares with what cells that have trained have written.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from altgrad.common.files import read_json, write_json
from altgrad.config import UserError
from altgrad.execution import cells
from altgrad.execution.__main__ import main
from altgrad.execution.costs import cell_bytes, disk_needed, require_room, scratch_bytes, size, weights_of
from altgrad.execution.executor import Task
from altgrad.model import GPT
from altgrad.model.gpt import GPTConfig
from tests.execution.test_budget import grid  # noqa: F401 - a fixture
from tests.pipeline.conftest import PROJECT

CELL = Path("data/grid/E4M3-adamw-0-1.json")


def free(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**15, 0, count))


@pytest.mark.parametrize("sizes", [(2, 64, 64, 4.0, 1024), (12, 768, 1024, 4.0, 50257), (3, 32, 16, 2.5, 300)])
def test_the_weights_of_a_model_are_those_that_it_has(sizes):
    layers, width, context, mlp_ratio, vocabulary = sizes
    model = {"layers": layers, "width": width, "context": context, "mlp_ratio": mlp_ratio}
    with torch.device("meta"):
        made = GPT(GPTConfig(**model, heads=2, vocab_size=vocabulary))
    assert weights_of(model, vocabulary) == sum(p.numel() for p in made.parameters() if p.ndim == 2)


def test_a_grid_takes_its_cells_and_checkpoints_of_those_that_train_at_a_time(grid, monkeypatch):  # noqa: F811
    cell = read_json(CELL)
    kept, at_work = cell_bytes(cell, 4096), scratch_bytes(cell, 4096)
    assert disk_needed(grid, 2) == len(grid) * kept + 2 * at_work
    assert disk_needed(grid[:1], 2) == kept + at_work and disk_needed([], 2) == 0
    diagnoses = [Task("diagnose", task.key, (), 1) for task in grid]
    assert disk_needed([*grid, *diagnoses], 2) == disk_needed(grid, 2) and disk_needed(diagnoses, 2) == 0

    probes, larger = (cell | {"monitor": cell["monitor"] | {"probes": cell["monitor"]["probes"] + 1}}), dict(cell)
    weights = 4 * weights_of(cell["model"], 4096)
    assert cell_bytes(probes, 4096) - kept == scratch_bytes(probes, 4096) - at_work == weights
    larger["model"] = cell["model"] | {"width": 2 * cell["model"]["width"]}
    write_json(CELL, larger)
    assert disk_needed(grid, 1) == (len(grid) - 1) * kept + cell_bytes(larger, 4096) + scratch_bytes(larger, 4096)

    before = disk_needed(grid, 0)
    monkeypatch.setattr(os, "link", lambda source, target: (_ for _ in ()).throw(OSError(95, "not supported")))
    assert disk_needed(grid, 0) == 2 * before, "outputs and the cache stand beside one another"
    assert not list(Path("data").glob(".links-*"))


def test_what_does_not_fit_is_refused_in_one_sentence_and_what_just_fits_is_not(grid, monkeypatch):  # noqa: F811
    need = disk_needed(grid, 2)
    free(monkeypatch, need)
    require_room(grid, 2)
    free(monkeypatch, need - 2_000_000)
    with pytest.raises(UserError) as error:
        require_room(grid, 2)
    for words in (size(need), f"{size(need - 2_000_000)} are free", "2.0 MB too few", "`dvc gc -w`", "monitor.probes"):
        assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_nothing_trains_where_it_would_not_fit(grid, monkeypatch):  # noqa: F811
    chosen = []

    def run_cells(executor, choose, limit, *, early_stop):
        chosen.append(choose(grid))

    monkeypatch.setattr(cells, "run_cells", run_cells)
    monkeypatch.setattr(cells, "run_the_rest", lambda rest: None)
    shutil.copy(PROJECT / "params.yaml", ".")
    free(monkeypatch, 10**6)
    with pytest.raises(UserError, match=r"the cells that have to run need about .* of disk, of which 1\.0 MB are free"):
        main(["--jobs", "2"])
    assert chosen == []
    free(monkeypatch, 10**12)
    main(["--jobs", "2"])
    assert chosen == [grid]


def test_sizes_are_read_at_a_glance():
    assert [size(n) for n in (0, 999, 12_345, 999_600, 84e6, 1.234e9, 5e12)] == [
        "0.0 kB", "1.0 kB", "12 kB", "1.0 MB", "84 MB", "1.2 GB", "5000 GB"]  # fmt: skip
