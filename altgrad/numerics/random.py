"""Random numbers that are a function of a stream and a place: for stochastic rounding that a resumed run repeats.

A generator's state would have to be stored with every checkpoint and would tie the numbers to the order of the draws.
Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011) needs neither: it
enciphers a counter of 128 bits, and a compiler fuses it with the rounding.

Streams never overlap. A stream is (seed, tensor, step), and its counters are (block, step, tensor, seed), each a word
of 32 bits of its own. So two streams share no counter, and as Philox under one key is a bijection of its counters, they
share no block of its results either, at whatever shift.
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
        shape: of the result, below 2^31 elements.
        stream: seed, tensor and step, each from 0 to below 2^32: int64, shape (3,).
        first: place of the first element, of a part of a tensor.
    """
    count = 1
    for length in shape:
        count = count * length
    found = words(count, stream, first) >> (32 - BITS)
    return (found * 2 + 1).view(shape).float() * 2.0 ** -(BITS + 1)


def words(count: int, stream: Tensor, first: int = 0) -> Tensor:
    """Return ``count`` words of a stream from place ``first`` on, uniform over 0 to 2^32 - 1: int64, below 2^34."""
    seed, tensor, step = stream
    row, rest = first // (4 * LANES), first % (4 * LANES)  # which graphs of any size know, and not divmod
    rows = (rest + count + 4 * LANES - 1) // (4 * LANES)
    blocks = torch.arange(row * LANES, (row + rows) * LANES, dtype=torch.int64, device=stream.device).view(-1, LANES)
    # Plus 0, as a number of 64 bits out of memory: what the compiler for GPUs makes of places alone has 32 bits, in
    # which their products with the multipliers do not fit.
    blocks = blocks + (seed >> 32)
    return torch.stack(philox((blocks, step, tensor, seed), (0, 0)), dim=1).flatten()[rest : rest + count]


def permutation(count: int, seed: int, tensor: int) -> Tensor:
    """Return a shuffle of ``count`` places, int32: the order of 63 random bits each, of the stream before step 1."""
    low, high = words(2 * count, torch.tensor([seed, tensor, 0])).view(2, -1)
    return torch.argsort((high << 31) | (low >> 1), stable=True).int()


def philox(counter: tuple[Tensor, ...], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Return the four words of Philox4x32-10 at ``counter`` under ``key``.

    Words are int64 from 0 to 2^32 - 1, the counter's four broadcastable. A product of two of them wraps at 2^64 as
    two's complement does, and its upper word is masked of the sign.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1 = (p1 >> 32) & _WORD ^ c1 ^ k0, p1 & _WORD
        c2, c3 = (p0 >> 32) & _WORD ^ c3 ^ k1, p0 & _WORD
        k0, k1 = (k0 + WEYL[0]) & _WORD, (k1 + WEYL[1]) & _WORD
    return torch.broadcast_tensors(c0, c1, c2, c3)
