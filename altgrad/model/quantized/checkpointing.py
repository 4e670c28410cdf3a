"""Make forward passes that activation checkpointing repeats round as they did the first time.

Stochastic rounding draws random numbers, and delayed scaling takes its scale from a history that every pass extends. So
a layer notes its operand states at each pass inside a checkpoint. When `torch.utils.checkpoint` repeats the pass, the
layer looks these states up.

Autograd's sequence numbers grow with each node of a graph, and tell which pass is repeated. The backward pass repeats a
forward pass while autograd executes a node of the checkpoint:

- reentrant: the checkpoint's own node, whose number is below the numbers of the passes inside the checkpoint;
- non-reentrant: the last node of the checkpoint that saved a tensor. The checkpoint's passes began at that number or
  below, and shared one hook for saved tensors, which belongs to this checkpoint alone.

A compiled graph would read histories and streams as they are at the time of its backward pass. So the compiler leaves
a checkpoint around such layers to eager mode, and refuses it with ``fullgraph=True``.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from altgrad.model.quantized.quantizer import OperandStates

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
