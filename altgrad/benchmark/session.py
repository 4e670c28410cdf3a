"""One session of the benchmark: each part that was asked for, measured, printed and written to the record."""

from __future__ import annotations

import argparse
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from altgrad.benchmark import (
    alone,
    command_line,
    limits,
    optimizers,
    quantizers,
    steps,
    study,
    tables,
)
from altgrad.benchmark.machines import MACHINE
from altgrad.benchmark.record import Record
from altgrad.config import UserError
from altgrad.config.process import usable_cores
from altgrad.formats import get_format
from altgrad.model import GPTConfig
from altgrad.numerics.check.records import environment
from altgrad.training import machine

VOCABULARY = 4096


class Session:
    """The machine, its record, and what was asked for. Methods named after parts measure them.

    Args:
        options: from :func:`altgrad.benchmark.command_line.parse`.
        arguments: the command line, for the record.
    """

    def __init__(self, options: argparse.Namespace, arguments: list[str]) -> None:
        try:
            self.formats = [get_format(name).name for name in options.formats]
        except ValueError as error:
            raise UserError(f"--formats: {error}") from None
        self.options = options
        self.cache = machine.compile_cache(Path.cwd())
        machine.use_compile_cache(self.cache)
        self.device = machine.select_device(options.device)
        self.threads = min(torch.get_num_threads(), usable_cores())  # one for each core
        torch.set_num_threads(self.threads)
        self.names = [entry.name for entry in steps.contestants(self.formats, self.device)]
        name = machine.device_name(self.device)
        found = environment("altgrad.benchmark", arguments) | {"device": name, "on_gpu": self.device.type == "cuda"}
        slug = re.sub(r"[^a-z0-9]+", "-", f"{name} {self.threads} threads".lower()).strip("-")
        self.record = Record(
            options.output or Path("reports/bench") / f"{slug}.json",
            {key: value for key, value in found.items() if key in MACHINE},
            {key: value for key, value in found.items() if key not in MACHINE},
        )

    def run(self) -> Path:
        """Measure the parts in the order of the list of parts and return the record's path."""
        for part in command_line.PARTS:
            if part in self.options.parts:
                getattr(self, f"_{part}")()
        return self.record.path

    def _limits(self) -> None:
        self.record.put_limits(limits.measure(self.device))

    def _steps(self) -> None:
        for model, batch in command_line.sizes(self.options):
            config = self._config(model)
            entries = steps.contestants(self.formats, self.device)
            found = steps.measure(config, batch, entries, self.options.rounds, self.device)
            self._put("steps", [{"model": model, **result} for result in found])

    def _memory(self) -> None:
        for model, batch in command_line.sizes(self.options):
            found = []
            for name in tqdm(self.names, desc=f"{model}, batch {batch}: memory, a process each", leave=False):
                result = self._alone(model, batch, name, self.cache)
                found.append({"model": model, "batch": batch, "name": name, "state_mb": result["state_mb"],
                              "peak_mb": result["peak_mb"]})  # fmt: skip
            self._put("memory", found)

    def _compile(self) -> None:
        model, batch = self.options.models[0], command_line.BATCH
        found = []
        for name in tqdm(self.names, desc=f"{model}: compile time, two processes each", leave=False):
            result = alone.cold_and_warm(partial(self._first_step_s, model, batch, name))
            found.append({"model": model, "batch": batch, "name": name, **result})
        self._put("compile", found)

    def _first_step_s(self, model: str, batch: int, name: str, cache: Path) -> float:
        return self._alone(model, batch, name, cache)["first_step_s"]

    def _optimizers(self) -> None:
        model = self.options.models[-1]
        for name, arm in tqdm(self.options.arms.items(), desc=f"{model}: arms", leave=False):
            settings = arm.model_dump()
            found = optimizers.measure(
                self._config(model), self.formats[0], name, settings, self.options.rounds, self.device, self.threads
            )
            self._put("optimizers", [{"model": model, "format": self.formats[0], **found}])

    def _quantizers(self) -> None:
        for size in tqdm(self.options.elements, desc="quantizers", leave=False):
            found = quantizers.measure(self.formats[0], size, self.options.rounds, self.device)
            self._put("quantizers", found)

    def _study(self) -> None:
        name = self.options.study
        jobs = max(1, self.threads // self.options.presets[name].threads)
        self._put("study", [study.measure(Path.cwd(), name, jobs, self.cache)])

    def _put(self, part: str, results: list[dict[str, Any]]) -> None:
        self.record.put(part, results)
        tqdm.write(tables.as_text(part, results, self.record.content))
        sys.stdout.flush()  # a long session may be written to a file

    def _config(self, model: str) -> GPTConfig:
        return GPTConfig(vocab_size=VOCABULARY, **self.options.presets[model].sizes)

    def _alone(self, model: str, batch: int, name: str, cache: Path) -> dict[str, Any]:
        return alone.measure(
            self._config(model), batch, name, self.formats,
            device=self.device.type, threads=self.threads, cache=cache,
        )  # fmt: skip
