"""A run that is stopped anywhere and goes on ends with the same bits, whatever its cell is.

Oracle: the files of a run that nobody disturbed, byte for byte, all but the timings.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import altgrad
from altgrad.common.files import write_text
from altgrad.common.fingerprint import TRAINING, discard_finished, source_files
from altgrad.config.cell import Cell, scratch_directory
from altgrad.config.tasks import Classifier
from altgrad.training import train_cell
from altgrad.training.records import RowLog, load_newest, save_checkpoint
from altgrad.training.trainer import Trainer
from tests.optim.arms import ARMS
from tests.training.conftest import STATEFUL, arm_cell, make_cell, outputs, resumed, trained
from tests.training.test_arms import EVERY_DAY
from tests.training.test_state_cells import CODED
from tests.training.test_switches import scheduled, stiff
from tests.training.test_torchao_cells import ao_cell

CELLS: dict[str, tuple[Callable[[], Cell], tuple[int, ...]]] = {
    "every kind of state": (partial(make_cell, **STATEFUL), (1, 3, 4, 5, 11)),
    **{name: (partial(arm_cell, name, "E1M6"), (7,)) for name in (*EVERY_DAY, *(f"virtual.{x}" for x in EVERY_DAY))},
    **{f"{name} as codes": (partial(make_cell, arm=arm), (7,)) for name, arm in CODED.items()},
    "a schedule": (scheduled, (6, 7, 9, 10)),
    "a schedule under a stiffness": (stiff, (7,)),
    "torchao": (ao_cell, (5,)),
    "a classifier": (lambda: make_cell().model_copy(update={"task": Classifier()}), (7,)),
}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ARMS if name not in EVERY_DAY]
CELLS |= {name: (partial(arm_cell, name, "E1M6"), (7,)) for name in ARMS if name not in EVERY_DAY}


@pytest.mark.parametrize("name", [*(name for name in CELLS if name not in ARMS or name in EVERY_DAY), *SLOW])
def test_a_signal_saves_and_the_next_run_ends_with_the_same_bits(name, tokens, documents, tmp_path, monkeypatch):
    make, steps = CELLS[name]
    cell = make()
    data = documents if cell.task else tokens
    undisturbed = trained(cell, data, tmp_path / "once")
    for step in steps:
        assert resumed(cell, data, tmp_path / f"{step}", monkeypatch, step) == undisturbed


def _train_in_a_process(root: Path, tokens: Path, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    train_cell(Cell.read(root / "cell.json"), tokens, root / "out", root)


@pytest.mark.slow
def test_killed_at_any_moment_it_resumes_with_the_same_bits(tokens, undisturbed, tmp_path):
    """SIGKILL, which nothing can catch, at moments spread over the run, until one run gets through.

    A process each, from a server that has loaded torch already. The loops in C++ are in the cache by now: a process
    that is killed while it builds them leaves none to the next. What one left in the outputs, DVC would clear.
    """
    write_text(tmp_path / "cell.json", make_cell(**STATEFUL).to_json())
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.training.test_resume"])
    kills, patience = 0, 0.02
    while True:
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        process = context.Process(target=_train_in_a_process, args=(tmp_path, tokens, dict(os.environ)))
        process.start()
        while process.is_alive() and not list(tmp_path.glob("scratch/*/history.jsonl")):
            time.sleep(0.01)
        process.join(patience)
        if not process.is_alive():
            break
        process.kill()
        process.join()
        kills, patience = kills + 1, patience + 0.03
    assert process.exitcode == 0 and kills > 3
    assert outputs(tmp_path / "out") == undisturbed


@pytest.mark.parametrize("damage", ["truncate", "flip", "record", "missing"])
def test_a_damaged_checkpoint_is_noticed_and_the_one_before_it_used(
    tokens, finished, undisturbed, tmp_path, capsys, damage
):
    cell = make_cell(**STATEFUL)
    shutil.copytree(finished / "scratch", tmp_path / "scratch")
    scratch = scratch_directory(tmp_path, cell, tokens)
    newest = scratch / "step-00000012.safetensors"
    content = newest.read_bytes()
    if damage == "truncate":
        newest.write_bytes(content[: len(content) // 2])
    elif damage == "flip":
        newest.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    elif damage == "record":
        newest.with_suffix(".json").write_text("{")
    else:
        newest.unlink()
    found, problems = load_newest(scratch)
    assert found.step == 8 and len(problems) == 1
    assert trained(cell, tokens, tmp_path) == undisturbed
    assert "going back further" in "".join(capsys.readouterr())


def test_a_new_checkpoint_is_never_the_one_that_is_removed(tmp_path):
    save_checkpoint(tmp_path, 100, {}, {})
    (tmp_path / "step-00000100.safetensors").write_bytes(b"damaged")
    assert load_newest(tmp_path)[0] is None
    save_checkpoint(tmp_path, 30, {}, {"b": 1})
    found, problems = load_newest(tmp_path)
    assert found.step == 30 and found.state == {"b": 1} and not problems


def test_a_log_resumes_after_its_step_and_drops_a_cut_off_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    log = RowLog(path, None)
    log.extend([[1, 0.5], [2, float("nan")], [3, 0.1]])
    log.close()
    with open(path, "a") as file:
        file.write("[4, 0.")
    assert RowLog(path, 2).rows() == [[1, 0.5], [2, None]]
    assert RowLog(path, None).rows() == []


def test_a_scratch_folder_is_named_by_the_cell_and_by_every_source_that_decides_a_result(tokens, tmp_path, monkeypatch):
    """A checkpoint of another setting, or of other loops in C++, must not be resumed from."""
    package = tmp_path / "altgrad"
    shutil.copytree(Path(altgrad.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(altgrad, "__file__", str(package / "__init__.py"))
    cells = make_cell(**STATEFUL), make_cell(lr=1.1e-2, **STATEFUL)
    assert cells[0].key == cells[1].key
    names = {scratch_directory(tmp_path, cell, tokens) for cell in cells}
    found = {file.suffix for name in TRAINING for file in source_files(package / name)}
    assert found == {".py", ".cpp", ".h", ".yaml"}  # prose decides nothing
    for source in (package / "numerics/cpu/kernels.cpp", package / "formats/format.py"):
        source.write_text(source.read_text() + "\n")
        names.add(scratch_directory(tmp_path, cells[0], tokens))
    assert len(names) == 4


def test_a_finished_scratch_directory_is_discarded_on_request(tokens, finished, tmp_path):
    cell = make_cell(**STATEFUL)
    shutil.copytree(finished / "scratch", tmp_path / "scratch")
    unfinished = tmp_path / "scratch" / f"{cell.key}-0123"
    unfinished.mkdir()
    discard_finished(tmp_path, "E4M3-adamw-7-1")
    assert scratch_directory(tmp_path, cell, tokens).exists()
    discard_finished(tmp_path, cell.key)
    assert list((tmp_path / "scratch").glob(f"{cell.key}-*")) == [unfinished]


def test_two_workers_on_one_cell_train_it_once(tokens, undisturbed, tmp_path, monkeypatch, capsys):
    cell, updates, update = make_cell(**STATEFUL), [], Trainer.update

    def counted(self, step):
        updates.append(step)
        time.sleep(0.02)
        update(self, step)

    monkeypatch.setattr(Trainer, "update", counted)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # handlers belong to the main thread
    workers = [threading.Thread(target=train_cell, args=(cell, tokens, tmp_path / n, tmp_path)) for n in "ab"]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert updates == list(range(1, 13))
    assert outputs(tmp_path / "a") == outputs(tmp_path / "b") == undisturbed
    assert "waiting" in "".join(capsys.readouterr())
