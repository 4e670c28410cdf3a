"""Rounding without a compiler: in place, through scratch that fits the cache.

Eager PyTorch runs one operation at a time over whole tensors, so a kernel of a dozen operations
would stream a large tensor through memory a dozen times and hold several copies of it. Walking the
tensor in chunks keeps the intermediate results in cache and the extra memory near the size of the
output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from altgrad.numerics.constants import ANCHOR, HALF, KEEP, MAX, MIN_NORMAL, PARITY, SHIFT, SIGN_BIT, ZERO

# Elements per thread. Small enough for a core's cache (256 KiB of float32 per buffer), large enough that
# starting a dozen operations per chunk, and the threads waiting for each other in each, costs little.
PIECE = 1 << 16
_GPU_CHUNK = 1 << 24


def map_chunks(x: Tensor, scale: Tensor | None, round_: Callable[[Tensor], None], piece: int = PIECE) -> Tensor:
    """Return ``round_(x * scale) / scale``, computed chunk by chunk.

    Args:
        x: float16, bfloat16, float32 or float64, any shape and strides.
        scale: None, or broadcastable to ``x``, of the dtype that is computed in: float64 for float64
            and float32 otherwise.
        round_: rounds a contiguous 1-d tensor of that dtype in place.
        piece: elements per thread and chunk.

    Returns:
        Contiguous, the shape and dtype of ``x``.
    """
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    if scale is not None and scale.numel() > 1:
        out = (x.to(compute) * scale).contiguous()
        for work in _chunks(out.view(-1), piece):
            round_(work)
        return out.div_(scale).to(x.dtype)

    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for source, target in zip(_chunks(x.reshape(-1), piece), _chunks(out.view(-1), piece), strict=True):
        work = target if x.dtype == compute else torch.empty_like(source, dtype=compute)
        work.copy_(source)
        if scale is not None:
            work.mul_(scale.reshape(()))
        round_(work)
        if scale is not None:
            work.div_(scale.reshape(()))
        if work is not target:
            target.copy_(work)
    return out


def _chunks(flat: Tensor, piece: int) -> Iterator[Tensor]:
    size = piece * torch.get_num_threads() if flat.device.type == "cpu" else _GPU_CHUNK
    return iter(flat.split(size)) if flat.numel() else iter(())


class InPlaceRounder:
    """`rounding.round_to_grid` operation by operation, in place and with reused scratch.

    Args:
        constants: the format, from `format_constants`, on the device of the tensors to round.
    """

    def __init__(self, constants: Tensor) -> None:
        self._integers = constants.unbind()
        self._floats = constants.view(torch.float32).unbind()
        self._scratch: tuple[Tensor, ...] = ()

    def __call__(self, work: Tensor) -> None:
        """Round ``work`` (float32, contiguous, 1-d) in place."""
        integers, floats = self._integers, self._floats
        sign, normal, is_normal = self._buffers(work)
        bits = work.view(torch.int32)
        torch.bitwise_and(bits, SIGN_BIT, out=sign)
        work.abs_().clamp_max_(floats[MAX])

        torch.add(bits, integers[PARITY], out=normal)
        normal.bitwise_right_shift_(integers[SHIFT]).bitwise_and_(1)
        normal.add_(bits).add_(integers[HALF]).bitwise_and_(integers[KEEP])
        torch.ge(work, floats[MIN_NORMAL], out=is_normal)
        work.add_(floats[ANCHOR]).sub_(floats[ANCHOR])

        torch.where(is_normal, normal.view(torch.float32), work, out=work)
        bits.bitwise_or_(sign)
        work.add_(floats[ZERO])

    def _buffers(self, work: Tensor) -> tuple[Tensor, ...]:
        if not self._scratch or self._scratch[0].numel() < work.numel():
            dtypes = (torch.int32, torch.int32, torch.bool)
            self._scratch = tuple(torch.empty_like(work, dtype=dtype) for dtype in dtypes)
        return tuple(buffer[: work.numel()] for buffer in self._scratch)
