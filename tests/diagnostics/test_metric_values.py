"""Every metric on a case computed by hand.

The weights lie on and between the values of E2M1 (0, 0.5, 1, 1.5, 2, 3, 4, 6; rungs 0 to 7), and
their largest magnitude is its maximum, so the scale is 1 and the rounding can be read off:

    weight   6    0.5   0.1   -0.1   0   2.5   -3   1.25
    rounded  6    0.5   0     -0     0   2     -3   1        ties to the even code: 4 (2), not 5 (3)
    rung     7    1     0     0      0   4     -5   2
    code     7    1     0     8      0   4     13   2        bit 3 is the sign
    ulp      2    0.5   0.5   0.5    .5  1     1    0.5
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from altgrad.diagnostics import ANALYSES, Histogram, LayerView
from altgrad.diagnostics.analysis import GradientNoise, QuantizationGrid
from altgrad.formats import get_format
from tests.diagnostics.test_geometry import CASES as CASES_OF_GEOMETRY

COMPUTE = {analysis.name: analysis.compute for analysis in ANALYSES}
WEIGHT = torch.tensor([[6.0, 0.5, 0.1, -0.1], [0.0, 2.5, -3.0, 1.25]])
BEFORE = torch.tensor([[6.0, 0.5, 0.2, 0.3], [0.0, 3.0, -3.0, 1.0]])  # rungs 7 1 0 1 0 5 -5 2
MOVED = 0.1**2 + 0.4**2 + 0.5**2 + 0.25**2  # squared distance between the two
LENGTH = 36 + 0.25 + 0.04 + 0.09 + 9 + 9 + 1  # squared length of BEFORE
RANK_TWO = torch.tensor([[3.0, 0.0, 0.0], [0.0, 1.0, 0.0]])


def binary_entropy(share: float) -> float:
    return -share * math.log2(share) - (1 - share) * math.log2(1 - share)


def view(weight: Tensor = WEIGHT, fmt: str = "E2M1", **others: Tensor) -> LayerView:
    return LayerView("layer", 10, weight, QuantizationGrid.of(weight, get_format(fmt)), **others)


def moved() -> LayerView:
    return view(initial=BEFORE, previous=BEFORE, previous_grid=QuantizationGrid.of(BEFORE, get_format("E2M1")))


def with_gradients(quantized: list[float], plain: list[float]) -> LayerView:
    return LayerView("layer", 10, grad_quantized=torch.tensor([quantized]), grad_float=torch.tensor([plain]))


def noisy(causes: dict[str, float], together: float, **apart: float) -> LayerView:
    return LayerView("layer", 10, noise=GradientNoise(9.0, causes, together, **{"along": 0.0} | apart))


NUMBERS = [
    ("code_used_frac", view(), 6 / 15),
    ("code_entropy", view(), 5 * 3 / 8 + 3 / 8 * math.log2(8 / 3)),
    ("code_entropy", view(torch.ones(2, 2)), 0.0),
    ("code_stale_frac", moved(), 6 / 8),
    ("sqnr_db", view(), 10 * math.log10(53.0825 / (2 * 0.1**2 + 0.5**2 + 0.25**2))),
    ("sqnr_db", view(torch.tensor([[6.0, 3.0]])), None),
    ("misalignment_mean", view(), (0.2 + 0.2 + 0.5 + 0.5) / 8),
    ("boundary_frac", view(), 1 / 8),
    ("boundary_frac", view(torch.tensor([[4.0, -4.0, 1.0, 0.0]]), "E7M0"), 2 / 4),  # at the cap of the scale, 2^16
    ("underflow_frac", view(), 2 / 7),
    ("underflow_frac", view(torch.zeros(2, 2)), 0.0),
    ("gradient_to_noise", noisy({"weight": 1.0, "grad": 2.0}, 4.0), 1.5),
    ("gradient_to_noise", noisy({}, 0.0), None),
    ("cosine_exact", noisy({"weight": 1.0}, 16.0), 3 / 5),  # gradient (3, 0), noise (0, 4)
    ("cosine_exact", noisy({"weight": 1.0}, 25.0, along=9.0), 6 / math.sqrt(52)),  # noise (3, 4)
    ("cosine_exact", noisy({"weight": 1.0}, 9.0, along=-9.0), None),  # noise (-3, 0)
    ("cosine_exact", noisy({}, 0.0), None),
    ("noise_from_weight", noisy({"weight": 1.0, "grad": 2.0}, 4.0), 1 / 3),
    ("noise_from_input", noisy({"weight": 1.0, "grad": 2.0}, 4.0), 0.0),
    ("noise_from_grad", noisy({"weight": 1.0, "grad": 2.0}, 4.0), 2 / 3),
    ("noise_from_grad", noisy({}, 0.0), None),
    ("noise_additivity", noisy({"weight": 1.0, "grad": 2.0}, 4.0), 4 / 3),
    ("noise_additivity", noisy({}, 0.0), None),
    ("noise_bias", noisy({"weight": 1.0}, 4.0, bias=1.0, scatter=3.0), 1 / 4),
    ("noise_bias", noisy({"weight": 1.0}, 4.0), None),
    ("noise_bias", noisy({}, 0.0, bias=0.0, scatter=0.0), None),
    ("stable_rank", view(RANK_TWO), (9 + 1) / 9),
    ("effective_rank", view(RANK_TWO), math.exp(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))),
    ("effective_rank", view(torch.zeros(2, 2)), None),
    ("stable_rank", view(torch.zeros(2, 2)), None),
    ("effective_rank_kept", view(torch.diag(torch.tensor([5.0, 0, 0])), initial=torch.eye(3)), 1 / 3),
    ("init_distance", moved(), math.sqrt(MOVED / LENGTH)),
    ("init_distance", view(initial=torch.zeros(2, 4)), None),
    ("init_distance_kept", moved(), math.sqrt((0.5**2 + 1**2) / MOVED)),
    ("init_distance_kept", view(initial=WEIGHT), None),
    ("init_distance_rungs", moved(), 2 / 8),
    ("grad_snr_db", with_gradients([3.0, 4.0], [3.0, 3.0]), 10 * math.log10(18)),
    ("grad_snr_db", with_gradients([3.0, 4.0], [3.0, 4.0]), None),
    ("grad_cosine", with_gradients([3.0, 4.0], [4.0, 3.0]), 24 / 25),
    ("grad_cosine", with_gradients([0.0, 0.0], [4.0, 3.0]), None),
]  # fmt: skip

HISTOGRAMS = [
    # log2 of 6, 0.5, 0.1 (twice), 2.5, 3, 1.25 is 2.58, -1, -3.32, 1.32, 1.58, 0.32
    ("log2_magnitude", view(), {-3.5: 2 / 7, -1.0: 1 / 7, 0.25: 1 / 7, 1.25: 1 / 7, 1.5: 1 / 7, 2.5: 1 / 7}),
    ("log2_magnitude", view(torch.tensor([[2.0**-60, 2.0**20]])), {-40.0: 1 / 2, 7.75: 1 / 2}),
    ("log2_magnitude", view(torch.zeros(2, 2)), None),
    ("binade_usage", view(), {-1: 4 / 8, 0: 1 / 8, 1: 2 / 8, 2: 1 / 8}),  # 0.5 is subnormal, as all below 2^emin = 1
    ("code_usage", view(), {-5: 1 / 8, 0: 3 / 8, 1: 1 / 8, 2: 1 / 8, 4: 1 / 8, 7: 1 / 8}),
    ("code_usage", view(fmt="FP16"), None),
    ("bit_activity", view(), {i: binary_entropy(p) for i, p in enumerate((3 / 8, 2 / 8, 3 / 8, 2 / 8))}),
    ("bit_activity", view(torch.full((2, 2), 6.0)), {0: 0.0, 1: 0.0, 2: 0.0, 3: 0.0}),
    ("misalignment", view(), {i / 32: {0: 4 / 8, 6: 2 / 8, 15: 2 / 8}.get(i, 0.0) for i in range(16)}),
]


@pytest.mark.parametrize(("name", "given", "expected"), NUMBERS)
def test_a_number_is_what_its_definition_gives_by_hand(name: str, given: LayerView, expected: float | None) -> None:
    found = COMPUTE[name](given)
    assert found == (None if expected is None else pytest.approx(expected, rel=1e-6, abs=1e-12))


@pytest.mark.parametrize(("name", "given", "expected"), HISTOGRAMS)
def test_a_histogram_is_what_its_definition_gives_by_hand(
    name: str, given: LayerView, expected: dict[float, float] | None
) -> None:
    found = COMPUTE[name](given)
    if expected is None:
        assert found is None
    else:
        assert isinstance(found, Histogram)
        assert dict(zip(*found, strict=True)) == pytest.approx(expected, rel=1e-6)


def test_every_metric_has_a_case() -> None:
    cases = {name for name, *_ in [*NUMBERS, *HISTOGRAMS]}
    assert {analysis.name for analysis in ANALYSES} == cases | CASES_OF_GEOMETRY


def test_a_scale_moves_the_weights_onto_the_quantization_grid() -> None:
    """A power of two changes what is stored, not what is measured in rungs."""
    for name in ("code_entropy", "misalignment_mean", "boundary_frac", "sqnr_db"):
        assert COMPUTE[name](view(WEIGHT / 64)) == pytest.approx(COMPUTE[name](view()))
    assert QuantizationGrid.of(WEIGHT / 64, get_format("E2M1")).scale == 64
    five = torch.tensor([[5.0]])
    assert QuantizationGrid.of(five, get_format("E2M1"), scale_format="E8M0").scale == 1  # 6 / 5, rounded down
    two_level = {"granularity": "block", "block": 1, "scale_format": "E4M3"}
    blocks = QuantizationGrid.of(torch.tensor([[6.0, 3.0, 1.5]]), get_format("E2M1"), **two_level)
    assert blocks.scale.tolist() == [[1.0, 2.0, 4.0]]  # 448 of the tensor over 448, 224 and 112 of the blocks
