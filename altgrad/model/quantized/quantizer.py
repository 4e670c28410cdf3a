"""Scaling state of one quantized tensor of one layer.

The arithmetic is in altgrad.numerics; this module only remembers what delayed and static scaling
must remember between steps, as buffers, so that it moves with the model and is part of its
checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from altgrad.config.recipe import TensorRecipe
from altgrad.numerics import amax_from_history, format_constants, operand_scale
from altgrad.numerics.operand_definition import FLOAT8, PACKED

SEEDS_APART = 0x9E3779B1  # of processes: odd, so that no two of 2^32 have one seed


@dataclass(frozen=True)
class Scaling:
    """What a compiled graph is made for: a tensor's recipe without its format and its history.

    ``scale`` is the recipe's `scale_options` as pairs, by which graphs, and layers that share one, are distinguished.
    With more than one of ``ranks`` the tensor is this process's share of the rows of one, and has its scales.
    """

    scale: tuple[tuple[str, Any], ...]
    method: str  # how a history sets the scale
    hardware: torch.dtype | None  # of the operand, for FP8 and FP4 units
    stochastic: bool  # draws random numbers while training
    ranks: int = 1
    ms_eden: bool = False  # of a gradient: how both operands of both backward products are rounded while training

    @classmethod
    def of(cls, recipe: TensorRecipe, native: bool) -> Scaling:
        """Return the static part of ``recipe``."""
        hardware = (FLOAT8 | {"E2M1": PACKED})[recipe.format.name] if native else None
        options, rounding = tuple(recipe.scale_options.items()), recipe.rounding
        return cls(options, recipe.reduce, hardware, rounding != "nearest", ms_eden=rounding == "MS-EDEN")

    @property
    def per_tensor(self) -> bool:
        """Whether one scale serves the whole tensor, in all the products that it takes part in."""
        return self.options["granularity"] == "tensor"

    @property
    def once(self) -> bool:
        """Whether the tensor has the same values, in one layout, in all the products that it takes part in."""
        return self.options["granularity"] in ("tensor", "tile") and self.hardware != PACKED

    @property
    def options(self) -> dict[str, Any]:
        """The scale as `operand_scale` takes it."""
        return dict(self.scale)


class Source(NamedTuple):
    """What a tensor's operands are made with in one pass, besides its `Scaling`; nothing where it is not quantized.

    ``constants`` are its format. ``history`` holds the amax that sets the scale; the tensor's own does where that is
    ``None`` or has seen none. With a ``stream`` of random numbers it is stochastically rounded, all operands by one.
    """

    constants: Tensor | None = None
    history: Tensor | None = None
    stream: Tensor | None = None

    def kept(self) -> Source:
        """Return it as it is now, whatever the history learns later."""
        return self if self.history is None else self._replace(history=self.history.clone())


class Quantizer(nn.Module):
    """The scale of a tensor that is quantized as ``recipe`` says.

    ``constants`` carries the format into the compiled graph as a tensor, with that of its block scales, so that one
    graph serves every format. ``history`` holds amax values (delayed: the last ones; static: the first) and is
    saved with the model; 0 stands for a step that has not happened. ``stream`` is that of the random numbers of the
    last stochastic rounding: seed, tensor, and which it was. It is saved with the model too, so that a run goes on with
    the numbers that it would have had.

    They follow the model to a device and keep their dtypes and values when it is cast. What the ``meta`` device does
    not hold is made anew where the model gets its memory: constants from the format, the rest as before the first step.
    A checkpoint without a history or a stream leaves them as they are, and one that has more than there is loads too.
    """

    constants: Tensor
    history: Tensor | None
    stream: Tensor | None

    def __init__(self, recipe: TensorRecipe, native: bool = False) -> None:
        super().__init__()
        self.recipe = recipe
        self.scaling = Scaling.of(recipe, native)
        constants = format_constants(recipe.format, scale_format=recipe.scale)
        self.register_buffer("constants", constants, persistent=False)
        length = {"dynamic": None, "static": 1, "delayed": recipe.history}[recipe.scaling]
        self.register_buffer("history", None if length is None else torch.zeros(length, dtype=torch.float32))
        self.first = (0, 0)
        self.register_buffer("stream", self._new("stream") if self.scaling.stochastic else None)

    def _new(self, name: str) -> Tensor:
        """Return a buffer as it is before the first step."""
        if name == "constants":
            return format_constants(self.recipe.format, scale_format=self.recipe.scale)
        if name == "stream":
            return torch.tensor([*self.first, 0])
        return torch.zeros(1 if self.history is None else len(self.history), dtype=torch.float32)

    def count_from(self, seed: int, tensor: int) -> None:
        """Draw the random numbers of ``tensor`` under ``seed`` from now on, from the first on."""
        self.first = (seed, tensor)
        if self.stream is not None:
            self.stream.copy_(self._new("stream"))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Quantizer:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, was in before.items():
            now = self._buffers[name]
            if was is None or now is None or now is was:
                continue
            if now.is_meta:
                self._buffers[name] = now.to(was.dtype)
            else:
                self._buffers[name] = (self._new(name) if was.is_meta else was).to(now.device)
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        remembered = {prefix + "history", prefix + "stream"}
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        for keys in (missing_keys, unexpected_keys):
            keys[:] = [key for key in keys if key not in remembered]

    def hold(self) -> Tensor:
        """Stop following the tensor; return the buffer (1,) of the amax that sets the scale from now on.

        For a weight that lives on its quantization grid, which its optimizer places. Raises ``ValueError`` for a tensor
        with several scales, or one that remembers amax values of its own.
        """
        if self.recipe.granularity != "tensor" or self.recipe.scaling != "dynamic":
            raise ValueError(
                "weights on the quantization grid hold one scale that their optimizer sets; quantize them with "
                "granularity: tensor and scaling: dynamic"
            )
        # Its optimizer saves it. A model has the same keys whoever steps its weights.
        held = torch.zeros(1, dtype=torch.float32, device=self.constants.device)
        self.register_buffer("history", held, persistent=False)
        return self.get_buffer("history")

    @property
    def holds(self) -> bool:
        """Whether `hold` was called."""
        return self.recipe.scaling == "dynamic" and self.history is not None

    def follow(self, amax: Tensor) -> None:
        """Set the amax that is held."""
        assert self.history is not None
        self.history.copy_(amax.expand_as(self.history))

    def go_on_from(self, other: Quantizer) -> None:
        """Take over the amax history of ``other``, of the same tensor, if it is of one kind with this one's."""
        if self.history is None or other.history is None or self.learns != other.learns:
            return
        if self.history.shape == other.history.shape:
            self.history.copy_(other.history)

    def draw(self, rank: int = 0) -> Tensor | None:
        """Go on to the next stream and return it (3,), for one stochastic rounding; ``None`` if it is to nearest.

        Processes with another ``rank`` get another seed: where each has rows of its own, their errors are independent.
        The buffer, which DistributedDataParallel copies from the first process and checkpoints keep, is one for all.

        In this order: a compiled graph (torch 2.13) has the buffer itself, as its forward pass leaves it, stand for a
        copy that was made earlier, and would so draw other numbers in its backward pass than eager mode.
        """
        if self.stream is None:
            return None
        self.stream[2] += 1
        stream = self.stream.clone()
        if rank > 0:
            stream[0] = (stream[0] + rank * SEEDS_APART) % (1 << 32)
        return stream

    def source(self, training: bool, rank: int = 0) -> Source:
        """Return what one pass makes operands with, in the process ``rank``; stochastic only in ``training``."""
        return Source(self.constants, self.history, self.draw(rank) if training else None)

    def remembered_amax(self) -> Tensor | None:
        """Return the amax (0-d float32) that sets the scale, 0 before the first step; ``None`` if dynamic."""
        return None if self.history is None else amax_from_history(self.history, self.recipe.reduce)

    @property
    def learns(self) -> str:
        """What a training step leaves in the history, as in `quantize_operands`."""
        return {"dynamic": "nothing", "static": "first", "delayed": "each"}[self.recipe.scaling]

    @property
    def changes(self) -> bool:
        """Whether a training step leaves its mark here, and so quantizes otherwise than an evaluation."""
        return self.learns != "nothing" or self.stream is not None

    def scales(self, t: Tensor) -> Tensor:
        """Return the scales (float32, broadcastable to ``t``) of the forward product's ``t`` (tokens, features)."""
        return operand_scale(t, self.constants, self.remembered_amax(), **self.scaling.options)
