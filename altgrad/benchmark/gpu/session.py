"""The list: what is checked and measured in which order, each written when it is there, none of them twice."""

from __future__ import annotations

import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from altgrad.benchmark import limits, memory, optimizers, steps, tables
from altgrad.benchmark.gpu import checks, compiled, needs, operands, runs
from altgrad.benchmark.machines import MACHINE
from altgrad.benchmark.record import Record
from altgrad.config import UserError, load_params
from altgrad.config.process import usable_cores
from altgrad.model import GPTConfig
from altgrad.numerics.check.records import environment
from altgrad.training import machine

LIMIT_S = 115.0  # of one item; what takes longer is given up, and said
ARMS_FORMAT = "E4M3"
SAME_GRAPH = ("E3M4", "E7M0")  # as E4M3, since a format enters a graph as a tensor


@dataclass(frozen=True)
class Sizes:
    """How much of each: of the list for a GPU, and of its rehearsal on a CPU."""

    checks: dict[str, list[str]]
    later_checks: dict[str, list[str]]
    operands: tuple[int, int]
    model: str
    config: GPTConfig
    batch: int
    rounds: int
    entries: tuple[str, ...] | None  # names of the contestants in steps; None: all
    optimizers: tuple[str, ...]
    jobs: tuple[int, ...]
    parts_of: dict[str, int]  # models whose runs are taken apart, with their vocabulary
    train: dict[str, Any]  # settings of whole runs


FULL = Sizes(
    checks={"numerics": ["tests/gpu/test_numerics.py"], "runs": ["tests/gpu/test_cells.py"]},
    later_checks={"optimizers": ["tests/gpu/test_arms.py"]},
    operands=(1 << 16, 3072),
    model="gpt-124m",
    config=GPTConfig(vocab_size=50257, layers=12, width=768, heads=12, context=1024),
    batch=16,
    rounds=10,
    entries=None,
    optimizers=("adamw", "stiff_matched", "rung", "muon"),
    jobs=(1, 4, 8, 16),
    parts_of={"pico": 1024, "nano": 4096, "micro": 4096, "mini": 4096, "gpt-50m": 50257, "gpt-124m": 50257},
    train={},
)
MINIATURE = Sizes(
    checks={"numerics": ["tests/gpu/test_numerics.py::test_codes_are_the_same_bytes"]},
    later_checks={},
    operands=(64, 96),
    model="miniature",
    config=GPTConfig(vocab_size=128, layers=1, width=32, heads=2, context=32),
    batch=2,
    rounds=2,
    entries=("bf16", "E4M3", "E3M4"),
    optimizers=("adamw", "rung"),
    jobs=(2,),
    parts_of={"pico": 512},
    train={"steps": 4, "batch": 2, "eval_sequences": 4, "compile": "off"},
)


class Item(NamedTuple):
    """Something that is measured by itself, and the rows that it gives each part of the record."""

    name: str
    measure: Callable[[], dict[str, list[dict[str, Any]]]]


def _row_of(part: str, measure: Callable[[], dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return what ``measure`` finds as the one row of a part."""
    return {part: [measure()]}


class Session:
    """A GPU, its record, and the list; ``miniature`` rehearses it on whatever device there is.

    ``arguments`` are the command line, for the record.
    """

    def __init__(self, output: Path | None, miniature: bool, arguments: list[str]) -> None:
        self.root = Path.cwd()
        self.sizes = MINIATURE if miniature else FULL
        self.params = load_params()
        machine.use_compile_cache(machine.compile_cache(self.root))
        self.device = machine.select_device("auto")
        if self.device.type != "cuda" and not miniature:
            raise UserError(
                "this torch sees no GPU, so there is nothing to measure; --miniature rehearses the list on the CPU"
            )
        self.threads = min(torch.get_num_threads(), usable_cores())
        torch.set_num_threads(self.threads)
        device = machine.device_name(self.device)
        found = environment("altgrad.benchmark.gpu", arguments)
        found |= {"device": device, "on_gpu": self.device.type == "cuda", **_versions(self.device)}
        slug = re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_")
        default = self.root / ("scratch/gpu_miniature.json" if miniature else f"reports/bench/gpu_{slug}.json")
        self.record = Record(
            output or default,
            {key: value for key, value in found.items() if key in MACHINE},
            {key: value for key, value in found.items() if key not in MACHINE},
        )

    def run(self, seconds: float, again: bool) -> list[str]:
        """Measure what the record does not have of this commit, torch and driver; return what is still to be done.

        No item is begun after ``seconds``. One that fails is written down with its error, and tried again by the next
        session; with ``again`` all are measured anew.
        """
        began, items = time.perf_counter(), list(self.items())
        left = [item for item in items if again or not self.record.has(item.name)]
        if len(left) < len(items):
            print(f"{len(items) - len(left)} of {len(items)} items are in {self.record.path} already", flush=True)
        for item in left:
            if time.perf_counter() - began > seconds:
                break
            number = f"[{items.index(item) + 1}/{len(items)}]"
            started = time.perf_counter()
            try:
                with _at_most(LIMIT_S):
                    found = item.measure()
            except Exception as error:  # noqa: BLE001 - whatever it is, the next item may be measured
                words = (str(error).strip() or type(error).__name__).splitlines()[0]
                self.record.put_item(item.name, time.perf_counter() - started, words)
                print(f"{number} {item.name}: failed: {words}", flush=True)
                continue
            for part, rows in found.items():
                self.record.put_limits(rows[0]) if part == "limits" else self.record.put(part, rows, each=True)
            self.record.put_item(item.name, took := time.perf_counter() - started)
            print(f"{number} {item.name}: {took:.0f} s{_said(found, self.record.content)}", flush=True)
        return [item.name for item in items if not self.record.has(item.name)]

    def items(self) -> Iterator[Item]:
        """Yield the list, what is worth most first."""
        sizes = self.sizes
        yield from (self._check(name, tests) for name, tests in sizes.checks.items())
        yield Item("limits", lambda: {"limits": [limits.measure(self.device)]})
        rounds = 3 * sizes.rounds
        yield Item("operands", lambda: {"operands": operands.measure(sizes.operands, rounds, self.device)})
        yield Item("graphs of steps", self._compile)
        yield from (Item(f"step: {entry.name}", partial(self._step, entry)) for entry in self.entries())
        yield from (Item(f"optimizer: {name}", partial(self._optimizer, name)) for name in sizes.optimizers)
        for jobs in sizes.jobs:
            measure = partial(runs.at_once, self.root, "pico", jobs, sizes.train)
            yield Item(f"runs: {jobs} at a time", partial(_row_of, "at_once", measure))
        for model, vocabulary in sizes.parts_of.items():
            measure = partial(runs.parts_of, self.root, model, vocabulary, sizes.train)
            yield Item(f"a run of {model}", partial(_row_of, "parts_of_runs", measure))
        yield from (self._check(name, tests) for name, tests in sizes.later_checks.items())

    def entries(self) -> list[steps.Contestant]:
        """Return the contestants in training steps, the baseline first."""
        found = steps.on_gpu()
        return [entry for entry in found if self.sizes.entries is None or entry.name in self.sizes.entries]

    def _compile(self) -> dict[str, list[dict[str, Any]]]:
        """Compile all steps at once; formats share a graph with the first of their kind."""
        names = [entry.name for entry in self.entries() if entry.name not in SAME_GRAPH and _is_there(entry)]
        at_a_time = min(compiled.AT_A_TIME, max(1, usable_cores() // 2))
        cache = machine.compile_cache(self.root)
        compiled.compile_all(names, self.sizes.config, self.sizes.batch, cache, at_a_time)
        return {}

    def _check(self, name: str, tests: list[str]) -> Item:
        return Item(f"check: {name}", lambda: {"checks": [checks.run(name, tests, LIMIT_S - 5)]})

    @cached_property
    def _baseline(self) -> steps.Step:
        """The step that all others are measured beside; the first item that needs it compiles it."""
        return self._warm(next(entry for entry in self.entries() if entry.name == steps.BASELINE))

    def _warm(self, entry: steps.Contestant) -> steps.Step:
        tokens = steps.random_tokens(self.sizes.config, self.sizes.batch, self.device)
        return steps.Step(self.sizes.config, entry, tokens, self.device).warm()

    def _step(self, entry: steps.Contestant) -> dict[str, list[dict[str, Any]]]:
        """Measure a contestant's step beside the baseline's, turn by turn, and its memory."""
        if not _is_there(entry):
            raise RuntimeError("torchao is not installed")
        baseline = self._baseline
        step = baseline if entry.name == steps.BASELINE else self._warm(entry)
        pairs, chance = [], random.Random(0)
        for _ in range(self.sizes.rounds):
            turns = {entry.name: step, steps.BASELINE: baseline}
            pairs.append({name: turns[name].seconds() for name in chance.sample(list(turns), len(turns))})
        of = {"model": self.sizes.model, "batch": self.sizes.batch, "name": entry.name}
        peak = memory.peak_mb(step)
        state = {"state_mb": round(memory.state_mb(step), 1), "peak_mb": None if peak is None else round(peak, 1)}
        result = steps.result(entry.name, self.sizes.config, self.sizes.batch, step.first_s, pairs)
        return {"steps": [of | result], "memory": [of | state]}

    def _optimizer(self, name: str) -> dict[str, list[dict[str, Any]]]:
        settings = self.params.optimizers[name].model_dump()
        found = optimizers.measure(
            self.sizes.config, ARMS_FORMAT, name, settings, 3 * self.sizes.rounds, self.device, self.threads
        )
        return {"optimizers": [{"model": self.sizes.model, "format": ARMS_FORMAT, **found}]}


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in what takes longer."""

    def give_up(*_: object) -> None:
        raise TimeoutError(f"had not ended after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _is_there(entry: steps.Contestant) -> bool:
    """Whether what an entry needs is installed."""
    return not ("torchao" in entry.name and "torchao" in needs.left_out())


def _said(found: dict[str, list[dict[str, Any]]], bench: dict[str, Any]) -> str:
    """Return the rows as the terminal shows them."""
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
