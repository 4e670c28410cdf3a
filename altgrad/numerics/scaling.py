"""Scales: from a tensor's largest magnitude to the factor that it is quantized with.

``x_q = round(x * scale)``, dequantized as ``x_q / scale``, with ``scale = target / amax``. A float format's target is
``min(max, 2^16)``. The ratio is taken in float64 and rounded to float32 once, so eager and compiled code, CPU
and GPU, agree on every bit. An amax of zero gives 1. Scales are limited to 2^-126..2^127, where neither the scale nor
its reciprocal overflows or vanishes in float32; a subnormal amax would otherwise ask for an infinite scale.

**An amax of Inf or NaN gives NaN.** Every value under that scale becomes NaN, and so does every product with it: an
overflow reaches the loss and the gradients, where GradScaler and the training loop look for it. torchao does the same.

A scale has a format too: ``float32``, or ``E8M0``, the powers of two of the OCP MX formats, by which multiplying is
exact. Four rules round to a power of two. Their names are the field's, and refer to the X that an MX block stores and
divides its values by: the scale here is ``1 / X``. With ``emax`` the exponent of the target:

- ``floor``: ``X = 2^(floor(log2 amax) - emax)``, the rule of OCP MX v1.0. It saturates where amax / X is beyond the
  target, by less than a factor of two.
- ``ceil``: ``X = 2^(ceil(log2 amax) - emax)``. It never saturates, and may leave a binade empty.
- ``rceil``: ``X = 2^ceil(log2(amax / target))``, the smallest that never saturates (NVIDIA, arXiv:2506.08027).
- ``even``: ``floor`` of amax, whose significand is first rounded to the format's spacing in the target's binade. Ties
  go up, since the next power of two is the even one.

Block scales in any other format stand under a float32 scale of the tensor: `two_level`. SCALES.md says where torchao
differs.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from altgrad.formats import SCALE_FORMATS, Format, get_format
from altgrad.formats.format import STATISTICS
from altgrad.numerics.codes import decode, encode
from altgrad.numerics.compile_utils import constant_in_graphs
from altgrad.numerics.constants import (
    FLOAT32_RULE,
    FOUR_OVER_SIX,
    SCALE_RULES,
    TARGET,
    TWO_LEVEL,
)
from altgrad.numerics.quantization import require_choice
from altgrad.numerics.rounding import grid_spacing, power_of_two

GRANULARITIES = ("tensor", "row", "block", "tile")
SCALE_ROUNDINGS = SCALE_RULES[1:]
OF_TWO = "4/6"  # a rule for block scales under a tensor scale: see `two_level`
HISTORY_METHODS = ("max", "most-recent")

_LOWEST_EXPONENT, _HIGHEST_EXPONENT = -126, 127
LOWEST, HIGHEST = 2.0**_LOWEST_EXPONENT, 2.0**_HIGHEST_EXPONENT


def amax(x: Tensor, granularity: str = "tensor", *, block: int = 32, dim: int = -1) -> Tensor:
    """Return the largest magnitudes of a tensor.

    Args:
        x: a float tensor.
        granularity: ``tensor`` (one), ``row`` (one per row along ``dim``: per output channel of a
            weight, per token of an activation), ``block`` (one per ``block`` neighbours along
            ``dim``, the last block may be shorter) or ``tile`` (one per ``block`` x ``block`` elements of the last two
            dimensions, whatever ``dim``).
        block: elements per block; 32 in the OCP MX formats.
        dim: the dimension that the matrix product sums over.

    Returns:
        Shape (), or that of ``x`` with ``dim`` of length 1, or with ``dim`` (for tiles the last two) of length
        ceil(n / block). float64 for float64, else float32. NaN where there is a NaN, 0 for an empty tensor.
    """
    require_choice("granularity", granularity, GRANULARITIES)
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
    for along in (-2, -1) if granularity == "tile" else (dim,):
        magnitude = _in_blocks(magnitude, block, along, torch.amax)
    return magnitude.to(wide)


def rms(x: Tensor, granularity: str = "tensor", *, block: int = 32, dim: int = -1) -> Tensor:
    """Return the roots of the mean squares of a tensor's parts, as `amax` returns their largest magnitudes.

    Sums are in float64, so that results on different devices rarely differ, and then in the last bit.
    """
    require_choice("granularity", granularity, GRANULARITIES)
    squares = x.detach().double().square()
    if granularity == "tensor":
        mean = squares.mean() if squares.numel() else squares.sum()
    elif granularity == "row":
        mean = squares.mean(dim=dim, keepdim=True)
    else:
        counts = torch.ones_like(squares)
        for along in (-2, -1) if granularity == "tile" else (dim,):
            squares, counts = (_in_blocks(t, block, along, torch.sum) for t in (squares, counts))
        mean = squares / counts
    return mean.sqrt() if x.dtype == torch.float64 else mean.sqrt().float()


def measured(statistic: str, x: Tensor, granularity: str = "tensor", **options: int) -> Tensor:
    """Return the `amax` or the `rms` of ``x``, whichever ``statistic`` names; a scale brings it to its target."""
    require_choice("statistic", statistic, STATISTICS)
    return (rms if statistic == "rms" else amax)(x, granularity, **options)


def _in_blocks(t: Tensor, block: int, dim: int, reduce: Callable[..., Tensor]) -> Tensor:
    t = t.movedim(dim, -1)
    t = torch.nn.functional.pad(t, (0, -t.shape[-1] % block))
    return reduce(t.unflatten(-1, (-1, block)), dim=-1).movedim(-1, dim)


def broadcast_scale(scale: Tensor, length: int, *, block: int = 32, dim: int = -1) -> Tensor:
    """Repeat one scale per block into one per element along ``dim``, which gets ``length`` elements."""
    # Not repeat_interleave and narrow: torch 2.13 compiles those for CPU into a loop that leaves out a shorter
    # last block.
    return scale.index_select(dim, torch.arange(length, device=scale.device) // block)


def broadcast_tiles(scale: Tensor, shape: torch.Size, *, block: int) -> Tensor:
    """Repeat one scale per ``block`` x ``block`` elements into one per element of the last two dimensions."""
    return broadcast_scale(broadcast_scale(scale, shape[-2], block=block, dim=-2), shape[-1], block=block, dim=-1)


def compute_scale(
    amax: float | Tensor,
    target: str | Format | float,
    *,
    scale_format: str = "float32",
    scale_rounding: str = "rceil",
) -> Tensor:
    """Return the scale that brings ``amax`` to the target.

    Args:
        amax: largest magnitudes, any shape.
        target: a format or its name, for its `scale_target`; or the target itself, positive.
        scale_format: ``float32``, or ``E8M0`` (a power of two).
        scale_rounding: to a power of two, ``floor``, ``ceil``, ``rceil`` or ``even``; see the module's docstring.

    Returns:
        float32, the shape of ``amax``, positive and finite; 1 where ``amax`` is zero or negative, NaN where it is Inf
        or NaN.

    Raises:
        ValueError: an unknown choice, a target that is not positive and finite, or ``even`` without a format.
    """
    rule, spacing = scale_rule(scale_format, scale_rounding), None
    if isinstance(target, (str, Format)):
        fmt = get_format(target)
        target, spacing = _target_and_spacing(fmt)
    if not 0 < target < float("inf"):
        raise ValueError(f"target: expected a positive finite number, got {target}")
    if SCALE_RULES[rule] == "even" and spacing is None:
        raise ValueError(f"target: scale_rounding even rounds to the spacing of a format; give one, not {target}")
    amax = amax.detach() if isinstance(amax, Tensor) else torch.tensor(amax, dtype=torch.float32)
    values = amax.new_tensor([target, spacing or 0.0], dtype=torch.float64)
    return scale_by_rule(amax, values[0], rule, values[1])


@constant_in_graphs
def _target_and_spacing(fmt: Format) -> tuple[float, float]:
    return fmt.scale_target, float(fmt.spacing(fmt.scale_target))


def scale_from_amax(
    amax: Tensor, constants: Tensor, *, scale_format: str = "float32", scale_rounding: str = "rceil"
) -> Tensor:
    """Return `compute_scale` for a format given as `format_constants`, as compiled graphs need it."""
    return scale_by_constants(amax, constants, scale_rule(scale_format, scale_rounding))


def scale_rule(scale_format: str, scale_rounding: str, granularity: str = "tensor") -> int:
    """Return a rule as the number that operators take: an index of `SCALE_RULES`, `TWO_LEVEL` or `FOUR_OVER_SIX`.

    Raises:
        ValueError: an unknown rounding, or a format that scales of this granularity cannot have.
    """
    require_choice("scale_rounding", scale_rounding, (*SCALE_ROUNDINGS, OF_TWO))
    if granularity in ("block", "tile") and scale_format not in SCALE_FORMATS:
        return FOUR_OVER_SIX if scale_rounding == OF_TWO else TWO_LEVEL
    require_choice("scale_format", scale_format, SCALE_FORMATS)
    if scale_rounding == OF_TWO:
        raise ValueError("scale_rounding: 4/6 is a choice between scales of blocks in a small format such as E4M3")
    return FLOAT32_RULE if scale_format == "float32" else SCALE_RULES.index(scale_rounding)


def scale_by_constants(amax: Tensor, constants: Tensor, rule: int) -> Tensor:
    """Return `scale_by_rule` with target and spacing from ``constants``, made by `format_constants`."""
    target, spacing = constants[TARGET].double(), None
    if SCALE_RULES[rule] == "even":
        spacing = grid_spacing(constants[TARGET], constants).double()
    return scale_by_rule(amax.detach(), target, rule, spacing)


def scale_by_rule(amax: Tensor, target: Tensor, rule: int, spacing: Tensor | None = None) -> Tensor:
    """Return `compute_scale` of ``amax``; ``rule`` is a number from `scale_rule`.

    ``target`` and ``spacing``, the format's spacing at the target, are 0-d float64. Only ``even`` reads the spacing.
    """
    amax = amax.double()
    usable, zero = (amax > 0) & (amax < torch.inf), amax <= 0
    amax = torch.where(usable, amax, target)
    if rule == FLOAT32_RULE:
        scale = (target / amax).clamp(LOWEST, HIGHEST)
    else:
        exponent = -_shared_exponent(amax, target, spacing, SCALE_RULES[rule])
        scale = power_of_two(exponent.clamp(_LOWEST_EXPONENT, _HIGHEST_EXPONENT))
    return torch.where(usable, scale, torch.where(zero, 1.0, torch.nan)).float()


def _shared_exponent(amax: Tensor, target: Tensor, spacing: Tensor | None, rounding: str) -> Tensor:
    """Return the exponent of X, int64, by the rule ``rounding``, which the module's docstring defines."""
    exponent, significand = floor_log2(amax) - floor_log2(target), _significand(amax)
    if rounding == "ceil":
        return exponent + (significand > 1)
    if rounding == "rceil":
        return exponent + (significand > _significand(target))
    if rounding == "even":
        assert spacing is not None
        half_spacing = spacing / power_of_two(floor_log2(target) + 1)
        return exponent + (significand + half_spacing >= 2)
    return exponent


def floor_log2(x: Tensor) -> Tensor:
    """Return the exponent of positive normal float64 values: int64."""
    return (x.view(torch.int64) >> 52) - 1023


def _significand(x: Tensor) -> Tensor:
    """Return the significands, in [1, 2), of positive normal float64 values: float64."""
    return ((x.view(torch.int64) & ((1 << 52) - 1)) | (1023 << 52)).view(torch.float64)


def update_amax_history(history: Tensor, amax: Tensor) -> Tensor:
    """Return the history with ``amax`` first and the oldest entry dropped; unchanged if ``amax`` is Inf or NaN.

    Args:
        history: shape (length, *amax.shape), newest first; zeros mean not seen yet. Usual length: 16.
        amax: the amax of the present step.
    """
    amax = amax.detach().to(history.dtype)
    return torch.where(amax.isfinite(), torch.cat([amax.unsqueeze(0), history[:-1]]), history)


def amax_from_history(history: Tensor, method: str = "max") -> Tensor:
    """Return the amax that delayed scaling uses.

    Args:
        history: from `update_amax_history`.
        method: ``max`` over the history without Inf and NaN entries, or ``most-recent``.

    Returns:
        Shape ``history.shape[1:]``. Zero, which gives scale 1, if no entry is usable.
    """
    require_choice("method", method, HISTORY_METHODS)
    if method == "most-recent":
        return history[0]
    return torch.where(history.isfinite(), history, 0.0).amax(dim=0)


def scaling_amax(remembered: Tensor | None, own: Tensor) -> Tensor:
    """Return the amax that sets a scale: ``remembered``, of earlier steps, where positive; else the tensor's ``own``.

    An ``own`` that is not finite is always returned, so that a history cannot hide an overflow.
    """
    # Delayed scaling that began with scale 1 would send every gradient of the first step to zero.
    return own if remembered is None else torch.where((remembered > 0) & own.isfinite(), remembered, own)


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
