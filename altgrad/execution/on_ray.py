"""The executor of a cluster: a `Node` on each machine of it, carried by Ray Core.

Ray starts a process on each machine, takes calls and files there and back, and tells when a machine is lost. What a
task is, who gets which, what is kept of it and what happens when a machine is lost is decided here and in `node`.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from tqdm import tqdm

from altgrad.common.errors import UserError
from altgrad.common.files import read_json, write_text
from altgrad.execution import node
from altgrad.execution.executor import TOLD_TO_STOP, Outcome, Status, Task
from altgrad.execution.node import (
    READS,
    SHARED,
    WRITES,
    About,
    Ended,
    News,
    Node,
    grow,
    pack,
    places,
    scratch_of,
    unpack,
)
from altgrad.execution.ray_cluster import connected, require_ray

LOOK_EVERY = 5.0  # seconds between looks for new machines
ASK_EVERY = 0.2  # seconds between calls to a machine, at least ...
ANSWERED_WITHIN = 120.0  # seconds that an answer which is there may take to arrive
CALLS = 200  # ... and so many calls a second to all of them, at most
ATTEMPTS = 3  # of a task whose machine or process was lost
LOST = -9  # the status of a task that was lost as often as it was tried


@dataclass
class _Machine:
    """A machine of the cluster, as far as it has answered."""

    actor: Any
    about: About | None = None
    tasks: dict[str, Task] = field(default_factory=dict)  # given and not ended
    answer: Any = None  # of a call that is under way
    asked: float = 0.0
    used: bool = True  # False for one whose disk is full

    @property
    def known(self) -> About:
        assert self.about is not None
        return self.about


class RayCluster:
    """Up to so many tasks at a time on each machine of a Ray cluster as its CPUs serve, or those of its GPUs.

    ``threads``, ``gpus`` and ``cell_mb``: what each task takes, as `LocalPool` has them. The cluster is that of
    ``RAY_ADDRESS``, or of `ray start` on this machine, or one of this machine alone, made for the occasion. Machines
    may join and leave while tasks run: a task whose machine is lost goes on from its last checkpoint elsewhere. All
    tasks of a seed run on one class of machine, since others may give other bits, and cells are compared seed by seed.
    Raises :class:`UserError` where Ray is not installed or nothing answers at its address.
    """

    def __init__(
        self, threads: int = 1, gpus: int = 1, cell_mb: float | None = None, keep_every: float = node.KEEP_EVERY
    ) -> None:
        require_ray()
        self._threads, self._gpus, self._cell_mb, self._keep_every = threads, gpus, cell_mb, keep_every
        self._waiting: list[Task] = []
        self._machines: dict[str, _Machine] = {}
        self._unusable: set[str] = set()
        self._lost: Counter[str] = Counter()  # how often each task was, by name
        self._class_of: dict[int, str] = {}  # by seed
        self._seeds: dict[str, int] = {}  # by cell
        self._outcomes: list[Outcome] = []
        self._looked = -LOOK_EVERY
        self._cancelled: int | None = None
        self._stopped: set[str] = set()  # tasks that alone were told to stop
        self._before: dict[int, str] | None = None  # the classes of cells that were trained before, by seed
        self._shared: Any = None
        self._ray: ModuleType | None = None

    def submit(self, tasks: Sequence[Task]) -> None:
        """Queue ``tasks``: diagnoses first, which are short and wanted soon, then long cells before short ones."""
        self._cancelled = None
        self._waiting = sorted([*self._waiting, *tasks], key=lambda task: (task.stage != "diagnose", -task.size))

    def poll(self) -> Status:
        """Take in what machines have answered, give the idle ones tasks, and ask all of them again."""
        if self._ray is None and self._waiting:
            self._ray = connected()
        if self._ray is not None:
            self._look_for_machines(self._ray)
            self._collect(self._ray)
            self._give()
            self._ask()
        ended, self._outcomes = self._outcomes, []
        given = [machine for machine in self._machines.values() if machine.about]
        return Status([task for machine in given for task in machine.tasks.values()], ended)

    def cancel(self, signum: int, only: Collection[str] | None = None) -> None:
        if only is None:
            self._waiting.clear()
            self._cancelled = signum
        else:
            self._stopped |= set(only)
        for machine in self._machines.values():
            if machine.tasks:
                machine.actor.cancel.remote(signum, None if only is None else list(only))

    def _look_for_machines(self, ray: ModuleType) -> None:
        if time.monotonic() - self._looked < LOOK_EVERY:
            return
        self._looked = time.monotonic()
        for found in ray.nodes():
            name, has = found["NodeID"], found["Resources"]
            if name in self._machines or name in self._unusable or not found["Alive"] or has.get("CPU", 0) < 1:
                continue
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            slots = None if has.get("GPU") else max(1, int(has["CPU"]) // self._threads)
            where = NodeAffinitySchedulingStrategy(name, soft=False)
            options = {"num_cpus": has["CPU"], "num_gpus": has.get("GPU", 0), "scheduling_strategy": where}
            actor = ray.remote(Node).options(**options).remote(
                found["NodeManagerAddress"], slots, self._threads, self._gpus, self._keep_every, self._cell_mb
            )  # fmt: skip
            self._machines[name] = _Machine(actor, answer=actor.about.remote())

    def _collect(self, ray: ModuleType) -> None:
        waited = {machine.answer: name for name, machine in self._machines.items() if machine.answer is not None}
        answered, _ = ray.wait(list(waited), num_returns=len(waited), timeout=0) if waited else ([], [])
        for answer in answered:
            name = waited[answer]
            machine = self._machines[name]
            machine.answer = None
            try:
                found = ray.get(answer, timeout=ANSWERED_WITHIN)
            except ray.exceptions.RayTaskError as error:
                self._lose(ray, name, f"cannot be used: {error.cause}")
                self._unusable.add(name)
                continue
            except ray.exceptions.RayError:  # the machine, or what it sent, is no longer there
                self._lose(ray, name, "is lost")
                continue
            if isinstance(found, About):
                machine.about = found
                if self._shared is None:
                    self._shared = ray.put(pack(Path(), SHARED))
                machine.actor.take.remote(self._shared)
                _say(f"{found.name}: {found.slots} at a time ({found.machine_class})")
            else:
                self._take_in(machine, found)

    def _take_in(self, machine: _Machine, news: News) -> None:
        for name, parcel in news.kept.items():
            key = machine.tasks[name].key if name in machine.tasks else ""
            _put_each(parcel, key)
        for path in news.gone:
            if path.startswith("scratch/") and ".." not in path:
                Path(path).unlink(missing_ok=True)
        for path, growth in news.grown.items():
            if path.startswith("scratch/") and ".." not in path:
                grow(Path(path), growth)
        for ended in news.ended:
            if ended.name in machine.tasks:
                self._end(machine, machine.tasks.pop(ended.name), ended)

    def _end(self, machine: _Machine, task: Task, ended: Ended) -> None:
        if ended.wrote is not None:
            unpack(ended.wrote, Path(), places(WRITES, task))
            scratch = scratch_of(task)
            if scratch is not None:
                shutil.rmtree(scratch)
        elif self._cancelled is None and ended.full:
            machine.used = False
            _say(f"{_name(machine)}: its disk is full, it gets no more cells")
            return self._again(task, ended.status)
        elif self._is_lost(task, ended.status):
            return self._again(task, ended.status)
        self._outcomes.append(Outcome(task, ended.status))
        return None

    def _is_lost(self, task: Task, status: int) -> bool:
        """Whether its process died, or was told to stop by somebody else."""
        told = self._cancelled is not None or task.name in self._stopped
        return not told and (status < 0 or status in TOLD_TO_STOP)

    def _again(self, task: Task, status: int) -> None:
        self._lost[task.name] += 1
        if self._cancelled is not None or self._lost[task.name] >= ATTEMPTS:
            self._outcomes.append(Outcome(task, status))
        else:
            self._waiting = [task, *self._waiting]

    def _lose(self, ray: ModuleType, name: str, why: str) -> None:
        machine = self._machines.pop(name)
        ray.kill(machine.actor)  # so that what it may still be at does not go on unseen
        _say(f"{_name(machine)} {why}")
        for task in machine.tasks.values():
            self._again(task, LOST if self._cancelled is None else 128 + self._cancelled)

    def _give(self) -> None:
        """Give tasks to machines that have room, each to the class of machine that its seed has."""
        if self._machines and all(machine.about and not machine.used for machine in self._machines.values()):
            return self._give_up("the disk of every machine is full; free some space and run the same command again")
        ready = [machine for machine in self._machines.values() if machine.about and machine.used]
        free = [machine for machine in ready if len(machine.tasks) < machine.known.slots]
        waiting: list[Task] = []
        for place, task in enumerate(self._waiting):
            if not free:
                waiting += self._waiting[place:]
                break
            wanted = self._class(task, ready)
            fit = [machine for machine in free if machine.known.machine_class == wanted]
            if not fit:
                waiting.append(task)
                continue
            machine = max(fit, key=lambda m: m.known.slots - len(m.tasks))
            scratch = scratch_of(task)
            reads = pack(Path(), [*places(READS, task), *([str(scratch)] if scratch else [])])
            machine.tasks[task.name] = task
            machine.actor.run.remote(task, reads, str(scratch) if scratch else None)
            free = [machine for machine in free if len(machine.tasks) < machine.known.slots]
        self._waiting = waiting
        return None

    def _give_up(self, why: str) -> None:
        """End all that waits, with ``why`` as its last word."""
        for task in self._waiting:
            write_text(task.log, f"{why}\n")
        self._outcomes += [Outcome(task, 1) for task in self._waiting]
        self._waiting = []

    def _class(self, task: Task, ready: list[_Machine]) -> str:
        """Return the class of machine that the task's seed runs on, the emptiest if it has none yet."""
        if task.key not in self._seeds:
            self._seeds[task.key] = _seed(task.key)
        if self._before is None:
            self._before = _classes_before()
        seed, classes = self._seeds[task.key], Counter[str]()
        for machine in ready:
            classes[machine.known.machine_class] += machine.known.slots
        if self._class_of.get(seed) not in classes:
            before = self._class_of.get(seed) or self._before.get(seed)
            if before is not None and before not in classes:
                _say(f"seed {seed}: no machine like {before} is left; its other cells run on another class")
            if before is not None and before in classes:
                self._class_of[seed] = before
            else:
                taken = Counter(self._class_of.values())
                self._class_of[seed] = min(classes, key=lambda name: taken[name] / classes[name])
        return self._class_of[seed]

    def _ask(self) -> None:
        every = max(ASK_EVERY, len(self._machines) / CALLS)
        for machine in self._machines.values():
            if machine.about and machine.answer is None and time.monotonic() - machine.asked >= every:
                machine.asked = time.monotonic()
                machine.answer = machine.actor.news.remote()


def _seed(key: str) -> int:
    """Return a cell's seed, 0 for one that is not planned."""
    cell = Path(f"data/grid/{key}.json")
    return read_json(cell).get("seed", 0) if cell.exists() else 0


def _classes_before() -> dict[int, str]:
    """Return the class of machine that cells of each seed were trained on before, as far as any was."""
    found: dict[int, str] = {}
    for timing in sorted(Path("data/runs").glob("*/timing.json")):
        with suppress(KeyError, UserError):
            found.setdefault(_seed(timing.parent.name), read_json(timing)["machine_class"])
    return found


def _say(what: str) -> None:
    tqdm.write(what, file=sys.stderr)


def _name(machine: _Machine) -> str:
    return machine.about.name if machine.about else "a machine of the cluster"


def _put_each(parcel: Any, key: str) -> None:
    """Put a cell's checkpoints in place file by file, beside those that are there."""
    if key:
        folders = {name.rpartition("/")[0] for name in parcel.files}
        allowed = [name for name in parcel.files if name.startswith(f"scratch/{key}-")] if len(folders) < 2 else []
        unpack(parcel, Path(), allowed)
