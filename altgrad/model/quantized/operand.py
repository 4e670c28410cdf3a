"""The operands of a quantized product, and how their scales are applied to its result.

A product of two scaled operands is divided by both scales. An intermediate result may leave float32's range where the
final result does not: after a row's scale of 1e35, before a column's scale of 1e-35. So the reciprocal of an unusual
scale is split into a ``factor`` and a ``rest``, a power of two with half its exponent. The result is multiplied by all
factors, then by the product of the rests. Splitting changes no bit, except in results that would have left the range,
and in results below 2^-126, which are rounded once more.

A reciprocal in 2^-62..2^62 is a factor itself, and its rest is 1. In eager mode on a CPU the scales are read first, so
that rests of 1 cost nothing, and two scales of tensors become one Python number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from altgrad.formats import SCALE_FORMATS
from altgrad.model.quantized.quantizer import OperandState, ScaleSpec
from altgrad.numerics import (
    amax,
    amax_from_history,
    decode_operand,
    encode_operand,
    quantize_operand,
    rotate_rows,
)
from altgrad.numerics.compile_utils import materialized
from altgrad.numerics.operand import Packed, signs_on
from altgrad.numerics.operand_definition import learn
from altgrad.numerics.rounding import power_of_two
from altgrad.numerics.scaling import floor_log2, scaling_amax

CODES = torch.uint8  # the dtype of codes; packed operands have it too, no others


class Operand(NamedTuple):
    """One factor of a product.

    Attributes:
        values: representable values of the format, or their codes; the cast tensor if it is not quantized.
        scale: the product is divided by it: 0-d, or one per row, column or native block. ``None`` if only cast.
        constants: the format, from `format_constants`; ``None`` if the tensor was only cast.
        kept: bool, where a gated gradient passes; ``None`` if it passes everywhere.
        blocks: codes of the block scales, for packed values only.
    """

    values: Tensor
    scale: Tensor | None = None
    constants: Tensor | None = None
    kept: Tensor | None = None
    blocks: Tensor | None = None

    @classmethod
    def of(
        cls, t: Tensor, scaling: ScaleSpec | None, state: OperandState, dim: int, dtype: torch.dtype, *,
        learns: str = "nothing", overwrite: bool = False, in_memory: bool = False, rotate: bool = False,
    ) -> Operand:  # fmt: skip
        """Return ``t`` (..., n, k), quantized by ``state`` for a product that sums over ``dim``; or cast.

        ``dim`` is 0 for n and 1 for k. Without ``scaling`` the tensor is cast. Only a 2-d ``t`` can be rotated or have
        tiles or codes. The other options are the ones of `quantize_operand`.
        """
        t, constants, history, stream = t.detach(), *state
        if scaling is None:
            return cls((rotate_rows(t) if rotate else t).to(dtype))
        if t.ndim > 2:
            turns = dim == 0 and not scaling.once
            rows = t.movedim(-3, 0) if scaling.heads else t.mT if turns else t
            flat = rows.flatten(1) if scaling.heads else rows.flatten(0, -2)
            one = cls.of(flat, scaling, state, 1, dtype, learns=learns, overwrite=overwrite, in_memory=in_memory)
            values, scale = one.values.reshape(rows.shape), one.scale
            if scaling.heads:
                assert scale is not None
                return one._replace(values=values.movedim(0, -3), scale=scale.unsqueeze(-1))
            if scale is not None and scale.ndim > 0:
                scale = scale.reshape(*rows.shape[:-1], 1)
            back = cls(values, scale).t() if turns else cls(values, scale)
            return one._replace(values=back.values, scale=back.scale)
        assert constants is not None
        options: dict[str, Any] = dict(scaling.scale, dim=dim, dtype=scaling.hardware or dtype)
        method, first = scaling.method, 0
        if scaling.ranks > 1:
            if rotate:
                t, rotate, overwrite = rotate_rows(t), False, True
            history, method, learns = _amax_over_ranks(t, scaling, history, dim, learns), "most-recent", "nothing"
            first = dist.get_rank() * t.numel() if stream is not None else 0
        quantized = quantize_operand(
            t, constants, history, stream, method=method, learns=learns, first=first, overwrite=overwrite,
            in_memory=in_memory, rotate=rotate, **options,
        )  # fmt: skip
        blocks = quantized.blocks if isinstance(quantized, Packed) else None
        return cls(quantized.values, quantized.scale, constants, blocks=blocks)

    def t(self) -> Operand:
        """Return the transposed operand, without ``constants`` and ``kept``."""
        scale = self.scale if self.scale is None or self.scale.ndim == 0 else self.scale.mT
        return Operand(self.values.mT, scale, blocks=None if self.blocks is None else self.blocks.t())

    def gated(self, gradient: Tensor) -> Tensor:
        """Return ``gradient``, which belongs to the operand's tensor, with zeros where ``kept`` is ``False``."""
        return gradient if self.kept is None else gradient * self.kept

    def encoded(self) -> Operand:
        """Return the operand with a code of one byte in place of each value; the operand must have one scale."""
        if self.values.dtype == CODES:
            return self
        assert self.constants is not None
        return self._replace(values=encode_operand(self.values, self.constants))

    def decoded(self, dtype: torch.dtype) -> Operand:
        """Undo `encoded`, with values in ``dtype``; return any other operand as it is."""
        if self.values.dtype != CODES or self.blocks is not None:
            return self
        assert self.constants is not None
        return self._replace(values=decode_operand(self.values, self.constants, dtype))


class Operands(NamedTuple):
    """A tensor's operands: for the forward product, and for the backward product that sums over the other dimension."""

    forward: Operand
    backward: Operand


def dequantized(operand: Operand, rotated: int | None = None) -> Tensor:
    """Return the values of ``operand`` divided by its scale, float32 (n, k).

    ``rotated``: number of rows before `rotate_rows`, to undo the rotation; ``None`` if rows were not rotated.

    Raises:
        NotImplementedError: the operand has blocks as FP8 and FP4 units take them.
    """
    scale = operand.scale
    if operand.blocks is not None or (scale is not None and scale.ndim > 0 and 1 not in scale.shape):
        raise NotImplementedError(
            "blocks as codes have no second derivative (create_graph=True); take backend: emulated"
        )
    values = operand.values.float() if scale is None else operand.values.float() / scale
    if rotated is None:
        return values
    signs = signs_on(values.device)
    turned = rotate_rows(values, torch.ones_like(signs)).unflatten(0, (-1, len(signs))) * signs.unsqueeze(-1)
    return turned.flatten(0, 1)[:rotated]


# --- scales of rows that processes share ------------------------------------------------------------------------------


@torch.library.custom_op("altgrad::max_over_ranks", mutates_args=())
def max_over_ranks(x: Tensor) -> Tensor:
    """Return the elementwise maximum of ``x`` over all processes; infinity where a process has NaN."""
    largest = x.nan_to_num(nan=torch.inf, posinf=torch.inf)  # a reduction leaves NaN undefined
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest


@max_over_ranks.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _amax_over_ranks(
    t: Tensor, scaling: ScaleSpec, history: Tensor | None, dim: int, learns: str
) -> Tensor | None:  # fmt: skip
    """Return a history of one step with the amax of all processes' rows, to scale this process's rows ``t`` (n, k).

    Return ``None`` if each scale covers one row or a block in it. ``history`` holds earlier steps and learns this step.
    """
    if scaling.options.get("statistic") == "rms":
        raise NotImplementedError("scale_to: an rms is of the rows of one process; name a target for the amax")
    granularity = scaling.options["granularity"]
    in_groups = granularity in ("block", "tile")
    two_level = in_groups and scaling.options["scale_format"] not in SCALE_FORMATS
    if (granularity == "row" and dim == 1) or (in_groups and not two_level):
        return None
    largest = max_over_ranks(amax(materialized(t), "row" if granularity == "row" else "tensor", dim=dim))
    if history is None:
        return largest.unsqueeze(0)
    remembered = amax_from_history(history, scaling.method)
    learn(history, largest, learns)
    return scaling_amax(remembered, largest).unsqueeze(0)


# --- scales applied to a product --------------------------------------------------------------------------------------


def apply_scales(y: Tensor, scales: Sequence[Tensor | None]) -> Tensor:
    """Return ``y / (s_1 s_2)``, in float32 or with each element rounded once to bfloat16; it may overwrite ``y``.

    Args:
        y: float32 or bfloat16 (..., n, m). Of bfloat16 the result is bfloat16 or float32, whichever takes less time.
        scales: of the product's two factors, positive float32: 0-d, or broadcastable to ``y``, such as (n, 1) and
            (1, m); ``None`` for 1.
    """
    # Two scales of tensors are multiplied by each other first, in float64, which holds their product.
    single = [scale for scale in scales if scale is not None and scale.ndim == 0]
    several = [scale for scale in scales if scale is not None and scale.ndim > 0]
    if not (single or several):
        return y
    if not several and all(map(_is_readable, single)):
        common = math.prod(scale.item() for scale in single)
        if 2.0**-62 <= common <= 2.0**62:
            return y.mul_(1 / common)  # of bfloat16 too torch multiplies in float32, and rounds once
    single = [scale.double() for scale in single]
    several += [single[0] if len(single) == 1 else single[0] * single[1]] if single else []
    split = [factor_and_rest(scale) for scale in several]
    return multiplied(y.float(), [factor for factor, _ in split], [rest for _, rest in split])


def factor_and_rest(scale: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return float32 f and r in the shape of ``scale`` with ``f r = 1 / scale``; r is ``None`` if known to be 1."""
    exact = scale.double().reciprocal()
    if _known_as_usual(scale):
        return exact.float(), None
    # Literals: a float of the module would be a symbol in dynamic graphs, which torch 2.13 cannot take into a Function.
    unusual = (exact < 2.0**-62) | (exact > 2.0**62)
    rest = torch.where(unusual, power_of_two(floor_log2(exact) >> 1), 1.0)
    return materialized((exact / rest).float()), materialized(rest.float())


def multiplied(y: Tensor, factors: Sequence[Tensor], rests: Sequence[Tensor | None]) -> Tensor:
    """Return ``y`` times each factor, then times the product of the rests; the result may overwrite ``y``."""
    if rest := [rest for rest in rests if rest is not None]:
        factors = [*factors, rest[0] if len(rest) == 1 else rest[0] * rest[1]]
    if not factors:
        return y
    if not torch.compiler.is_compiling():
        for factor in factors:
            y.mul_(factor)
        return y
    # The extra dimension hides the product from Inductor's mul_softmax_pattern, which turns softmax(y * factor) into a
    # scaled softmax of y. In float32 that takes 20 of the 27 ms of a head's loss on CPU, and rounds unlike eager mode.
    hidden = y.unsqueeze(0)
    for factor in factors:
        hidden = hidden * factor
    return hidden.squeeze(0)


def _is_readable(scale: Tensor) -> bool:
    """Return whether eager code reads a scale without waiting for a device."""
    return not torch.compiler.is_compiling() and scale.device.type == "cpu" and type(scale) is Tensor


def _known_as_usual(scale: Tensor) -> bool:
    """Return whether all scales are in 2^-62..2^62; ``False`` off the CPU and while compiling, without reading them."""
    if not _is_readable(scale):
        return False
    if scale.numel() == 0:
        return True
    low, high = (scale, scale) if scale.ndim == 0 else scale.aminmax()
    return low.item() >= 2.0**-62 and high.item() <= 2.0**62
