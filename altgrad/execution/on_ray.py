"""The executor of a cluster: a `Node` on each machine, called through Ray Core.

Ray starts a process on each machine, carries calls and files there and back, and reports lost machines. This file
decides which machine gets which task, brings results and checkpoints home, and repeats the tasks of a lost machine.
"""

import logging
import os
import shutil
import socket
import sys
import time
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from tqdm import tqdm

from altgrad.common.errors import UserError
from altgrad.common.files import read_json, write_text
from altgrad.execution import TOLD_TO_STOP, Outcome, Status, Task
from altgrad.execution.node import (
    KEEP_EVERY,
    READS,
    SHARED,
    WRITES,
    About,
    Ended,
    News,
    Node,
    pack,
    places,
    unpack,
)

LOOK_EVERY = 5.0  # seconds between looks for new machines
ASK_EVERY = 0.2  # least seconds between calls to a machine
CALLS = 200  # most calls a second to all machines together
ANSWERED_WITHIN = 120.0  # seconds in which an answer that is ready must arrive
CONNECTED_WITHIN = 10.0  # seconds in which the head of a cluster must accept a connection
ATTEMPTS = 3  # runs of a task whose machine or process is lost each time
LOST = -9  # the exit status of a task that was lost `ATTEMPTS` times
PASSED_ON = ("ALTGRAD_CPU_BF16",)  # environment variables that affect a cell's bits


@dataclass
class _Machine:
    """A machine of the cluster; ``about`` is None until it has answered."""

    actor: Any
    about: About | None = None
    tasks: dict[str, Task] = field(default_factory=dict)  # tasks given to it that have not ended, by name
    answer: Any = None  # Ray's handle of the answer to the present call
    asked: float = 0.0
    used: bool = True  # False if its disk is full

    @property
    def known(self) -> About:
        assert self.about is not None
        return self.about

    @property
    def name(self) -> str:
        return self.about.name if self.about else "a machine of the cluster"


class RayCluster:
    """The executor of a Ray cluster. Each machine runs as many tasks at a time as its CPUs or GPUs serve.

    ``threads``, ``gpus`` and ``cell_mb`` are those of each task, as for `LocalPool`. ``RAY_ADDRESS`` names the cluster.
    Without it, the cluster is that of `ray start` on this machine, or a new one of this machine alone. Machines may
    join and leave: a task whose machine is lost continues elsewhere from its last checkpoint. All tasks of a seed run
    on one class of machine, since cells are compared seed by seed and another class may give other bits.
    Raises :class:`UserError` if Ray is not installed or nothing answers at its address.
    """

    def __init__(
        self, threads: int = 1, gpus: int = 1, cell_mb: float | None = None, keep_every: float = KEEP_EVERY
    ) -> None:
        _require_ray()
        self._threads, self._gpus, self._cell_mb, self._keep_every = threads, gpus, cell_mb, keep_every
        self._waiting: list[Task] = []
        self._machines: dict[str, _Machine] = {}
        self._unusable: set[str] = set()
        self._lost: Counter[str] = Counter()  # how often each task was lost, by name
        self._class_of: dict[int, str] | None = None  # the class of machine by seed, read when first needed
        self._seeds: dict[str, int] = {}  # by cell
        self._outcomes: list[Outcome] = []
        self._looked = -LOOK_EVERY
        self._cancelled: int | None = None
        self._stopped: set[str] = set()  # names of tasks that were stopped by `cancel` with ``only``
        self._shared: Any = None
        self._ray: ModuleType | None = None

    def submit(self, tasks: Sequence[Task]) -> None:
        """Queue ``tasks``: first diagnoses, which are short and wanted soon, then long cells before short ones."""
        self._cancelled = None
        self._waiting = sorted([*self._waiting, *tasks], key=lambda task: (task.stage != "diagnose", -task.size))

    def poll(self) -> Status:
        """Collect the answers of the machines, give tasks to machines with room, and ask each for its news."""
        if self._ray is None and self._waiting:
            self._ray = _connected()
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
        for machine in ray.nodes():
            name, has = machine["NodeID"], machine["Resources"]
            if name in self._machines or name in self._unusable or not machine["Alive"] or has.get("CPU", 0) < 1:
                continue
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            slots = None if has.get("GPU") else max(1, int(has["CPU"]) // self._threads)
            where = NodeAffinitySchedulingStrategy(name, soft=False)
            options = {"num_cpus": has["CPU"], "num_gpus": has.get("GPU", 0), "scheduling_strategy": where}
            actor = ray.remote(Node).options(**options).remote(
                machine["NodeManagerAddress"], slots, self._threads, self._gpus, self._keep_every, self._cell_mb
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
                told = ray.get(answer, timeout=ANSWERED_WITHIN)
            except ray.exceptions.RayTaskError as error:
                self._lose(ray, name, f"cannot be used: {error.cause}")
                self._unusable.add(name)
                continue
            except ray.exceptions.RayError:  # the machine, or its answer, is no longer there
                self._lose(ray, name, "is lost")
                continue
            if isinstance(told, News):
                self._take_in(machine, told)
                continue
            machine.about = told
            if self._shared is None:
                self._shared = ray.put(pack(Path(), SHARED))
            machine.actor.take.remote(self._shared)
            _say(f"{told.name}: {told.slots} at a time ({told.machine_class})")

    def _take_in(self, machine: _Machine, news: News) -> None:
        for name, parcel in news.kept.items():
            if name in machine.tasks:  # only files of one scratch folder of the cell; files that are there stay
                one_folder = len({file.rpartition("/")[0] for file in parcel}) < 2
                start = f"scratch/{machine.tasks[name].key}-"
                unpack(parcel, Path(), [file for file in parcel if one_folder and file.startswith(start)])
        for path in filter(_is_in_scratch, news.gone):
            Path(path).unlink(missing_ok=True)
        for path in filter(_is_in_scratch, news.grown):
            news.grown[path].write_to(Path(path))
        for ended in news.ended:
            if ended.name in machine.tasks:
                self._end(machine, machine.tasks.pop(ended.name), ended)

    def _end(self, machine: _Machine, task: Task, ended: Ended) -> None:
        if ended.wrote is not None:
            unpack(ended.wrote, Path(), places(WRITES, task))
            if task.scratch is not None:
                shutil.rmtree(task.scratch)
        elif self._cancelled is None and ended.full:
            machine.used = False
            _say(f"{machine.name}: its disk is full, it gets no more cells")
            self._again(task, ended.status)
            return
        told = self._cancelled is not None or task.name in self._stopped
        if ended.status and not told and (ended.status < 0 or ended.status in TOLD_TO_STOP):
            self._again(task, ended.status)  # its process died, or somebody else told it to stop
        else:
            self._outcomes.append(Outcome(task, ended.status))

    def _again(self, task: Task, status: int) -> None:
        """Put a lost task first in the queue; after `ATTEMPTS` losses or an interrupt, end it with ``status``."""
        self._lost[task.name] += 1
        if self._cancelled is not None or self._lost[task.name] >= ATTEMPTS:
            self._outcomes.append(Outcome(task, status))
        else:
            self._waiting = [task, *self._waiting]

    def _lose(self, ray: ModuleType, name: str, why: str) -> None:
        machine = self._machines.pop(name)
        ray.kill(machine.actor)  # so that it does not go on unseen if it still runs
        _say(f"{machine.name} {why}")
        for task in machine.tasks.values():
            self._again(task, LOST if self._cancelled is None else 128 + self._cancelled)

    def _give(self) -> None:
        """Give each task to a machine with room, of the class of its seed; fail all tasks if every disk is full."""
        if self._machines and all(machine.about and not machine.used for machine in self._machines.values()):
            sentence = "the disk of every machine is full; free some space and run the same command again\n"
            for task in self._waiting:
                write_text(task.log, sentence)
            self._outcomes += [Outcome(task, 1) for task in self._waiting]
            self._waiting = []
            return
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
            scratch = task.scratch
            reads = pack(Path(), [*places(READS, task), *([str(scratch)] if scratch else [])])
            machine.tasks[task.name] = task
            machine.actor.run.remote(task, reads, str(scratch) if scratch else None)
            free = [machine for machine in free if len(machine.tasks) < machine.known.slots]
        self._waiting = waiting

    def _class(self, task: Task, ready: list[_Machine]) -> str:
        """Return the class of machine for the task's seed; if it has none, the class with the fewest seeds per slot."""
        if self._class_of is None:
            self._class_of = _classes_before()
        if task.key not in self._seeds:
            self._seeds[task.key] = _seed(task.key)
        seed, classes = self._seeds[task.key], Counter[str]()
        for machine in ready:
            classes[machine.known.machine_class] += machine.known.slots
        if self._class_of.get(seed) not in classes:
            if gone := self._class_of.get(seed):
                _say(f"seed {seed}: no machine like {gone} is left; its other cells run on another class")
            taken = Counter(self._class_of.get(other) for other in set(self._seeds.values()) - {seed})
            self._class_of[seed] = min(classes, key=lambda name: taken[name] / classes[name])
        return self._class_of[seed]

    def _ask(self) -> None:
        every = max(ASK_EVERY, len(self._machines) / CALLS)
        for machine in self._machines.values():
            if machine.about and machine.answer is None and time.monotonic() - machine.asked >= every:
                machine.asked = time.monotonic()
                machine.answer = machine.actor.news.remote()


def _seed(key: str) -> int:
    """Return the seed of the cell ``key``; 0 if the grid has no such cell."""
    cell = Path(f"data/grid/{key}.json")
    return read_json(cell).get("seed", 0) if cell.exists() else 0


def _classes_before() -> dict[int, str]:
    """Return the class of machine on which cells of a seed were trained before, by seed."""
    classes: dict[int, str] = {}
    for timing in sorted(Path("data/runs").glob("*/timing.json")):
        with suppress(KeyError, UserError):
            classes.setdefault(_seed(timing.parent.name), read_json(timing)["machine_class"])
    return classes


def _say(what: str) -> None:
    tqdm.write(what, file=sys.stderr)


def _is_in_scratch(path: str) -> bool:
    return path.startswith("scratch/") and ".." not in path


def _require_ray() -> None:
    """Raise :class:`UserError` if Ray is missing or no cluster answers; Ray itself would try for minutes."""
    if find_spec("ray") is None:
        raise UserError("ENGINE=ray needs Ray: pip install 'altgrad[ray]'")
    address = os.environ.get("RAY_ADDRESS", "")
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not port.isdigit():
        if address not in ("", "auto", "local"):
            raise UserError(f"RAY_ADDRESS is {address}; expected HOST:PORT, auto or local")
        return
    try:
        socket.create_connection((host, int(port)), CONNECTED_WITHIN).close()
    except (OSError, OverflowError):
        raise UserError(f"no Ray cluster answers at {address}, which RAY_ADDRESS names; is it up?") from None


def _connected() -> ModuleType:
    """Return the module ``ray``, connected to the cluster. Raises :class:`UserError` if no cluster answers."""
    import ray

    if not ray.is_initialized():
        variables = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        code = [str(Path(__file__).parents[1]), str(Path("stages").resolve())]  # Ray sends it to each machine once
        environment = {"py_modules": code, "excludes": ["*.md", "__pycache__"], "env_vars": variables}
        try:
            ray.init(
                log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False, runtime_env=environment
            )  # fmt: skip
        except (ConnectionError, ValueError, RuntimeError) as error:
            address = os.environ.get("RAY_ADDRESS", "this machine")
            raise UserError(f"no Ray cluster answers at {address}: {str(error).splitlines()[0]}") from None
    return ray
