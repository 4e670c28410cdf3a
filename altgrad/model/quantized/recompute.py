"""Forward passes that activation checkpointing runs again in the backward pass: they repeat what the first one drew.

Stochastic rounding draws numbers, and delayed scaling takes its scale from a history that each pass moves on. A
layer run again by `torch.utils.checkpoint` has to round as it did, or its gradients are those of another forward pass.
So each pass inside a checkpoint is noted with what it was made with, and looked up when it comes again.

Which pass comes again is told by autograd's sequence numbers, which grow by one with each node of a graph. The backward
pass recomputes while it executes a node of the checkpoint:

- reentrant: that node is the checkpoint's own, made just before its forward pass, which begins behind its number;
- non-reentrant: the last node of the checkpoint that saved a tensor. Its passes began at that number or below, under
  the same hooks for saved tensors, which no other checkpoint shares.

Inside of a compiled graph this cannot be done: its backward pass would read histories and streams as they are by then.
So a checkpoint around such layers runs in eager mode there, which ``fullgraph=True`` refuses.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

Made = TypeVar("Made")
Hook = Callable[[Any], Any]

#: Passes of one layer that may wait for their backward pass; of reentrant checkpoints nothing tells that they are over.
MOST = 256
# Parts of the names of the hooks under which torch runs a checkpoint for the first time, and again.
FIRST, AGAIN = "_checkpoint_hook", "_recomputation_hook"


def traced_in_checkpoint() -> bool:
    """Return whether the compiler traces what is inside of a checkpoint, or is itself inside of one."""
    tracer: Any = torch._dynamo.symbolic_convert.InstructionTranslator.current_tx().output.current_tracer
    while tracer is not None:
        if "checkpoint" in str(tracer.source_target):
            return True
        tracer = tracer.parent
    return _hook() is not None


# What torch.compiler.assume_constant_result says of a function, which would load the compiler.
traced_in_checkpoint._dynamo_marked_constant = True  # type: ignore[attr-defined]


def in_backward() -> bool:
    """Return whether autograd executes a graph, in which forward passes are run again."""
    return torch._C._current_graph_task_id() != -1


@dataclass
class _Pass(Generic[Made]):
    """A pass of one layer: ``number`` is autograd's when it began; ``hook`` that of its checkpoint, if that has one."""

    made: Made
    number: int
    hook: weakref.ref[Hook] | None

    @property
    def over(self) -> bool:
        """Whether the graph that could run it again is gone."""
        return self.hook is not None and self.hook() is None


class Passes(Generic[Made]):
    """What the passes of one layer were made with. Copies and pickles are empty, since no graph comes with them."""

    def __init__(self) -> None:
        self._passes: deque[_Pass[Made]] = deque(maxlen=MOST)
        self._execution: tuple[Any, ...] = ()  # of a checkpoint, which is under way
        self._next = 0  # pass in it

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()

    def note(self, made: Made) -> None:
        """Note a pass that is under way for the first time, if it may come again."""
        hook = _hook()
        if hook is None and torch.is_grad_enabled():
            return
        while self._passes and self._passes[0].over:
            self._passes.popleft()
        number = torch.autograd._get_sequence_nr()
        self._passes.append(_Pass(made, number, None if hook is None else weakref.ref(hook)))

    def again(self) -> Made | None:
        """Return what the pass that is run again was made with, or ``None`` if this one is the first.

        Raises ``RuntimeError`` for checkpoints inside of others, of which torch does not tell which is run again, and
        for one that was not noted.
        """
        node = torch._C._current_autograd_node()
        if not in_backward() or node is None:
            return None
        hook, number = _hook(), node._sequence_nr()
        if hook is not None and FIRST in hook.__qualname__:
            raise RuntimeError(
                "a layer with stochastic rounding or delayed scaling is in a checkpoint inside of another one, and "
                "cannot tell which of its forward passes is run again: use one checkpoint around it"
            )
        execution = torch._C._current_graph_task_id(), number, None if hook is None else id(hook)
        self._next = self._next + 1 if execution == self._execution else 0
        self._execution = execution
        found = self._of_checkpoint(number) or self._reentrant(number)
        if self._next < len(found):
            return found[self._next].made
        if hook is not None and AGAIN in hook.__qualname__:
            raise RuntimeError(
                "a checkpoint runs a forward pass again whose first run a layer with stochastic rounding or delayed "
                f"scaling does not know of; it knows its last {MOST}"
            )
        return None

    def _of_checkpoint(self, number: int) -> list[_Pass[Made]]:
        """Return the passes of the last non-reentrant checkpoint that had begun at ``number``."""
        begun = [p for p in self._passes if p.hook is not None and not p.over and p.number <= number]
        last = begun[-1].hook if begun else None
        return [p for p in self._passes if last is not None and p.hook == last]

    def _reentrant(self, number: int) -> list[_Pass[Made]]:
        """Return the passes since the reentrant checkpoint of ``number`` had begun, its own first."""
        return [p for p in self._passes if p.hook is None and p.number > number]


def _hook() -> Hook | None:
    """Return what packs the tensors that are saved for the backward pass now, if anything does."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks[0] if hooks else None
