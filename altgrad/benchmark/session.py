"""Runs the list of measurements in order, writes each result at once, and measures nothing twice.

`Sizes` has the sizes of all measurements: on a GPU, on a CPU, and in the rehearsal of a GPU's list on any device.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from altgrad.benchmark import operands, runs, steps, timing
from altgrad.benchmark.records import BASELINE, TABLES, Record, as_text
from altgrad.benchmark.timing import in_turn
from altgrad.common.machine import environment, usable_cores
from altgrad.config import load_params
from altgrad.config.models import Model
from altgrad.model import GPTConfig
from altgrad.model.hardware import select_device
from altgrad.training import machine

LIMIT_S, CPU_LIMIT_S = 115.0, 600.0  # time limit of an item, on a GPU and elsewhere; a slower item fails
ARMS_FORMAT = "E4M3"
SAME_GRAPH = ("E3M4", "E7M0")  # formats that use E4M3's graph: a format enters a graph as a tensor
SHAPED = (BASELINE, "E4M3", "MXFP8, all tensors", "NVFP4, all tensors", "attention in E4M3", "attention in MXFP8")
Rows = dict[str, list[dict[str, Any]]]  # {part of the record: results}


@dataclass(frozen=True)
class Sizes:
    """The sizes of each measurement.

    Attributes:
        operands: shape of the tensor that is quantized.
        steps: (model, batch) of the training steps.
        shapes: the same of models of other shapes, with the contestants of `SHAPED` alone.
        vocabulary: vocabulary size of these models.
        rounds: number of timed steps of each contestant.
        optimizers: names of the optimizers to time, on the last model in ``steps``.
        jobs: the numbers of runs of pico to try at a time.
        parts_of: ``{model: vocabulary size}`` of the runs whose parts are timed.
        changed: model sizes that replace those of the preset, such as ``{"layers": 1}``.
        entries: names of the contestants in training steps; None means all.
        operand_entries: names of the ways to make an operand; None means all.
        train: settings that replace those of the section ``train`` in whole runs.
    """

    operands: tuple[int, int]
    steps: tuple[tuple[str, int], ...]
    vocabulary: int
    rounds: int
    optimizers: tuple[str, ...]
    jobs: tuple[int, ...]
    parts_of: dict[str, int]
    shapes: tuple[tuple[str, int], ...] = ()
    changed: dict[str, int] = field(default_factory=dict)
    entries: tuple[str, ...] | None = None
    operand_entries: tuple[str, ...] | None = None
    train: dict[str, Any] = field(default_factory=dict)


ON_GPU = Sizes(
    operands=(1 << 16, 3072),
    steps=(("gpt-124m", 16),),
    vocabulary=50257,
    rounds=10,
    entries=(
        "bf16", "E4M3", "E3M4", "E7M0", "MXFP8, all tensors", "NVFP4, all tensors", "NVFP4 as published",
        "E4M3, native tensorwise", "E4M3, native rowwise", "E4M3, torchao tensorwise", "E4M3, torchao rowwise",
        "E4M3, torchao rowwise_with_gw_hp", "E4M3, codes kept", "E4M3, native blocks of 128", "MXFP8, native",
        "NVFP4 as published, native",
    ),
    optimizers=("adamw", "spacing_unmatched", "spacing_scaled", "rung", "muon"),
    jobs=(1, 4, 8, 16),
    parts_of={"pico": 1024, "nano": 4096, "micro": 4096, "mini": 4096, "gpt-50m": 50257, "gpt-124m": 50257},
)  # fmt: skip
ON_CPU = Sizes(
    operands=(1 << 12, 1024),
    steps=(("nano", 16), ("micro", 16)),
    shapes=(("llama-nano", 16), ("moe-nano", 16)),
    vocabulary=4096,
    rounds=15,
    optimizers=(
        "adamw", "spacing_unmatched", "spacing_scaled", "shuffled_unmatched", "rung", "muon",
        "adamw_e4m3_state", "adamw_coat", "adamw_fishman", "adamw_dynamic8", "eco_3_bytes", "rung_3_bytes",
    ),
    jobs=(1, 2),
    parts_of={"pico": 1024, "nano": 4096},
)  # fmt: skip
MINIATURE = Sizes(
    operands=(64, 96),
    steps=(("pico", 2),),
    vocabulary=128,
    rounds=2,
    changed={"layers": 1},
    entries=("bf16", "E4M3", "E3M4"),
    operand_entries=(
        "copy", "E4M3, a scale per row, to float8", "E2M1, MS-EDEN", "E4M3, a scale per tensor, by kernels",
    ),
    optimizers=("adamw", "rung"),
    jobs=(2,),
    parts_of={"pico": 512},
    train={"steps": 4, "batch": 2, "eval_sequences": 4, "compile": "off"},
)  # fmt: skip


class Item(NamedTuple):
    """A unit of measurement: its name, its function, and ``patience``, a factor of its time limit."""

    name: str
    measure: Callable[[], Rows]
    patience: int = 1


class Session:
    """One call of the benchmark command: it measures the items of the list and writes the machine's record.

    Args:
        output: the record's file; None means reports/bench/<machine>.json.
        miniature: rehearse a GPU's list with tiny sizes on any device.
        arguments: the command line, for the record.
    """

    def __init__(self, output: Path | None, miniature: bool, arguments: list[str]) -> None:
        self.root = Path.cwd()
        self.params = load_params()
        machine.use_compile_cache(machine.compile_cache(self.root))
        self.device = select_device("auto")
        on_gpu = self.device.type == "cuda"
        self.sizes = MINIATURE if miniature else ON_GPU if on_gpu else ON_CPU
        self.limit_s = LIMIT_S if on_gpu or miniature else CPU_LIMIT_S
        threads = min(torch.get_num_threads(), usable_cores())
        torch.set_num_threads(threads)
        device = machine.device_name(self.device)
        if not on_gpu:  # processors of one name differ in this
            device += f", {machine.choose_compute('bf16', self.device)[0]} products"
        facts = environment("altgrad.benchmark", arguments)
        facts |= {"device": device, "on_gpu": on_gpu, **_versions(self.device)}
        name = f"gpu {device}" if on_gpu else f"{device} {threads} threads"
        slug = re.sub(r"[^a-z0-9]+", "_" if on_gpu else "-", name.lower()).strip("_-")
        default = "scratch/miniature.json" if miniature else f"reports/bench/{slug}.json"
        self.record = Record(output or self.root / default, facts)
        self._baselines: dict[tuple[str, int], steps.Step] = {}

    def run(self, seconds: float, again: bool, only: str = "") -> list[str]:
        """Measure the items that the record lacks for this commit and versions; return the names still missing.

        The record has the error of an item that fails, and the next session tries the item again.

        Args:
            seconds: begin no item after this time.
            again: also measure items that the record has.
            only: measure only items with this text in their name; "" means all.
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
                    measured = item.measure()
            except (Exception, OutOfTime) as error:  # noqa: BLE001 - whatever it is, the next item may be measured
                words = (str(error).strip() or type(error).__name__).splitlines()[0]
                self.record.put_item(item.name, time.perf_counter() - started, words)
                print(f"{number} {item.name}: failed: {words}", flush=True)
                continue
            for part, rows in measured.items():
                self.record.put(part, rows)
            self.record.put_item(item.name, took := time.perf_counter() - started)
            shown = [part for part in measured if part in TABLES]
            texts = (f"\n{as_text(part, measured[part], self.record.content)}" for part in shown)
            print(f"{number} {item.name}: {took:.0f} s{''.join(texts)}", flush=True)
        return [item.name for item in items if not self.record.has(item.name)]

    def items(self) -> Iterator[Item]:
        """Yield the items in order of worth."""
        sizes = self.sizes
        yield Item("limits", lambda: {"limits": [timing.limits(self.device)]})
        rounds, made = 3 * sizes.rounds, sizes.operand_entries
        yield Item("operands", lambda: {"operands": operands.measure(sizes.operands, rounds, self.device, made)})
        if sizes is not ON_CPU:  # on a CPU, parallel processes compile no faster
            yield from (Item("graphs of steps", partial(self._compile, *size), 2) for size in sizes.steps)
        for model, batch in (*sizes.steps, *sizes.shapes):
            size = "" if len(sizes.steps) == 1 else f"{model}, batch {batch}: "
            for entry in self.entries():
                if (model, batch) in sizes.shapes and entry.name not in SHAPED:
                    continue
                yield Item(f"step: {size}{entry.name}", partial(self._step, model, batch, entry))
        yield from (Item(f"optimizer: {name}", partial(self._optimizer, name)) for name in sizes.optimizers)
        for jobs in sizes.jobs:
            yield Item(f"runs: {jobs} at a time", partial(self._at_once, jobs))
        for of_model in sizes.parts_of.items():
            yield Item(f"a run of {of_model[0]}", partial(self._parts_of_run, *of_model))

    def entries(self) -> list[steps.Contestant]:
        """Return the contestants in training steps whose products the device has; the baseline comes first."""
        return [entry for entry in self._asked_for() if entry.runs_on(self.device)]

    def without_products(self) -> dict[str, str]:
        """Return ``{contestant: scales}`` of the contestants whose products the device lacks."""
        return {entry.name: str(entry.scales) for entry in self._asked_for() if not entry.runs_on(self.device)}

    def _asked_for(self) -> list[steps.Contestant]:
        entries = steps.contestants(self.device)
        return [entry for entry in entries if self.sizes.entries is None or entry.name in self.sizes.entries]

    def _compile(self, model: str, batch: int) -> Rows:
        """Compile the steps of all contestants in parallel, except formats that share E4M3's graph; return no rows."""
        names = [entry.name for entry in self.entries() if entry.name not in SAME_GRAPH and not _lacks_torchao(entry)]
        at_a_time = min(steps.COMPILED_AT_A_TIME, usable_cores())
        failed = steps.compile_all(names, self._config(model), batch, machine.compile_cache(self.root), at_a_time)
        if failed:
            raise RuntimeError("; ".join(f"{name}: {why}" for name, why in failed.items()))
        return {}

    def _config(self, model: str) -> GPTConfig:
        preset = self.params.models[model]
        assert isinstance(preset, Model)
        return GPTConfig(vocab_size=self.sizes.vocabulary, **preset.sizes | self.sizes.changed)

    def _warm(self, model: str, batch: int, entry: steps.Contestant) -> steps.Step:
        """Return a compiled and warmed-up step; the baseline's is cached, as every other is timed beside it."""
        if entry.name != BASELINE:
            return steps.Step(self._config(model), entry, batch, self.device).warm()
        if (model, batch) not in self._baselines:
            self._baselines = {(model, batch): steps.Step(self._config(model), entry, batch, self.device).warm()}
        return self._baselines[model, batch]

    def _step(self, model: str, batch: int, entry: steps.Contestant) -> Rows:
        """Return a contestant's step time, alternating with the baseline's, and its memory."""
        if _lacks_torchao(entry):
            raise RuntimeError("torchao is not installed")
        baseline, step = (self._warm(model, batch, one) for one in (self.entries()[0], entry))
        taken = in_turn({entry.name: step, BASELINE: baseline}, self.sizes.rounds, self.device)
        of = {"model": model, "batch": batch, "name": entry.name}
        peak = steps.peak_mb(step)
        state = {"state_mb": round(steps.state_mb(step), 1), "peak_mb": None if peak is None else round(peak, 1)}
        result = steps.result(entry.name, self._config(model), batch, step.first_s, taken)
        return {"steps": [of | result], "memory": [of | state]}

    def _optimizer(self, name: str) -> Rows:
        model, settings = self.sizes.steps[-1][0], self.params.optimizers[name].model_dump()
        config, rounds = self._config(model), 3 * self.sizes.rounds
        result = steps.measure_optimizer(config, ARMS_FORMAT, name, settings, rounds, self.device)
        return {"optimizers": [{"model": model, "format": ARMS_FORMAT, **result}]}

    def _at_once(self, jobs: int) -> Rows:
        return {"at_once": [runs.at_once(self.root, "pico", jobs, self.sizes.train)]}

    def _parts_of_run(self, model: str, vocabulary: int) -> Rows:
        return {"parts_of_runs": [runs.parts_of(self.root, model, vocabulary, self.sizes.train)]}


class OutOfTime(BaseException):
    """An item took too long. Not an `Exception`, since an item may catch those of its parts and go on."""


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Raise `OutOfTime` in the block if it takes longer than ``seconds``."""

    def give_up(*_: object) -> None:
        raise OutOfTime(f"had not ended after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def left_out() -> bool:
    """Return whether torchao is not installed, without which steps of its layers are left out."""
    return _installed_version("torchao") is None


def _lacks_torchao(entry: steps.Contestant) -> bool:
    return "torchao" in entry.name and left_out()


def _installed_version(name: str) -> str | None:
    """Return the version of the distribution ``name``, such as ``"3.5.0"``; ``None`` if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _versions(device: torch.device) -> dict[str, str | None]:
    """Return the versions of driver, CUDA, Triton and torchao, such as ``{"cuda": "12.8"}``; None if absent."""
    driver = None
    if device.type == "cuda" and shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        answer = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()
        driver = answer[0] if answer else None
    packages = {name: _installed_version(name) for name in ("triton", "torchao")}
    return {"driver": driver, "cuda": torch.version.cuda, **packages}
