"""Random numbers that are a function of a key and a place: for stochastic rounding that a resumed run repeats.

A generator's state would have to be stored with every checkpoint and would tie the numbers to the order of the draws.
Hashing a counter needs neither, and a compiler fuses it with the rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

BITS = 23  # of randomness: (2 k + 1) / 2^24 is exact in float32 for each of them


def uniform(shape: torch.Size, key: Tensor) -> Tensor:
    """Return numbers uniform over the odd multiples of 2^-24 in (0, 1): float32, on the device of ``key``.

    The counter of each element, in row-major order, goes through the ``lowbias32`` hash (C. Wellons, 2018: two
    multiplications and three shifts found by search, every output bit flips with probability 1/2 to within 2e-3 for
    each input bit) between two additions of the key's words.

    Args:
        shape: of the result, below 2^31 elements.
        key: int32, shape (2,).
    """
    count = 1
    for length in shape:
        count = count * length
    x = torch.arange(count, dtype=torch.int32, device=key.device).view(shape)
    x = _lowbias32(_lowbias32(x + key[0]) + key[1])
    return ((x & ((1 << BITS) - 1)) * 2 + 1).float() * 2.0 ** -(BITS + 1)


def _lowbias32(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 16)) * 0x7FEB352D
    x = (x ^ _shifted(x, 15)) * (0x846CA68B - (1 << 32))
    return x ^ _shifted(x, 16)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Return ``x >> bits`` with zeros moving in, whatever the sign."""
    return (x >> bits) & ((1 << (32 - bits)) - 1)
