"""Reading a run's files, one layer at a time: a model of any size needs memory for one layer only.

`altgrad.training.records` describes ``probes.safetensors``, which has snapshots of the weights and the gradients of one
step. ``model.safetensors`` holds the final weights by parameter name. If a run diverged between two snapshots, only
``model.safetensors`` has its last weights.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from altgrad.common.errors import UserError
from altgrad.common.files import read_json
from altgrad.config import Cell
from altgrad.config.recipe import TensorRecipe
from altgrad.diagnostics.analysis import LayerView, QuantizationGrid
from altgrad.model.from_cell import recipe_of


class SavedRun(ExitStack):
    """The files of one run; use it as a context manager.

    Raises :class:`altgrad.config.UserError` when a file is missing or damaged.
    """

    def __init__(self, cell: Cell, folder: Path) -> None:
        super().__init__()
        self.folder, metrics = folder, read_json(folder / "metrics.json")
        self.last_step: int = metrics["steps"]
        self._began, self._switches = cell, metrics.get("switches", [])
        self.cell = self.cell_at(self.last_step)
        self._probes, self._model = (
            self.enter_context(_open(folder / f"{name}.safetensors")) for name in ("probes", "model")
        )
        self._steps: dict[str, dict[str, dict[int, str]]] = {}  # kind -> layer or entry -> step -> tensor name
        self._model_names = frozenset(self._model.keys())
        probes = self._probes.keys()  # the open file itself cannot be iterated
        for name in probes:
            kind, step, layer = name.split("/", 2)
            self._steps.setdefault(kind, {}).setdefault(layer, {})[int(step)] = name
        layers: dict[str, dict[str, str | None]] = json.loads(self._probes.metadata()["layers"])
        #: layer -> role -> format name or None, in the order of the model's blocks
        self.formats = dict(sorted(layers.items(), key=lambda item: _natural(item[0])))
        places = {0, *(switch["place"] for switch in self._switches)}
        self._recipes = {place: recipe_of(cell.under(place)).match(layers) for place in places}

    def views(self, layer: str) -> Iterator[LayerView]:
        """Yield a view of ``layer`` for each step at which its weight or gradients were saved, in ascending order."""
        steps = {kind: layers.get(layer, {}) for kind, layers in self._steps.items()}
        initial = previous = previous_grid = None
        for step in sorted({self.last_step, *(step for found in steps.values() for step in found)}):
            weight = self._weight(layer, step, steps.get("weight", {}))
            gradients = {
                kind: self._probes.get_tensor(steps[kind][step])
                for kind in ("grad_quantized", "grad_float")
                if step in steps.get(kind, {})
            }
            if weight is None and not gradients:
                continue
            remembered = self._probes.get_tensor(steps["amax"][step]) if step in steps.get("amax", {}) else None
            grid = None if weight is None else self._grid(layer, step, weight, remembered)
            virtual = None if weight is None else self._virtual_grid(layer, step, weight)
            yield LayerView(layer, step, weight, grid, initial, previous, previous_grid, **gradients, virtual=virtual)
            if weight is not None:
                previous, previous_grid = weight, grid
                initial = weight if step == 0 else initial

    def cell_at(self, step: int) -> Cell:
        """Return the cell with the recipe in use after ``step``; `cell` has the recipe that the run ended with."""
        return self._began.under(self._place(step))

    def _place(self, step: int) -> int:
        return max((switch["place"] for switch in self._switches if switch["step"] <= step), default=0)

    @property
    def model_steps(self) -> list[int]:
        """The steps at which the whole model was saved, ascending, including the last step."""
        saved = {step for steps in self._steps.get("state", {}).values() for step in steps}
        return sorted({*saved, self.last_step})

    def model(self, step: int | None = None) -> dict[str, Tensor]:
        """Return every parameter and buffer by name after ``step``, one of `model_steps`; ``None`` is the last step.

        A weight that a layer shares with an embedding has the layer's name in a snapshot, the embedding's at the end.
        """
        if step in (None, self.last_step):
            return {name: self._model.get_tensor(name) for name in sorted(self._model_names)}
        return {
            f"{name}{suffix}": self._probes.get_tensor(steps[step])
            for kind, suffix in (("state", ""), ("weight", ".weight"))
            for name, steps in sorted(self._steps.get(kind, {}).items())
            if step in steps
        }

    def _weight(self, layer: str, step: int, snapshots: dict[int, str]) -> Tensor | None:
        if step in snapshots:
            return self._probes.get_tensor(snapshots[step])
        final = f"{layer}.weight"  # absent for a head tied to the embedding: stored under the embedding's name
        if step == self.last_step and final in self._model_names:
            return self._model.get_tensor(final)
        return None

    def _grid(self, layer: str, step: int, weight: Tensor, remembered: Tensor | None) -> QuantizationGrid | None:
        """Return the quantization grid of ``weight`` in the forward pass of ``step``, ``None`` if it is unquantized."""
        name, spec = self.formats[layer]["weight"], self._spec(layer, step)
        if self._place(step) != self._place(self.last_step):
            name = None if spec is None or spec.virtual else spec.format.name
        if name is None:
            return None
        if spec is None or spec.format.name != name:
            raise UserError(f"{self.folder} is not a run of today's {self.cell.key}; run `dvc repro` to train it again")
        return QuantizationGrid.of(weight, spec.format, remembered, **spec.scale_options)

    def _virtual_grid(self, layer: str, step: int, weight: Tensor) -> QuantizationGrid | None:
        """Return the quantization grid of ``weight`` that only the optimizer sees, ``None`` if there is no such grid.

        The present amax of ``weight`` sets the scale. In training a weight on a finer grid may have had a scale from an
        amax of up to twice that. Snapshots do not store that amax.
        """
        spec = self._spec(layer, step)
        if spec is None or not spec.virtual:
            return None
        return QuantizationGrid.of(weight, spec.format, **spec.scale_options)

    def _spec(self, layer: str, step: int) -> TensorRecipe | None:
        found = self._recipes[self._place(step)].get(layer)
        return None if found is None else found.weight


def _open(path: Path) -> Any:
    try:
        return safe_open(path, "pt")
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; run `dvc repro` to train the cell") from None
    except SafetensorError as error:
        raise UserError(f"{path} is damaged ({error}); delete the run's folder and run `dvc repro`") from None


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key for layer names that puts ``blocks.10`` after ``blocks.9``."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
