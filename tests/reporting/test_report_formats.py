"""What a figure says of a format's precision is what the format's values say."""

from __future__ import annotations

import numpy as np
import pytest

from altgrad.formats import get_format
from altgrad.reporting.figures.weights import significant_bits


@pytest.mark.parametrize("name", ["E0M7", "E1M6", "E2M5", "E3M4", "E4M3", "E5M2", "E6M1", "E7M0"])
def test_significant_bits_count_the_values_of_a_binade(name: str) -> None:
    """A binade with n representable values holds 1 + log2(n) significant bits; one without any holds none."""
    fmt = get_format(name)
    values = fmt.magnitudes
    top = np.floor(np.log2(fmt.scale_target)) - 1  # the highest binade that scaling can fill
    for exponent in np.arange(top, max(top - 20, fmt.emin - fmt.mantissa_bits - 3), -1):
        count = ((values >= 2.0**exponent) & (values < 2.0 ** (exponent + 1))).sum()
        binades = np.array([exponent + 0.5]) - np.log2(fmt.scale_target)
        assert significant_bits(fmt, binades)[0] == (1 + np.log2(count) if count else 0), exponent
