"""Signal to quantization noise of a normal distribution with the clip that minimizes the error.

The figures are those of Kuzmin et al. 2022, FP8 Quantization: The Power of the Exponent
(arXiv:2208.09225), recomputed. They depend on ranges, spacing and rounding all being right.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from altgrad.formats import get_format
from altgrad.numerics import quantize


@pytest.mark.parametrize(
    ("name", "decibels"),
    [("E5M2", 25.57), ("E4M3", 31.55), ("E3M4", 37.56), ("E2M5", 42.67), ("E1M6", 40.54), ("E0M7", 40.54)],
)
def test_best_sqnr_of_a_normal_distribution_is_the_known_one(name, decibels):
    fmt = get_format(name)
    x = torch.linspace(-7, 7, 2**16 + 1)
    density = torch.exp(-(x.double() ** 2) / 2)
    density /= density.sum()

    def sqnr(clip: float) -> float:
        error = quantize(x, fmt, scale=fmt.max / clip).double() - x
        return -10 * math.log10((density * error**2).sum())

    # A float-like format repeats itself with every factor of two in the clip.
    assert max(sqnr(clip) for clip in np.geomspace(3.0, 9.0, 100)) == pytest.approx(decibels, abs=0.02)
