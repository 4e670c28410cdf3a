"""The gate of Kuzmin et al. 2022, "FP8 Quantization: The Power of the Exponent" (arXiv:2208.09225).

Samples of a uniform, a Gaussian and a heavy-tailed distribution (Student's t with 3 degrees of freedom) are rounded to
every split of 8 bits, each at the scale that a search finds best, as there: the scale decides what is clipped. The
order is the gate: evenly spaced values suit the uniform distribution, two exponent bits the Gaussian, and outliers
call for more of them. Formats are the paper's, without special codes.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from altgrad.diagnostics.rounding_error import ratio_db
from altgrad.formats import Format
from altgrad.numerics import quantize

SAMPLES, SEED = 1 << 17, 0
DISTRIBUTIONS = ("uniform", "gaussian", "student-t(3)")
OCTAVES, PER_OCTAVE = 12, 4  # what is searched below the absmax scale's clipping


def samples(distribution: str, count: int = SAMPLES) -> Tensor:
    """Return ``count`` independent samples (float32) of one of `DISTRIBUTIONS`, always the same."""
    draw = np.random.default_rng(SEED)
    if distribution == "uniform":
        return torch.from_numpy(draw.uniform(-1, 1, count)).float()
    if distribution == "gaussian":
        return torch.from_numpy(draw.standard_normal(count)).float()
    return torch.from_numpy(draw.standard_t(3, count)).float()


def best_sqnr_db(x: Tensor, fmt: Format) -> tuple[float, float]:
    """Return the highest SQNR in dB over scales, and log2 of that scale over the absmax scale, ``max / amax``.

    Scales are searched in steps of 2^(1/`PER_OCTAVE`), from the absmax scale on to `OCTAVES` times smaller clipping,
    and an octave to the other side, where a wide format would not use its largest values.
    """
    absmax = fmt.max / x.abs().max().double().item()
    steps = [step / PER_OCTAVE for step in range(-PER_OCTAVE, OCTAVES * PER_OCTAVE + 1)]
    return max((_sqnr_db(x, fmt, absmax * 2.0**step), step) for step in steps)


def _sqnr_db(x: Tensor, fmt: Format, scale: float) -> float:
    return ratio_db(x, quantize(x, fmt, scale=scale).double() - x.double())


def gate(count: int = SAMPLES) -> pd.DataFrame:
    """Return distribution, format, ``absmax_db``, ``best_db`` and ``best_scale_log2`` for every split of 8 bits."""
    rows = []
    for distribution in DISTRIBUTIONS:
        x = samples(distribution, count)
        for bits in range(8):
            fmt = Format(f"E{bits}M{7 - bits}", bits, 7 - bits)
            best, step = best_sqnr_db(x, fmt)
            absmax = _sqnr_db(x, fmt, fmt.max / x.abs().max().item())
            rows.append((distribution, fmt.name, round(absmax, 2), round(best, 2), step))
    return pd.DataFrame(rows, columns=["distribution", "format", "absmax_db", "best_db", "best_scale_log2"])
