"""The list: what is checked and measured in which order, each written when it is there, none of them twice."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from altgrad.benchmark import checks, compiled, needs, operands, optimizers, runs, steps, tables, timing
from altgrad.benchmark.record import BASELINE, Record
from altgrad.benchmark.sizes import MINIATURE, ON_CPU, ON_GPU
from altgrad.benchmark.timing import in_turn
from altgrad.common.provenance import environment
from altgrad.common.threads import usable_cores
from altgrad.config import load_params
from altgrad.config.models import Model
from altgrad.model import GPTConfig
from altgrad.model.hardware import select_device
from altgrad.training import machine

LIMIT_S, CPU_LIMIT_S = 115.0, 600.0  # of one item on a GPU and elsewhere; what takes longer is given up, and said
ARMS_FORMAT = "E4M3"
MODES_OF = (BASELINE, "E4M3")
SAME_GRAPH = ("E3M4", "E7M0")  # as E4M3, since a format enters a graph as a tensor
Rows = dict[str, list[dict[str, Any]]]


class Item(NamedTuple):
    """Something that is measured by itself, and the rows that it gives each part of the record.

    ``patience``: for how many times the limit of an item.
    """

    name: str
    measure: Callable[[], Rows]
    patience: int = 1


def _row_of(part: str, measure: Callable[[], dict[str, Any]]) -> Rows:
    """Return what ``measure`` finds as the one row of a part."""
    return {part: [measure()]}


class Session:
    """A machine, its record, and the list; ``miniature`` rehearses a GPU's on whatever device there is.

    ``arguments`` are the command line, for the record.
    """

    def __init__(self, output: Path | None, miniature: bool, arguments: list[str]) -> None:
        self.root = Path.cwd()
        self.params = load_params()
        machine.use_compile_cache(machine.compile_cache(self.root))
        self.device = select_device("auto")
        on_gpu = self.device.type == "cuda"
        self.sizes = MINIATURE if miniature else ON_GPU if on_gpu else ON_CPU
        self.limit_s = LIMIT_S if on_gpu or miniature else CPU_LIMIT_S
        self.threads = min(torch.get_num_threads(), usable_cores())
        torch.set_num_threads(self.threads)
        device = machine.device_name(self.device)
        if not on_gpu:  # by which processors of one name differ
            device += f", {machine.choose_compute('bf16', self.device)[0]} products"
        found = environment("altgrad.benchmark", arguments)
        found |= {"device": device, "on_gpu": on_gpu, **_versions(self.device)}
        name = f"gpu {device}" if on_gpu else f"{device} {self.threads} threads"
        slug = re.sub(r"[^a-z0-9]+", "_" if on_gpu else "-", name.lower()).strip("_-")
        default = "scratch/miniature.json" if miniature else f"reports/bench/{slug}.json"
        self.record = Record(output or self.root / default, found)
        self._baselines: dict[tuple[str, int], steps.Step] = {}

    def run(self, seconds: float, again: bool, only: str = "") -> list[str]:
        """Measure what the record does not have of this commit, torch and driver; return what is still to be done.

        Of the items with ``only`` in their name. None is begun after ``seconds``. One that fails is written down with
        its error, and tried again by the next session; with ``again`` all are measured anew.
        """
        began, items = time.perf_counter(), [item for item in self.items() if only in item.name]
        left = [item for item in items if again or not self.record.has(item.name)]
        if len(left) < len(items):
            print(f"{len(items) - len(left)} of {len(items)} items are in {self.record.path} already", flush=True)
        for item in left:
            if time.perf_counter() - began > seconds:
                break
            number = f"[{items.index(item) + 1}/{len(items)}]"
            started = time.perf_counter()
            try:
                with _at_most(item.patience * self.limit_s):
                    found = item.measure()
            except (Exception, OutOfTime) as error:  # noqa: BLE001 - whatever it is, the next item may be measured
                words = (str(error).strip() or type(error).__name__).splitlines()[0]
                self.record.put_item(item.name, time.perf_counter() - started, words)
                print(f"{number} {item.name}: failed: {words}", flush=True)
                continue
            for part, rows in found.items():
                self.record.put_limits(rows[0]) if part == "limits" else self.record.put(part, rows)
            self.record.put_item(item.name, took := time.perf_counter() - started)
            print(f"{number} {item.name}: {took:.0f} s{_said(found, self.record.content)}", flush=True)
        return [item.name for item in items if not self.record.has(item.name)]

    def items(self) -> Iterator[Item]:
        """Yield the list, what is worth most first."""
        sizes = self.sizes
        yield from (self._check(name, tests) for name, tests in sizes.checks.items())
        yield Item("limits", lambda: {"limits": [timing.limits(self.device)]})
        rounds, made = 3 * sizes.rounds, sizes.operand_entries
        yield Item("operands", lambda: {"operands": operands.measure(sizes.operands, rounds, self.device, made)})
        if sizes is not ON_CPU:  # where processes of their own compile no sooner
            yield from (Item("graphs of steps", partial(self._compile, *size), 2) for size in sizes.steps)
        for model, batch in sizes.steps:
            size = "" if len(sizes.steps) == 1 else f"{model}, batch {batch}: "
            for entry in self.entries():
                yield Item(f"step: {size}{entry.name}", partial(self._step, model, batch, entry))
        yield from (Item(f"optimizer: {name}", partial(self._optimizer, name)) for name in sizes.optimizers)
        yield from (Item(f"mode: {', '.join(of)}", partial(self._mode, *of)) for of in product(MODES_OF, sizes.modes))
        for jobs in sizes.jobs:
            measure = partial(runs.at_once, self.root, "pico", jobs, sizes.train)
            yield Item(f"runs: {jobs} at a time", partial(_row_of, "at_once", measure))
        for model, vocabulary in sizes.parts_of.items():
            measure = partial(runs.parts_of, self.root, model, vocabulary, sizes.train)
            yield Item(f"a run of {model}", partial(_row_of, "parts_of_runs", measure))
        yield from (self._check(name, tests) for name, tests in sizes.later_checks.items())

    def entries(self) -> list[steps.Contestant]:
        """Return the contestants in training steps that the device has the products of, the baseline first."""
        return [entry for entry in self._asked_for() if entry.runs_on(self.device)]

    def without_products(self) -> dict[str, str]:
        """Return the contestants whose products the device has not, and of which scales these would be."""
        return {entry.name: str(entry.scales) for entry in self._asked_for() if not entry.runs_on(self.device)}

    def _asked_for(self) -> list[steps.Contestant]:
        found = steps.contestants(self.device)
        return [entry for entry in found if self.sizes.entries is None or entry.name in self.sizes.entries]

    def _compile(self, model: str, batch: int) -> Rows:
        """Compile all steps at once; formats share a graph with the first of their kind."""
        names = [entry.name for entry in self.entries() if entry.name not in SAME_GRAPH and _is_there(entry)]
        at_a_time = min(compiled.AT_A_TIME, usable_cores())
        cache = machine.compile_cache(self.root)
        failed = compiled.compile_all(names, self._config(model), batch, cache, at_a_time)
        if failed:
            raise RuntimeError("; ".join(f"{name}: {why}" for name, why in failed.items()))
        return {}

    def _check(self, name: str, tests: list[str]) -> Item:
        return Item(f"check: {name}", lambda: {"checks": [checks.run(name, tests, self.limit_s - 5)]})

    def _config(self, model: str) -> GPTConfig:
        preset = self.params.models[model]
        assert isinstance(preset, Model)
        return GPTConfig(vocab_size=self.sizes.vocabulary, **preset.sizes | self.sizes.changed)

    def _warm(self, model: str, batch: int, entry: steps.Contestant, mode: str = "default") -> steps.Step:
        config = self._config(model)
        return steps.Step(config, entry, steps.random_tokens(config, batch, self.device), self.device, mode).warm()

    def _baseline(self, model: str, batch: int) -> steps.Step:
        """Return the step that others of this size are measured beside; the first item that needs it compiles it."""
        if (model, batch) not in self._baselines:
            first = next(entry for entry in self.entries() if entry.name == BASELINE)
            self._baselines = {(model, batch): self._warm(model, batch, first)}
        return self._baselines[model, batch]

    def _step(self, model: str, batch: int, entry: steps.Contestant) -> Rows:
        """Measure a contestant's step beside the baseline's, turn by turn, and its memory."""
        if not _is_there(entry):
            raise RuntimeError("torchao is not installed")
        baseline = self._baseline(model, batch)
        step = baseline if entry.name == BASELINE else self._warm(model, batch, entry)
        taken = in_turn({entry.name: step, BASELINE: baseline}, self.sizes.rounds, self.device)
        of = {"model": model, "batch": batch, "name": entry.name}
        peak = steps.peak_mb(step)
        state = {"state_mb": round(steps.state_mb(step), 1), "peak_mb": None if peak is None else round(peak, 1)}
        result = steps.result(entry.name, self._config(model), batch, step.first_s, taken)
        return {"steps": [of | result], "memory": [of | state]}

    def _mode(self, name: str, mode: str) -> Rows:
        model, batch = self.sizes.steps[-1]
        entry = next(entry for entry in self.entries() if entry.name == name)
        default = self._baseline(model, batch) if name == BASELINE else self._warm(model, batch, entry)
        both = {mode: self._warm(model, batch, entry, mode), "default": default}
        found = steps.mode_result(name, mode, in_turn(both, self.sizes.rounds, self.device))
        return {"modes": [{"model": model, "batch": batch} | found]}

    def _optimizer(self, name: str) -> Rows:
        model = self.sizes.steps[-1][0]
        settings = self.params.optimizers[name].model_dump()
        found = optimizers.measure(self._config(model), ARMS_FORMAT, name, settings, 3 * self.sizes.rounds, self.device)
        return {"optimizers": [{"model": model, "format": ARMS_FORMAT, **found}]}


class OutOfTime(BaseException):
    """What is under way took too long: no `Exception`, which whoever goes on after a failure would go on after too."""


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Raise `OutOfTime` in what takes longer."""

    def give_up(*_: object) -> None:
        raise OutOfTime(f"had not ended after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _is_there(entry: steps.Contestant) -> bool:
    return not ("torchao" in entry.name and "torchao" in needs.left_out())


def _said(found: Rows, bench: dict[str, Any]) -> str:
    parts = {part: rows for part, rows in found.items() if part in tables.TABLES}
    return "".join(f"\n{tables.as_text(part, rows, bench)}" for part, rows in parts.items())


def _versions(device: torch.device) -> dict[str, str | None]:
    """Return what a GPU's times depend on besides torch: the driver, CUDA, Triton and torchao."""
    driver = None
    if device.type == "cuda" and shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        answer = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()
        driver = answer[0] if answer else None
    found = {"driver": driver, "cuda": torch.version.cuda}
    return found | {name: needs.installed(name) for name in ("triton", "torchao")}
