"""Helpers for code that `torch.compile` traces. Importing them does not load the compiler."""

import inspect
from collections.abc import Callable
from itertools import count
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., object])

#: Whether this torch can keep one function's compiled graphs apart from all others; 2.11 cannot.
ISOLATES = "isolate_recompiles" in inspect.signature(torch.compile).parameters
_numbers = count()


def constant_in_graphs(function: Function) -> Function:
    """Mark ``function`` so that a compiled graph calls it once, when traced, and keeps the result as a constant.

    `torch.compiler.assume_constant_result` does the same but loads the compiler, which takes as long as loading torch.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def converted(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``t`` in ``dtype``, and ``t`` itself if it has that dtype.

    For results of a `torch.autograd.Function`: graphs of torch 2.11 return a zero gradient for a result that aliases
    another tensor, as ``t.to(t.dtype)`` does.
    """
    return t if t.dtype == dtype else t.to(dtype)


def materialized(t: Tensor) -> Tensor:
    """Return ``t``, which a compiled graph stores once instead of computing it again in each loop that reads it.

    Otherwise Inductor computes a GELU or a softmax twice: in the loop that finds the amax and in the loop that
    quantizes. It would also repeat a scale's division for every vector of elements. The values do not change. Outside a
    compiled graph the function returns ``t`` itself.

    The two negations make the result a tensor of the graph's own. If ``t`` is an input of the graph, such as a weight,
    torch 2.13 would otherwise reuse its memory, and the backward pass would write into the weight.
    """
    if not torch.compiler.is_compiling():
        return t
    from torch._inductor.inductor_prims import force_stride_order  # takes a second to import

    return force_stride_order(t.neg().neg(), t.stride())


def compile_apart(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return ``torch.compile(function, **options)`` with graphs that are not shared with other functions.

    torch keeps graphs by the code object that they were traced from, and limits their number per code object. Where
    torch cannot keep them apart itself, ``function`` gets a code object of its own.
    """
    compiler: Any = torch.compile  # whose options torch types one by one
    if ISOLATES:
        return compiler(function, isolate_recompiles=True, **options)
    assert isinstance(function, FunctionType)
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_numbers)}")
    copy = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    return compiler(copy, **options)
