"""Torch's default dtype changes no bit where inputs and parameters say their own: a law of three packages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

OTHERS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Have torch create float tensors in ``dtype`` meanwhile."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def require_same_bits(made: Callable[[], Any], dtype: torch.dtype) -> None:
    """Raise ``AssertionError`` where ``made`` gives other dtypes or bits under ``dtype`` than under float32."""
    expected = tree_leaves(made())
    with default_dtype(dtype):
        found = tree_leaves(made())
    for a, b in zip(found, expected, strict=True):
        assert type(a) is type(b)
        if isinstance(b, Tensor):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            assert torch.equal(*(t.detach().contiguous().flatten().view(torch.uint8) for t in (a, b)))
        else:
            assert a == b or (a != a and b != b)
