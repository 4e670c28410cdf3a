"""A resolved cell: one training run with all presets, overrides and recipes applied; its file, and the name of its run.

The file of a cell holds everything that decides its result except the tokens and the source code, and nothing else. So
DVC trains a cell again exactly when one of its own settings has changed.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Self

from altgrad.common.files import canonical_json, read_json, write_json, write_text
from altgrad.common.fingerprint import training_digest
from altgrad.config.arms import OF_FLOATS, Arm
from altgrad.config.base import Settings
from altgrad.config.models import CellModel, Lora
from altgrad.config.own_formats import FormatDefinition
from altgrad.config.params import CellSwitch, validated
from altgrad.config.recipe import ROLES, Rule, TensorRecipe, last_matching
from altgrad.config.schema import MonitorSettings, Train
from altgrad.config.tasks import Classifier
from altgrad.formats import FloatFormat, Format, default_bias
from altgrad.formats.clamping import cut_off, right_token, unclamped
from altgrad.formats.format import TARGET_CAP

HEAD = "head"  # the layer that makes the logits
SMALL = 1e-6  # a probability of the right token so small that the token's gradient is as large as it gets
LEAST = 0.01  # a smaller clamped share of the gradient is not reported: an 8-bit format rounds by more


def cell_key(format: str, optimizer: str, seed: int, lr_scale: int | float, model: str | None = None) -> str:
    """Return the cell's key, which DVC makes from the same values, such as ``"E4M3-adamw-0-1"``.

    ``model`` is the cell's one of ``grid.models``, as in ``"E4M3-adamw-0-1-nano"``; ``None`` for the grid's ``model``.
    """
    return f"{format}-{optimizer}-{seed}-{lr_scale}{'' if model is None else f'-{model}'}"


class Cell(Settings):
    """One cell of the grid.

    ``format`` is the grid's entry: the name of a format or of a recipe, or both, as in ``virtual.E3M4``. ``rules`` name
    formats, and ``formats`` defines each of them. ``schedule`` has the recipes that take over during the run. ``task``
    says how documents are classified; it is ``None`` where the model learns the next token. ``lora`` is ``None`` where
    the weights themselves are trained. ``model_name`` is the cell's one of ``grid.models``; it is ``None`` for the
    grid's ``model``. The cell's file leaves out ``schedule``, ``task``, ``lora`` and ``model_name`` if empty.
    """

    key: str
    format: str
    optimizer: str
    seed: int
    lr_scale: int | float
    model: CellModel
    rules: list[Rule]
    schedule: list[CellSwitch] = []
    formats: dict[str, FormatDefinition]
    arm: Arm
    train: Train
    monitor: MonitorSettings
    task: Classifier | None = None
    lora: Lora | None = None
    model_name: str | None = None

    def mistakes(self) -> Iterator[str]:
        """Yield a sentence for each setting that contradicts a schedule of recipes or adapters (``lora``)."""
        if self.schedule and self.arm.weights == "quantized":
            yield (
                f"weights: quantized keeps the weights of {self.optimizer} in one format, and {self.format} changes it "
                "during the run; take an arm with weights: master, or a recipe without a schedule"
            )
        for switch in self.schedule:
            steps = self.train.steps
            if switch.after is not None and not 0 < round(switch.after * steps) < steps:
                yield f"after {switch.after} leaves one of the recipes no step of {steps}; take more steps"
            if switch.when is not None and switch.when.overflow is not None and "tensors" not in self.monitor.groups:
                yield "when overflow needs tensors in monitor.groups, which see it; name it there"
        for role, _, fmt in self._quantized():
            its = f"scale_to {fmt.scale_to} of {role}"
            if fmt.scale_statistic == "rms" and self.train.devices > 1:
                yield f"{its} is of the rows of one process; set train.devices to 1, or scale_to to a number or max"
            if fmt.scale_statistic == "rms" and role == "weight" and self.arm.weights == "quantized":
                yield "weights: quantized holds a scale by the amax; set scale_to of weight to a number or max"
            if not isinstance(fmt, FloatFormat) and role == "weight" and self.arm.stiffness in OF_FLOATS:
                yield f"stiffness: {self.arm.stiffness} needs mantissa bits, and {fmt.name} has none; take ulp, say"
        if self.lora is None:
            return
        if self.model.start is None:
            yield "lora adapts weights that do not change; name those to begin with in start"
        if self.arm.has_own_step:
            yield f"lora leaves {self.optimizer} no weight that it could act on"
        if self.schedule:
            yield f"lora keeps weights in one format, and {self.format} changes it during the run"
        if self.train.devices > 1:
            yield "lora is for one process; set train.devices to 1"
        for rule in self.rules:
            tensor = rule.weight
            if rule.torchao or (tensor is not None and (tensor.rounding != "nearest" or tensor.scaling != "dynamic")):
                yield "lora keeps the codes of weights, which need rounding nearest and scaling dynamic"

    def _quantized(self) -> Iterator[tuple[str, TensorRecipe, Format]]:
        """Yield (role, its recipe, its format) of each quantized tensor of all rules."""
        for rule in (*self.rules, *(rule for switch in self.schedule for rule in switch.rules)):
            for role in ROLES:
                tensor: TensorRecipe | None = getattr(rule, role)
                name: Any = None if tensor is None else tensor.format
                if tensor is not None and name in self.formats:
                    fmt = self.formats[name]
                    yield role, tensor, fmt if tensor.scale_to is None else fmt.scaled_to(tensor.scale_to)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the cell in the file ``data/grid/<key>.json``; raise :class:`UserError` for any other file or none."""
        return validated(cls, read_json(path), path)

    def to_json(self) -> str:
        unset = {name for name in ("schedule", "task", "lora", "model_name") if not getattr(self, name)}
        return canonical_json(self.model_dump(mode="json", exclude=unset))

    def sha256(self) -> str:
        """Return the SHA-256 of the cell's file as hex digits; checkpoints and diagnoses name their cell by it."""
        return hashlib.sha256(self.to_json().encode("utf-8")).hexdigest()

    def under(self, place: int) -> Self:
        """Return the cell with the rules of one recipe: 0 is the first recipe, n the n-th in ``schedule``, from 1."""
        return self.model_copy(update={"rules": self.schedule[place - 1].rules}) if place else self

    @property
    def peak_lr(self) -> float:
        return self.arm.lr * self.lr_scale


def write_grid(cells: list[Cell], selected: dict[str, Any], out: Path) -> None:
    """Write ``out/<key>.json`` for each cell, and ``out/index.json`` with their order and the ``selected`` settings."""
    for cell in cells:
        write_text(out / f"{cell.key}.json", cell.to_json())
    write_json(out / "index.json", {"cells": [cell.key for cell in cells], "params": selected})


def position_in_grid(directory: Path, key: str) -> str:
    """Return ``[3/12]`` for the third of twelve cells, or an empty text where the index does not name ``key``."""
    index = directory / "index.json"
    cells = read_json(index)["cells"] if index.exists() else []
    return f"[{cells.index(key) + 1}/{len(cells)}]" if key in cells else ""


def run_names(cells: Iterable[Cell], tokens: Path) -> dict[str, str]:
    """Return, by the cell's key, a name for each cell's run: the key and a hash of all that decides the run's bits.

    The hash ignores ``train.devices``: an interrupted run may continue with more or fewer processes, though its sums
    then have other last bits. ``tokens`` is the folder of the token files.
    """
    shared, names = training_digest(tokens), {}
    for cell in cells:
        content = cell.model_copy(update={"train": cell.train.but(devices=1)}).to_json()
        names[cell.key] = f"{cell.key}-{hashlib.sha256(f'{shared} {content}'.encode()).hexdigest()[:16]}"
    return names


def scratch_directory(root: Path, cell: Cell, tokens: Path) -> Path:
    """Return the folder in which ``cell`` keeps its checkpoints until it is finished.

    Its name depends on everything that decides the run's bits, so no run resumes from another one's checkpoint.
    """
    return root / "scratch" / run_names([cell], tokens)[cell.key]


class ClampedHead(NamedTuple):
    """How much of the head's gradient its scales clamp."""

    tokens: int  # of a step
    rule: str  # by which scales are rounded: scale_rounding
    cut: float  # the largest clamped share of the right token's gradient
    unclamped: tuple[int, int]  # first and last number of the nearest range of tokens that clamps nothing

    def __str__(self) -> str:
        first, last = self.unclamped
        return (
            f"scales of the gradient of {HEAD} are rounded down ({self.rule}), and with {self.tokens:,} tokens a step "
            f"they clamp up to {100 * self.cut:.3g} % of the right token's gradient; set scale_rounding: rceil or even "
            f"there, or take {first:,} to {last:,} tokens"
        )


def clamped_head(cell: Cell) -> ClampedHead | None:
    """Return the worst clamping of the head's gradient in any recipe of ``cell``; ``None`` up to the share `LEAST`.

    `altgrad.formats.clamping` derives the share. E8M0 scales rounded by ``floor`` clamp where the tokens of a step,
    divided by the loss's factor, are 2^n or a few per cent more. A classifier's cell gives ``None``: its loss is a mean
    over labels, and the number of labels depends on the text.
    """
    tokens = cell.train.grad_accumulation * cell.train.batch * cell.model.context
    label = cell.train.loss_scale  # the gradient's limit at the right token, times the loss's factor
    found = []
    for rules in [] if cell.task else [cell.rules, *(switch.rules for switch in cell.schedule)]:
        grad = last_matching([HEAD], [(rule.layers, 1.0, rule.grad) for rule in rules]).get(HEAD)
        if grad is not None and grad.scale == "E8M0" and grad.scale_rounding == "floor":
            fmt = grad.with_formats(cell.formats).format
            cut = float(cut_off(right_token(tokens, SMALL, label=label), fmt, grad.scale_rounding))
            found.append(ClampedHead(tokens, grad.scale_rounding, cut, unclamped(tokens, fmt, label)))
    return max((one for one in found if one.cut > LEAST), key=lambda one: one.cut, default=None)


def clamped_heads(cells: Iterable[Cell]) -> dict[ClampedHead, list[str]]:
    """Return each result of `clamped_head` for ``cells``, with the grid's entries (``cell.format``) that have it."""
    entries: dict[ClampedHead, list[str]] = {}
    for cell in cells:
        if (clamped := clamped_head(cell)) is not None and cell.format not in entries.setdefault(clamped, []):
            entries[clamped].append(cell.format)
    return entries


def idle_biases(cells: Iterable[Cell]) -> dict[str, list[str]]:
    """Return a sentence for each format whose own bias changes no bit, with the grid's entries that use the format.

    A float32 scale that follows the tensor brings the largest magnitude to the format's, so another bias changes the
    scale by a power of two and nothing else.
    """
    entries: dict[str, list[str]] = {}
    for cell in cells:
        for _, tensor, fmt in cell._quantized():
            follows = (tensor.scaling, tensor.scale, fmt.scale_to) == ("dynamic", "float32", "max")
            if not (follows and isinstance(fmt, FloatFormat)):
                continue
            usual = default_bias(fmt.exponent_bits, fmt.specials)
            if fmt.bias == usual or max(fmt.max, replace(fmt, bias=usual).max) > TARGET_CAP:
                continue
            said = (
                f"bias {fmt.bias} of {fmt.name} changes nothing under a float32 scale that follows the tensor: runs "
                f"have the bits of bias {usual}"
            )
            if cell.format not in entries.setdefault(said, []):
                entries[said].append(cell.format)
    return entries
