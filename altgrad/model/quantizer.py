"""Scaling state of one quantized tensor of one layer.

The arithmetic is in altgrad.numerics; this module only remembers what delayed and static scaling
must remember between steps, as buffers, so that it moves with the model and is part of its
checkpoint.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from altgrad.model.recipe import TensorRecipe
from altgrad.numerics import amax_from_history, format_constants, scale_from_amax, update_amax_history
from altgrad.numerics.constants import MAX


class Quantizer(nn.Module):
    """The scale of a tensor that is quantized as ``recipe`` says.

    ``constants`` carries the format into the compiled graph as a tensor, so that one graph serves
    every format. ``history`` holds amax values (delayed: the last ones; static: the first) and is
    saved with the model; 0 stands for a step that has not happened.
    """

    constants: Tensor
    history: Tensor

    def __init__(self, recipe: TensorRecipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.register_buffer("constants", format_constants(recipe.format), persistent=False)
        if recipe.scaling != "dynamic":
            length = recipe.history if recipe.scaling == "delayed" else 1
            self.register_buffer("history", torch.zeros(length))

    def remembered_amax(self) -> Tensor | None:
        """Return the amax (0-d float32) that sets the scale, 0 before the first step; ``None`` if dynamic."""
        if self.recipe.scaling == "dynamic":
            return None
        return amax_from_history(self.history, self.recipe.reduce)

    def scale(self, amax: Tensor) -> Tensor:
        """Return the scale (0-d float32) for a tensor whose largest magnitude is ``amax`` (0-d)."""
        return scale_for(amax, self.remembered_amax(), self.constants, self.recipe.scale)

    def remember(self, amax: Tensor) -> None:
        """Record the ``amax`` (0-d) of a training step's tensor."""
        if self.recipe.scaling == "delayed":
            self.history.copy_(update_amax_history(self.history, amax))
        elif self.recipe.scaling == "static":
            self.history.copy_(torch.where(self.history == 0, amax, self.history))


def overflows(scaled: Tensor, constants: Tensor) -> Tensor:
    """Return where ``scaled`` lies beyond the format's largest value, as a boolean tensor.

    An amax times its own scale may exceed the target by a rounding of each, 2^-23 in all; that is no
    overflow, and would be one in some formats more often than in others.
    """
    return scaled.abs() > constants[MAX] * (1 + 2.0**-22)


def scale_for(amax: Tensor, remembered: Tensor | None, constants: Tensor, dtype: str) -> Tensor:
    """Return the scale from the remembered amax, or from ``amax`` where nothing is remembered yet.

    Starting delayed scaling at scale 1 instead would send every gradient of the first step to zero.
    """
    if remembered is not None:
        amax = torch.where(remembered > 0, remembered, amax)
    return scale_from_amax(amax, constants, dtype=dtype)


def amax_of(t: Tensor) -> Tensor:
    """Return the largest magnitude of ``t`` as a float32 scalar (0-d).

    Taken in the tensor's own dtype: a cast to float32 first would make the compiler store the whole
    tensor in float32. Where it keeps a bfloat16 tensor unrounded in registers, the amax can so be below
    the true one by a factor 1 - 2^-9; such an element still rounds to the format's largest value.
    """
    return t.detach().abs().amax().float()
