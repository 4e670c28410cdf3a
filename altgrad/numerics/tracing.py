"""What the compiler is told of a function, without loading the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Function = TypeVar("Function", bound=Callable[..., object])


def constant_in_graphs(function: Function) -> Function:
    """Mark ``function`` as `torch.compiler.assume_constant_result` does: a graph holds what it returned.

    That one loads the compiler, which takes as long as torch itself; most processes compile nothing.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
