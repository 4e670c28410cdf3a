"""Scales: exact by definition and always usable. Powers of two have more in `test_scale_rules`."""

from __future__ import annotations

from fractions import Fraction
from typing import get_args

import pytest
import torch

from altgrad.config import tensor_recipe
from altgrad.formats import get_format
from altgrad.numerics import (
    amax,
    amax_from_history,
    broadcast_scale,
    compute_scale,
    decode_mx_scale,
    encode_mx_scale,
    format_constants,
    quantize,
    scale_from_amax,
    scale_from_history,
    update_amax_history,
)
from altgrad.numerics.operand_definition import learn
from altgrad.numerics.scaling import OF_TWO, SCALE_ROUNDINGS, scaling_amax
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


@pytest.mark.parametrize("fmt", KERNEL_FORMATS, ids=name_of)
def test_packed_constants_give_the_same_scale(fmt):
    for options in ({}, *({"scale_format": "E8M0", "scale_rounding": rounding} for rounding in SCALE_ROUNDINGS)):
        packed = scale_from_amax(AMAXES, format_constants(fmt), **options)
        torch.testing.assert_close(packed, compute_scale(AMAXES, fmt, **options), rtol=0, atol=0, equal_nan=True)


def test_power_of_two_rules_differ_as_defined():
    """E4M3: the largest value is 1.75 * 2^8, and 1.9375 is half a spacing below the next power of two."""
    amaxes = torch.tensor([1.0, 1.5, 1.75, 1.9, 1.9375, 2.0])
    scales = {
        rule: compute_scale(amaxes, "E4M3", scale_format="E8M0", scale_rounding=rule).tolist()
        for rule in SCALE_ROUNDINGS
    }
    assert scales["floor"] == [256.0, 256.0, 256.0, 256.0, 256.0, 128.0]
    assert scales["ceil"] == [256.0, 128.0, 128.0, 128.0, 128.0, 128.0]
    assert scales["rceil"] == [256.0, 256.0, 256.0, 128.0, 128.0, 128.0]
    assert scales["even"] == [256.0, 256.0, 256.0, 256.0, 128.0, 128.0]


def test_scaled_values_never_pass_the_target_by_default():
    scale = compute_scale(USABLE, "E2M5", scale_format="E8M0")
    assert (USABLE * scale <= 7.875).all()


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


def test_history_is_newest_first_and_of_fixed_length():
    history = torch.zeros(3)
    for value in (1.0, 2.0, 3.0, 4.0):
        history = update_amax_history(history, torch.tensor(value))
    assert history.tolist() == [4.0, 3.0, 2.0]
    rows = update_amax_history(torch.zeros(16, 5, 1), torch.ones(5, 1))
    assert rows.shape == (16, 5, 1)
    assert scale_from_history(rows, "E3M4").tolist() == [[31.0]] * 5


def test_history_is_read_by_maximum_or_most_recent():
    history = torch.tensor([2.0, 8.0, 4.0])
    assert amax_from_history(history).item() == 8.0
    assert amax_from_history(history, "most-recent").item() == 2.0
    assert scale_from_history(history, "E4M3").item() == 56.0
    assert scale_from_history(history, "E4M3", method="most-recent").item() == 224.0
    assert scale_from_history(history, "E4M3", scale_format="E8M0").item() == 32.0


def test_unusable_history_entries_are_passed_over():
    assert amax_from_history(torch.tensor([torch.nan, 3.0, torch.inf])).item() == 3.0
    assert scale_from_history(torch.zeros(16), "E4M3").item() == 1.0
    assert scale_from_history(torch.tensor([torch.nan, 3.0]), "E4M3", method="most-recent").isnan()


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


def test_mx_quantization_follows_the_specification():
    """OCP MX 1.0, section 6.3: X = 2^(floor(log2 amax) - emax), elements round(v / X)."""
    fmt = get_format("E2M1")
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    scale = broadcast_scale(compute_scale(amax(x, "block"), fmt, scale_format="E8M0", scale_rounding="floor"), 64)
    shared = 2.0 ** (torch.floor(torch.log2(x.unflatten(1, (2, 32)).abs().amax(-1))) - fmt.emax)
    shared = shared.repeat_interleave(32, 1)
    assert torch.equal(quantize(x, fmt, scale=scale), quantize(x / shared, fmt) * shared)


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
    ],
)
def test_errors_name_the_argument(match, call):
    with pytest.raises(ValueError, match=match):
        call()


def test_the_settings_of_a_recipe_name_every_rounding_of_a_scale_and_no_other():
    """They stand in `altgrad.config`, which is read without torch and cannot ask here."""
    assert get_args(tensor_recipe.TensorRecipe.model_fields["scale_rounding"].annotation) == (*SCALE_ROUNDINGS, OF_TWO)
