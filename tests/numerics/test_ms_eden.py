"""Rotations; and MS-EDEN: its definition in float64, unbiased over its random numbers, nearer than stochastic rounding.

Oracles: ml_dtypes' casts to E2M1 and E4M3, scipy's Hadamard matrix, sums in float64; what Quartet II claims of it.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from scipy.linalg import hadamard

from altgrad.numerics import format_constants, quantize_operand, rotate_rows, uniform
from altgrad.numerics.constants import HADAMARD_SIGNS
from altgrad.numerics.ms_eden import ms_eden, ms_eden_by_tensors, ms_eden_pair, random_signs
from altgrad.numerics.operand_definition import rotate_by_tensors
from altgrad.numerics.rounding import words
from tests.numerics.numerics_oracles import same, spread

E4M3 = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)  # 0 to 448
V, M = 6 / (17 / 16 * 0.93), 255.99


def constants(fmt="E2M1"):
    return format_constants(fmt, scale_format="E4M3")


def in_float64(x, random):
    """Return the values of (128 n, k) and s, and where the float32 sums of the definition may decide otherwise."""
    s = np.float32(V * M / np.float64(np.abs(x).max()))
    values, close = np.zeros(x.shape), np.zeros(x.shape, bool)
    for top in range(0, len(x), 128):
        for j in range(x.shape[1]):
            blocks = x[top : top + 128, j].reshape(8, 16)
            wanted = (np.abs(blocks).max(1).astype(np.float64) * s / V).astype(np.float32)
            d = np.maximum(wanted.astype(ml_dtypes.float8_e4m3fn).astype(np.float64), E4M3[1])
            z = blocks * (s / d).astype(np.float32)[:, None]
            q = z.clip(-6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float64)
            z = z.astype(np.float64)
            longer = d * (z * z).sum() / max((z * q).sum(), 1e-300) if (z * q).any() else d
            low = np.searchsorted(E4M3, longer.clip(max=448), side="right") - 1
            gap = np.where(low < 126, E4M3[np.minimum(low + 1, 126)] - E4M3[low], 1)
            share, drawn = (longer - E4M3[low]) / gap, random[top // 16 : top // 16 + 8, j]
            up = (drawn < share) & (low < 126)
            values[top : top + 128, j] = (q * E4M3[low + up][:, None]).ravel()
            edge = np.minimum(share, 1 - share) < 1e-4
            close[top : top + 128, j] = np.repeat((np.abs(share - drawn) < 1e-4) | edge, 16)
    return values, s, close


@pytest.mark.parametrize("rows", [16, 37, 1, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_is_the_hadamard_matrix_with_the_signs(rows, dtype):
    """Exact for whole numbers; of others the loops have the definition's bits."""
    matrix = hadamard(16) @ np.diag(HADAMARD_SIGNS)
    whole = torch.randint(-9, 9, (rows, 21), generator=torch.Generator().manual_seed(rows)).to(dtype)
    padded = np.pad(whole.float().numpy(), ((0, -rows % 16), (0, 0)))
    expected = np.concatenate([matrix @ part / 4 for part in np.split(padded, len(padded) // 16)])
    assert torch.equal(rotate_rows(whole), torch.from_numpy(expected).float())
    x = spread((rows, 150), seed=3).to(dtype)
    for size in (16, 128, 2):
        signs = random_signs(torch.tensor([3, 4, 5]), 0)[:size]
        assert same(rotate_rows(x, signs), rotate_by_tensors(x, signs))


def test_rotating_both_operands_leaves_their_product():
    a, b = (spread((48, n), seed=n, binades=1.0) for n in (5, 7))
    turned = rotate_rows(a).t().double() @ rotate_rows(b).double()
    assert torch.allclose(turned, a.t().double() @ b.double(), rtol=0, atol=1e-5 * turned.abs().max().item())


@pytest.mark.parametrize("binades", [0.0, 4.0])
def test_it_is_its_definition_in_float64(binades):
    x, stream = spread((256, 40), seed=1, binades=binades), torch.tensor([3, 4, 5])
    values, s, close = in_float64(x.numpy(), uniform(torch.Size((16, 40)), stream, 77).numpy())
    found, scale = ms_eden(x, constants(), stream, 77)
    assert scale.item() == s and close.mean() < 0.01
    assert np.array_equal(found.numpy()[~close], values[~close])


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("fmt", "block"), [("E2M1", 16), ("E2M1", 32), ("E3M0", 8), ("E2M3", 128), ("E4M3", 16)])
def test_its_loops_have_the_bits_of_the_definition(fmt, block, dtype):
    """Of columns that fill no stripe, blocks of zeros, tiny and huge ones, and one with an Inf and a NaN."""
    x, stream = spread((384, 37), seed=2, binades=6.0), torch.tensor([3, 4, 5])
    x[:128, 3], x[128:256, 4] = 0, -0.0
    x[:, 5:7] *= torch.tensor([1e-30, 1e4])
    x[256:, 8] *= 1e-9
    for damaged in (False, True):
        if damaged:
            x[3, 1], x[300, 2] = torch.inf, torch.nan
        values, scale = ms_eden(x, constants(fmt), stream, 77, block, dtype)
        expected, of_expected = ms_eden_by_tensors(x, constants(fmt), stream, 77, block)
        assert same(scale, of_expected) and same(values, expected.to(dtype))


def test_zeros_stay_and_one_that_is_not_finite_is_in_all_that_has_its_scale():
    x = torch.zeros(256, 3)
    stream = torch.tensor([0, 1, 2])
    values, scale = ms_eden(x, constants(), stream, 0)
    assert not values.any() and scale == 1
    x[:, 1] = 1.0
    assert not ms_eden(x, constants(), stream, 0)[0][:, 0].any()
    for unusual in (torch.nan, torch.inf, -torch.inf):
        x[5, 2] = unusual
        values, scale = ms_eden(x, constants(), stream, 0)
        assert values.isnan().all() and scale.isnan()


@pytest.mark.parametrize("product", [0, 1])
def test_signs_are_of_words_behind_those_of_all_scales(product):
    stream = torch.tensor([2**31 + 5, 7, 2**32 - 1])
    drawn = words(128, stream, 2**33 + 128 * product)
    assert torch.equal(random_signs(stream, product), torch.where(drawn % 2 == 1, -1.0, 1.0))


def test_signs_are_drawn_anew_for_each_product_and_step():
    signs = torch.stack([random_signs(torch.tensor([1, 2, step]), product) for step in range(99) for product in (0, 1)])
    assert set(signs.unique().tolist()) == {-1, 1} and len(signs.unique(dim=0)) == len(signs)
    assert abs(signs.mean().item()) < 4 / signs.numel() ** 0.5


@pytest.mark.parametrize("product", [0, 1])
def test_the_operands_of_a_product_draw_numbers_of_their_own(product):
    """Of one tensor twice some block scales go different ways: of numbers in common none would."""
    x = spread((256, 40), seed=3, binades=1.0)
    (left, _), (right, _) = ms_eden_pair(x, x, constants(), torch.tensor([3, 4, 5]), product, dtype=torch.float32)
    blocks = (left == right).unflatten(0, (-1, 16)).all(1)
    assert 0.3 < blocks.float().mean() < 0.9


@pytest.mark.parametrize(("fmt", "of_stochastic"), [("E2M1", 0.55), ("E3M0", 0.55), ("E2M3", 1.0)])
def test_its_bias_is_small_and_its_error_below_that_of_stochastic_rounding(fmt, of_stochastic):
    """The bias's square is below 0.1 % of the mean square error: of 256 draws the mean is no further off than errors
    without bias allow, and a tenth for chance. The error is half of SR's where the elements' error outweighs the
    scales', which Quartet II claims for E2M1; in E2M3 it does not, and the two differ by 6 %."""
    draws, x = 256, spread((128, 24), seed=4, binades=1.0)
    matrix, total, squares = torch.from_numpy(hadamard(128)).float(), torch.zeros(2, 128, 24), torch.zeros(3)
    options = {"granularity": "block", "block": 16, "dim": 0, "scale_format": "E4M3", "dtype": torch.float32}
    for step in range(draws):
        stream = torch.tensor([1, 2, step])
        signs = random_signs(stream, 0)
        turned = rotate_rows(x, signs)
        by_chance, nearest = (
            quantize_operand(turned, constants(fmt), None, draws, **options) for draws in (stream, None)
        )
        of_each = [ms_eden(turned, constants(fmt), stream, 0), nearest, by_chance]
        errors = [signs[:, None] * (matrix @ (values / scale)) / 16 - x for values, scale in of_each]
        total += torch.stack(errors[:2])
        squares += torch.stack([error.square().sum() for error in errors])
    ours, nearest = (t.square().sum() / square for t, square in zip(total, squares[:2], strict=True))
    assert 0.8 < ours < 1 + draws * 0.001 + 0.1 < nearest
    assert squares[0] < of_stochastic * squares[2]


def test_the_mean_of_products_is_the_product():
    a, b = spread((200, 6), seed=8, binades=1.0), spread((200, 9), seed=9, binades=1.0)
    exact, draws = a.t() @ b, 300
    found = []
    for step in range(draws):
        pair = ms_eden_pair(a, b, constants(), torch.tensor([5, 6, step]), step % 2, dtype=torch.float32)
        (left, of_left), (right, of_right) = pair
        assert left.shape == (256, 6) and right.shape == (256, 9)
        found.append(left.t() @ right / (of_left * of_right))
    off = (torch.stack(found).mean(0) - exact) / (torch.stack(found).std(0) / draws**0.5)
    assert off.square().mean() < 1.6 and off.abs().max() < 4.5
