"""A resolved cell: one training run with every preset, override and recipe already applied.

A cell's file holds everything that decides its result except the tokens and the source code, and
nothing else, so DVC reruns a cell exactly when one of its own settings changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import model_validator

from altgrad.common.files import canonical_json, read_json
from altgrad.common.fingerprint import training_digest
from altgrad.config.models import CellModel, Lora
from altgrad.config.params import validated
from altgrad.config.schema import Arm, Monitor, Rule, Section, Train
from altgrad.config.switches import CellSwitch
from altgrad.config.tasks import Classifier


def cell_key(format: str, optimizer: str, seed: int, lr_scale: int | float) -> str:
    """Return the name that DVC gives to this combination: the four values joined by ``-``."""
    return f"{format}-{optimizer}-{seed}-{lr_scale}"


class Cell(Section):
    """One cell of the grid.

    ``format`` is the grid's entry: a format's name, a recipe's, or both, as in ``virtual.E3M4``. ``rules`` name the
    formats that are used and ``formats`` define each of them in full (the fields of ``altgrad.numerics.Format``).
    ``schedule`` has the recipes that take over from them; without one it is not in the file.
    ``task`` is how documents are classified, and absent from the file of a cell that models text; so is ``lora`` where
    the weights themselves are trained.
    """

    key: str
    format: str
    optimizer: str
    seed: int
    lr_scale: int | float
    model: CellModel
    rules: list[Rule]
    schedule: list[CellSwitch] = []
    formats: dict[str, dict[str, Any]]
    arm: Arm
    train: Train
    monitor: Monitor
    task: Classifier | None = None
    lora: Lora | None = None

    @model_validator(mode="after")
    def _can_change_its_recipe(self) -> Cell:
        if self.schedule and self.arm.weights == "quantized":
            raise ValueError(
                f"weights: quantized keeps the weights of {self.optimizer} in one format, and {self.format} changes it "
                "during the run; take an arm with weights: master, or a recipe without a schedule"
            )
        for switch in self.schedule:
            steps = self.train.steps
            if switch.after is not None and not 0 < round(switch.after * steps) < steps:
                raise ValueError(f"after {switch.after} leaves one of the recipes no step of {steps}; take more steps")
            if switch.when is not None and switch.when.overflow is not None and "tensors" not in self.monitor.groups:
                raise ValueError("when overflow needs tensors in monitor.groups, which see it; name it there")
        return self

    @model_validator(mode="after")
    def _can_freeze_its_weights(self) -> Cell:
        if self.lora is None:
            return self
        for wrong, why in (
            (self.model.start is None, "adapts weights that do not change; name those to begin with in start"),
            (self.arm.has_own_step, f"leaves {self.optimizer} no weight that it could act on"),
            (bool(self.schedule), f"keeps weights in one format, and {self.format} changes it during the run"),
            (self.train.devices > 1, "is for one process; set train.devices to 1"),
        ):
            if wrong:
                raise ValueError(f"lora {why}")
        for rule in self.rules:
            tensor = rule.weight
            if rule.torchao or (tensor is not None and (tensor.rounding != "nearest" or tensor.scaling != "dynamic")):
                raise ValueError("lora keeps the codes of weights, which need rounding nearest and scaling dynamic")
        return self

    @classmethod
    def read(cls, path: Path) -> Cell:
        """Read ``data/grid/<key>.json``; :class:`UserError` if it is missing or does not fit."""
        return validated(cls, read_json(path), path)

    def to_json(self) -> str:
        unset = {name for name in ("schedule", "task", "lora") if not getattr(self, name)}
        return canonical_json(self.model_dump(mode="json", exclude=unset))

    def sha256(self) -> str:
        """Return the SHA-256 of the cell's file, the identity that checkpoints and diagnoses carry."""
        return hashlib.sha256(self.to_json().encode("utf-8")).hexdigest()

    def under(self, place: int) -> Cell:
        """Return the cell with the rules that it begins with (0), or those of a place in its schedule, from 1."""
        return self.model_copy(update={"rules": self.schedule[place - 1].rules}) if place else self

    @property
    def peak_lr(self) -> float:
        return self.arm.lr * self.lr_scale


def run_names(cells: Iterable[Cell], tokens: Path) -> dict[str, str]:
    """Return a name for each cell's run, by its key, that no run with other bits has.

    But for those that sums have when another number of processes shares the batch: an interrupted run may go on with
    more of them, or fewer.
    """
    shared, names = training_digest(tokens), {}
    for cell in cells:
        own = cell.model_copy(update={"train": cell.train.but(devices=1)}).to_json()
        names[cell.key] = f"{cell.key}-{hashlib.sha256(f'{shared} {own}'.encode()).hexdigest()[:16]}"
    return names


def scratch_directory(root: Path, cell: Cell, tokens: Path) -> Path:
    """Return the folder in which ``cell`` keeps its checkpoints until it is finished.

    It is named after all that decides the run's bits, so no run resumes from the checkpoint of another configuration.
    """
    return root / "scratch" / run_names([cell], tokens)[cell.key]
