"""Data-parallel training: scales of a batch that processes share, and weights that FSDP2 gathers as codes.

**Shared batches.** Each process has some of a batch's tokens. Scales from their amax alone would differ from the scales
of a run in a single process. So amax values are reduced over the processes wherever a scale covers several tokens.

**Codes.** `fully_shard` leaves each process a part of each master weight, and gathers the whole weight before a layer
runs. A layer with one scale per weight needs only the quantized weight. So each process quantizes its part with the
scale of the whole weight, and sends codes, one byte per element. The gathered codes are the quantized weight to the
bit, except for the sign of a zero. They are not kept between the forward and the backward product: FSDP2 gathers them
again, as it gathers weights.

torchao's ``enable_fsdp_float8_all_gather`` does the same, but computes all scales by one call after each step. Here the
scale of a weight is computed whenever the weight is gathered, with a message of one number.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from altgrad.config.recipe import LayerRecipe
from altgrad.model.quantized.operand import Operand, Operands
from altgrad.model.quantized.quantizer import Quantizer
from altgrad.numerics import encode_operand, quantize_operand
from altgrad.numerics.scaling import scaling_amax

CODE_BITS = 8
aten = torch.ops.aten
#: Operations of FSDP2, module moves and checkpoints that return a `ByCodes`; all others return plain tensors.
KEEPS_CLASS = {
    aten.detach.default, aten.clone.default, aten.view.default, aten.as_strided.default, aten.slice.Tensor,
    aten.new_zeros.default, aten.empty_like.default, aten._to_copy.default, aten._pin_memory.default,
}  # fmt: skip


def is_sharded(t: Tensor) -> bool:
    """Return whether ``t`` is a DTensor, of which this process may have only a part."""
    return hasattr(t, "device_mesh")


def share_rows(model: nn.Module, ranks: int) -> None:
    """Tell the quantized layers of ``model`` that ``ranks`` processes share the rows of each batch."""
    for quantizer in _quantizers_of_rows(model):
        quantizer.scaling = replace(quantizer.scaling, ranks=ranks)


@contextmanager
def rows_not_shared(model: nn.Module) -> Iterator[None]:
    """Within the context, take the batches of this process as whole: the scales in ``model`` cover its rows alone."""
    before = [(quantizer, quantizer.scaling) for quantizer in _quantizers_of_rows(model)]
    share_rows(model, 1)
    try:
        yield
    finally:
        for quantizer, scaling in before:
            quantizer.scaling = scaling


def _quantizers_of_rows(model: nn.Module) -> list[Quantizer]:
    modules: list[Any] = [module for module in model.modules() if hasattr(module, "shared_roles")]
    return [m.quantizers[role] for m in modules for role in m.shared_roles if role in m.quantizers]


# --- weights gathered as codes ----------------------------------------------------------------------------------------


class ByCodes(torch.Tensor):
    """A master weight, or this process's part of one, that FSDP2 gathers as codes; ``master`` is the plain tensor."""

    master: Tensor

    @staticmethod
    def __new__(cls: type[ByCodes], master: Tensor) -> ByCodes:
        return _wrapper(cls, master, master.dtype)

    def __init__(self, master: Tensor) -> None:
        self.master = master

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        plain_args, plain_kwargs = tree_map_only(ByCodes, lambda t: t.master, (args, kwargs or {}))
        result = func(*plain_args, **plain_kwargs)
        if func in KEEPS_CLASS:
            return ByCodes(result)
        in_place = bool(args) and isinstance(args[0], ByCodes) and result is plain_args[0]
        return args[0] if in_place else result

    def data_ptr(self) -> int:
        """Return the address of ``master``: Accelerate uses it to match a parameter with the part that replaces it."""
        return self.master.data_ptr()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        clone: Tensor = ByCodes(copy.deepcopy(self.master, memo))
        memo[id(self)] = clone = nn.Parameter(clone, self.requires_grad) if isinstance(self, nn.Parameter) else clone
        return clone

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain tensor or parameter: a checkpoint does not say how the weight is gathered."""
        plain = nn.Parameter(self.master, self.requires_grad) if isinstance(self, nn.Parameter) else self.master
        return plain.__reduce_ex__(protocol)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ByCodes({self.master})"

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """Return the codes of this part, padded to the size of the other parts, and (scale, shape of the weight)."""
        if self.shape[1:] != outer_size[1:]:
            raise NotImplementedError(
                "weights that are gathered as codes are split over processes by dimension 0 alone; call fully_shard "
                "without shard_placement_fn, or quantize_model without gather_codes"
            )
        quantizer, largest = module.quantizer("weight"), _largest(self.master)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=mesh.get_group())
        part = self.master if mp_policy.param_dtype is None else self.master.to(mp_policy.param_dtype)
        amax = largest.to(part.dtype).float()  # also of the rounded weight, since rounding keeps order
        amax = scaling_amax(quantizer.remembered_amax(), amax)
        options = {"method": "most-recent", "dtype": torch.float32, **quantizer.scaling.options}
        operand = quantize_operand(part, quantizer.constants, amax.reshape(1), **options)
        codes = encode_operand(operand.values, quantizer.constants)
        missing = -(-outer_size[0] // mesh.size()) - len(codes)
        if missing:
            codes = torch.cat([codes, codes.new_zeros(missing, *outer_size[1:])])
        return (codes,), (operand.scale, outer_size)

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Return the whole weight from its codes ``outputs``; if ``out`` has the codes already, only set its scale."""
        scale, outer_size = metadata
        if out is not None:
            out.scale = scale
            return None
        return GatheredCodes(outputs[0][: outer_size[0]], scale, param_dtype), ()


class GatheredCodes(torch.Tensor):
    """A whole quantized weight: its ``codes`` and its one ``scale``. This process does not have the master weight."""

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
        weight = args[0]
        if func in (aten.detach.default, aten.as_strided.default):  # FSDP2 asks for the strides that the weight has
            return cls(weight.codes, weight.scale, weight.dtype)
        if func is aten.t.default:
            return cls(weight.codes.t(), weight.scale, weight.dtype)
        if func is aten.zeros_like.default:
            return torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)
        raise RuntimeError(
            f"{func} was called on a weight that is gathered as codes, which its own layer alone reads: call "
            "quantize_model without gather_codes"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"GatheredCodes({self.codes}, scale={self.scale})"


def gathered_operands(weight: GatheredCodes, quantizer: Quantizer, operand_dtype: torch.dtype) -> Operands:
    """Return the operands of a ``weight`` gathered as codes; for emulated products with ``operand_dtype`` values."""
    # The codes share FSDP2's memory: FSDP2 empties it after the forward pass and refills it for the backward pass.
    backward = Operand(weight.codes, weight.scale, quantizer.constants)
    forward = backward.decoded(operand_dtype)
    if quantizer.scaling.hardware is not None:
        forward = backward = forward._replace(values=forward.values.to(quantizer.scaling.hardware))
    return Operands(forward, backward)


def require_codes_suffice(name: str, recipe: LayerRecipe) -> None:
    """Raise ``ValueError`` if the products of layer ``name`` need more of its weight than codes and one scale."""
    weight, why = recipe.weight, None
    if recipe.torchao is not None:
        why = "torchao gathers the weights of its layers by a config of its own"
    elif weight is None:
        return
    elif weight.granularity != "tensor":
        why = f"granularity {weight.granularity} has several scales, and codes come with one; take granularity tensor"
    elif weight.scaling != "dynamic":
        why = f"scaling {weight.scaling} takes up an amax that codes do not tell; take scaling dynamic"
    elif weight.rounding == "stochastic":
        why = "codes gathered again for the backward product would be drawn anew; take rounding nearest"
    elif recipe.gradient == "clipped":
        why = "codes do not tell which weights were clipped; take gradient straight-through"
    elif weight.format.bits > CODE_BITS:
        why = f"{weight.format.name} has more than {CODE_BITS} bits"
    elif not weight.format.has_bytes:
        why = f"{weight.format.name} leaves no code for NaN"
    elif weight.of_rms:
        why = f"scale_to {weight.format.scale_to} is not the amax that processes share; take a number or max"
    if why is not None:
        raise ValueError(f"gather_codes cannot gather the weight of layer {name}: {why}, or leave gather_codes out")


def require_resharding(model: nn.Module, inputs: tuple[Any, ...] = ()) -> None:
    """Raise ``ValueError`` if FSDP2 would split codes over fewer processes after the forward pass, which it cannot."""
    for module in model.modules():
        known: Any = module
        state = known._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
        if any(group._use_post_forward_mesh for group in getattr(state, "_fsdp_param_groups", ())):
            raise ValueError(
                "weights that are gathered as codes stay whole between the passes or go back into their parts; call "
                "fully_shard with reshard_after_forward True or False, or quantize_model without gather_codes"
            )


def master_of(t: Tensor) -> Tensor:
    """Return the plain tensor of a `ByCodes`, in the same memory; return any other tensor as it is."""
    return t.master if isinstance(t, ByCodes) else t


def _largest(part: Tensor) -> Tensor:
    """Return the largest magnitude (0-d float32), 0 without elements; infinity if there is a NaN.

    The maximum over processes is undefined for NaN.
    """
    largest = part.abs().amax().float() if part.numel() else part.new_zeros((), dtype=torch.float32)
    return largest.nan_to_num(nan=torch.inf, posinf=torch.inf)


def _wrapper(cls: Any, like: Tensor, dtype: torch.dtype) -> Any:
    make = torch.Tensor._make_wrapper_subclass
    return make(
        cls, like.size(), strides=like.stride(), storage_offset=like.storage_offset(), dtype=dtype,
        layout=like.layout, device=like.device,
    )  # fmt: skip
