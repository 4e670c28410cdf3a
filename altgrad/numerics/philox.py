"""Random numbers that are a function of a stream and a place, so that a resumed run draws the same ones.

A generator's state would have to be stored with every checkpoint and would tie the numbers to the order of the draws.
Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011) has no state: it
enciphers a counter of 128 bits, and a compiler fuses it with the rounding.

A stream is (seed, tensor, step). Its counters are (block, step, tensor, seed), a 32-bit word each. Two streams share no
counter; under one key Philox is a bijection of its counters, so they share no block of numbers either, at any shift.
"""

from __future__ import annotations

import torch
from torch import Tensor

BITS = 23  # of randomness: (2 k + 1) / 2^24 is exact in float32 for each of them
LANES = 16  # blocks side by side: word w of the block in lane l is for place 16 w + l, so that loops need no shuffling
ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)  # added to the key's words from round to round

_WORD = (1 << 32) - 1


def uniform(shape: torch.Size, stream: Tensor, first: int = 0) -> Tensor:
    """Return numbers uniform over the odd multiples of 2^-24 in (0, 1): float32, on the device of ``stream``.

    Args:
        shape: shape of the result, below 2^31 elements.
        stream: seed, tensor and step, each from 0 to below 2^32: int64, shape (3,).
        first: place of the first element in the stream; not 0 for a part of a tensor.
    """
    count = 1
    for length in shape:
        count = count * length
    bits = words(count, stream, first) >> (32 - BITS)
    return (bits * 2 + 1).view(shape).float() * 2.0 ** -(BITS + 1)


def words(count: int, stream: Tensor, first: int = 0) -> Tensor:
    """Return ``count`` words of a stream from place ``first`` (below 2^34) on: int64, uniform over 0 to 2^32 - 1."""
    seed, tensor, step = stream
    row, rest = first // (4 * LANES), first % (4 * LANES)  # which graphs of any size know, unlike divmod
    rows = (rest + count + 4 * LANES - 1) // (4 * LANES)
    blocks = torch.arange(row * LANES, (row + rows) * LANES, dtype=torch.int64, device=stream.device).view(-1, LANES)
    # Adding 0 loaded from memory keeps the places 64 bits wide: the compiler for GPUs would give them 32, which their
    # products with the multipliers do not fit.
    blocks = blocks + (seed >> 32)
    return torch.stack(philox((blocks, step, tensor, seed), (0, 0)), dim=1).flatten()[rest : rest + count]


def permutation(count: int, seed: int, tensor: int) -> Tensor:
    """Return a random permutation of 0 to count - 1, int32: the sort order of 63 bits each, drawn at step 0."""
    low, high = words(2 * count, torch.tensor([seed, tensor, 0])).view(2, -1)
    return torch.argsort((high << 31) | (low >> 1), stable=True).int()


def philox(counter: tuple[Tensor, ...], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Return the four words of Philox4x32-10 at ``counter`` under ``key``.

    Words are int64 from 0 to 2^32 - 1; the counter's four broadcast. A product of two words wraps at 2^64 as two's
    complement, and masking its upper word removes the sign.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1 = (p1 >> 32) & _WORD ^ c1 ^ k0, p1 & _WORD
        c2, c3 = (p0 >> 32) & _WORD ^ c3 ^ k1, p0 & _WORD
        k0, k1 = (k0 + WEYL[0]) & _WORD, (k1 + WEYL[1]) & _WORD
    return torch.broadcast_tensors(c0, c1, c2, c3)
