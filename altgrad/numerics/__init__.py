"""Rounding to small floating-point formats, codes, and scaling: pure functions of tensors.

`altgrad.formats` says what a format is.
"""

from altgrad.formats import Format, get_format
from altgrad.numerics.codes import at_coordinate, coordinate, decode, encode, neighbours, rung, ulp
from altgrad.numerics.constants import format_constants, refined_constants, refined_format
from altgrad.numerics.operand import decode_operand, encode_operand, quantize_operand, rotate_rows
from altgrad.numerics.operand_definition import operand_scale
from altgrad.numerics.quantization import quantize
from altgrad.numerics.rounding import (
    OVERFLOW_POLICIES,
    ROUNDING_MODES,
    grid_spacing,
    permutation,
    round_to_grid,
    round_to_grid_stochastic,
    uniform,
)
from altgrad.numerics.scaling import (
    amax,
    amax_from_history,
    broadcast_scale,
    compute_scale,
    decode_mx_scale,
    encode_mx_scale,
    scale_from_amax,
    scale_rule,
    update_amax_history,
)
from altgrad.numerics.two_level import TwoLevel, decode_two_level, encode_two_level

__all__ = [
    "OVERFLOW_POLICIES", "ROUNDING_MODES", "Format", "TwoLevel", "amax", "amax_from_history", "at_coordinate",
    "broadcast_scale", "compute_scale", "coordinate", "decode", "decode_mx_scale", "decode_operand",
    "decode_two_level", "encode", "encode_mx_scale", "encode_operand", "encode_two_level", "format_constants",
    "get_format", "grid_spacing", "neighbours", "operand_scale", "permutation", "quantize", "quantize_operand",
    "refined_constants", "refined_format", "rotate_rows", "round_to_grid",
    "round_to_grid_stochastic", "rung", "scale_from_amax", "scale_rule", "ulp", "uniform", "update_amax_history",
]  # fmt: skip
