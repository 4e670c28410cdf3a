"""The quantization grid of a weight: the values that its format represents at its scale.

A forward pass rounds a master weight to its grid. An arm with ``weights: quantized`` stores the weight on its grid.

In an unquantized control (``virtual.E3M4``) no product uses the format, but the optimizer sees the format's code steps,
scales and stiffness. Stored weights of a control lie on a grid 256 times finer, so that the format's rounding has no
effect. Products in bf16 round these weights to 8 significant bits, like float32 weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from operator import getitem
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from altgrad.formats import Format
from altgrad.model import QuantizedLinear, TensorRecipe, embedded_weights, linear_layers, virtual_weight
from altgrad.model.layers import quantizer_of, scales_along
from altgrad.model.quantized.quantizer import ScaleSpec
from altgrad.numerics import (
    decode,
    decode_operand,
    encode,
    encode_operand,
    grid_spacing,
    operand_scale,
    refined_constants,
    refined_format,
    round_to_grid,
)

HELD = "held_amax"  # name of a held amax as a layer's buffer and in an optimizer's state
REFINEMENT = 256  # grid steps per code step in a control: 8 more bits, so 8-bit formats take 16
# A stored weight times its scale is a value of the format up to float32 rounding, and `encode_operand` truncates. This
# factor keeps the product at or above that value; it adds less than the spacing of 8-bit formats.
ABOVE = 1 + 2.0**-12


def _nothing() -> None:
    return None


@dataclass(frozen=True, eq=False)
class WeightGrid:
    """The quantization grid of one weight: its format and the settings of its scale.

    Attributes:
        format: the weight's format; the optimizer uses its code steps and stiffness.
        options: ``granularity``, ``block``, ``scale_format`` and ``scale_rounding`` of `operand_scale`, and ``dim``
            for a weight that is stored as (in, out).
        remembered: a function that returns the amax (0-d float32) that sets the scale in the current step. If it
            returns None, or 0 before the first step, the weight's current amax sets the scale.
        held: a one-element buffer with the scale's amax, set by the optimizer if weights are stored on the grid;
            else None.
        device: the weight's device.
        refinement: grid steps per code step of the format: a power of two, above 1 only in a control.
    """

    format: Format
    options: dict[str, Any] = field(default_factory=dict)
    remembered: Callable[[], Tensor | None] = _nothing
    held: Tensor | None = None
    device: torch.device | None = None
    refinement: int = 1
    constants: Tensor = field(init=False)  # the grid's constants, from `refined_constants`

    def __post_init__(self) -> None:
        scale_format = self.options.get("scale_format", "float32")
        constants = refined_constants(self.format, self.refinement, self.device, scale_format=scale_format)
        object.__setattr__(self, "constants", constants)

    def scale(self, weight: Tensor) -> Tensor:
        """Return the scale, float32, broadcastable: the forward product rounds ``weight * scale``."""
        return operand_scale(weight, self.constants, self.remembered(), **self.options)

    def on_grid(self, weight: Tensor) -> Tensor:
        """Return ``weight`` rounded to the nearest values on the grid, float32."""
        scale = self.scale(weight)
        return round_to_grid(weight * scale, self.constants) / scale

    def spacing(self, weight: Tensor) -> Tensor:
        """Return the distance between the format's values around each weight, in the weight's unit, float32."""
        scale = self.scale(weight)
        return grid_spacing(weight * scale, self.constants) * self.refinement / scale

    def encode(self, weight: Tensor) -> Tensor:
        """Return the code of each weight, with its shape: uint8 for codes of at most 8 bits, else int16."""
        return encode(weight.detach() * self.scale(weight), refined_format(self.format, self.refinement))

    def decode(self, codes: Tensor, weight: Tensor) -> Tensor:
        """Return the weights that `encode` encoded, bit for bit. ``weight`` sets the scale if no amax is remembered."""
        return decode(codes, refined_format(self.format, self.refinement)) / self.scale(weight)

    def to_stored(self, weight: Tensor) -> Tensor:
        """Return the codes of ``weight``, which lies on the grid, with its shape. The held amax sets the scale."""
        if self.has_bytes:
            return encode_operand(weight * (self.scale(self._no_weight()) * ABOVE), self.constants)
        return self.encode(weight)

    def from_stored(self, codes: Tensor) -> Tensor:
        """Return the weight of ``codes`` from `to_stored`, float32, bit for bit."""
        if self.has_bytes:
            return decode_operand(codes, self.constants, torch.float32).div_(self.scale(self._no_weight()))
        return self.decode(codes, self._no_weight())

    @property
    def has_bytes(self) -> bool:
        """Whether `to_stored` returns uint8 codes of `encode_operand`, as the C++ loops read them."""
        return self.refinement == 1 and self.format.has_bytes

    def _no_weight(self) -> Tensor:
        return torch.ones(1, 1, dtype=torch.float32, device=self.device)


def weight_grids(model: nn.Module, *, on_grid: bool) -> dict[nn.Parameter, WeightGrid]:
    """Return the quantization grid of each quantized weight of ``model``, in layer order.

    Controls count as quantized. Weights shared with an embedding are left out.

    Args:
        model: the model, after `quantize_model`.
        on_grid: whether the optimizer stores weights on their grids. If true, each grid has a ``held`` amax, which the
            optimizer sets and the layer takes its scale from.

    Raises:
        ValueError: ``on_grid`` is true and a layer cannot store its weight on a grid.
    """
    embedded = embedded_weights(model)
    grids = {}
    for name, layer in linear_layers(model).items():
        quantizer, virtual = quantizer_of(layer, "weight"), virtual_weight(layer)
        if layer.weight in embedded:
            continue
        along = scales_along(layer)
        if virtual is not None:
            grids[layer.weight] = _virtual_grid(name, layer, virtual, along, on_grid)
        if quantizer is None:
            continue
        if on_grid and not isinstance(layer, QuantizedLinear):
            raise ValueError(
                f"layer {name} is quantized by torchao, which cannot keep weights on their quantization grid"
            )
        grids[layer.weight] = WeightGrid(
            quantizer.recipe.format, quantizer.scaling.options | along, held=quantizer.hold() if on_grid else None,
            remembered=quantizer.remembered_amax, device=layer.weight.device,
        )  # fmt: skip
    return grids


def _virtual_grid(
    name: str, layer: nn.Linear, virtual: TensorRecipe, along: dict[str, Any], on_grid: bool
) -> WeightGrid:  # fmt: skip
    fmt, device = virtual.format, layer.weight.device
    options = ScaleSpec.of(virtual, native=False).options | along
    if not on_grid:
        return WeightGrid(fmt, options, device=device)
    if virtual.granularity != "tensor":
        raise ValueError(
            "weights on the quantization grid hold one scale that their optimizer sets; use granularity: tensor"
        )
    held = torch.zeros(1, dtype=torch.float32, device=device)
    layer.register_buffer(HELD, held, persistent=False)
    try:
        first: Any = partial(getitem, held, 0)  # a partial, so that a copy or pickle takes its buffer along
        return WeightGrid(fmt, options, remembered=first, held=held, device=device, refinement=REFINEMENT)
    except ValueError as error:
        raise ValueError(
            f"layer {name}: {fmt.name} has no quantization grid {REFINEMENT} times finer, for its virtual weights "
            f"({error}); take a format of at most 8 bits, or an arm with weights: master"
        ) from None


# --- weights stored as codes ------------------------------------------------------------------------------------------
# Weights stored as codes (``weights: quantized`` with ``store: codes``): a byte per parameter.
#
# Reading such a weight decodes it to a temporary float32 tensor. The optimizer writes values on the quantization grid
# and encodes them again, so a run has the same bits as with float32 storage. Values written by other code, such as a
# checkpoint's, stay in float32 until the next step: their scale is known only after the optimizer's state is loaded.
# Compiled graphs cannot read these weights; eager Python can.

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
