"""A run's model, rebuilt from the saved weights, and a fixed batch of its validation sample.

The rebuilt model is the loss as the straight-through estimator sees it: weights and inputs of every quantized layer
are rounded by its recipe, and rounding has the derivative 1. So the loss has the derivatives of a smooth function with
constant rounding errors, taken at the quantized weights, and the Hessian is symmetric. Two things do not belong to a
loss and are left out: the rounding of incoming gradients, and the zeros that ``gradient: clipped`` or ``relu`` puts
into gradients. Products are in float32.

NNGeometry 0.4 computes Fisher information and Kronecker factors too, but not of these layers. Its list of layer classes
has neither embeddings nor quantized layers. Its linear layers take inputs of shape (samples, features), without the
tokens of a language model. It requires torchvision. Here it would do three products of `altgrad.diagnostics.geometry`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from altgrad.common.errors import UserError
from altgrad.config import Cell
from altgrad.config.recipe import LayerRecipe
from altgrad.data.batches import task_of
from altgrad.model import GPT, embedded_weights, linear_layers
from altgrad.model.from_cell import config_of, recipe_of
from altgrad.model.layers import adapter_of, add_adapters, attach
from altgrad.model.quantized.quantizer import Quantizer
from altgrad.numerics import quantize

ROUNDED = ("weight", "input")


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
    def of(cls, cell: Cell, saved: Mapping[str, Tensor], tokens: Path, most: int) -> RebuiltModel:
        """Return the model of ``cell`` with the ``saved`` parameters and buffers, as ``model.safetensors`` names them.

        The batch has as many sequences as ``most`` tokens hold, and at least one. Raises :class:`UserError` if the
        weights do not fit the cell, or the tokens do not fit the weights.
        """
        model, inputs, targets = plain_model(cell, saved, tokens, most)
        replace_linear(model, recipe_of(cell).match(linear_layers(model)), saved)
        return cls(model, inputs, targets)

    def loss(self, sequences: slice = slice(None)) -> Tensor:
        """Return the mean loss (0-d, nats per token) of the batch's ``sequences``, by default all."""
        with second_derivatives():
            return self.model(self.inputs[sequences], self.targets[sequences])


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


def _quantizer(spec: Any, history: Tensor | None) -> Quantizer:
    quantizer = Quantizer(spec)
    if history is not None:
        quantizer.register_buffer("history", history.float())
    return quantizer


def second_derivatives() -> AbstractContextManager[None]:
    """Return a context in which attention can be differentiated twice; its fused kernels cannot."""
    return sdpa_kernel(SDPBackend.MATH)
