"""How many cells share a GPU. Oracle: sums by hand; the GPUs are made up, as no machine of these tests has one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from altgrad.common.files import write_json
from altgrad.common.threads import GPU_SHARE
from altgrad.execution.local import CONTEXT_MB, MARGIN, LocalPool, cells_on, measured_mb
from altgrad.training import machine

MODEL = {"layers": 4, "width": 128}


def cell(key: str, peak: float | None, device: str = "cuda", batch: int = 16, **model: int) -> None:
    write_json(Path(f"data/grid/{key}.json"), {"model": MODEL | {"start": None} | model, "train": {"batch": batch}})
    if peak is not None:
        write_json(Path(f"data/runs/{key}/timing.json"), {"device": device, "peak_memory_mb": peak})


def test_what_cells_of_this_model_and_batch_took_on_a_gpu_counts_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert measured_mb(MODEL, 16) is None
    cell("a", 900.0)
    cell("b", 1200.0)
    cell("not-run", None)
    cell("on-cpu", 5000.0, device="cpu")
    cell("wider", 5000.0, width=256)
    cell("larger-batch", 5000.0, batch=32)
    write_json(Path("data/grid/index.json"), {"cells": []})
    assert measured_mb(MODEL, 16) == 1200.0
    assert measured_mb(MODEL | {"layers": 8}, 16) is None


def test_a_gpu_holds_what_its_memory_does_and_always_one():
    each = MARGIN * 1000 + CONTEXT_MB
    assert [cells_on(total, 1000.0) for total in (each / 2, 2.5 * each, 3 * each)] == [1, 2, 3]
    assert cells_on(1e9, None) == 1


@pytest.mark.parametrize(
    ("gpus", "each", "threads", "cell_mb", "jobs", "share"),
    [(2, 1, 1, 1000.0, 8, "0.25"), (2, 1, 4, 1000.0, 4, "0.5"), (2, 1, 1, None, 2, None), (2, 2, 1, 1000.0, 1, None)],
)
def test_cells_share_gpus_that_hold_them_and_cores_that_feed_them(
    gpus, each, threads, cell_mb, jobs, share, monkeypatch
):
    total = SimpleNamespace(total_memory=4.2 * (MARGIN * 1000 + CONTEXT_MB) * 1e6)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("altgrad.execution.local.usable_cores", lambda: 16)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: total)
    started = []
    monkeypatch.setattr("altgrad.execution.local._Worker", lambda _, environment: started.append(environment))
    pool = LocalPool(None, threads, each, cell_mb)
    assert pool.jobs == jobs
    for slot in range(jobs):
        pool._worker(slot)
    assert [environment.get(GPU_SHARE) for environment in started] == [share] * jobs
    seen = [environment["CUDA_VISIBLE_DEVICES"] for environment in started]
    wanted = ["0,1"] if each == 2 else ["0", "1"] * (jobs // 2)
    assert seen == wanted


def test_a_process_is_held_to_its_part_of_a_gpu_it_shares(monkeypatch):
    held = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *given: held.append(given))
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    machine.keep_to_share(cuda)
    monkeypatch.setenv(GPU_SHARE, "0.25")
    machine.keep_to_share(cpu)
    machine.keep_to_share(cuda)
    assert held == [(0.25,)]
