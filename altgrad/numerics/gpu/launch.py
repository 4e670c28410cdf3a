"""When operands are made by the kernels of `kernels`, and how these are started.

Nothing else imports Triton. Where it is not installed, or a kernel cannot be compiled for a device, the tensor
operations of `operand_definition` have the same bits.
"""

from __future__ import annotations

import warnings
from importlib.util import find_spec

import torch
from torch import Tensor

from altgrad.numerics.constants import TWO_LEVEL, scale_constants
from altgrad.numerics.operand_definition import ONE_SCALE, ROWS, quantize_by_tensors, scale_shape
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
    if x.device.type != DEVICE or {x.dtype, dtype} - DTYPES or _padded(high) * _padded(wide) > LARGEST:
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
    """Write the values of `quantize_by_tensors` to ``values``, contiguous, and return its scale.

    ``known`` is of one element or one per row, empty for nothing; with an empty ``stream`` it rounds to nearest.
    """
    if x.numel() > 0 and not _failures:
        try:
            with torch.cuda.device_of(x):
                return _quantize_into(x, values, constants, known, stream, first, block, dim, rule)
        except torch.OutOfMemoryError:
            raise  # which tensor operations, needing more, would meet too
        except Exception as error:  # noqa: BLE001 - whatever the compiler or a device has against a kernel
            _failures.append(str(error))
            warnings.warn(f"altgrad's GPU kernels are not in use, training is slower: {error}", stacklevel=2)
    remembered, draws = (t if t.numel() > 0 else None for t in (known, stream))
    found, scale = quantize_by_tensors(x, constants, remembered, block, dim, rule, values.dtype, draws, first)
    values.copy_(found)
    return scale


def quantize_in_place(
    values: Tensor, constants: Tensor, known: Tensor, stream: Tensor, first: int, block: int, dim: int, rule: int
) -> Tensor:
    """Do the same with what ``values`` hold."""
    return quantize_into(values, values, constants, known, stream, first, block, dim, rule)


def _quantize_into(
    x: Tensor, values: Tensor, constants: Tensor, known: Tensor, stream: Tensor, first: int, block: int, dim: int,
    rule: int,
) -> Tensor:  # fmt: skip
    from altgrad.numerics.gpu import kernels

    two_level = rule >= TWO_LEVEL
    if two_level:
        scale_constants(constants)  # which must be there
    scale = x.new_empty(scale_shape(x, block, dim, rule), dtype=torch.float32)
    if block == ONE_SCALE and x.is_contiguous():
        x = x.view(1, -1)
    n, k = x.shape
    of = {ONE_SCALE: "all", ROWS: "row" if dim != 0 else "column"}.get(block, "group")
    has_known = known.numel() > 0 and (two_level or of != "group")
    x, y = (t.view(torch.int16) if t.dtype == torch.bfloat16 else t for t in (x, values))
    flat, short_rows = _tile(x), of == "row" and _padded(k) <= 2 * TILE

    amaxes = scale  # nothing is read of it
    if two_level or not (of == "group" or short_rows):
        of_which = "all" if two_level else of
        amaxes = torch.zeros({"all": 1, "row": n, "column": k}[of_which], dtype=torch.int32, device=x.device)
        kernels.find_amax[(_programs(n, k, *flat),)](
            x, known, amaxes, n, k, *x.stride(), OF=of_which, HAS_KNOWN=has_known and of_which == "all",
            H=flat[0], G=flat[1],
        )  # fmt: skip

    if short_rows or of == "group":
        high, wide = (1, k) if short_rows else _group(block, dim)
        H, W = _padded(high), _padded(wide)
        G = max(1, min(_padded(-(-k // wide)), TILE // (H * W)))
    else:
        high, wide, (H, G), W = flat[0], 1, flat, 1
    places = 4 * LANES  # whose random numbers are the words of the same blocks
    aligned = wide == W and all(length % places == 0 for length in (G * W, first, k if n > 1 else 0))
    kernels.scale_and_round[(_programs(n, k, high, G * wide),)](
        x, y, constants, amaxes, known, int(known.numel() > 1), stream, first, scale, n, k, *x.stride(), high, wide,
        RULE=rule, OF=of, OWN=short_rows or of == "group", HAS_KNOWN=has_known, DRAWS=stream.numel() > 0,
        ALIGNED=aligned, H=H, G=G, W=W, num_warps=max(1, min(16, H * G * W // 1024)), enable_fp_fusion=False,
    )  # fmt: skip
    return scale


def _tile(x: Tensor) -> tuple[int, int]:
    """Return rows and columns of a tile, long where neighbours lie in memory."""
    (n, k), along_rows = x.shape, x.stride(0) >= x.stride(1)
    columns = min(_padded(k), TILE if n == 1 else 512 if along_rows else 32)
    return min(_padded(n), TILE // columns), columns


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
