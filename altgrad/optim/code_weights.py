"""Weights stored as codes (``weights: quantized`` with ``store: codes``): a byte per parameter.

Reading such a weight decodes it to a temporary float32 tensor. The optimizer writes values on the quantization grid and
encodes them again, so a run has the same bits as with float32 storage. Values written by other code, such as a
checkpoint's, stay in float32 until the next step: their scale is known only after the optimizer's state is loaded.
Compiled graphs cannot read these weights; eager Python can.
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
    """The storage of a weight and its aliases: float32 ``values`` if not None, else ``codes`` on ``grid``."""

    grid: WeightGrid
    codes: Tensor
    values: Tensor | None = None

    @property
    def steps_in_codes(self) -> bool:
        """Whether the C++ loops take ``codes`` as the weight: bytes, and no float32 values beside them."""
        return self.values is None and self.grid.has_bytes

    def keep(self, values: Tensor) -> None:
        """Store ``values``, which must lie on the quantization grid, as codes."""
        self.codes.copy_(self.grid.to_stored(values))
        self.values = None

    def read(self) -> Tensor:
        """Return a copy of the weight's values, float32."""
        if self.values is not None:
            return self.values.clone()
        return self.grid.from_stored(self.codes)


class CodeWeight(torch.Tensor):
    """A tensor that looks like float32 and is stored in ``memory`` as codes."""

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
        """The bytes of the codes, plus those of the float32 values if there are any."""
        return self.memory.codes.nbytes + (0 if self.memory.values is None else self.memory.values.nbytes)

    def data_ptr(self) -> int:
        """Return the address of the codes: equal for weights that share memory."""
        return self.memory.codes.data_ptr()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return a float32 copy."""
        copy: Tensor = plain(self).detach()
        memo[id(self)] = copy = nn.Parameter(copy, self.requires_grad) if isinstance(self, nn.Parameter) else copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle this weight as a float32 tensor or parameter."""
        return self.__deepcopy__({}).__reduce_ex__(protocol)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"CodeWeight({self.memory})"


def plain(t: Tensor) -> Tensor:
    """Return a float32 copy of ``t`` if ``t`` is a `CodeWeight`, else ``t`` itself."""
    return t.memory.read() if isinstance(t, CodeWeight) else t


def store(p: nn.Parameter, grid: WeightGrid) -> None:
    """Turn ``p`` into a `CodeWeight` in place. Values that are not on ``grid`` stay float32 until the next step."""
    values = p.detach()
    memory = Memory(grid, grid.to_stored(values))
    if not torch.equal(memory.read(), values):
        memory.values = values
    torch.utils.swap_tensors(p, nn.Parameter(CodeWeight(memory), p.requires_grad))
