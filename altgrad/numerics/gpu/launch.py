"""When operands are made by the kernels of `kernels`, and how these are started.

Nothing else imports Triton. Where it is not installed, or a kernel cannot be compiled for a device, the tensor
operations of `operand_definition` have the same bits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from altgrad.numerics.constants import TWO_LEVEL, scale_constants
from altgrad.numerics.operand_definition import (
    FLOAT8,
    ONE_SCALE,
    PACKED,
    ROWS,
    filled_up,
    quantize_by_tensors,
    rotate_by_tensors,
    scale_shape,
)
from altgrad.numerics.random import LANES
from altgrad.numerics.tracing import constant_in_graphs

DEVICE = "cuda"
DTYPES = {torch.float32, torch.bfloat16}
TILE = 4096  # elements of a program, where a group has no more
LARGEST = 4 * TILE  # group that a program can hold

_failures: list[str] = []


def takes_kernels(x: Tensor, dtype: torch.dtype, block: int, stochastic: bool = False) -> bool:
    """Whether ``x`` becomes an operand of ``dtype`` by kernels, and not by tensor operations or loops.

    What has one scale and is rounded to nearest does not in a compiled graph: there the compiler finds its amax while
    it makes the tensor, which spares reading it for that. ``block`` is a `block_code`.
    """
    high, wide = _group(block, 1)
    if x.device.type != DEVICE or x.dtype not in DTYPES or dtype not in DTYPES.union(FLOAT8.values(), [PACKED]):
        return False
    if _padded(high) * _padded(wide) > LARGEST:
        return False
    return (stochastic or block != ONE_SCALE or not torch.compiler.is_compiling()) and available()


@constant_in_graphs
def available() -> bool:
    """Whether Triton is installed, and no kernel has failed."""
    return find_spec("triton") is not None and not _failures


def quantize_into(
    x: Tensor, values: Tensor, constants: Tensor, known: Tensor, stream: Tensor, first: int, block: int, dim: int,
    rule: int,
) -> Tensor:  # fmt: skip
    """Write the values of `quantize_by_tensors` to ``values`` and return its scale.

    ``known`` is of one element or one per row, empty for nothing; with an empty ``stream`` it rounds to nearest.
    """
    return quantize_rotated_into(x, x.new_empty(0), values, constants, known, stream, first, block, dim, rule)


def quantize_in_place(
    values: Tensor, constants: Tensor, known: Tensor, stream: Tensor, first: int, block: int, dim: int, rule: int
) -> Tensor:
    """Do the same with what ``values`` hold."""
    return quantize_into(values, values, constants, known, stream, first, block, dim, rule)


def quantize_rotated_into(
    x: Tensor, signs: Tensor, values: Tensor, constants: Tensor, known: Tensor, stream: Tensor, first: int, block: int,
    dim: int, rule: int,
) -> Tensor:  # fmt: skip
    """Do the same with ``x`` rotated by ``signs``, if there are any; ``values`` have the rows that this fills up."""
    return quantize_packed_into(x, signs, values, None, constants, known, stream, first, block, dim, rule)


def quantize_packed_into(
    x: Tensor, signs: Tensor, values: Tensor, blocks: Tensor | None, constants: Tensor, known: Tensor, stream: Tensor,
    first: int, block: int, dim: int, rule: int,
) -> Tensor:  # fmt: skip
    """Do the same with codes for ``values``, two in a byte, and those of their scales, if there are ``blocks``."""
    groups = (constants, known, stream, first, block, dim, rule)

    def by_tensors() -> Tensor:
        remembered, draws = (t if t.numel() > 0 else None for t in (known, stream))
        t = rotate_by_tensors(x, signs) if signs.numel() > 0 else x
        dtype = values.dtype if blocks is None else PACKED
        found, scale, *codes = quantize_by_tensors(t, constants, remembered, block, dim, rule, dtype, draws, first)
        values.copy_(found)
        if blocks is not None:
            blocks.copy_(codes[0])
        return scale

    return by_kernels(x, lambda: _quantize_into(x, signs, values, *groups, blocks), by_tensors)


def by_kernels(x: Tensor, run: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
    """Return what ``run`` does by kernels where ``x`` lies, or ``otherwise`` does where one has failed, and say so."""
    if x.numel() > 0 and not _failures:
        try:
            with torch.cuda.device_of(x):
                return run()
        except torch.OutOfMemoryError:
            raise  # which tensor operations, needing more, would meet too
        except Exception as error:  # noqa: BLE001 - whatever the compiler or a device has against a kernel
            _failures.append(str(error))
            warnings.warn(f"altgrad's GPU kernels are not in use, training is slower: {error}", stacklevel=3)
    return otherwise()


def _quantize_into(
    x: Tensor, signs: Tensor, values: Tensor, constants: Tensor, known: Tensor, stream: Tensor, first: int, block: int,
    dim: int, rule: int, blocks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    from altgrad.numerics.gpu import kernels

    two_level = rule >= TWO_LEVEL
    if two_level:
        scale_constants(constants)  # which must be there
    scale = x.new_empty(scale_shape(values, block, dim, rule, values.dtype), dtype=torch.float32)
    size = signs.numel()
    shape = torch.Size((filled_up(x.shape[0], max(size, 1)), x.shape[1]))
    if size and not _rotates_in_tiles(block, dim, size):
        x, size = rotate_by_tensors(x, signs), 0
    if block == ONE_SCALE and not size and x.is_contiguous() and values.is_contiguous():
        x, values = x.view(1, -1), values.view(1, -1)
        shape = x.shape
    (n, k), log = shape, max(size, 1).bit_length() - 1
    of = {ONE_SCALE: "all", ROWS: "row" if dim != 0 else "column"}.get(block, "group")
    has_known = known.numel() > 0 and (two_level or of != "group")
    flat, short_rows = _tile(x, shape, values, max(size, 1)), of == "row" and _padded(k) <= 2 * TILE

    amaxes = scale  # nothing is read of it
    if two_level or not (of == "group" or short_rows):
        of_which = "all" if two_level else of
        amaxes = _amaxes(x, {"all": 1, "row": n, "column": k}[of_which], of_which, known, x.new_empty(0), signs, log)

    if short_rows or of == "group":
        high, wide = (1, k) if short_rows else _group(block, dim)
        H, W = _padded(high), _padded(wide)
        G = max(1, min(_padded(-(-k // wide)), TILE // (H * W)))
    else:
        high, wide, (H, G), W = flat[0], 1, flat, 1
    places = 4 * LANES  # whose random numbers are the words of the same blocks
    aligned = wide == W and all(length % places == 0 for length in (G * W, first, k if n > 1 else 0))
    kernels.scale_and_round[(_programs(n, k, high, G * wide),)](
        _as_bits(x), _as_bits(values), constants, amaxes, known, int(known.numel() > 1), signs, stream, first, scale,
        scale if blocks is None else blocks, x.shape[0], n, k, *x.stride(), *values.stride(), high, wide,
        PAIRS=-1 if blocks is None else dim, RULE=rule, OF=of, OWN=short_rows or of == "group", HAS_KNOWN=has_known,
        LOG=log, DRAWS=stream.numel() > 0, ALIGNED=aligned, H=H, G=G, W=W, num_warps=_warps(H * G * W),
        enable_fp_fusion=False,
    )  # fmt: skip
    return scale


def ms_eden_into(
    x: Tensor, over: Tensor, signs: Tensor, values: Tensor, constants: Tensor, stream: Tensor, first: int, block: int,
    clip: float, room: float,
) -> Tensor:  # fmt: skip
    """Write the values of `ms_eden_by_tensors` of ``x``, over what ``over`` holds and rotated, and return its scale."""
    from altgrad.numerics.gpu import kernels

    scale_constants(constants)
    (n, k), log = x.shape, signs.numel().bit_length() - 1
    scale, columns = x.new_empty((), dtype=torch.float32), min(_padded(k), TILE >> log)
    amax = _amaxes(x, 1, "all", x.new_empty(0), over, signs, log)
    kernels.round_ms_eden[(_programs(n, k, 1 << log, columns),)](
        _as_bits(x), over, _as_bits(values), constants, amax, signs, stream, first, scale, n, k, *x.stride(),
        CLIP=clip, ROOM=room, HAS_OVER=over.numel() > 0, LOG=log, HIGH=block, G=columns,
        num_warps=_warps(columns << log), enable_fp_fusion=False,
    )  # fmt: skip
    return scale


def _amaxes(x: Tensor, count: int, of: str, known: Tensor, over: Tensor, signs: Tensor, log: int) -> Tensor:
    """Return the ``count`` largest magnitudes that `find_amax` finds, int32."""
    from altgrad.numerics.gpu import kernels

    found = torch.zeros(count, dtype=torch.int32, device=x.device)
    (n, k), (H, G) = x.shape, _tile(x, x.shape, x, 1 << log)
    kernels.find_amax[(_programs(n, k, H, G),)](
        _as_bits(x), known, over, signs, found, n, k, *x.stride(), OF=of, HAS_KNOWN=of == "all" and known.numel() > 0,
        HAS_OVER=over.numel() > 0, LOG=log, H=H, G=G, num_warps=_warps(H * G), enable_fp_fusion=False,
    )  # fmt: skip
    return found


def _as_bits(t: Tensor) -> Tensor:
    """Return ``t`` as kernels have it: bfloat16 as int16, float8 as bytes."""
    return t if t.dtype == torch.float32 else t.view(torch.int16 if t.dtype == torch.bfloat16 else torch.uint8)


def _warps(elements: int) -> int:
    return max(1, min(16, elements // 1024))


def _rotates_in_tiles(block: int, dim: int, size: int) -> bool:
    """Whether a program has all of the ``size`` rows that are rotated together."""
    high, _ = _group(block, dim)
    if block in (ONE_SCALE, ROWS):
        return dim == 0 or block == ONE_SCALE
    return high % size == 0 and high == _padded(high)


def _tile(x: Tensor, shape: torch.Size, y: Tensor, rows: int) -> tuple[int, int]:
    """Return rows and columns of a tile, long where neighbours lie in memory, of ``rows`` and more."""
    (n, k), along_rows = shape, x.stride(0) >= x.stride(1)
    wide = TILE if n == 1 else 512 if along_rows else 32
    if along_rows != (y.stride(0) >= y.stride(1)):
        wide = 64
    columns = min(_padded(k), wide, TILE // rows)
    return max(rows, min(_padded(n), TILE // columns)), columns


def _group(block: int, dim: int) -> tuple[int, int]:
    """Return rows and columns of a block or tile; of others of one element."""
    if block < ROWS:
        return -block, -block
    length = max(block, 1)
    return (1, length) if dim != 0 else (length, 1)


def _padded(length: int) -> int:
    """Return the next power of two."""
    return 1 << (length - 1).bit_length()


def _programs(n: int, k: int, rows: int, columns: int) -> int:
    return -(-n // rows) * -(-k // columns)
