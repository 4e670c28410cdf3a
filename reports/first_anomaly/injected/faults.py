"""The faults that are injected: into the cell before it trains, or around the loop's updates while it does.

Nothing of this is an option of training: the loop is the one that trains every cell, and a fault is a patch of this
process around it, as a test has them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from altgrad.config import Cell
from altgrad.model import embedded_weights, linear_layers
from altgrad.numerics.constants import TARGET
from altgrad.training.trainer import Trainer

HEALTHY, SCALE, FORMAT, RATE, NAN, LATE = "healthy", "scale", "format", "rate", "nonfinite", "late rate"
KINDS = {
    SCALE: "one tensor's scale is 2 to 2^12 times too large or too small, from a step on",
    FORMAT: "one tensor is in E7M0, from the first step",
    RATE: "the learning rate is 4 to 128 times too high, from the first step",
    NAN: "one element of one tensor is NaN, at one step",
    LATE: "the learning rate is 4 to 128 times too high, from a step on",
}
OF_UPDATES = RATE, LATE  # of no layer
BAD_FORMAT = "E7M0"


@dataclass(frozen=True)
class Fault:
    """What is wrong in a run, from ``step`` on.

    ``layer`` and ``role`` are the tensor's; a learning rate is no single layer's, and is seen first in the role
    ``update``. ``size`` is the exponent of the factor by which a scale is wrong, or the factor of the learning rate.
    """

    kind: str
    layer: str = ""
    role: str = ""
    step: int = 1
    size: float = 0.0


def drawn(kind: str, random: np.random.Generator, tensors: list[tuple[str, str]], steps: int) -> Fault:
    """Return a fault of ``kind``: its tensor one of ``tensors`` (layer, role), its step in the middle half of a run."""
    if kind in OF_UPDATES:
        fault = Fault(kind, role="update", size=float(2 ** random.integers(2, 8)))
        return replace(fault, step=_middle(random, steps)) if kind == LATE else fault
    layer, role = tensors[random.integers(len(tensors))]
    step = _middle(random, steps)
    if kind == FORMAT:
        return Fault(kind, layer, role)
    size = float(random.integers(1, 13) * random.choice([-1, 1])) if kind == SCALE else 0.0
    return Fault(kind, layer, role, step, size)


def _middle(random: np.random.Generator, steps: int) -> int:
    return int(random.integers(steps // 4, 3 * steps // 4))


def injected_in(cell: Cell, fault: Fault, bad_format: dict[str, object]) -> Cell:
    """Return ``cell`` with a fault of its settings; any other fault leaves it. ``bad_format`` defines E7M0."""
    content = cell.model_dump(mode="json")
    if fault.kind == RATE:
        content["arm"]["lr"] *= fault.size
    elif fault.kind == FORMAT:
        rule = next(rule for rule in reversed(content["rules"]) if rule["layers"] in ("*", fault.layer))
        content["rules"].append({**rule, "layers": fault.layer, fault.role: BAD_FORMAT})
        content["formats"][BAD_FORMAT] = bad_format
    return Cell.model_validate(content)


@contextmanager
def injected(fault: Fault) -> Iterator[None]:
    """Inject a fault into the training inside: a wrong scale or rate for good, a NaN for the one step."""
    update = Trainer.update

    def disturbed(trainer: Trainer, step: int) -> None:
        with ExitStack() as stack:
            if fault.kind == SCALE and step == fault.step:
                quantizer = linear_layers(trainer.model)[fault.layer].quantizers[fault.role]
                quantizer.constants = quantizer.constants.clone()  # which layers share
                quantizer.constants[TARGET] *= 2.0**fault.size
            if fault.kind == LATE and step == fault.step:
                _raise_rate(trainer, fault.size)
            if fault.kind == NAN and step == fault.step:
                stack.enter_context(_nan_in(trainer.model, fault))
            update(trainer, step)

    with mock.patch.object(Trainer, "update", disturbed):
        yield


def _raise_rate(trainer: Trainer, factor: float) -> None:
    """Multiply the rate of linear layers' weights, which is the arm's, and leave the share of them that decays."""
    weights = {layer.weight for layer in linear_layers(trainer.model).values()} - embedded_weights(trainer.model)
    for i, group in enumerate(trainer.optimizer.param_groups):
        if weights.intersection(group["params"]):
            trainer.peaks[i] *= factor
            group["weight_decay"] /= factor


@contextmanager
def _nan_in(model: nn.Module, fault: Fault) -> Iterator[None]:
    """Make the first element of a tensor of a layer NaN in every pass inside."""
    layer = linear_layers(model)[fault.layer]
    if fault.role == "weight":
        with torch.no_grad():
            layer.weight.view(-1)[0] = torch.nan
        yield
    elif fault.role == "input":
        handle = layer.register_forward_pre_hook(_spoil_input)
        yield
        handle.remove()
    else:
        # Behind the layer, whose own hooks see the gradient as it comes in: a hook on its output would be after them.
        parent, _, name = fault.layer.rpartition(".")
        setattr(model.get_submodule(parent), name, nn.Sequential(layer, _SpoiledGradient()))
        yield
        setattr(model.get_submodule(parent), name, layer)


class _SpoiledGradient(nn.Module):
    """The identity, with a gradient whose first element is NaN."""

    def forward(self, x: Tensor) -> Tensor:
        return _Spoiling.apply(x)


class _Spoiling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return _spoiled(grad)


def _spoil_input(layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (_spoiled(inputs[0]), *inputs[1:])


def _spoiled(t: Tensor) -> Tensor:
    mask = torch.zeros_like(t, dtype=torch.bool)
    mask.view(-1)[0] = True
    return t.masked_fill(mask, torch.nan)


