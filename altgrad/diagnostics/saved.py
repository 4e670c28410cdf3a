"""A finished run: its files, and its model rebuilt from them with a fixed batch of its validation sample.

**Files** (`SavedRun`) are read one layer at a time: a model of any size needs memory for one layer only.
`altgrad.training.records` describes ``probes.safetensors``, which has snapshots of the weights and the gradients of one
step. ``model.safetensors`` holds the final weights by parameter name. If a run diverged between two snapshots, only
``model.safetensors`` has its last weights.

**The rebuilt model** (`RebuiltModel`) is the loss as the straight-through estimator sees it: weights and inputs of
every quantized layer are rounded by its recipe, and rounding has the derivative 1. So the loss has the derivatives of a
smooth function with constant rounding errors, taken at the quantized weights, and the Hessian is symmetric. Two things
do not belong to a loss and are left out: the rounding of incoming gradients, and the zeros that ``gradient: clipped``
or ``relu`` puts into gradients. Products are in float32.

NNGeometry 0.4 computes Fisher information and Kronecker factors too, but not of these layers. Its list of layer classes
has neither embeddings nor quantized layers. Its linear layers take inputs of shape (samples, features), without the
tokens of a language model. It requires torchvision. Here it would do three products of `altgrad.diagnostics.geometry`.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from altgrad.common.errors import UserError
from altgrad.common.files import read_json
from altgrad.config import Cell
from altgrad.config.recipe import LayerRecipe, TensorRecipe
from altgrad.data.batches import task_of
from altgrad.diagnostics.analysis import LayerView, QuantizationGrid
from altgrad.model import GPT, Recipe, embedded_weights, linear_layers, quantize_model
from altgrad.model.from_cell import config_of, recipe_of
from altgrad.model.layers import adapter_of, add_adapters, attach
from altgrad.model.quantized.quantizer import Quantizer
from altgrad.numerics import quantize

ROUNDED = ("weight", "input")

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


# --- the rebuilt model -----------------------------------------------------------------------------


class StraightThroughLinear(nn.Module):
    """``round(x) @ round(weight).T + bias`` on the parameters of ``linear``, differentiable any number of times.

    ``quantizers`` has a quantizer for ``weight`` and ``input``; a role without one is not rounded. ``seen`` holds the
    rounded inputs and the outputs of the last call.
    """

    def __init__(self, linear: nn.Linear, quantizers: Mapping[str, Quantizer]) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.quantizers = nn.ModuleDict(dict(quantizers))
        self.seen: tuple[Tensor, Tensor] = (self.weight, self.weight)  # before any call

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs (..., out) for ``x`` (..., in)."""
        x, weight = self._rounded(x, "input"), self._rounded(self.weight, "weight")
        y = F.linear(x, weight, self.bias)
        self.seen = x, y
        return y

    def _rounded(self, t: Tensor, role: str) -> Tensor:
        if role not in self.quantizers:
            return t
        quantizer = self.quantizers[role]
        assert isinstance(quantizer, Quantizer)
        with torch.no_grad():
            flat = t.reshape(-1, t.shape[-1])
            scale = quantizer.scales(flat)
            error = (quantize(flat * scale, quantizer.recipe.format) / scale).reshape(t.shape) - t
        return t + error


class RebuiltModel:
    """The model of a finished run and a batch of validation tokens.

    ``layers`` are its linear layers by name. A layer that shares its weight with an embedding is left out: most of the
    weight's gradient comes from the embedding, and no optimizer uses the weight's quantization grid.
    """

    def __init__(self, model: GPT, inputs: Tensor, targets: Tensor) -> None:
        """Take a ``model`` after `replace_linear`; ``inputs`` and ``targets`` are int64 (n, length)."""
        self.model, self.inputs, self.targets = model.eval(), inputs, targets
        embedded = embedded_weights(model)
        layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, StraightThroughLinear)}
        self.layers = {name: layer for name, layer in layers.items() if layer.weight not in embedded}

    @classmethod
    def of(cls, cell: Cell, saved: Mapping[str, Tensor], tokens: Path, most: int) -> Self:
        """Return the model of ``cell`` with the ``saved`` parameters and buffers, as ``model.safetensors`` names them.

        The batch has as many sequences as ``most`` tokens hold, and at least one. Raises :class:`UserError` if the
        weights do not fit the cell, or the tokens do not fit the weights.
        """
        model, inputs, targets = plain_model(cell, saved, tokens, most)
        recipe = recipe_of(cell)
        replace_linear(model, recipe.match(linear_layers(model)), saved)
        of_products = [rule.but(grad=None) for rule in recipe.rules if rule.reaches_products]
        restore_histories(quantize_model(model, Recipe(rules=of_products)), saved)
        return cls(model, inputs, targets)

    def loss(self) -> Tensor:
        """Return the mean loss (0-d, nats per token) of the batch."""
        with second_derivatives():
            return self.model(self.inputs, self.targets)


def plain_model(cell: Cell, saved: Mapping[str, Tensor], tokens: Path, most: int) -> tuple[GPT, Tensor, Tensor]:
    """Return ``(model, inputs, targets)``: the arguments are those of `RebuiltModel.of`, the model is unquantized."""
    task = task_of(cell, tokens, "val")
    inputs, targets = task.sample(max(1, most // cell.model.context))
    model = GPT(config_of(cell, task.vocab_size, task.labels))
    if cell.lora is not None:
        add_adapters(model, cell.lora)
    model.requires_grad_()
    load_saved(cell, model, saved)
    return model.eval(), inputs, targets


def load_saved(cell: Cell, model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Load the ``saved`` parameters of ``cell`` into ``model``; raises :class:`UserError` if one is missing."""
    missing, _ = model.load_state_dict(saved, strict=False)  # `saved` has buffers of quantizers too
    state = model.state_dict()
    loaded = {t.data_ptr() for name, t in state.items() if name in saved}  # a shared weight has one of its names
    absent = [name for name in missing if state[name].data_ptr() not in loaded]
    if absent:
        raise UserError(f"the weights saved for {cell.key} lack {min(absent)}; run `dvc repro` to train it")


def replace_linear(model: nn.Module, recipes: Mapping[str, LayerRecipe], saved: Mapping[str, Tensor]) -> None:
    """Replace each linear layer of ``model`` by a `StraightThroughLinear`; ``saved`` has the amax histories."""
    for name, layer in linear_layers(model).items():
        recipe = recipes.get(name)
        specs = {} if recipe is None else {role: getattr(recipe, role) for role in ROUNDED}
        quantizers = {
            role: _quantizer(spec, saved.get(f"{name}.quantizers.{role}.history"))
            for role, spec in specs.items()
            if spec is not None and not spec.virtual
        }
        parent, _, child = name.rpartition(".")
        replacement = StraightThroughLinear(layer, quantizers)
        setattr(model.get_submodule(parent), child, replacement)
        if (adapter := adapter_of(layer)) is not None:
            attach(replacement, adapter)


def restore_histories(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Give the quantizers of ``model`` the amax histories, remembered or held, in the ``saved`` buffers of a run."""
    for name, module in model.named_modules():
        if isinstance(module, Quantizer) and (history := saved.get(f"{name}.history")) is not None:
            module.register_buffer("history", history.float())


def _quantizer(spec: Any, history: Tensor | None) -> Quantizer:
    quantizer = Quantizer(spec)
    if history is not None:
        quantizer.register_buffer("history", history.float())
    return quantizer


def second_derivatives() -> AbstractContextManager[None]:
    """Return a context in which attention can be differentiated twice; its fused kernels cannot."""
    return sdpa_kernel(SDPBackend.MATH)
