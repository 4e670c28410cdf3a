"""The four ways to a power of two, each as the field names it.

Oracles: torchao, where it has the elements' format; and for every format of 3 to 8 bits the rules in exact fractions.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cache

import pytest
import torch
from torch import Tensor

from altgrad.config.recipe import TensorRecipe
from altgrad.formats import Format, get_format
from altgrad.numerics import (
    amax,
    broadcast_scale,
    compute_scale,
    encode_mx_scale,
    format_constants,
    quantize,
    quantize_operands,
    scale_from_amax,
)
from altgrad.numerics.operand_definition import ROWS, quantize_by_tensors
from altgrad.numerics.scaling import SCALE_ROUNDINGS, scale_rule
from tests.numerics.numerics_oracles import name_of

SMALL = [get_format(f"E{e}M{bits - 1 - e}") for bits in range(3, 9) for e in range(bits)]
#: As torchao calls the elements.
TORCHAO = {
    "E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2,
    "E2M3": "fp6_e2m3", "E3M2": "fp6_e3m2", "E2M1": torch.float4_e2m1fn_x2,
}  # fmt: skip


def decisive(fmt: Format) -> Tensor:
    """Return amax (float32) at every significand that a rule may decide at, the next ones beside it, and others."""
    generator = torch.Generator().manual_seed(fmt.bits)
    target = fmt.scale_target / 2.0 ** math.floor(math.log2(fmt.scale_target))
    halves = [2 - 2.0**-bits for bits in range(1, 12)]
    points = torch.tensor([1.0, 1.5, target, 2 * target, *halves])
    beside = [torch.nextafter(points, torch.tensor(toward)) for toward in (0.0, torch.inf)]
    significands = torch.cat([points, *beside, 1 + torch.rand(20, generator=generator)])
    return (significands[:, None] * torch.exp2(torch.arange(-100, 101, 20).float())).flatten()


def exactly(value: float, fmt: Format, rounding: str) -> float:
    """Return 1 / X of the amax ``value``, in fractions and from the rules' own words."""
    largest, target = Fraction(value), Fraction(fmt.scale_target)
    emax = floor_log2(target)
    if rounding == "rceil":
        return float(1 / power(ceil_log2(largest / target)))
    if rounding == "ceil":
        return float(1 / power(ceil_log2(largest) - emax))
    if rounding == "even":  # to the spacing that the format's largest binade has, here in the binade of amax
        unit = largest_spacing(fmt, emax) / power(emax) * power(floor_log2(largest))
        largest = round(largest / unit) * unit  # a Fraction's round goes to even at a tie
    return float(1 / power(floor_log2(largest) - emax))


@cache
def largest_spacing(fmt: Format, emax: int) -> Fraction:
    values = [Fraction(v) for v in fmt.values if power(emax) <= Fraction(v) < 2 * power(emax)]
    return values[1] - values[0] if len(values) > 1 else power(emax)


def power(exponent: int) -> Fraction:
    return Fraction(2) ** exponent


def floor_log2(x: Fraction) -> int:
    exponent = x.numerator.bit_length() - x.denominator.bit_length()
    return exponent if power(exponent) <= x else exponent - 1


def ceil_log2(x: Fraction) -> int:
    return -floor_log2(1 / x)


@pytest.mark.parametrize("rounding", SCALE_ROUNDINGS)
@pytest.mark.parametrize("fmt", SMALL, ids=name_of)
def test_every_path_has_the_rule_in_fractions(fmt, rounding):
    amaxes, options = decisive(fmt), {"scale_format": "E8M0", "scale_rounding": rounding}
    expected = torch.tensor([exactly(value, fmt, rounding) for value in amaxes.tolist()])
    constants = format_constants(fmt)
    assert torch.equal(compute_scale(amaxes, fmt, **options), expected)
    assert torch.equal(scale_from_amax(amaxes, constants, **options), expected)
    rows, rule = amaxes[:, None], scale_rule("E8M0", rounding)
    (by_loops,) = quantize_operands([rows], [constants], granularity="row", dtype=torch.float32, **options)
    by_tensors = quantize_by_tensors(rows, constants, None, ROWS, 1, rule, torch.float32)
    assert torch.equal(by_loops.scale, expected[:, None]) and torch.equal(by_tensors[1], expected[:, None])
    assert torch.equal(by_loops.values, by_tensors[0])


def blocks(dtype: torch.dtype) -> Tensor:
    """Return 400 blocks of 32, in all binades that torchao's smallest and largest scales leave to the elements."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-80, 80, (400, 1), generator=generator).float()
    return (torch.randn(400, 32, generator=generator) * torch.exp2(exponents)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rounding", SCALE_ROUNDINGS)
@pytest.mark.parametrize("name", TORCHAO)
def test_codes_of_scales_and_elements_are_those_of_torchao(name, rounding, dtype):
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    x = blocks(dtype)
    theirs = mx.MXTensor.to_mx(x, TORCHAO[name], 32, mx.ScaleCalculationMode(rounding))
    scale = compute_scale(amax(x, "block"), name, scale_format="E8M0", scale_rounding=rounding)
    assert torch.equal(encode_mx_scale(scale), theirs.scale.view(torch.uint8).reshape(scale.shape))
    values = quantize(x.float(), name, scale=broadcast_scale(scale, x.shape[1]))
    assert torch.equal(values, theirs.dequantize(torch.float32))


@pytest.mark.parametrize("fmt", SMALL, ids=name_of)
def test_floor_and_even_may_saturate_ceil_and_rceil_never(fmt):
    amaxes = decisive(fmt)
    top = {r: amaxes * compute_scale(amaxes, fmt, scale_format="E8M0", scale_rounding=r) for r in SCALE_ROUNDINGS}
    target, above = fmt.scale_target, 2.0 ** (floor_log2(Fraction(fmt.scale_target)) + 1)
    assert (top["ceil"] <= target).all() and (top["rceil"] <= target).all()
    assert (top["rceil"] > target / 2).all() and (top["ceil"] > above / 4).all()
    assert (top["even"] <= top["floor"]).all() and (top["floor"] < above).all()
    assert (top["even"] < top["floor"]).any() and (top["floor"] > target).any() == (target < above / (1 + 2**-23))


@pytest.mark.parametrize("rounding", SCALE_ROUNDINGS)
def test_the_two_uniform_formats_have_the_same_scales_up_to_their_power_of_two(rounding):
    """The bits of E0M7's mantissa are one more than the digits that its largest values have behind the first."""
    amaxes, options = decisive(get_format("E1M6")), {"scale_format": "E8M0", "scale_rounding": rounding}
    scales = [compute_scale(amaxes, name, **options) for name in ("E0M7", "E1M6")]
    assert torch.equal(4 * scales[0], scales[1])


@pytest.mark.parametrize("unknown", ["down", "ocp", "up"])
def test_an_unknown_rounding_is_an_error_that_lists_those_there_are(unknown):
    with pytest.raises(ValueError, match=f"^scale_rounding: expected one of floor, ceil, .*, got '{unknown}'$"):
        compute_scale(1.0, "E4M3", scale_format="E8M0", scale_rounding=unknown)
    with pytest.raises(ValueError, match=f"scale_rounding: .* 'floor', 'ceil', .* not '{unknown}'$") as error:
        TensorRecipe(format="E4M3", scale="E8M0", scale_rounding=unknown)
    assert "\n" not in str(error.value)


def test_even_asks_for_a_format_whose_spacing_it_rounds_to():
    with pytest.raises(ValueError, match=r"^target: .* give one, not 448\.0$"):
        compute_scale(1.0, 448.0, scale_format="E8M0", scale_rounding="even")
