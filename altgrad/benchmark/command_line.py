"""The command line of ``python -m altgrad.benchmark``: what can be asked for, and mistakes in one sentence."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

from altgrad.benchmark.machines import PARTS
from altgrad.config import UserError, did_you_mean
from altgrad.config.models import Model
from altgrad.config.params import load_params

FORMATS = ("E4M3", "E3M4", "E7M0")
MODELS = ("nano", "micro", "mini")
BATCHES = (8, 16, 32, 64)
STUDY = "pico"
BATCH = 16  # of every model; the first one has the other batches too
ELEMENTS = tuple(1 << exponent for exponent in (16, 20, 22, 25))
EPILOG = (
    "A short session: --models micro --batches --formats E4M3 --rounds 10. Each part can also be "
    "measured on its own, later; what the record holds already stays."
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; `{self.prog} --help` lists what there is")


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the options, checked; raises UserError. ``presets`` and ``arms`` are those of ``params``, params.yaml."""
    parser = _Parser(
        prog="python -m altgrad.benchmark", description="Measure this machine: reports/bench/<machine>.json.",
        epilog=EPILOG,
    )  # fmt: skip
    parser.add_argument("--parts", nargs="+", default=tuple(PARTS), help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--formats", nargs="+", default=FORMATS, help="the first also has the other scalings")
    parser.add_argument("--models", nargs="+", default=MODELS, help=f"models: of params.yaml, at batch {BATCH}")
    parser.add_argument("--batches", nargs="*", type=int, default=BATCHES, help="more batches of the first model")
    parser.add_argument("--rounds", type=int, default=30, help="timed steps, and calls of each quantizer")
    parser.add_argument("--elements", nargs="+", type=int, default=ELEMENTS, help="sizes of the quantized tensors")
    parser.add_argument("--study", default=STUDY, metavar="MODEL", help="model of the throw-away study")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--output", type=Path, help="default: reports/bench/<machine>.json")
    options = parser.parse_args(arguments)
    options.params = params = load_params()
    options.presets = {name: preset for name, preset in params.models.items() if isinstance(preset, Model)}
    options.arms = params.optimizers
    _check(options)
    return options


def _check(options: argparse.Namespace) -> None:
    for part in options.parts:
        if part not in PARTS:
            raise UserError(f"--parts: there is no part {part}{did_you_mean(part, PARTS)}")
    for option, name in [*(("--models", name) for name in options.models), ("--study", options.study)]:
        if name not in options.presets:
            raise UserError(
                f"{option}: {name} is not in models: of params.yaml, which has {', '.join(options.presets)}"
            )
    if options.rounds < 2 or min(options.batches, default=1) < 1:
        raise UserError("--rounds and --batches: expected at least 2 rounds and batches of at least 1")
    if min(options.elements) < 1:
        raise UserError("--elements: expected numbers of at least 1")


def sizes(options: argparse.Namespace) -> list[tuple[str, int]]:
    """Return (model, batch) of every step to measure: each model at one batch, the first at all of them."""
    every = [(name, BATCH) for name in options.models]
    return list(dict.fromkeys(every + [(options.models[0], batch) for batch in options.batches]))
