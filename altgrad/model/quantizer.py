"""Scaling state of one quantized tensor of one layer.

The arithmetic is in altgrad.numerics; this module only remembers what delayed and static scaling
must remember between steps, as buffers, so that it moves with the model and is part of its
checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from altgrad.model.recipe import TensorRecipe
from altgrad.numerics import (
    amax,
    amax_from_history,
    broadcast_scale,
    format_constants,
    scale_from_amax,
    update_amax_history,
)
from altgrad.numerics.constants import MAX


@dataclass(frozen=True)
class Scaling:
    """What a compiled graph is made for: a tensor's recipe without its format and its history."""

    granularity: str
    block: int
    dtype: str

    @classmethod
    def of(cls, recipe: TensorRecipe) -> Scaling:
        """Return the static part of ``recipe``."""
        return cls(recipe.granularity, recipe.block, recipe.scale)

    @property
    def per_tensor(self) -> bool:
        """Whether one scale serves the whole tensor, in all the products that it takes part in."""
        return self.granularity == "tensor"

    def fine_scale(self, t: Tensor, dim: int, constants: Tensor) -> Tensor:
        """Return row or block scales for a product that sums over ``dim`` of the 2-d ``t``.

        Shaped like ``t``, or with ``dim`` of length 1 for rows.
        """
        largest = amax(t, self.granularity, block=self.block, dim=dim)
        scale = materialized(scale_from_amax(largest, constants, dtype=self.dtype))
        return broadcast_scale(scale, t.shape[dim], block=self.block, dim=dim) if self.granularity == "block" else scale


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
        self.scaling = Scaling.of(recipe)
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

    def scales(self, t: Tensor) -> Tensor:
        """Return the scales (float32, broadcastable to ``t``) of the forward product's ``t`` (..., features)."""
        if self.scaling.per_tensor:
            return self.scale(amax(t))
        return self.scaling.fine_scale(t, -1, self.constants)

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
    return materialized(scale_from_amax(amax, constants, dtype=dtype))


def materialized(t: Tensor) -> Tensor:
    """Have the compiler store ``t`` instead of computing it anew in each loop that reads it.

    Left alone, Inductor repeats what makes a tensor (a GELU, a softmax) in the loop that finds its amax
    and again in the loop that quantizes it, and repeats a scale's divisions for every vector of
    elements. The result is that of ``t`` either way; without a compiler nothing happens.
    """
    if not torch.compiler.is_compiling():
        return t
    from torch._inductor.inductor_prims import force_stride_order  # a second's import, and of no use in eager mode

    return force_stride_order(t, t.stride())


def amax_of(t: Tensor) -> Tensor:
    """Return the largest magnitude of ``t`` as a float32 scalar (0-d).

    Taken in the tensor's own dtype: a cast to float32 first would make the compiler store the whole
    tensor in float32. And taken of the tensor as it is stored, which the compiler thereby rounds to that
    dtype as eager mode does.
    """
    return amax(materialized(t.detach()))
