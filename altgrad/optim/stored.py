"""Weights that lie in memory as codes: those of ``weights: quantized`` with ``store: codes``, a byte per parameter.

What reads such a weight gets its values in float32, which last as long as the reading; the optimizer's step, or a
checkpoint that is loaded, writes values on the quantization grid, which become codes again. So a run has the bits of
one whose weights lie in float32. They are read by Python, not by compiled graphs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from altgrad.optim.weight_grid import WeightGrid

aten = torch.ops.aten
KEEPS_CLASS = {aten.detach.default, aten.alias.default}


class StoredWeight(torch.Tensor):
    """A float32 tensor, of which there are the ``codes`` on ``grid``, whose scale is held."""

    codes: Tensor
    grid: WeightGrid

    @staticmethod
    def __new__(cls: type[StoredWeight], codes: Tensor, grid: WeightGrid) -> StoredWeight:
        make: Any = torch.Tensor._make_wrapper_subclass
        found: StoredWeight = make(cls, codes.size(), strides=codes.stride(), dtype=torch.float32, device=codes.device)
        return found

    def __init__(self, codes: Tensor, grid: WeightGrid) -> None:
        self.codes, self.grid = codes, grid

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in KEEPS_CLASS:
            return cls(args[0].codes, args[0].grid)
        plain_args, plain_kwargs = tree_map_only(StoredWeight, plain, (args, kwargs or {}))
        found = func(*plain_args, **plain_kwargs)
        if args and isinstance(args[0], StoredWeight) and found is plain_args[0]:  # in place
            args[0].codes.copy_(args[0].grid.encode(found))
            return args[0]
        return found

    def data_ptr(self) -> int:
        """Return where the codes lie, by which shared weights are told."""
        return self.codes.data_ptr()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return a float32 copy, which may move anywhere."""
        made: Tensor = plain(self).detach()
        memo[id(self)] = made = nn.Parameter(made, self.requires_grad) if isinstance(self, nn.Parameter) else made
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"StoredWeight({self.codes})"


def plain(t: Tensor) -> Tensor:
    """Return the values of ``t`` in a tensor of their own memory where it has codes; else ``t`` itself."""
    return t.grid.decode(t.codes, t.codes.new_ones(1, 1, dtype=torch.float32)) if isinstance(t, StoredWeight) else t


def stored_bytes(t: Tensor) -> int:
    """Return the bytes that ``t`` takes in memory."""
    return t.codes.nbytes if isinstance(t, StoredWeight) else t.nbytes


def store(p: nn.Parameter, grid: WeightGrid) -> None:
    """Have ``p``, whose values lie on ``grid``, lie in memory as codes from now on."""
    codes = grid.encode(p)
    torch.utils.swap_tensors(p, nn.Parameter(StoredWeight(codes, grid), p.requires_grad))
