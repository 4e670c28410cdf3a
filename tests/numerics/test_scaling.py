"""Scales: exact by definition and always usable; amax and its history; and the rules for powers of two.

Oracles: exact fractions, and torchao where it has the elements' format.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cache
from typing import get_args

import pytest
import torch
from torch import Tensor

from altgrad.config import tensor_recipe
from altgrad.formats import Format, get_format
from altgrad.numerics import (
    amax,
    amax_from_history,
    broadcast_scale,
    compute_scale,
    decode_mx_scale,
    encode_mx_scale,
    format_constants,
    quantize,
    quantize_operand,
    scale_from_amax,
    update_amax_history,
)
from altgrad.numerics.operand_definition import ROWS, learn, quantize_by_tensors
from altgrad.numerics.scaling import OF_TWO, SCALE_ROUNDINGS, scale_rule, scaling_amax
from tests.numerics.numerics_oracles import EIGHT_BIT_SPLITS, KERNEL_FORMATS, name_of, random_patterns

AMAXES = random_patterns(4000).abs()
USABLE = AMAXES[(AMAXES > 0) & AMAXES.isfinite()]


def test_target_is_the_largest_value_capped_where_products_would_overflow():
    targets = {fmt.name: fmt.scale_target for fmt in EIGHT_BIT_SPLITS}
    assert targets == {
        "E0M7": 127 / 128, "E1M6": 3.96875, "E2M5": 7.875, "E3M4": 31.0,
        "E4M3": 448.0, "E5M2": 57344.0, "E6M1": 2.0**16, "E7M0": 2.0**16,
    }  # fmt: skip


@pytest.mark.parametrize("fmt", EIGHT_BIT_SPLITS, ids=name_of)
def test_scale_is_the_correctly_rounded_ratio(fmt):
    target = Fraction(fmt.scale_target)
    expected = [float(target / Fraction(a)) for a in USABLE.tolist()]
    expected = torch.tensor(expected, dtype=torch.float64).clamp(2.0**-126, 2.0**127).float()
    assert torch.equal(compute_scale(USABLE, fmt), expected)
    assert torch.equal(scale_from_amax(USABLE, format_constants(fmt)), expected)


@pytest.mark.parametrize("dtype", ["float32", "E8M0"])
@pytest.mark.parametrize("fmt", KERNEL_FORMATS, ids=name_of)
def test_every_finite_amax_gives_a_usable_scale_and_all_others_nan(fmt, dtype):
    finite = AMAXES.isfinite()
    extremes = torch.tensor([0.0, -1.0, 1e-45, 3.4028235e38])
    scale = compute_scale(torch.cat([extremes, AMAXES[finite]]), fmt, scale_format=dtype)
    assert scale.dtype == torch.float32
    assert (scale.isfinite() & (scale > 0) & (1 / scale).isfinite() & (1 / scale > 0)).all()
    assert scale[:2].tolist() == [1.0, 1.0]
    unusual = torch.cat([AMAXES[~finite], torch.tensor([torch.inf, torch.nan])])
    assert compute_scale(unusual, fmt, scale_format=dtype).isnan().all()


def test_amax_is_taken_per_tensor_row_or_block():
    x = torch.tensor([[1.0, -5.0, 2.0, 0.0, -3.0], [0.5, 0.25, -0.125, 7.0, -8.0]])
    assert amax(x).tolist() == 8.0
    assert amax(x, "row").tolist() == [[5.0], [8.0]]
    assert amax(x, "row", dim=0).tolist() == [[1.0, 5.0, 2.0, 7.0, 8.0]]
    assert amax(x, "block", block=2).tolist() == [[5.0, 2.0, 3.0], [0.5, 7.0, 8.0]]
    assert amax(x, "block", block=4, dim=0).tolist() == [[1.0, 5.0, 2.0, 7.0, 8.0]]
    assert amax(x.t(), "block", block=2, dim=0).tolist() == [[5.0, 0.5], [2.0, 7.0], [3.0, 8.0]]
    assert amax(x, "block", block=100).tolist() == [[5.0], [8.0]]


def test_amax_of_nothing_is_zero_and_of_nan_is_nan():
    assert amax(torch.empty(0)).item() == 0.0
    assert amax(torch.tensor([1.0, torch.nan])).isnan()
    assert amax(torch.tensor([1.0, -torch.inf])).item() == torch.inf
    assert amax(torch.ones(3).bfloat16()).dtype == torch.float32
    assert not amax(torch.ones(3, requires_grad=True)).requires_grad


@pytest.mark.parametrize("length", [1, 31, 32, 33, 100])
def test_block_scales_reach_their_own_block(length):
    x = torch.randn(3, length)
    blocks = amax(x, "block")
    assert blocks.shape == (3, -(-length // 32))
    spread = broadcast_scale(blocks, length)
    assert spread.shape == x.shape
    for i in range(length):
        assert torch.equal(spread[:, i], blocks[:, i // 32])


def test_a_history_is_newest_first_and_read_by_maximum_or_most_recent():
    history = torch.zeros(3)
    for value in (1.0, 4.0, 8.0, 2.0):
        history = update_amax_history(history, torch.tensor(value))
    assert history.tolist() == [2.0, 8.0, 4.0]
    assert amax_from_history(history).item() == 8.0 and amax_from_history(history, "most-recent").item() == 2.0
    rows = update_amax_history(torch.zeros(16, 5, 1), torch.ones(5, 1))
    assert rows.shape == (16, 5, 1) and amax_from_history(rows).tolist() == [[1.0]] * 5
    assert amax_from_history(torch.tensor([torch.nan, 3.0, torch.inf])).item() == 3.0
    assert amax_from_history(torch.tensor([torch.nan, 3.0]), "most-recent").isnan()


@pytest.mark.parametrize("unusual", [torch.inf, torch.nan])
def test_a_history_learns_no_amax_that_is_not_finite(unusual):
    history = torch.tensor([2.0, 1.0, 0.0])
    assert torch.equal(update_amax_history(history, torch.tensor(unusual)), history)
    assert update_amax_history(history, torch.tensor(5.0)).tolist() == [5.0, 2.0, 1.0]
    for learns in ("each", "first"):
        kept = history.clone() if learns == "each" else torch.zeros(1)
        before = kept.clone()
        learn(kept, torch.tensor(unusual), learns)
        assert torch.equal(kept, before)


@pytest.mark.parametrize("unusual", [torch.inf, torch.nan])
def test_a_remembered_amax_hides_no_overflow(unusual):
    remembered, own = torch.tensor([3.0, 0.0, 3.0, 0.0]), torch.tensor([1.0, 1.0, unusual, unusual])
    assert scaling_amax(remembered, own)[:2].tolist() == [3.0, 1.0]
    assert not scaling_amax(remembered, own)[2:].isfinite().any()


def test_shared_scales_are_coded_as_e8m0():
    scale = 2.0 ** torch.arange(-126, 128, dtype=torch.float32)
    codes = encode_mx_scale(scale)
    assert codes.tolist() == list(range(253, -1, -1))
    assert torch.equal(decode_mx_scale(codes), scale)
    assert torch.equal(decode_mx_scale(torch.tensor([127], dtype=torch.uint8)), torch.tensor([1.0]))
    assert decode_mx_scale(torch.tensor([255], dtype=torch.uint8)).isnan()
    with pytest.raises(ValueError, match="^scale: "):
        encode_mx_scale(torch.tensor([3.0]))


@pytest.mark.parametrize(
    ("match", "call"),
    [
        ("^granularity: ", lambda: amax(torch.ones(2), "column")),
        ("^block: ", lambda: amax(torch.ones(2), "block", block=0)),
        ("^target: ", lambda: compute_scale(1.0, 0.0)),
        ("^target: ", lambda: compute_scale(1.0, float("nan"))),
        ("unknown format", lambda: compute_scale(1.0, "E4M")),
        ("^scale_format: ", lambda: compute_scale(1.0, "E4M3", scale_format="bf16")),
        ("^scale_rounding: ", lambda: compute_scale(1.0, "E4M3", scale_format="E8M0", scale_rounding="nearest")),
        ("^method: ", lambda: amax_from_history(torch.ones(2), "mean")),
        (
            r"^target: .* give one, not 448\.0$",
            lambda: compute_scale(1.0, 448.0, scale_format="E8M0", scale_rounding="even"),
        ),
    ],
)
def test_errors_name_the_argument(match, call):
    with pytest.raises(ValueError, match=match):
        call()


def test_the_settings_of_a_recipe_name_every_rounding_of_a_scale_and_no_other():
    """They stand in `altgrad.config`, which is read without torch and cannot ask here."""
    assert get_args(tensor_recipe.TensorRecipe.model_fields["scale_rounding"].annotation) == (*SCALE_ROUNDINGS, OF_TWO)


# --- the four ways to a power of two, each as the field names it -----------------------------------------------------

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
    by_loops = quantize_operand(rows, constants, granularity="row", dtype=torch.float32, **options)
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
