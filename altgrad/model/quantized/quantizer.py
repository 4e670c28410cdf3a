"""The state that one quantized tensor of one layer keeps between steps.

The arithmetic is in `altgrad.numerics`. Delayed scaling, static scaling and stochastic rounding keep their state here
in buffers, so that it moves with the model and is part of the model's checkpoint.
"""

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from altgrad.config.recipe import TensorRecipe
from altgrad.numerics import amax_from_history, format_constants, operand_scale
from altgrad.numerics.operand_definition import FLOAT8, PACKED

SEEDS_APART = 0x9E3779B1  # distance between the seeds of two processes: odd, so that no two of 2^32 agree


@dataclass(frozen=True)
class ScaleSpec:
    """The part of a tensor's recipe that is fixed in a compiled graph: everything except its format and its history.

    ``scale``: the recipe's `scale_options` as pairs, to be hashable.
    ``ranks``: number of processes that share the tensor's rows; above 1, scales cover the rows of all processes.
    """

    scale: tuple[tuple[str, Any], ...]
    method: str  # how a history sets the scale, as in `amax_from_history`
    hardware: torch.dtype | None  # of the operand for FP8 and FP4 units; ``None``: emulated
    stochastic: bool  # draws random numbers while training
    ranks: int = 1
    ms_eden: bool = False  # of a gradient: both operands of both backward products are rounded by MS-EDEN
    heads: bool = False  # a scale per head, over all else: each head is then a row

    @classmethod
    def of(cls, recipe: TensorRecipe, native: bool) -> Self:
        """Return the fixed part of ``recipe``; ``native``: FP8 and FP4 units compute the products."""
        hardware = (FLOAT8 | {"E2M1": PACKED})[recipe.format.name] if native else None
        options, rounding, heads = recipe.scale_options, recipe.rounding, recipe.granularity == "head"
        scale = tuple((options | ({"granularity": "row"} if heads else {})).items())
        return cls(scale, recipe.reduce, hardware, rounding != "nearest", ms_eden=rounding == "MS-EDEN", heads=heads)

    @property
    def per_tensor(self) -> bool:
        """Whether one scale serves the whole tensor, in all its products."""
        return self.options["granularity"] == "tensor"

    @property
    def once(self) -> bool:
        """Whether the forward and the backward product use the same quantized values in the same layout."""
        return (self.options["granularity"] in ("tensor", "tile") and self.hardware != PACKED) or self.heads

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of `operand_scale`."""
        return dict(self.scale)


class OperandState(NamedTuple):
    """The state with which one pass quantizes a tensor, besides its `ScaleSpec`; all ``None`` if not quantized.

    constants: the format, from `format_constants`.
    history: the amax values that set the scale. If ``None`` or all zero, the tensor's own amax sets it.
    stream: random numbers of stochastic rounding for all operands of the tensor; ``None`` rounds to nearest.
    """

    constants: Tensor | None = None
    history: Tensor | None = None
    stream: Tensor | None = None

    def snapshot(self) -> Self:
        """Return the state with a copy of the history, which later steps do not change."""
        return self if self.history is None else self._replace(history=self.history.clone())


class OperandStates(NamedTuple):
    """The operand states of one pass of a layer, taken before its forward pass."""

    input: OperandState
    weight: OperandState
    grad: OperandState


class Quantizer(nn.Module):
    """The state of a tensor that is quantized by ``recipe``.

    Attributes:
        constants: the format and the block scales' format, as a tensor: so one compiled graph serves every format.
        history: amax values (delayed: the last ones; static: the first), 0 for a step that has not happened. Saved.
        stream: seed, tensor number and count of the last stochastic rounding. Saved, so a resumed run draws the next.
        known: the amax that sets the scale in place of the tensor's own, for a tensor whose bound is known; else 0.

    Buffers follow the model to a device and keep their dtypes when it is cast. Leaving the ``meta`` device sets them to
    their values before the first step. A checkpoint loads with or without a history and a stream.
    """

    constants: Tensor
    history: Tensor | None
    stream: Tensor | None

    def __init__(self, recipe: TensorRecipe, native: bool = False, known: float = 0.0) -> None:
        super().__init__()
        self.recipe = recipe
        self.known = known
        self.scaling = ScaleSpec.of(recipe, native)
        self.first = (0, 0)  # seed and tensor number of the stream
        self.register_buffer("constants", self._new("constants"), persistent=False)
        length = {"dynamic": None, "static": 1, "delayed": recipe.history}[recipe.scaling]
        self.register_buffer("history", None if length is None else torch.zeros(length, dtype=torch.float32))
        self.register_buffer("stream", self._new("stream") if self.scaling.stochastic else None)
        if known:
            self.hold().fill_(known)

    def _new(self, name: str) -> Tensor:
        """Return the value of the buffer ``name`` before the first step."""
        if name == "constants":
            return format_constants(self.recipe.format, scale_format=self.recipe.scale)
        if name == "stream":
            return torch.tensor([*self.first, 0])
        return torch.full((1 if self.history is None else len(self.history),), self.known, dtype=torch.float32)

    def count_from(self, seed: int, tensor: int) -> None:
        """Draw from now on the random numbers that belong to ``seed`` and tensor number ``tensor``, from the first."""
        self.first = (seed, tensor)
        if self.stream is not None:
            self.stream.copy_(self._new("stream"))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
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

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        _, _, missing_keys, unexpected_keys, _ = arguments
        for keys in (missing_keys, unexpected_keys):
            keys[:] = [key for key in keys if key not in (prefix + "history", prefix + "stream")]

    def hold(self) -> Tensor:
        """Return a buffer (1,) whose amax sets the scale from now on, in place of the tensor's own amax.

        An optimizer that keeps a weight at representable values writes its amax there, and saves the amax. Raises
        ``ValueError`` for a tensor with several scales or with an amax history.
        """
        if self.recipe.granularity != "tensor" or self.recipe.scaling != "dynamic":
            raise ValueError(
                "weights on the quantization grid hold one scale that their optimizer sets; quantize them with "
                "granularity: tensor and scaling: dynamic"
            )
        held = torch.zeros(1, dtype=torch.float32, device=self.constants.device)
        self.register_buffer("history", held, persistent=False)  # so that the model has the same keys as without
        return self.get_buffer("history")

    @property
    def holds(self) -> bool:
        """Whether `hold` was called."""
        return self.recipe.scaling == "dynamic" and self.history is not None

    def follow(self, amax: Tensor) -> None:
        """Write ``amax`` into the buffer of `hold`."""
        assert self.history is not None
        self.history.copy_(amax.expand_as(self.history))

    def go_on_from(self, other: Self) -> None:
        """Copy the amax history of ``other`` if both have the same kind of scaling and the same history length."""
        if self.history is None or other.history is None or self.learns != other.learns:
            return
        if self.history.shape == other.history.shape:
            self.history.copy_(other.history)

    def draw(self, rank: int = 0) -> Tensor | None:
        """Return the next stream (3,) for one stochastic rounding; ``None`` if the tensor is rounded to nearest.

        Each ``rank`` has its own seed, so that the errors of processes with different rows are independent. The buffer
        is the same in all processes, since DistributedDataParallel copies it from the first process.

        The count is raised before the clone. Otherwise torch 2.13 may use the buffer for an earlier copy of it in a
        compiled graph, whose backward pass would draw other numbers than eager mode.
        """
        if self.stream is None:
            return None
        self.stream[2] += 1
        stream = self.stream.clone()
        if rank > 0:
            stream[0] = (stream[0] + rank * SEEDS_APART) % (1 << 32)
        return stream

    def state(self, training: bool, rank: int = 0) -> OperandState:
        """Return the state for one pass in the process ``rank``; it rounds stochastically only in ``training``."""
        return OperandState(self.constants, self.history, self.draw(rank) if training else None)

    def remembered_amax(self) -> Tensor | None:
        """Return the amax (0-d float32) from the history for the next pass, 0 if empty; ``None`` without a history."""
        return None if self.history is None else amax_from_history(self.history, self.recipe.reduce)

    @property
    def learns(self) -> str:
        """Which amax a training step writes into the history: ``each``, the ``first`` or ``nothing``."""
        return {"dynamic": "nothing", "static": "first", "delayed": "each"}[self.recipe.scaling]

    @property
    def changes(self) -> bool:
        """Whether a training step changes this state."""
        return self.recipe.scaling != "dynamic" or self.scaling.stochastic

    def scales(self, t: Tensor) -> Tensor:
        """Return the scales (float32, broadcastable to ``t``) of ``t`` (tokens, features) in the forward product."""
        return operand_scale(t, self.constants, self.remembered_amax(), **self.scaling.options)


# --- activation checkpointing -----------------------------------------------------------------------------------------
# Make forward passes that activation checkpointing repeats round as they did the first time.
#
# Stochastic rounding draws random numbers, and delayed scaling takes its scale from a history that every pass extends.
# So a layer notes its operand states at each pass inside a checkpoint. When `torch.utils.checkpoint` repeats the pass,
# the layer looks these states up.
#
# Autograd's sequence numbers grow with each node of a graph, and tell which pass is repeated. The backward pass repeats
# a forward pass while autograd executes a node of the checkpoint:
#
# - reentrant: the checkpoint's own node, whose number is below the numbers of the passes inside the checkpoint;
# - non-reentrant: the last node of the checkpoint that saved a tensor. The checkpoint's passes began at that number or
#   below, and shared one hook for saved tensors, which belongs to this checkpoint alone.
#
# A compiled graph would read histories and streams as they are at the time of its backward pass. So the compiler leaves
# a checkpoint around such layers to eager mode, and refuses it with ``fullgraph=True``.

Hook = Callable[[Any], Any]
MOST = 256  # the most passes noted per layer: nothing tells when a reentrant checkpoint's graph is gone


def is_traced_in_checkpoint() -> bool:
    """Return whether `torch.compile` is tracing code inside a checkpoint, or was called inside a checkpoint."""
    tracer: Any = torch._dynamo.symbolic_convert.InstructionTranslator.current_tx().output.current_tracer
    while tracer is not None:
        if "checkpoint" in str(tracer.source_target):
            return True
        tracer = tracer.parent
    return _saving_hook() is not None


# The mark that torch.compiler.assume_constant_result sets; calling it here would load the compiler.
is_traced_in_checkpoint._dynamo_marked_constant = True  # type: ignore[attr-defined]


class _Pass(NamedTuple):
    states: OperandStates
    number: int  # autograd's sequence number when the pass began
    hook: weakref.ref[Hook] | None  # for saved tensors, of a non-reentrant checkpoint; else ``None``

    @property
    def over(self) -> bool:
        """Whether the graph that could repeat the pass is gone; ``False`` if the checkpoint is reentrant."""
        return self.hook is not None and self.hook() is None


class CheckpointedPasses:
    """The operand states of one layer's passes. A copy or pickle is empty, since the graphs are not copied."""

    def __init__(self) -> None:
        self._passes: deque[_Pass] = deque(maxlen=MOST)
        self._execution: tuple[Any, ...] = ()  # identifies the checkpoint that is repeated now
        self._next = 0  # index of this layer's current pass in that checkpoint

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()

    def note(self, states: OperandStates) -> None:
        """Note the states of a pass that runs for the first time, if a checkpoint may repeat it."""
        hook = _saving_hook()
        if hook is None and torch.is_grad_enabled():
            return
        while self._passes and self._passes[0].over:
            self._passes.popleft()
        reference = None if hook is None else weakref.ref(hook)
        self._passes.append(_Pass(states, torch.autograd._get_sequence_nr(), reference))

    def again(self) -> OperandStates | None:
        """Return the noted states if the current pass is a repetition, ``None`` if it runs for the first time.

        Raises ``RuntimeError`` for a checkpoint inside another checkpoint, as torch does not tell which is repeated,
        and for a repeated pass that was not noted.
        """
        node = torch._C._current_autograd_node()
        if node is None:
            return None
        hook, number = _saving_hook(), node._sequence_nr()
        execution = torch._C._current_graph_task_id(), number, None if hook is None else id(hook)
        self._next = self._next + 1 if execution == self._execution else 0
        self._execution = execution
        passes = self._of_non_reentrant(number) or [p for p in self._passes if p.hook is None and p.number > number]
        first = passes[0].hook and passes[0].hook() if passes else None
        if hook is not None and getattr(hook, "__code__", hook) is getattr(first, "__code__", None):
            raise RuntimeError(
                "a layer with stochastic rounding or delayed scaling is in a checkpoint inside of another one, and "
                "cannot tell which of its forward passes is run again: use one checkpoint around it"
            )
        if self._next < len(passes):
            return passes[self._next].states
        if hook is not None:
            raise RuntimeError(
                "a checkpoint runs a forward pass again whose first run a layer with stochastic rounding or delayed "
                f"scaling does not know of; it knows its last {MOST}"
            )
        return None

    def _of_non_reentrant(self, number: int) -> list[_Pass]:
        """Return the passes of the last non-reentrant checkpoint that began at ``number`` or below."""
        begun = [p for p in self._passes if p.hook is not None and not p.over and p.number <= number]
        return [p for p in self._passes if p.hook == begun[-1].hook] if begun else []


def _saving_hook() -> Any:
    """Return the active hook that packs tensors saved for the backward pass, ``None`` if there is none."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks[0] if hooks else None
