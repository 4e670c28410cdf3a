"""Weights that lie in memory as codes: those of ``weights: quantized`` with ``store: codes``, a byte per parameter.

What reads such a weight gets its values in float32, which last as long as the reading; the optimizer's step writes
values on the quantization grid, which become codes again. So a run has the bits of one whose weights lie in float32.
What others write, such as a checkpoint's values, stays in float32 until the next step, since its scale is known only
when the optimizer's state has been loaded too. Such weights are read by Python, not by compiled graphs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from altgrad.optim.weight_grid import WeightGrid

aten = torch.ops.aten
KEEPS_CLASS = {aten.detach.default, aten.alias.default}


@dataclass
class Memory:
    """What a weight and all that shares its memory are: ``codes`` on ``grid``, whose scale is held, or ``values``."""

    grid: WeightGrid
    codes: Tensor
    values: Tensor | None = None

    @property
    def steps_in_codes(self) -> bool:
        """Whether a step's loops may have ``codes`` themselves."""
        return self.values is None and self.grid.has_bytes

    def keep(self, values: Tensor) -> None:
        """Have codes of ``values``, which lie on the quantization grid."""
        self.codes.copy_(self.grid.to_stored(values))
        self.values = None

    def read(self) -> Tensor:
        """Return the values, float32."""
        if self.values is not None:
            return self.values.clone()
        return self.grid.from_stored(self.codes)


class StoredWeight(torch.Tensor):
    """A float32 tensor that lies in ``memory`` as codes."""

    memory: Memory

    @staticmethod
    def __new__(cls: type[StoredWeight], memory: Memory) -> StoredWeight:
        make, codes = cast("Any", torch.Tensor._make_wrapper_subclass), memory.codes
        found: StoredWeight = make(cls, codes.size(), strides=codes.stride(), dtype=torch.float32, device=codes.device)
        return found

    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in KEEPS_CLASS:
            return cls(args[0].memory)
        plain_args, plain_kwargs = tree_map_only(StoredWeight, plain, (args, kwargs or {}))
        found = func(*plain_args, **plain_kwargs)
        if args and isinstance(args[0], StoredWeight) and found is plain_args[0]:  # in place
            args[0].memory.values = found
            return args[0]
        return found

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """The bytes that it takes in memory."""
        return self.memory.codes.nbytes + (0 if self.memory.values is None else self.memory.values.nbytes)

    def data_ptr(self) -> int:
        """Return where the codes lie, by which shared weights are told."""
        return self.memory.codes.data_ptr()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return a float32 copy, which may move anywhere."""
        made: Tensor = plain(self).detach()
        memo[id(self)] = made = nn.Parameter(made, self.requires_grad) if isinstance(self, nn.Parameter) else made
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Be pickled as a float32 tensor or parameter."""
        return self.__deepcopy__({}).__reduce_ex__(protocol)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"StoredWeight({self.memory})"


def plain(t: Tensor) -> Tensor:
    """Return the values of ``t`` in a tensor of their own memory where it has codes; else ``t`` itself."""
    return t.memory.read() if isinstance(t, StoredWeight) else t


def store(p: nn.Parameter, grid: WeightGrid) -> None:
    """Have ``p`` lie in memory as codes on ``grid``, from its next step on where its values are not there yet."""
    values = p.detach()
    memory = Memory(grid, grid.to_stored(values))
    if not torch.equal(memory.read(), values):
        memory.values = values
    torch.utils.swap_tensors(p, nn.Parameter(StoredWeight(memory), p.requires_grad))
