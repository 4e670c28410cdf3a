"""`make bench` and `make gpu`: that the list runs, goes on where it stopped, and names what it measured on.

Oracles: the record's file, costs counted by hand.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from altgrad.benchmark import operands, runs, steps
from altgrad.benchmark.records import machine_blocks
from altgrad.benchmark.session import ON_GPU, Item, Session
from altgrad.common.files import write_json
from altgrad.config import UserError
from altgrad.config.schema import Budget
from altgrad.execution import Outcome, Status, Task, budget
from altgrad.execution.costs import kind_of
from altgrad.model import GPTConfig
from altgrad.reporting.markdown import to_markdown
from tests.benchmark.made import record
from tests.reporting.synthetic_project import write_project

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "altgrad.benchmark"]


@pytest.mark.parametrize(
    "compiles", [pytest.param(False, marks=pytest.mark.long), pytest.param(True, marks=pytest.mark.slow)],
    ids=["eager", "compiled"],
)  # fmt: skip
def test_the_list_is_rehearsed_and_one_that_was_killed_goes_on_where_it_was(tmp_path, compiles):
    """In miniature and in processes of its own, as `make gpu` runs it; a minute longer where it compiles first."""
    output = tmp_path / "gpu.json"
    command = [*COMMAND, "--miniature", "--output", str(output)]
    environment = os.environ | ({} if compiles else {"TORCHDYNAMO_DISABLE": "1"})
    first = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (output.exists() and "limits" in json.loads(output.read_text()).get("items", {})):
        assert first.poll() is None, "it ended before it was killed"
        time.sleep(0.2)
    first.send_signal(signal.SIGKILL)
    first.wait()
    before = json.loads(output.read_text())
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(output.read_text())
    assert f"{len(before['items'])} of {len(found['items'])} items are in {output} already" in done.stdout
    assert {name: found["items"][name] for name in before["items"]} == before["items"]
    assert [item["failed"] for item in found["items"].values()] == [None] * len(found["items"])
    said = [line for line in done.stderr.splitlines() if "skipping cudagraphs" not in line]  # which a CPU has not
    assert "still to be measured" not in done.stdout and not said
    for part, figure in (("operands", "over_copy"), ("steps", "over_bf16"), ("optimizers", "over_adamw")):
        for row in (row for row in found[part] if "absent" not in row):
            low, high = row[f"{figure}_quartiles"]
            assert 0 < low <= row[figure] <= high and row["rounds"] >= 2, (part, row)
    slowest, fastest = found["at_once"][0]["runs_per_hour_range"]
    assert 0 < slowest <= found["at_once"][0]["runs_per_hour"] <= fastest
    assert found["parts_of_runs"][0]["step_s"] > 0
    assert {"commit", "torch", "driver", "triton"} <= set(found["sessions"]["1"]) and found["device"]
    assert "| step | pico, batch 2 |" in to_markdown(machine_blocks(found))


class Clocked:
    """A pool with so many places, whose clock moves by a second a poll: training takes 30 seconds, a diagnosis 10."""

    def __init__(self, jobs: int) -> None:
        self.now, self.jobs, self.queue = 0.0, jobs, []
        self.running: dict[Task, float] = {}

    def submit(self, tasks: list[Task]) -> None:
        self.queue += tasks

    def poll(self) -> Status:
        self.now += 1
        done = [task for task, end in self.running.items() if end <= self.now]
        self.running = {task: end for task, end in self.running.items() if task not in done}
        while self.queue and len(self.running) < self.jobs:
            task = self.queue.pop(0)
            self.running[task] = self.now + {"train": 29, "diagnose": 9}[task.stage]  # and one to the next
        return Status(list(self.running), [Outcome(task, 0) for task in done])

    def close(self) -> None:
        assert not self.queue and not self.running


@pytest.mark.parametrize("jobs", [1, 3])
def test_runs_an_hour_are_those_that_were_trained_and_diagnosed_in_it(jobs, monkeypatch, tmp_path):
    pool = Clocked(jobs)
    monkeypatch.setattr(runs, "LocalPool", lambda jobs: pool)
    monkeypatch.setattr(runs, "project", lambda _, model, grid, train: nullcontext(list(map(str, grid["seeds"]))))
    monkeypatch.setattr(runs, "time", SimpleNamespace(perf_counter=lambda: pool.now, sleep=lambda _: None))
    monkeypatch.chdir(tmp_path)
    found = runs.at_once(ROOT, "pico", jobs, {})
    assert found["runs_per_hour"] == 90 * jobs and found["runs_per_hour_range"] == [90 * jobs, 90 * jobs]
    assert found["runs"] == runs.ROUNDS * jobs


def test_a_step_that_could_not_be_compiled_beforehand_says_why(tmp_path):
    config = GPTConfig(vocab_size=64, layers=1, width=16, heads=2, context=8)
    found = steps.compile_all(["no such", "nor this"], config, 2, tmp_path, 2)
    assert found == {name: f"KeyError: '{name}'" for name in ("no such", "nor this")}


class Listed(Session):
    """A session of three items, of which the second may fail."""

    def __init__(self, output: Path, fails: bool, version: str = "1") -> None:
        super().__init__(output, miniature=True, arguments=[])
        self.record._session["driver"] = version
        self.measured: list[str] = []
        self.fails = fails

    def items(self):
        for name in ("a", "b", "c"):
            yield Item(name, lambda name=name: self.measure(name))

    def measure(self, name: str) -> dict[str, list[dict[str, Any]]]:
        self.measured.append(name)
        if name == "b" and self.fails:
            raise RuntimeError("no kernel\nfor this card")
        return {"at_once": [{"name": name, "model": "pico", "jobs": 1, "runs_per_hour": 1, "first_s": 1.0,
                             "runs_per_hour_range": [1, 1]}]}  # fmt: skip


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_what_failed_is_tried_again_and_nothing_else_until_the_driver_changes(tmp_path, capsys):
    output = tmp_path / "gpu.json"

    def measured(fails: bool = False, version: str = "1", seconds: float = 60, again: bool = False) -> tuple[str, str]:
        listed = Listed(output, fails, version)
        left = listed.run(seconds, again=again)
        return "".join(listed.measured), "".join(left)

    assert measured(fails=True) == ("abc", "b")
    assert json.loads(output.read_text())["items"]["b"]["failed"] == "no kernel"
    assert "[2/3] b: failed: no kernel" in capsys.readouterr().out
    assert measured() == ("b", "") and measured() == ("", "") and measured(again=True) == ("abc", "")
    assert measured(version="2", seconds=-1) == ("", "abc") and measured(version="2") == ("abc", "")
    rows = json.loads(output.read_text())["at_once"]
    assert [row["name"] for row in rows] == ["a", "b", "c"] and len({row["session"] for row in rows}) == 1


def test_an_item_that_takes_too_long_is_given_up_also_by_what_goes_on_after_failures(tmp_path, monkeypatch):
    """Such as the operands, of which one that fails leaves the others."""

    def takes_long(x: torch.Tensor) -> None:
        time.sleep(0.2)

    entries = [operands.OperandMaker(name, takes_long, 2) for name in (operands.COPY, "ours", "theirs")]
    monkeypatch.setattr(operands, "contestants", lambda *_: entries)
    listed = Listed(tmp_path / "gpu.json", False)
    listed.limit_s = 0.3
    listed.items = lambda: iter([Item("operands", lambda: {"operands": operands.measure((4, 4), 3, listed.device)})])
    assert listed.run(60, again=False) == ["operands"]
    assert json.loads((tmp_path / "gpu.json").read_text())["items"]["operands"]["failed"] == "had not ended after 0 s"


def test_what_a_device_has_no_products_of_is_no_item(tmp_path, monkeypatch):
    session = Session(tmp_path / "gpu.json", miniature=True, arguments=[])
    session.device, session.sizes = torch.device("cuda"), ON_GPU
    native = {}
    for capability in ((8, 0), (9, 0), (10, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        names = [item.name.removeprefix("step: ") for item in session.items()]
        native[capability[0]] = [name for name in names if "native" in name]
    both = ["E4M3, native tensorwise", "E4M3, native rowwise"]
    assert native == {8: [], 9: [*both, "E4M3, native blocks of 128"], 10: [*both, *(blackwell := [
        "MXFP8, native", "NVFP4 as published, native"])]}  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert list(session.without_products()) == blackwell


def test_without_a_gpu_or_a_package_it_says_so_before_it_starts():
    lacks = "import sys; sys.modules['safetensors'] = None; from altgrad.benchmark.__main__ import *; run_stage(main)"
    commands = [([sys.executable, "-c", lacks], "error: not installed: safetensors; run `make env`")]
    if not torch.cuda.is_available():
        commands.append(([*COMMAND, "--gpu"], "sees no GPU"))
    for command, said in commands:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 1 and said in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.fixture
def grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Task]:
    monkeypatch.chdir(tmp_path)
    keys = write_project(tmp_path, ["bf16", "E4M3"], ["adamw"], (0, 1), steps=60, blocks=1)
    for key in keys:
        cell = json.loads(Path(f"data/grid/{key}.json").read_text())
        write_json(Path(f"data/grid/{key}.json"), cell | {"train": cell["train"] | {"grad_accumulation": 1}})
    return [Task("train", key, (), 60) for key in keys]


def test_an_estimate_on_a_gpu_is_counted_from_its_record(grid):
    cell = json.loads(Path(f"data/grid/{grid[0].key}.json").read_text())
    row = record()["parts_of_runs"][0]
    known = row | {"sizes": {"layers": cell["model"]["layers"]}, "batch": cell["train"]["batch"]}
    found = budget.estimate_on(record(parts_of_runs=[known]), grid)
    train, monitor = cell["train"], cell["monitor"]
    evaluations, looks = 2 + (60 - 1) // train["eval_every"], 1 + 60 // monitor["every"]
    a_run = 2.0 + 60 * 0.01 + evaluations * 0.2 + looks * 0.3 + 4.0
    kinds = {kind_of(json.loads(Path(f"data/grid/{task.key}.json").read_text())) for task in grid}
    load = len(kinds) * (30.0 - (2.0 + 24 * 0.01 + 2 * 0.2 + 3 * 0.3))
    assert found.jobs == 1 and found.of(grid) == pytest.approx(load + len(grid) * a_run)
    with pytest.raises(UserError, match=r"was not measured with the model and batch of .*; it was: pico \(batch 16\)"):
        budget.estimate_on(record(parts_of_runs=[row | {"sizes": {"layers": 99}}]), grid)


def test_a_table_of_sizes_has_what_runs_cost():
    head, _columns, row = budget.sizes_table(record(), Budget()).splitlines()
    assert "An Imaginary GPU (torch 2.11.0, commit 0123456789), E4M3" in head and "at 2.50 an hour" in head
    seconds = 20 * 168_000 / 102_400
    assert row.split() == ["pico", "0.168", "M", "102,400", "33", "s", f"{2.5 * seconds / 3600:.2f}", "0.23"]
    assert 10 * 2.5 * seconds / 3600 == pytest.approx(0.23, abs=0.005)
    assert "at 30.00 an hour" in budget.sizes_table(record(), Budget(price=30))


def test_a_gpu_is_named_by_a_part_of_its_name(tmp_path):
    with pytest.raises(UserError, match="GPU=h100: no GPU is named so; measured: none; `make gpu` writes one"):
        budget.record_of("h100", tmp_path)
    write_json(tmp_path / "gpu_a.json", record())
    write_json(tmp_path / "gpu_b.json", record(device="An Imaginary H200", parts_of_runs=[]))
    assert budget.record_of("imaginary gpu", tmp_path)["device"] == "An Imaginary GPU"
    with pytest.raises(UserError, match="more than one GPU is named so"):
        budget.record_of("imaginary", tmp_path)
    with pytest.raises(UserError, match="has no seconds of runs"):
        budget.record_of("h200", tmp_path)
