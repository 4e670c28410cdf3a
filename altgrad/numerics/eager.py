"""Eager rounding without a compiler: chunk by chunk, through scratch that fits the cache.

Eager PyTorch runs one operation at a time over whole tensors: a dozen operations would stream a large tensor through
memory a dozen times and hold several copies of it. In chunks the intermediate results stay in the cache and the extra
memory is about the size of the output.
"""

from collections.abc import Callable

import torch
from torch import Tensor

# Elements per thread. Small enough for a core's cache (256 KiB of float32 per buffer), large enough that starting a
# dozen operations per chunk, and the threads waiting for each other in each, costs little.
PIECE = 1 << 16
_GPU_CHUNK = 1 << 24


def map_chunks(x: Tensor, scale: Tensor | None, round_: Callable[[Tensor], None], piece: int = PIECE) -> Tensor:
    """Return ``round_(x * scale) / scale``, computed chunk by chunk: contiguous, shape and dtype of ``x``.

    Args:
        x: float16, bfloat16, float32 or float64, any shape and strides.
        scale: None (no scale), or broadcastable to ``x``, in the compute dtype: float64 for float64, else float32.
        round_: rounds a contiguous 1-d tensor of the compute dtype in place.
        piece: elements per thread and chunk.
    """
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    if scale is not None and scale.numel() > 1:
        out = (x.to(compute) * scale).contiguous()
        for work in _chunks(out.view(-1), piece):
            round_(work)
        return out.div_(scale).to(x.dtype)

    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    scale = None if scale is None else scale.reshape(())
    for source, target in zip(_chunks(x.reshape(-1), piece), _chunks(out.view(-1), piece), strict=True):
        work = target if x.dtype == compute else torch.empty_like(source, dtype=compute)
        work.copy_(source)
        if scale is not None:
            work.mul_(scale)
        round_(work)
        if scale is not None:
            work.div_(scale)
        if work is not target:
            target.copy_(work)
    return out


def map_elements(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return the element-wise ``function(x)``, computed chunk by chunk so that its temporaries stay small."""
    if torch.compiler.is_compiling():
        return function(x)
    first, *rest = _chunks(x.reshape(-1), PIECE)
    done = function(first)
    if not rest:
        return done.view(x.shape)
    out = done.new_empty(x.numel())
    targets = _chunks(out, PIECE)
    targets[0].copy_(done)
    for source, target in zip(rest, targets[1:], strict=True):
        target.copy_(function(source))
    return out.view(x.shape)


def _chunks(flat: Tensor, piece: int) -> tuple[Tensor, ...]:
    size = piece * torch.get_num_threads() if flat.device.type == "cpu" else _GPU_CHUNK
    return flat.split(size) if flat.numel() > size else (flat,)
