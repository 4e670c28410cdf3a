"""What the compiler is told of a function, without loading the compiler before it is called."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import count
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., object])

#: Whether this torch keeps the graphs of one compiled function from all others; 2.11 does not.
ISOLATES = "isolate_recompiles" in inspect.signature(torch.compile).parameters
_numbers = count()


def constant_in_graphs(function: Function) -> Function:
    """Mark ``function`` as `torch.compiler.assume_constant_result` does: a graph holds what it returned.

    That one loads the compiler, which takes as long as torch itself; most processes compile nothing.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def sent(t: Tensor, device: torch.device) -> Tensor:
    """Return ``t`` of the CPU on ``device``, without waiting for what that is at, as `torch.tensor` would."""
    return t.to(device, non_blocking=True)


def converted(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``t`` in ``dtype``, itself where it is.

    For results of a `torch.autograd.Function`: torch 2.11's graphs take the gradient of one that is another tensor's
    alias, as ``t.to(t.dtype)`` is, for zero.
    """
    return t if t.dtype == dtype else t.to(dtype)


def materialized(t: Tensor) -> Tensor:
    """Have the compiler store ``t`` instead of computing it anew in each loop that reads it.

    Left alone, Inductor repeats what makes a tensor (a GELU, a softmax) in the loop that finds its amax
    and again in the loop that quantizes it, and repeats a scale's divisions for every vector of
    elements. The result is that of ``t`` either way; without a compiler nothing happens.

    The two signs make it a tensor of the graph's own. Where ``t`` is an input of the graph, such as a weight, torch
    2.13 would else take the result for memory that nobody has, and the backward pass would write into the weight.
    """
    if not torch.compiler.is_compiling():
        return t
    from torch._inductor.inductor_prims import force_stride_order  # a second's import, and of no use in eager mode

    return force_stride_order(t.neg().neg(), t.stride())


def compile_apart(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return ``torch.compile(function)``, with graphs that no other function made of the same code is given.

    torch keeps graphs by the code that they were traced from, and limits their number for each. Where it cannot be told
    to keep them apart, ``function`` gets code of its own.
    """
    compiler: Any = torch.compile  # whose options torch types one by one
    if ISOLATES:
        return compiler(function, isolate_recompiles=True, **options)
    assert isinstance(function, FunctionType)
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_numbers)}")
    own = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    return compiler(own, **options)
