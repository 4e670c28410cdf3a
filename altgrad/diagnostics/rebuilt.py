"""A run's model at its end, rebuilt from the saved weights, and a fixed batch of its validation sample.

The rebuilt model is the loss as the straight-through estimator sees it: weights and inputs of every quantized layer
are rounded as its recipe says, and rounding has the derivative 1. So every derivative of the loss is that of a smooth
function whose rounding errors are constants, the Hessian is symmetric, and what is measured at the quantized weights is
measured there. The rounding of incoming gradients is no part of a loss and is left out, and so are the zeros that
``gradient: clipped`` or ``relu`` puts into gradients. Products are in float32.

NNGeometry 0.4 computes Fisher information and Kronecker factors too, but not of these layers: it knows layers by the
name of their class, a list that has neither embeddings nor quantized layers, its sums for linear layers take inputs of
shape (samples, features), where a language model's have tokens between the two, and it requires torchvision. What it
would do here are three products, those of `altgrad.diagnostics.curvature`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
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
    """``round(x) @ round(weight).T + bias`` on the parameters of ``linear``, differentiable as often as one likes.

    ``quantizers`` are those of the roles ``weight`` and ``input`` that are rounded. While it ``records``, ``seen`` gets
    the (rounded) inputs and the outputs of each call.
    """

    def __init__(self, linear: nn.Linear, quantizers: Mapping[str, Quantizer]) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.quantizers = nn.ModuleDict(dict(quantizers))
        self.records = False
        self.seen: list[tuple[Tensor, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs (..., out) for ``x`` (..., in)."""
        x, weight = self._rounded(x, "input"), self._rounded(self.weight, "weight")
        y = F.linear(x, weight, self.bias)
        if self.records:
            self.seen.append((x, y))
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

    ``layers`` are its linear layers by name, those left out whose weight is an embedding's too: most of its gradient
    comes from there, and no arm looks at its quantization grid.
    """

    def __init__(self, model: GPT, inputs: Tensor, targets: Tensor) -> None:
        """Make of ``model`` what stands for it from here on; ``inputs`` and ``targets`` are int64 (n, length)."""
        self.model, self.inputs, self.targets = model.eval(), inputs, targets
        embedded = embedded_weights(model)
        found = {name: layer for name, layer in model.named_modules() if isinstance(layer, StraightThroughLinear)}
        self.layers = {name: layer for name, layer in found.items() if layer.weight not in embedded}

    @classmethod
    def of(cls, cell: Cell, saved: Mapping[str, Tensor], tokens: Path, most: int) -> RebuiltModel:
        """Return the model of ``cell`` with the ``saved`` parameters and buffers, as ``model.safetensors`` names them.

        The batch has as many sequences as go into ``most`` tokens, and at least one. Raises :class:`UserError` where
        the weights do not fit the cell, or the tokens do not go with them.
        """
        model, inputs, targets = plain_model(cell, saved, tokens, most)
        replace_linear(model, recipe_of(cell).match(linear_layers(model)), saved)
        return cls(model, inputs, targets)

    def loss(self, sequences: slice = slice(None)) -> Tensor:
        """Return the mean loss (0-d, nats per token) of a range of the batch."""
        with second_derivatives():
            return self.model(self.inputs[sequences], self.targets[sequences])

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Let the layers remember inputs and outputs, in ``seen``."""
        for layer in self.layers.values():
            layer.records = True
        try:
            yield
        finally:
            for layer in self.layers.values():
                layer.records, layer.seen = False, []


def plain_model(cell: Cell, saved: Mapping[str, Tensor], tokens: Path, most: int) -> tuple[GPT, Tensor, Tensor]:
    """Return the model of ``cell`` with its ``saved`` parameters and nothing quantized, and a batch, as in `of`."""
    task = task_of(cell, tokens, "val")
    inputs, targets = task.sample(max(1, most // cell.model.context))
    model = GPT(config_of(cell, task.vocab_size, task.labels))
    if cell.lora is not None:
        add_adapters(model, cell.lora)
    model.requires_grad_()
    load_saved(cell, model, saved)
    return model.eval(), inputs, targets


def load_saved(cell: Cell, model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Give ``model`` what was ``saved`` of a run of ``cell``; raises :class:`UserError` where a weight is missing."""
    missing, _ = model.load_state_dict(saved, strict=False)  # buffers of quantizers are beside the parameters
    state = model.state_dict()
    loaded = {t.data_ptr() for name, t in state.items() if name in saved}  # a shared weight has one of its names
    absent = [name for name in missing if state[name].data_ptr() not in loaded]
    if absent:
        raise UserError(f"the weights saved for {cell.key} lack {min(absent)}; run `dvc repro` to train it")


def replace_linear(model: nn.Module, recipes: Mapping[str, LayerRecipe], saved: Mapping[str, Tensor]) -> None:
    """Replace every linear layer of ``model`` in place; ``saved`` has the amax histories of remembered scales."""
    for name, layer in linear_layers(model).items():
        recipe = recipes.get(name)
        specs = {} if recipe is None else {role: getattr(recipe, role) for role in ROUNDED}
        quantizers = {
            role: _quantizer(spec, saved.get(f"{name}.quantizers.{role}.history"))
            for role, spec in specs.items()
            if spec is not None and not spec.virtual
        }
        parent, _, child = name.rpartition(".")
        made = StraightThroughLinear(layer, quantizers)
        setattr(model.get_submodule(parent), child, made)
        if (adapter := adapter_of(layer)) is not None:
            attach(made, adapter)


def _quantizer(spec: Any, history: Tensor | None) -> Quantizer:
    made = Quantizer(spec)
    if history is not None:
        made.register_buffer("history", history.float())
    return made


def second_derivatives() -> AbstractContextManager[None]:
    """Return a context in which attention can be differentiated twice, as its fused kernels cannot."""
    return sdpa_kernel(SDPBackend.MATH)
