"""FSDP2 gathers a weight as codes: one byte per element, and its scale, in place of the master weight.

`fully_shard` leaves each process a part of each master weight, and gathers all of it before a layer's turn. A layer
with one scale per weight needs no more than the operand of its products. So each process puts its part on the
quantization grid, under the scale of the largest magnitude in all parts, and sends codes. What comes together is that
operand, bit for bit but for the sign of a zero. Between the forward and the backward product nothing is kept: the codes
are gathered again, as FSDP2 gathers weights.

torchao does so for its own layers (``enable_fsdp_float8_all_gather``), with a call after each step of the optimizer
that finds the scales of all weights at once. Here each weight finds its own whenever it is gathered, by a message of
one number, which nobody can forget.

FSDP2 asks a tensor's class for this: `ByCodes` is a part, and before sharding the weight; `GatheredCodes` the whole.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from altgrad.model.quantized.operand import Operand, Operands
from altgrad.numerics import encode_operand, quantize_operands
from altgrad.numerics.scaling import scaling_amax

if TYPE_CHECKING:
    from altgrad.model.quantized.linear import QuantizedLinear
    from altgrad.model.quantized.matmul import MatmulSettings

aten = torch.ops.aten
#: What FSDP2, a module's moves and checkpoints make of a part, which is a part too; all else makes plain tensors.
KEEPS_CLASS = {
    aten.detach.default, aten.clone.default, aten.view.default, aten.as_strided.default, aten.slice.Tensor,
    aten.new_zeros.default, aten.empty_like.default, aten._to_copy.default, aten._pin_memory.default,
}  # fmt: skip


class ByCodes(torch.Tensor):
    """A master weight, or a part of one, in ``master``, that FSDP2 gathers as codes."""

    master: Tensor

    @staticmethod
    def __new__(cls: type[ByCodes], master: Tensor) -> ByCodes:
        return _wrapper(cls, master, master.dtype)

    def __init__(self, master: Tensor) -> None:
        self.master = master

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        plain_args, plain_kwargs = tree_map_only(ByCodes, lambda t: t.master, (args, kwargs or {}))
        found = func(*plain_args, **plain_kwargs)
        if func in KEEPS_CLASS:
            return ByCodes(found)
        in_place = bool(args) and isinstance(args[0], ByCodes) and found is plain_args[0]
        return args[0] if in_place else found

    def data_ptr(self) -> int:
        """Return where ``master`` lies, by which Accelerate knows a parameter again whose part replaces it."""
        return self.master.data_ptr()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        made: Tensor = ByCodes(copy.deepcopy(self.master, memo))
        memo[id(self)] = made = nn.Parameter(made, self.requires_grad) if isinstance(self, nn.Parameter) else made
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Be saved as a plain tensor or parameter: a checkpoint does not say how it is gathered."""
        plain = nn.Parameter(self.master, self.requires_grad) if isinstance(self, nn.Parameter) else self.master
        return plain.__reduce_ex__(protocol)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ByCodes({self.master})"

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """Return the codes of this part, filled up to the size of the others, and the scale with the whole's shape."""
        if self.shape[1:] != outer_size[1:]:
            raise NotImplementedError(
                "weights that are gathered as codes are split over processes by dimension 0 alone; call fully_shard "
                "without shard_placement_fn, or quantize_model without gather_codes"
            )
        quantizer, largest = module.quantizer("weight"), _largest(self.master)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=mesh.get_group())
        part = self.master if mp_policy.param_dtype is None else self.master.to(mp_policy.param_dtype)
        amax = largest.to(part.dtype).float()  # as rounding keeps order, that of the rounded weight
        amax = scaling_amax(quantizer.remembered_amax(), amax)
        options = {"method": "most-recent", "dtype": torch.float32, **quantizer.scaling.options}
        (found,) = quantize_operands([part], [quantizer.constants], [amax.reshape(1)], **options)
        codes = encode_operand(found.values, quantizer.constants)
        missing = -(-outer_size[0] // mesh.size()) - len(codes)
        if missing:
            codes = torch.cat([codes, codes.new_zeros(missing, *outer_size[1:])])
        return (codes,), (found.scale, outer_size)

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Return the whole weight, or have ``out``, whose codes are ``outputs``, be it again."""
        scale, outer_size = metadata
        if out is not None:
            out.scale = scale
            return None
        return GatheredCodes(outputs[0][: outer_size[0]], scale, param_dtype), ()


class GatheredCodes(torch.Tensor):
    """A whole weight of which this process has the ``codes`` of its operand and the operand's ``scale``."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls: type[GatheredCodes], codes: Tensor, scale: Tensor, dtype: torch.dtype) -> GatheredCodes:
        return _wrapper(cls, codes, dtype)

    def __init__(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["codes", "scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], dtype: torch.dtype, size: Any, stride: Any) -> GatheredCodes:
        return GatheredCodes(inner["codes"], inner["scale"], dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        whole = args[0]
        if func in (aten.detach.default, aten.as_strided.default):  # FSDP2 gives it the strides that it has
            return cls(whole.codes, whole.scale, whole.dtype)
        if func is aten.t.default:
            return cls(whole.codes.t(), whole.scale, whole.dtype)
        if func is aten.zeros_like.default:
            return torch.zeros(whole.shape, dtype=whole.dtype, device=whole.device)
        raise RuntimeError(
            f"{func} was called on a weight that is gathered as codes, which its own layer alone reads: call "
            "quantize_model without gather_codes"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"GatheredCodes({self.codes}, scale={self.scale})"


def is_gathered(weight: Tensor) -> bool:
    """Return whether ``weight`` is here as codes alone."""
    return isinstance(weight, GatheredCodes)


def gathered_operands(layer: QuantizedLinear, weight: Tensor, settings: MatmulSettings) -> Operands:
    """Return the operands of a layer's ``weight`` that is here as codes."""
    quantizer = layer.quantizer("weight")
    assert isinstance(weight, GatheredCodes) and quantizer is not None
    # The same memory as FSDP2's, which empties it after the forward pass and fills it again for the backward pass.
    backward = Operand(weight.codes, weight.scale, quantizer.constants)
    forward = backward.decoded(settings.operand_dtype)
    if quantizer.scaling.hardware is not None:
        forward = backward = forward._replace(values=forward.values.to(quantizer.scaling.hardware))
    return Operands(forward, backward)


def require_gatherable_again(model: nn.Module, inputs: tuple[Any, ...] = ()) -> None:
    """Raise ``ValueError`` where FSDP2 would leave codes in other parts between the passes, as it cannot."""
    for module in model.modules():
        known: Any = module
        state = known._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
        if any(group._use_post_forward_mesh for group in getattr(state, "_fsdp_param_groups", ())):
            raise ValueError(
                "weights that are gathered as codes stay whole between the passes or go back into their parts; call "
                "fully_shard with reshard_after_forward True or False, or quantize_model without gather_codes"
            )


def master_of(t: Tensor) -> Tensor:
    """Return a plain tensor that shares the memory of ``t``."""
    return t.master if isinstance(t, ByCodes) else t


def _largest(part: Tensor) -> Tensor:
    """Return the largest magnitude (0-d float32); infinity for NaN, of which a reduction makes anything."""
    found = part.abs().amax().float() if part.numel() else part.new_zeros((), dtype=torch.float32)
    return found.nan_to_num(nan=torch.inf, posinf=torch.inf)


def _wrapper(cls: Any, like: Tensor, dtype: torch.dtype) -> Any:
    make = torch.Tensor._make_wrapper_subclass
    return make(
        cls, like.size(), strides=like.stride(), storage_offset=like.storage_offset(), dtype=dtype,
        layout=like.layout, device=like.device,
    )  # fmt: skip
