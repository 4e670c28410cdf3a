"""Scales: from a tensor's largest magnitude to the factor it is quantized with.

``x_q = round(x * scale)``, dequantized as ``x_q / scale``, with ``scale = target / amax`` and
``target = min(max, 2^16)``. The ratio is taken in float64 and rounded to float32 once, so that eager
and compiled code, and CPU and GPU, agree on every bit. A scale is always usable: an amax of zero, Inf
or NaN gives 1, and the range is limited to 2^-126..2^127, where neither the scale nor its reciprocal
overflows or vanishes in float32 (a subnormal amax would otherwise ask for an infinite scale).

A scale is stored in a format too: ``float32``, or ``E8M0``, the powers of two of the OCP MX formats, by which
multiplying is exact. How the ratio is rounded to a power of two is a choice with consequences, so it is stated by
name:

- ``down``: never saturates. (torchao calls this RCEIL, after the reciprocal.)
- ``up``: uses the whole range and may saturate values within a factor two of amax.
- ``even``: to the nearest, ties to the even exponent code.
- ``ocp``: ``2^(floor(log2 target) - floor(log2 amax))``, the OCP MX specification's rule; like
  ``up`` it may saturate.

Scales of blocks in any other format stand under a float32 scale of the tensor: `two_level`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from altgrad.formats import Format, get_format
from altgrad.numerics.codes import decode, encode
from altgrad.numerics.constants import FLOAT32_RULE, SCALE_FORMATS, SCALE_RULES, TARGET, TWO_LEVEL
from altgrad.numerics.rounding import power_of_two

GRANULARITIES = ("tensor", "row", "block")
SCALE_ROUNDINGS = SCALE_RULES[1:]
HISTORY_METHODS = ("max", "most-recent")

_LOWEST_EXPONENT, _HIGHEST_EXPONENT = -126, 127
LOWEST, HIGHEST = 2.0**_LOWEST_EXPONENT, 2.0**_HIGHEST_EXPONENT


def amax(x: Tensor, granularity: str = "tensor", *, block: int = 32, dim: int = -1) -> Tensor:
    """Return the largest magnitudes of a tensor.

    Args:
        x: a float tensor.
        granularity: ``tensor`` (one), ``row`` (one per row along ``dim``: per output channel of a
            weight, per token of an activation) or ``block`` (one per ``block`` neighbours along
            ``dim``, the last block may be shorter).
        block: elements per block; 32 in the OCP MX formats.
        dim: the dimension of the matrix product's sum.

    Returns:
        Shape (), or that of ``x`` with ``dim`` of length 1, or with ``dim`` of length
        ceil(n / block). float64 for float64, else float32. NaN where NaN was seen, 0 for nothing.
    """
    _require("granularity", granularity, GRANULARITIES)
    if block < 1:
        raise ValueError(f"block: expected 1 or more, got {block}")
    magnitude = x.detach().abs()
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    if magnitude.numel() == 0 and granularity == "tensor":
        return magnitude.new_zeros((), dtype=wide)
    if granularity == "tensor":
        return magnitude.amax().to(wide)
    if granularity == "row":
        return magnitude.amax(dim=dim, keepdim=True).to(wide)
    magnitude = magnitude.movedim(dim, -1)
    padding = -magnitude.shape[-1] % block
    magnitude = torch.nn.functional.pad(magnitude, (0, padding))
    return magnitude.unflatten(-1, (-1, block)).amax(dim=-1).movedim(-1, dim).to(wide)


def broadcast_scale(scale: Tensor, length: int, *, block: int = 32, dim: int = -1) -> Tensor:
    """Repeat one scale per block into one per element along ``dim``, which gets ``length`` elements."""
    # Not repeat_interleave and narrow: torch 2.13 compiles those for CPU into a loop that leaves out a shorter
    # last block.
    return scale.index_select(dim, torch.arange(length, device=scale.device) // block)


def compute_scale(
    amax: float | Tensor,
    target: str | Format | float,
    *,
    scale_format: str = "float32",
    scale_rounding: str = "down",
) -> Tensor:
    """Return the scale that brings ``amax`` to the target.

    Args:
        amax: largest magnitudes, any shape.
        target: a format or its name, for ``min(max, 2^16)``; or the target itself, positive.
        scale_format: ``float32``, or ``E8M0`` (a power of two).
        scale_rounding: to a power of two, ``down``, ``up``, ``even`` or ``ocp``; see the module's docstring.

    Returns:
        float32, the shape of ``amax``, positive and finite; 1 where ``amax`` is zero, negative, Inf
        or NaN.

    Raises:
        ValueError: an unknown choice, or a target that is not positive and finite.
    """
    if isinstance(target, (str, Format)):
        target = get_format(target).scale_target
    if not 0 < target < float("inf"):
        raise ValueError(f"target: expected a positive finite number, got {target}")
    amax = torch.as_tensor(amax).detach()
    rule = scale_rule(scale_format, scale_rounding)
    return scale_by_rule(amax, amax.new_tensor(target, dtype=torch.float64), rule)


def scale_from_amax(
    amax: Tensor, constants: Tensor, *, scale_format: str = "float32", scale_rounding: str = "down"
) -> Tensor:
    """`compute_scale` for compiled graphs, the target read from `format_constants`."""
    return scale_by_rule(amax.detach(), constants[TARGET].double(), scale_rule(scale_format, scale_rounding))


def scale_rule(scale_format: str, scale_rounding: str, granularity: str = "tensor") -> int:
    """Return the place in `SCALE_RULES` of what these ask for, or `TWO_LEVEL`, which is how operators are told.

    Raises:
        ValueError: an unknown rounding, or a format that no scale of this granularity is computed in.
    """
    _require("scale_rounding", scale_rounding, SCALE_ROUNDINGS)
    if granularity == "block" and scale_format not in SCALE_FORMATS:
        return TWO_LEVEL
    _require("scale_format", scale_format, SCALE_FORMATS)
    return FLOAT32_RULE if scale_format == "float32" else SCALE_RULES.index(scale_rounding)


def scale_by_rule(amax: Tensor, target: Tensor, rule: int) -> Tensor:
    """`compute_scale` with ``target`` as a tensor (float64) and the `scale_rule` by its number."""
    amax = amax.double()
    usable = (amax > 0) & (amax < torch.inf)
    amax = torch.where(usable, amax, target)
    if rule == FLOAT32_RULE:
        scale = (target / amax).clamp(LOWEST, HIGHEST)
    else:
        exponent = _exponent_of(amax, target, SCALE_RULES[rule])
        scale = power_of_two(exponent.clamp(_LOWEST_EXPONENT, _HIGHEST_EXPONENT))
    return torch.where(usable, scale, 1.0).float()


def _exponent_of(amax: Tensor, target: Tensor, rounding: str) -> Tensor:
    if rounding == "ocp":
        return _floor_log2(target) - _floor_log2(amax)
    ratio = target / amax
    exponent = _floor_log2(ratio)
    significand = ratio / power_of_two(exponent.clamp(-1022, 1023))
    if rounding == "up":
        return exponent + (significand > 1)
    if rounding == "even":
        # E8M0 codes exponent + 127, so the even code is the odd exponent.
        return exponent + ((significand > 1.5) | ((significand == 1.5) & (exponent % 2 == 0)))
    return exponent


def _floor_log2(x: Tensor) -> Tensor:
    """Exponent of positive normal float64 values: int64."""
    return (x.view(torch.int64) >> 52) - 1023


def update_amax_history(history: Tensor, amax: Tensor) -> Tensor:
    """Return the history with ``amax`` put first and the oldest entry dropped.

    Args:
        history: shape (length, *amax.shape), newest first; zeros mean not seen yet. Usual length: 16.
        amax: of the present step.
    """
    return torch.cat([amax.detach().to(history.dtype).unsqueeze(0), history[:-1]])


def amax_from_history(history: Tensor, method: str = "max") -> Tensor:
    """Return the amax that delayed scaling uses.

    Args:
        history: from `update_amax_history`.
        method: ``max`` over the history, Inf and NaN entries passed over, or ``most-recent``.

    Returns:
        Shape ``history.shape[1:]``. Zero (which gives scale 1) where nothing usable was seen.
    """
    _require("method", method, HISTORY_METHODS)
    if method == "most-recent":
        return history[0]
    return torch.where(history.isfinite(), history, 0.0).amax(dim=0)


def scale_from_history(
    history: Tensor,
    target: str | Format | float,
    *,
    method: str = "max",
    scale_format: str = "float32",
    scale_rounding: str = "down",
) -> Tensor:
    """`compute_scale` of `amax_from_history`: delayed scaling."""
    remembered = amax_from_history(history, method)
    return compute_scale(remembered, target, scale_format=scale_format, scale_rounding=scale_rounding)


def encode_mx_scale(scale: Tensor) -> Tensor:
    """Return the E8M0 code of the shared scale that an MX block stores, which is ``1 / scale``.

    Raises:
        ValueError: a scale that is no power of two in 2^-127..2^127.
    """
    shared = 1 / scale.double()
    codes = encode(shared, "E8M0")
    if not torch.equal(decode(codes, "E8M0", torch.float64), shared):
        raise ValueError("scale: every entry must be a power of two from 2^-127 to 2^127")
    return codes


def decode_mx_scale(codes: Tensor) -> Tensor:
    """Return the scale (float32) whose reciprocal the E8M0 codes store; NaN for 0xFF."""
    return (1 / decode(codes, "E8M0", torch.float64)).float()


def _require(argument: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{argument}: expected one of {', '.join(choices)}, got {value!r}")
