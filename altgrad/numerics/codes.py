"""Codes of values, and their places on a format's grid: as integers (rungs) and as real numbers (coordinates).

`encode`, `decode`, `rung`, `ulp` and `neighbours` take any format. `encode` and `rung` first round values off the grid
by the format's own rule, saturating, as a hardware cast does. `coordinate` and `at_coordinate` serve compiled graphs:
they take `format_constants` and do not round.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from altgrad.formats import FloatFormat, Format, get_format
from altgrad.numerics.constants import COUNT, FLOAT32_MANTISSA, MAX, SPACING, ULPS, ZERO_PLACE, table_of
from altgrad.numerics.eager import map_elements
from altgrad.numerics.quantization import quantize, require_holds
from altgrad.numerics.rounding import binade, grid_spacing, power_of_two


def encode(x: Tensor, fmt: str | Format) -> Tensor:
    """Return the code of each value, after rounding it to the grid.

    Infinities take the format's infinity code where it has one and saturate otherwise.

    Args:
        x: a float tensor whose dtype can hold the format, any shape.
        fmt: a format or its name.

    Returns:
        The shape of ``x``; uint8 up to 8 bits, else int16 holding the code's bit pattern (so codes
        from 2^15 up appear negative).

    Raises:
        ValueError: NaN in a format that has no code for it.
    """
    fmt = get_format(fmt)
    require_holds("x", x.dtype, fmt)
    return map_elements(lambda part: _encode(part, fmt), x.detach())


def _encode(x: Tensor, fmt: Format) -> Tensor:
    on_grid = quantize(x, fmt)
    nans, sign_code = on_grid.isnan(), 1 << fmt.bits - 1
    codes = torch.tensor(fmt.value_codes, device=x.device)[_place(on_grid.double().nan_to_num(fmt.smallest), fmt)]
    if fmt.has_negative_zero:
        codes = torch.where((on_grid == 0) & torch.signbit(on_grid), sign_code, codes)
    if fmt.inf_code is not None:
        codes = torch.where(x.isinf(), fmt.inf_code + sign_code * torch.signbit(x), codes)
    if fmt.nan_code is not None:
        codes = torch.where(nans, fmt.nan_code, codes)
    elif bool(nans.any()):
        raise ValueError(f"x: NaN has no code in {fmt}")
    return codes.to(torch.uint8 if fmt.bits <= 8 else torch.int16)


def decode(codes: Tensor, fmt: str | Format, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the value of each code, Inf, NaN and -0 included.

    Args:
        codes: integers, any shape; int16 is read as a 16-bit pattern.
        fmt: a format or its name.
        dtype: of the result; it must be able to hold the format.

    Raises:
        TypeError: ``codes`` are no integers.
        ValueError: a code of more bits than the format has.
    """
    fmt = get_format(fmt)
    if codes.is_floating_point() or codes.is_complex() or codes.dtype == torch.bool:
        raise TypeError(f"codes: expected an integer tensor, got {codes.dtype}")
    require_holds("dtype", dtype, fmt)
    table = torch.tensor(fmt.code_values, dtype=dtype, device=codes.device)

    def look_up(part: Tensor) -> Tensor:
        index = part.long()
        if part.dtype == torch.int16:
            index = index & 0xFFFF
        if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < 1 << fmt.bits:
            raise ValueError(f"codes: {fmt.name} has codes 0 to {(1 << fmt.bits) - 1}")
        return table[index]

    return map_elements(look_up, codes)


def rung(x: Tensor, fmt: str | Format) -> Tensor:
    """Return each value's rung: its place among the representable values, counted from zero.

    ``rung(b) - rung(a)`` is the number of representable values crossed on the way from a to b. In an unsigned format
    without zero the smallest value is rung 0.

    Args:
        x: a float tensor whose dtype can hold the format, any shape.
        fmt: a format or its name.

    Returns:
        int32, the shape of ``x``.

    Raises:
        ValueError: NaN, which has no place on the grid.
    """
    fmt = get_format(fmt)
    require_holds("x", x.dtype, fmt)

    def place(part: Tensor) -> Tensor:
        on_grid = quantize(part, fmt).double()
        if bool(on_grid.isnan().any()):
            raise ValueError("x: NaN has no rung")
        return (_place(on_grid, fmt) - int(np.searchsorted(fmt.values, 0.0))).int()

    return map_elements(place, x.detach())


def ulp(x: Tensor, fmt: str | Format) -> Tensor:
    """Return the spacing at each value: for a float format ``2^(max(floor(log2|x|), emin) - M)``.

    For any other format it is the distance between the values around x; on a value, to the next away from zero. Beyond
    the range it is the last spacing; NaN gives NaN. ``x`` is not rounded first.

    Args:
        x: a float tensor whose dtype can hold the format, any shape.
        fmt: a format or its name.

    Returns:
        The shape and dtype of ``x``.
    """
    fmt = get_format(fmt)
    require_holds("x", x.dtype, fmt)

    def spacing_at(part: Tensor) -> Tensor:
        wide = part.double()
        if isinstance(fmt, FloatFormat):
            spacing = power_of_two(binade(wide.abs().clamp_max(fmt.max), fmt) - fmt.mantissa_bits)
        else:
            values = torch.tensor(fmt.values, device=part.device)
            right, left = (torch.searchsorted(values, wide, right=right) for right in (True, False))
            place = torch.where(wide < 0, left, right).clamp(1, len(values) - 1)
            spacing = values[place] - values[place - 1]
        return torch.where(part.isnan(), part, spacing.to(x.dtype))

    return map_elements(spacing_at, x.detach())


def neighbours(x: Tensor, fmt: str | Format) -> tuple[Tensor, Tensor]:
    """Return the nearest representable values strictly below and strictly above each value.

    ``x`` is not rounded first, so off the grid these are the two values it lies between. Below the lowest and above the
    highest value the neighbour is infinite.

    Args:
        x: a float tensor whose dtype can hold the format, any shape, no NaN.
        fmt: a format or its name.

    Returns:
        Two tensors of the shape and dtype of ``x``.

    Raises:
        ValueError: NaN, which has no neighbours.
    """
    fmt = get_format(fmt)
    require_holds("x", x.dtype, fmt)
    x = x.detach()
    if bool(x.isnan().any()):
        raise ValueError("x: NaN has no neighbours")
    values = torch.tensor(fmt.values, device=x.device)
    nowhere = values.new_tensor([torch.inf])
    grid = torch.cat([-nowhere, values, nowhere])

    def nearest(right: bool) -> Tensor:
        return map_elements(
            lambda part: grid[torch.searchsorted(values, part.double(), right=right) + right].to(x.dtype), x
        )

    return nearest(right=False), nearest(right=True)


def _place(on_grid: Tensor, fmt: Format) -> Tensor:
    """Return the place among ``fmt.values`` of float64 values of the format: int64."""
    return torch.searchsorted(torch.tensor(fmt.values, device=on_grid.device), on_grid)


# --- coordinates: the grid as a line ---------------------------------------------------------------------------------


def coordinate(x: Tensor, constants: Tensor) -> Tensor:
    """Return the signed place of each value on the grid: the real-valued extension of `rung`.

    A representable value has its rung as coordinate; values to which no float32 is rounded do not count. Between two
    representable values the coordinate grows linearly, by one per spacing. Beyond the largest value it goes on with the
    last spacing.

    Args:
        x: float32, any shape.
        constants: the format, from `format_constants`.

    Returns:
        float32, the shape of ``x``: exact for representable values.
    """
    if (table := table_of(constants)) is not None:
        place = table.interval(x)
        places = place - table.numbers[ZERO_PLACE].long()
        return places.float() + (x - table.values[place]) / table.spacings[place]
    magnitude, spacing = x.abs(), grid_spacing(x, constants)
    binades = (_exponent(spacing) - _exponent(constants[SPACING])).float()
    return torch.copysign(binades * _per_binade(constants) + magnitude / spacing, x)


def at_coordinate(u: Tensor, constants: Tensor) -> Tensor:
    """Return the values whose `coordinate` is ``u``: float32 in and out, the same shape."""
    if (table := table_of(constants)) is not None:
        u = u + table.numbers[ZERO_PLACE]
        place = torch.minimum(u.floor().long(), table.numbers[COUNT].long() - 2).clamp(min=0)
        return table.values[place] + (u - place) * table.spacings[place]
    magnitude = u.abs()
    per_binade = _per_binade(constants)
    lowest = _exponent(constants[SPACING])
    highest = _exponent(grid_spacing(constants[MAX], constants))
    exponent = torch.minimum(((magnitude / per_binade).floor() - 1).clamp(0, 255).int() + lowest, highest)
    binades = (exponent - lowest).float()
    spacing = (exponent << FLOAT32_MANTISSA).view(torch.float32)
    return torch.copysign((magnitude - binades * per_binade) * spacing, u)


def _per_binade(constants: Tensor) -> Tensor:
    """Return 2^M, the number of representable values per binade."""
    return 2.0**FLOAT32_MANTISSA / constants[ULPS]


def _exponent(power_of_two: Tensor) -> Tensor:
    """Return the biased exponent of a positive normal float32: int32."""
    return power_of_two.view(torch.int32) >> FLOAT32_MANTISSA
