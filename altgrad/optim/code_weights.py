"""Weights that are stored as codes (``weights: quantized`` with ``store: codes``): a byte per parameter.

A reader gets the values in float32, for as long as it reads. The optimizer's step writes values on the quantization
grid, which are encoded again, so a run has the bits of one whose weights are stored in float32. Values that others
write, such as a checkpoint's, stay in float32 until the next step: their scale is known only when the optimizer's state
has been loaded too. Python reads such weights; compiled graphs do not.
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
    """The memory of a weight and of what shares it: ``values`` if there are any, else ``codes`` on ``grid``."""

    grid: WeightGrid
    codes: Tensor
    values: Tensor | None = None

    @property
    def steps_in_codes(self) -> bool:
        """Whether the CPU's loops can step ``codes`` themselves."""
        return self.values is None and self.grid.has_bytes

    def keep(self, values: Tensor) -> None:
        """Encode ``values``, which lie on the quantization grid."""
        self.codes.copy_(self.grid.to_stored(values))
        self.values = None

    def read(self) -> Tensor:
        """Return the values, float32."""
        if self.values is not None:
            return self.values.clone()
        return self.grid.from_stored(self.codes)


class CodeWeight(torch.Tensor):
    """A float32 tensor that is stored in ``memory`` as codes."""

    memory: Memory

    @staticmethod
    def __new__(cls: type[CodeWeight], memory: Memory) -> CodeWeight:
        make, codes = cast("Any", torch.Tensor._make_wrapper_subclass), memory.codes
        weight: CodeWeight = make(cls, codes.size(), strides=codes.stride(), dtype=torch.float32, device=codes.device)
        return weight

    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in KEEPS_CLASS:
            return cls(args[0].memory)
        plain_args, plain_kwargs = tree_map_only(CodeWeight, plain, (args, kwargs or {}))
        result = func(*plain_args, **plain_kwargs)
        if args and isinstance(args[0], CodeWeight) and result is plain_args[0]:  # in place
            args[0].memory.values = result
            return args[0]
        return result

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """The bytes that it takes in memory."""
        return self.memory.codes.nbytes + (0 if self.memory.values is None else self.memory.values.nbytes)

    def data_ptr(self) -> int:
        """Return the address of the codes, which tells whether weights are shared."""
        return self.memory.codes.data_ptr()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return a float32 copy."""
        copy: Tensor = plain(self).detach()
        memo[id(self)] = copy = nn.Parameter(copy, self.requires_grad) if isinstance(self, nn.Parameter) else copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle it as a float32 tensor or parameter."""
        return self.__deepcopy__({}).__reduce_ex__(protocol)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"CodeWeight({self.memory})"


def plain(t: Tensor) -> Tensor:
    """Return the values of ``t``, in memory of their own, if it is stored as codes; else ``t`` itself."""
    return t.memory.read() if isinstance(t, CodeWeight) else t


def store(p: nn.Parameter, grid: WeightGrid) -> None:
    """Store ``p`` as codes on ``grid``; if its values are not on the grid yet, from the next step on."""
    values = p.detach()
    memory = Memory(grid, grid.to_stored(values))
    if not torch.equal(memory.read(), values):
        memory.values = values
    torch.utils.swap_tensors(p, nn.Parameter(CodeWeight(memory), p.requires_grad))
