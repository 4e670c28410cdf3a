"""Who gets which task, what becomes of lost ones, files that arrive. Oracles: made-up machines, the files sent."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from altgrad.config import UserError
from altgrad.execution import Task
from altgrad.execution.node import About, Ended, Growth, News, pack, unpack
from altgrad.execution.on_ray import ATTEMPTS, RayCluster, _Machine


class Actor:
    """Stands in for Ray's handle of a node: remembers what was called."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(remote=lambda *arguments: self.calls.append((name, *arguments)))


@pytest.fixture
def cluster_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RayCluster]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    Path("data/grid").mkdir(parents=True)

    def made(**classes: str) -> RayCluster:
        cluster = RayCluster()
        cluster._machines = {
            name: _Machine(Actor(), About(name, machine_class, 2)) for name, machine_class in classes.items()
        }
        return cluster

    return made


def task(format: str, seed: int, size: int = 100, stage: str = "train") -> Task:
    key = f"{format}-adamw-{seed}-1"
    Path(f"data/grid/{key}.json").write_text(json.dumps({"seed": seed}))
    return Task(stage, key, (), size)


def given(cluster: RayCluster, *tasks: Task) -> _Machine:
    """Have the first machine take as many of ``tasks`` as it has room for; return it."""
    cluster.submit(tasks)
    cluster._give()
    return cluster._machines["a"]


def run_all(cluster: RayCluster) -> dict[str, str]:
    """Let machines end their tasks at once until nothing waits; return the class that each task ran on."""
    found = {}
    while cluster._waiting:
        cluster._give()
        for machine in cluster._machines.values():
            for name in list(machine.tasks):
                found[name] = machine.about.machine_class
                del machine.tasks[name]
    return found


def test_all_cells_of_a_seed_run_on_one_class_of_machine(cluster_of):
    cluster = cluster_of(a="x", b="x", c="y")
    cluster.submit([task(fmt, seed) for fmt in ("bf16", "E4M3", "E3M4") for seed in range(6)])
    ran = run_all(cluster)
    assert len(ran) == 18
    by_seed = {seed: {where for name, where in ran.items() if name.endswith(f"-{seed}-1")} for seed in range(6)}
    assert all(len(classes) == 1 for classes in by_seed.values())
    assert {where for classes in by_seed.values() for where in classes} == {"x", "y"}  # and none stands idle


def test_a_seed_that_has_begun_stays_where_it_was_trained(cluster_of):
    cluster = cluster_of(a="x", b="x", c="y")
    for seed in range(4):
        timing = Path(f"data/runs/{task('bf16', seed).key}/timing.json")
        timing.parent.mkdir(parents=True)
        timing.write_text(json.dumps({"machine_class": "y"}))
    cluster.submit([task("E4M3", seed) for seed in range(4)])
    assert set(run_all(cluster).values()) == {"y"}


def test_where_its_class_has_left_a_seed_goes_on_elsewhere_and_that_is_said(cluster_of, capsys):
    cluster = cluster_of(a="x")
    cluster._class_of = {0: "gone"}
    cluster.submit([task("E4M3", 0)])
    assert set(run_all(cluster).values()) == {"x"}
    assert "seed 0: no machine like gone is left" in capsys.readouterr().err


def test_diagnoses_come_first_and_long_cells_before_short_ones(cluster_of):
    cluster = cluster_of()
    cluster.submit([task("a", 0, 10), task("b", 0, 1000)])
    cluster.submit([task("c", 0, 1, "diagnose"), task("d", 0, 100)])
    assert [waiting.key[0] for waiting in cluster._waiting] == ["c", "b", "d", "a"]


def test_a_lost_task_is_tried_again_and_then_reported(cluster_of, capsys):
    ray = SimpleNamespace(kill=lambda actor: None)
    cluster = cluster_of()
    cluster.submit([task("E4M3", 0)])
    for attempt in range(1, ATTEMPTS + 1):
        cluster._machines = {f"n{attempt}": _Machine(Actor(), About(f"n{attempt}", "x", 2))}
        cluster._give()
        cluster._lose(ray, f"n{attempt}", "is lost")
        assert len(cluster._waiting) == (attempt < ATTEMPTS)
    assert [outcome.status for outcome in cluster.poll().ended] == [-9]
    assert capsys.readouterr().err.count("is lost") == ATTEMPTS


@pytest.mark.parametrize(("status", "again"), [(-11, True), (143, True), (1, False), (3, False)])
def test_a_process_that_died_is_tried_again_and_a_cell_that_failed_is_not(cluster_of, status, again):
    cluster = cluster_of(a="x")
    machine = given(cluster, task("E4M3", 0))
    ended = [Ended(name, status, None, full=False) for name in machine.tasks]
    cluster._take_in(machine, News(ended, {}, {}, []))
    assert bool(cluster._waiting) == again and bool(cluster._outcomes) != again


def test_where_every_disk_is_full_what_waits_is_given_up_with_a_reason(cluster_of):
    cluster = cluster_of(a="x")
    tasks = [task("E4M3", 0), task("bf16", 0), task("E3M4", 0)]
    machine = given(cluster, *tasks)
    cluster._take_in(machine, News([Ended(name, 1, None, full=True) for name in machine.tasks], {}, {}, []))
    assert len(cluster._waiting) == 3
    cluster._give()
    assert {outcome.task for outcome in cluster._outcomes} == set(tasks) and not cluster._waiting
    assert {outcome.status for outcome in cluster._outcomes} == {1}
    assert all("the disk of every machine is full" in waited.log.read_text() for waited in tasks)


def test_after_an_interrupt_nothing_is_tried_again(cluster_of):
    cluster = cluster_of(a="x")
    machine = given(cluster, task("E4M3", 0), task("bf16", 0), task("E3M4", 0))
    cluster.cancel(2)
    assert not cluster._waiting and ("cancel", 2, None) in machine.actor.calls
    cluster._take_in(machine, News([Ended(name, 130, None, full=False) for name in machine.tasks], {}, {}, []))
    assert [outcome.status for outcome in cluster._outcomes] == [130, 130] and not cluster._waiting


def test_a_task_that_alone_was_told_to_stop_is_not_tried_again_and_the_others_go_on(cluster_of):
    cluster = cluster_of(a="x")
    tasks = [task("E4M3", 0), task("bf16", 0), task("E3M4", 0)]
    machine = given(cluster, *tasks)
    cluster.cancel(15, [tasks[0].name])
    assert ("cancel", 15, [tasks[0].name]) in machine.actor.calls and len(cluster._waiting) == 1
    ended = [Ended(name, 143, None, full=False) for name in machine.tasks]
    cluster._take_in(machine, News(ended, {}, {}, []))
    assert [outcome.task for outcome in cluster._outcomes] == tasks[:1]
    assert [waiting.name for waiting in cluster._waiting] == [tasks[1].name, tasks[2].name]


def test_what_a_node_sends_goes_where_it_belongs_and_nowhere_else(cluster_of, tmp_path):
    cluster = cluster_of(a="x")
    machine = given(cluster, task("E4M3", 0))
    (name,) = machine.tasks
    home = "scratch/E4M3-adamw-0-1-0123456789abcdef"
    there = tmp_path / "there"
    (there / home).mkdir(parents=True)
    (there / home / "step-1.json").write_text("{}")
    grown = dict.fromkeys(["README.md", "scratch/../x"], Growth(0, b"x")) | {
        f"{home}/history.jsonl": Growth(0, b"one\n")
    }
    cluster._take_in(machine, News([], grown, {name: pack(there, [home])}, []))
    cluster._take_in(machine, News([], {f"{home}/history.jsonl": Growth(4, b"two\n")}, {}, []))
    assert Path(home, "history.jsonl").read_text() == "one\ntwo\n" and Path(home, "step-1.json").exists()
    assert not Path("README.md").exists() and not Path("x").exists()
    cluster._take_in(machine, News([], {}, {}, [f"{home}/step-1.json"]))
    assert not Path(home, "step-1.json").exists()
    other = "scratch/bf16-adamw-0-1-0123456789abcdef"
    (there / other).mkdir()
    (there / other / "step-1.json").write_text("{}")
    with pytest.raises(UserError, match="none of what it was asked for"):
        cluster._take_in(machine, News([], {}, {name: pack(there, [other])}, []))


@pytest.mark.parametrize(
    ("address", "words"),
    [("127.0.0.1:1", "no Ray cluster answers at 127.0.0.1:1"), ("ray://127.0.0.1:1", "no Ray cluster answers at ray"),
     ("127.0.0.1:99999", "no Ray cluster answers"), ("somewhere", "expected HOST:PORT, auto or local")],
)  # fmt: skip
def test_an_address_where_nothing_answers_is_one_sentence_at_once(monkeypatch, address, words):
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(UserError, match=words):
        RayCluster()


def test_without_ray_it_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr("altgrad.execution.on_ray.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'altgrad\[ray\]'"):
        RayCluster()


SENT = {"data/runs/a/metrics.json": b"{}", "data/runs/a/deep/model.bin": bytes(range(256)), "data/diag/a.json": b"1"}

BELOW = ["data/runs/a", "data/diag/a.json"]


def test_what_is_sent_arrives_in_place_of_what_was_there(tmp_path):
    sender, home = tmp_path / "sender", tmp_path / "home"
    for name, content in SENT.items():
        (sender / name).parent.mkdir(parents=True, exist_ok=True)
        (sender / name).write_bytes(content)
    (home / "data/runs/a").mkdir(parents=True)
    (home / "data/runs/a/old.csv").touch()
    (home / "data/runs/b.csv").touch()
    unpack(pack(sender, [*BELOW, "data/not/there"]), home, BELOW)
    there = {path.relative_to(home).as_posix(): path.read_bytes() for path in home.rglob("*") if path.is_file()}
    assert there == SENT | {"data/runs/b.csv": b""}


def test_nothing_is_put_where_it_was_not_asked_for(tmp_path):
    for name in ("data/runs/b/x", "/etc/passwd", "data/runs/a/../../../x", "data/runs/ab", "../x"):
        content = {"data/runs/a/good": b"1", name: b"2"}
        with pytest.raises(UserError, match="none of what it was asked for"):
            unpack(content, tmp_path / "home", BELOW)
    assert not (tmp_path / "home").exists()
