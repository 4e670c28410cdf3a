"""Triton kernels of `update_gpu`: one launch steps all weights of a group.

``table`` (weights, `WIDTH`) int64 has a row per weight: the addresses of its tensors, its size and its first chunk. A
program handles one chunk, and ``of_chunk`` has each chunk's row. Operations, their order and rounding are those of
`update`, but a sum over a tensor adds up chunk sums in float64.
"""

from importlib import import_module

import triton
import triton.language as tl

from altgrad.numerics import constants as packed
from altgrad.numerics.gpu_elements import FLOAT32, INFINITY, bits, number, scale_of, spacing_at
from altgrad.optim import update

MAX, TARGET = tl.constexpr(packed.MAX), tl.constexpr(packed.TARGET)
LR, DECAY, EPS, MOMENTUM = (tl.constexpr(getattr(update, name)) for name in ("LR", "DECAY", "EPS", "MOMENTUM"))
BETA1, BETA2 = tl.constexpr(update.BETA1), tl.constexpr(update.BETA2)
UNBIAS1, UNBIAS2 = tl.constexpr(update.UNBIAS1), tl.constexpr(update.UNBIAS2)
PER_RANGE = tl.constexpr(import_module("altgrad.optim.stiffness").PER_RANGE)  # the function of this name hides it

# Columns of the table, filled by `update_gpu`: addresses of float32 tensors, number of elements, first chunk.
WEIGHT, GRADIENT, FIRST, SECOND, NUMBERS, GRID, STIFF, RANGE, KNOWN, SIZE, CHUNK, WIDTH = map(tl.constexpr, range(12))


@triton.jit
def address(row, COLUMN: tl.constexpr):
    """Return the pointer in a column of ``row``, to a float32 tensor."""
    return tl.load(row + COLUMN).to(tl.pointer_type(tl.float32))


@triton.jit
def places(row, LENGTH: tl.constexpr):
    """Return the indices of this program's elements in their tensor, (LENGTH,)."""
    return (tl.program_id(0) - tl.load(row + CHUNK)) * LENGTH + tl.arange(0, LENGTH)


@triton.jit
def remembered(row, FORMULA: tl.constexpr):
    """Return the remembered amax that sets the scale; 0 means the weight's current amax."""
    found = 0.0
    if FORMULA != "foreign":
        found = tl.load(address(row, KNOWN), mask=tl.load(row + KNOWN) != 0, other=0.0)
    return found


@triton.jit
def find_largest(table, of_chunk, found, FORMULA: tl.constexpr, LENGTH: tl.constexpr):
    """Write each weight's amax, as int32 bits, into ``found`` (weights,); weights with a remembered amax keep 0."""
    tensor = tl.load(of_chunk + tl.program_id(0))
    row = table + tensor * WIDTH
    at, size = places(row, LENGTH), tl.where(remembered(row, FORMULA) > 0, 0, tl.load(row + SIZE))
    values = tl.load(address(row, WEIGHT) + at, mask=at < size, other=0.0)
    tl.atomic_max(found + tensor, tl.max(bits(values) & 0x7FFFFFFF, axis=0))


@triton.jit
def add_up(table, sums, chunks, means, tensors, TERMS: tl.constexpr, LENGTH: tl.constexpr):
    """Write root mean squares into ``means`` (terms, tensors), from the sums of squares ``sums`` (terms, chunks)."""
    tensor = tl.program_id(0)
    row = table + tensor * WIDTH
    first, size = tl.load(row + CHUNK), tl.load(row + SIZE)
    count = tl.cdiv(size, LENGTH)
    for term in tl.static_range(TERMS):
        total = tl.zeros((1024,), tl.float64)
        for start in range(0, count, 1024):
            i = start + tl.arange(0, 1024)
            total += tl.load(sums + term * chunks + first + i, mask=i < count, other=0.0)
        tl.store(means + term * tensors + tensor, tl.sqrt(tl.sum(total, axis=0) / size.to(tl.float64)).to(tl.float32))


@triton.jit
def stiffness(row, weights, largest, FORMULA: tl.constexpr, RULE: tl.constexpr):
    """Return the stiffness of ``weights`` for the formulas ulp, range and foreign, as `evaluate` of `stiffness`."""
    stiff, own = address(row, STIFF), address(row, GRID)
    if FORMULA == "foreign":
        scale = scale_of(largest, tl.load(stiff + TARGET).to(tl.float64), stiff, FLOAT32)
    else:
        known = remembered(row, FORMULA)
        largest = tl.where(known > 0, known, largest)
        scale = scale_of(largest, tl.load(own + TARGET).to(tl.float64), own, RULE)
    magnitude = number(bits(weights * scale) & 0x7FFFFFFF)
    magnitude = tl.where(magnitude > tl.load(stiff + MAX), tl.load(stiff + MAX), magnitude)
    found = tl.where(weights != weights, weights, tl.div_rn(spacing_at(magnitude, stiff), scale))
    if FORMULA == "range":
        found = found * tl.load(address(row, RANGE) + PER_RANGE)
    return found


@triton.jit
def step(
    table, of_chunk, largest, means, means_of_steps, sums, chunks, tensors,
    PHASE: tl.constexpr, ADAM: tl.constexpr, FORMULA: tl.constexpr, RULE: tl.constexpr, ON_GRADIENT: tl.constexpr,
    POWER: tl.constexpr, RMS: tl.constexpr, MOMENTUM_KEPT: tl.constexpr, MATCH: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """Take a step of all weights, or only write sums of squares into ``sums`` (terms, chunks).

    PHASE ``spacings`` sums the squared stiffness, and ``sizes`` the squared step and AdamW direction. Only ``step``
    changes weights and moments. ``means`` and ``means_of_steps`` (2, tensors) are the results of `add_up` for the two.
    """
    chunk = tl.program_id(0)
    tensor = tl.load(of_chunk + chunk)
    row = table + tensor * WIDTH
    at = places(row, LENGTH)
    inside = at < tl.load(row + SIZE)
    weights = tl.load(address(row, WEIGHT) + at, mask=inside, other=0.0)
    factor = stiffness(row, weights, number(tl.load(largest + tensor)), FORMULA, RULE)
    if PHASE == "spacings":
        tl.store(sums + chunk, tl.sum(tl.where(inside, factor * factor, 0.0).to(tl.float64), axis=0))
    else:
        if RMS:
            factor = tl.div_rn(factor, tl.load(means + tensor))
        if POWER == 2:
            factor = factor * factor
        h = address(row, NUMBERS)
        g = tl.load(address(row, GRADIENT) + at, mask=inside, other=0.0)
        if ON_GRADIENT:
            g = factor * g
        m, v, direction = g, g, g
        if ADAM:
            m = tl.load(address(row, FIRST) + at, mask=inside, other=0.0)
            v = tl.load(address(row, SECOND) + at, mask=inside, other=0.0)
            m = m + (g - m) * (1.0 - tl.load(h + BETA1))
            v = v * tl.load(h + BETA2) + g * g * (1.0 - tl.load(h + BETA2))
            root = tl.sqrt_rn(v * tl.load(h + UNBIAS2)) + tl.load(h + EPS)
            direction = tl.div_rn(m * tl.load(h + UNBIAS1), root)
        elif MOMENTUM_KEPT:
            m = tl.load(address(row, FIRST) + at, mask=inside, other=0.0) * tl.load(h + MOMENTUM) + g
            direction = m
        moved = direction
        if not ON_GRADIENT:
            moved = factor * direction
        if PHASE == "sizes":
            tl.store(sums + chunk, tl.sum(tl.where(inside, moved * moved, 0.0).to(tl.float64), axis=0))
            of_adam = tl.where(inside, direction * direction, 0.0)
            tl.store(sums + chunks + chunk, tl.sum(of_adam.to(tl.float64), axis=0))
        else:
            if MATCH:
                ratio = tl.div_rn(tl.load(means_of_steps + tensors + tensor), tl.load(means_of_steps + tensor))
                moved = moved * tl.where((ratio != ratio) | (bits(ratio) == INFINITY), 1.0, ratio)
            if ADAM:
                tl.store(address(row, SECOND) + at, v, mask=inside)
            if ADAM or MOMENTUM_KEPT:
                tl.store(address(row, FIRST) + at, m, mask=inside)
            found = weights * tl.load(h + DECAY) - tl.load(h + LR) * moved
            tl.store(address(row, WEIGHT) + at, found, mask=inside)
