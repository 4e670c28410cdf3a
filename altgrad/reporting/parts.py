"""A part of the study as it lies on disk: its losses, and what it trained."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from altgrad.config.files import read_yaml

MILLIONS = {"pico": 0.17, "nano": 1.3, "micro": 5.8, "mini": 12, "m50": 50, "m124": 124}  # parameters of each model


@dataclass(frozen=True)
class Part:
    """A part: ``losses`` by format, arm and seed, and its ``params.yaml``."""

    losses: pd.Series
    params: dict[str, Any]

    @property
    def model(self) -> str:
        """The model's name."""
        return self.params["model"]

    @property
    def steps(self) -> int:
        """Optimizer steps of each cell."""
        return self.params["train"]["steps"]

    @property
    def width(self) -> int:
        """The model's width."""
        return self.params["models"][self.model]["width"]

    @property
    def tokens(self) -> int:
        """What each cell trains on."""
        train = self.params["train"]
        batch = train["batch"] * train["grad_accumulation"]
        return self.steps * batch * self.params["models"][self.model]["context"]


def read_losses(folder: Path) -> pd.Series:
    """Return the final validation losses (nats per token) of a part, by format, arm and seed."""
    return pd.read_csv(folder / "results.csv").set_index(["format", "optimizer", "seed"])["val_loss"]


def read_part(folder: Path) -> Part:
    """Return the part in ``folder``."""
    return Part(read_losses(folder), read_yaml(folder / "params.yaml"))


def parts_in(study: Path, patterns: Iterable[str]) -> list[Part]:
    """Return the parts of ``study`` that are there, in the order of ``patterns`` and by name within each."""
    return [read_part(path.parent) for name in patterns for path in sorted(study.glob(f"{name}/results.csv"))]
