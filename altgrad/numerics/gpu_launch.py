"""Start the Triton kernels that make operands on a GPU, and decide when to use them.

Only this module imports `gpu_kernels` and with it Triton. If Triton is not installed, or a kernel cannot be compiled
for a device, the tensor operations of `operand_definition` give the same bits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from altgrad.numerics.compile_utils import constant_in_graphs
from altgrad.numerics.constants import LANES, TWO_LEVEL, scale_constants, table_start
from altgrad.numerics.operand_definition import (
    FLOAT8,
    ONE_SCALE,
    PACKED,
    ROWS,
    filled_up,
    has_scale,
    quantize_by_tensors,
    rotate_by_tensors,
    scale_shape,
)

DEVICE = "cuda"
DTYPES = {torch.float32, torch.bfloat16}
TILE = 4096  # elements of a program, where a group has no more
LARGEST = 4 * TILE  # group that a program can hold

_failures: list[str] = []


def takes_kernels(x: Tensor, dtype: torch.dtype, block: int, stochastic: bool = False) -> bool:
    """Whether kernels quantize ``x`` to an operand of ``dtype``; ``block`` is a `block_code`.

    A compiled graph uses no kernel to round to nearest with one scale: the compiler finds the amax while it makes the
    tensor, which saves reading the tensor once.
    """
    if x.device.type != DEVICE or x.dtype not in DTYPES or dtype not in DTYPES.union(FLOAT8.values(), [PACKED]):
        return False
    high, wide = _group(block, 1)
    if _padded(high) * _padded(wide) > LARGEST:
        return False
    return (stochastic or block != ONE_SCALE or not torch.compiler.is_compiling()) and available()


@constant_in_graphs
def available() -> bool:
    """Whether Triton is installed, and no kernel has failed."""
    return find_spec("triton") is not None and not _failures


def by_kernels(x: Tensor, run: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
    """Return ``run()``, which starts kernels on the device of ``x``; ``otherwise()`` after any failure of a kernel."""
    if x.numel() > 0 and not _failures:
        try:
            with torch.cuda.device_of(x):
                return run()
        except torch.OutOfMemoryError:
            raise  # tensor operations need more memory
        except Exception as error:  # noqa: BLE001 - whatever the compiler or a device has against a kernel
            _failures.append(str(error))
            warnings.warn(f"altgrad's GPU kernels are not in use, training is slower: {error}", stacklevel=3)
    return otherwise()


def quantize_on_gpu(
    x: Tensor, signs: Tensor | None, values: Tensor, blocks: Tensor | None, constants: Tensor, amaxes: Sequence[Tensor],
    streams: Sequence[Tensor], first: int, newest: bool, learns: int, block: int, dim: int, rule: int,
) -> Tensor:  # fmt: skip
    """Write the values of `quantize_by_tensors` to ``values`` and return its scale.

    Args:
        x: (n, k), float32 or bfloat16.
        signs: x is first rotated by these; None or empty: not rotated.
        values: the tensor that gets the values, with the rows that a rotation adds. May be x if it is not rotated.
        blocks: the tensor that gets the codes of block scales, if values are `PACKED`; otherwise None or empty.
        constants, first, block, dim, rule: as in `quantize_by_tensors`.
        amaxes: empty, or the amax that sets the scale (one, or one per row), used where it is positive.
        streams: empty, or random numbers for stochastic rounding.
        newest, learns: for the loops of a CPU, which share this operator; not read here.
    """
    signs, blocks = (None if t is None or t.numel() == 0 else t for t in (signs, blocks))
    known, stream = (t[0] if t else None for t in (amaxes, streams))

    def by_tensors() -> Tensor:
        t = x if signs is None else rotate_by_tensors(x, signs)
        dtype = values.dtype if blocks is None else PACKED
        found, scale, *codes = quantize_by_tensors(t, constants, known, block, dim, rule, dtype, stream, first)
        values.copy_(found)
        if blocks is not None:
            blocks.copy_(codes[0])
        return scale

    scale: Tensor = by_kernels(
        x, lambda: _quantize(x, signs, values, blocks, constants, known, stream, first, block, dim, rule), by_tensors
    )
    return scale


def _quantize(
    x: Tensor, signs: Tensor | None, values: Tensor, blocks: Tensor | None, constants: Tensor, known: Tensor | None,
    stream: Tensor | None, first: int, block: int, dim: int, rule: int,
) -> Tensor:  # fmt: skip
    from altgrad.numerics import gpu_kernels as kernels

    two_level = rule >= TWO_LEVEL
    if two_level:
        scale_constants(constants)  # raises where they are missing
    scale = x.new_empty(scale_shape(values, block, dim, rule, values.dtype), dtype=torch.float32)
    if signs is not None and not _rotates_in_tiles(block, dim, signs.numel()):
        x, signs = rotate_by_tensors(x, signs), None
    turned = 1 if signs is None else signs.numel()  # rows that are rotated together
    shape = torch.Size((filled_up(x.shape[0], turned), x.shape[1]))
    if block == ONE_SCALE and signs is None and x.is_contiguous() and values.is_contiguous():
        x, values = x.view(1, -1), values.view(1, -1)
        shape = x.shape
    n, k = shape
    of = {ONE_SCALE: "all", ROWS: "row" if dim != 0 else "column"}.get(block, "group")
    short_rows = of == "row" and _padded(k) <= 2 * TILE  # a program has a whole row
    in_groups = two_level or of == "group" or short_rows
    if two_level or not in_groups:
        amax = _amaxes(x, {"row": n, "column": k}.get(of, 1), "all" if two_level else of, known, None, signs)
    if in_groups:
        high, wide = (1, k) if short_rows else _group(block, dim)
        H, W = _padded(high), _padded(wide)
        G = max(1, min(_padded(-(-k // wide)), TILE // (H * W)))
    else:
        (H, G), W = _tile(x, shape, values, turned), 1
        high, wide = H, 1

    places = 4 * LANES  # whose random numbers are the words of the same blocks
    has_known = known is not None and (two_level or of != "group")
    options: dict[str, Any] = {
        "RULE": rule, "HAS_KNOWN": has_known, "LOG": turned.bit_length() - 1, "DRAWS": stream is not None,
        "ALIGNED": wide == W and all(length % places == 0 for length in (G * W, first, k if n > 1 else 0)),
        "H": H, "G": G, "num_warps": _warps(H * G * W), "enable_fp_fusion": False,
    }  # fmt: skip
    # Kernels need a pointer for each argument; they do not read the one that stands for None.
    known, signs, stream = (scale if t is None else t for t in (known, signs, stream))
    known_step = int(known.numel() > 1)
    tensors, programs = (_as_bits(x), _as_bits(values), constants), (_programs(n, k, high, G * wide),)
    extent = (x.shape[0], n, k, *x.stride(), *values.stride())
    if two_level:
        codes = scale if blocks is None else blocks
        options |= {"PAIRS": -1 if blocks is None else dim, "W": W}
        kernels.round_two_level[programs](
            *tensors, amax, known, signs, stream, first, scale, codes, *extent, high, wide, **options
        )
    elif in_groups:
        options |= {"KEEPS": has_scale(block, rule, values.dtype), "TABLE": table_start(constants), "W": W}
        kernels.round_groups[programs](
            *tensors, known, known_step, signs, stream, first, scale, *extent, high, wide, **options
        )
    else:
        kernels.round_at_amax[programs](
            *tensors, amax, known, known_step, signs, stream, first, scale, *extent, OF=of,
            TABLE=table_start(constants), **options,
        )  # fmt: skip
    return scale


def ms_eden_into(
    x: Tensor, over: Tensor | None, signs: Tensor, values: Tensor, constants: Tensor, stream: Tensor, first: int,
    block: int, clip: float, room: float,
) -> Tensor:  # fmt: skip
    """Divide ``x`` by ``over``, rotate it, write its `ms_eden_by_tensors` to ``values`` and return the scale."""
    from altgrad.numerics import gpu_kernels as kernels

    scale_constants(constants)  # raises where they are missing
    (n, k), log = x.shape, signs.numel().bit_length() - 1
    scale, columns = x.new_empty((), dtype=torch.float32), min(_padded(k), TILE >> log)
    amax = _amaxes(x, 1, "all", None, over, signs)
    kernels.round_ms_eden[(_programs(n, k, 1 << log, columns),)](
        _as_bits(x), scale if over is None else over, _as_bits(values), constants, amax, signs, stream, first, scale,
        n, k, *x.stride(), CLIP=clip, ROOM=room, HAS_OVER=over is not None, LOG=log, HIGH=block, G=columns,
        num_warps=_warps(columns << log), enable_fp_fusion=False,
    )  # fmt: skip
    return scale


def _amaxes(x: Tensor, count: int, of: str, known: Tensor | None, over: Tensor | None, signs: Tensor | None) -> Tensor:
    """Return the ``count`` largest magnitudes that `find_amax` finds, as int32 bits."""
    from altgrad.numerics import gpu_kernels as kernels

    found = torch.zeros(count, dtype=torch.int32, device=x.device)
    turned = 1 if signs is None else signs.numel()
    (n, k), (H, G) = x.shape, _tile(x, x.shape, x, turned)
    pointers = (found if t is None else t for t in (known, over, signs))  # kernels do not read `found` in place of None
    kernels.find_amax[(_programs(n, k, H, G),)](
        _as_bits(x), *pointers, found, n, k, *x.stride(), OF=of, HAS_KNOWN=of == "all" and known is not None,
        HAS_OVER=over is not None, LOG=turned.bit_length() - 1, H=H, G=G, num_warps=_warps(H * G),
        enable_fp_fusion=False,
    )  # fmt: skip
    return found


def _as_bits(t: Tensor) -> Tensor:
    """Return a view of ``t`` that kernels take: bfloat16 as int16, float8 as bytes."""
    return t if t.dtype == torch.float32 else t.view(torch.int16 if t.dtype == torch.bfloat16 else torch.uint8)


def _warps(elements: int) -> int:
    return max(1, min(16, elements // 1024))


def _rotates_in_tiles(block: int, dim: int, size: int) -> bool:
    """Whether a tile has all of the ``size`` rows that are rotated together, so that a kernel can rotate them."""
    high, _ = _group(block, dim)
    if block in (ONE_SCALE, ROWS):
        return dim == 0 or block == ONE_SCALE
    return high % size == 0 and high == _padded(high)


def _tile(x: Tensor, shape: torch.Size, y: Tensor, rows: int) -> tuple[int, int]:
    """Return (rows, columns) of a tile: long where memory is contiguous, and at least ``rows`` high."""
    (n, k), along_rows = shape, x.stride(0) >= x.stride(1)
    wide = TILE if n == 1 else 512 if along_rows else 32
    if along_rows != (y.stride(0) >= y.stride(1)):
        wide = 64
    columns = min(_padded(k), wide, TILE // rows)
    return max(rows, min(_padded(n), TILE // columns)), columns


def _group(block: int, dim: int) -> tuple[int, int]:
    """Return (rows, columns) of a block or tile; (1, 1) for other block codes."""
    if block < ROWS:
        return -block, -block
    length = max(block, 1)
    return (1, length) if dim != 0 else (length, 1)


def _padded(length: int) -> int:
    """Return the smallest power of two that is not below ``length``."""
    return 1 << (length - 1).bit_length()


def _programs(n: int, k: int, rows: int, columns: int) -> int:
    return -(-n // rows) * -(-k // columns)
