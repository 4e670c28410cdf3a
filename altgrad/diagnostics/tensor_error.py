"""What rounding a tensor as a recipe says would do to it, whether or not a run did so.

A tensor is quantized by the same functions and for the same `TensorRecipe` as in training, so that what is measured
here is what a run with that recipe would see. Granularities lie along the sum of the forward product, and for an
incoming gradient along that of its product with the weight: the last dimension of each tensor.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from altgrad.config.recipe import TensorRecipe
from altgrad.diagnostics.rounding_error import ratio_db
from altgrad.numerics import format_constants, operand_scale, quantize
from altgrad.numerics.rounding import OVERFLOW_SLACK

SEED = 0  # of stochastic rounding


class TensorError(NamedTuple):
    """As the metrics of these names say; ``sqnr_db`` is infinite where nothing was rounded, NaN for a tensor of 0."""

    sqnr_db: float
    underflow_frac: float
    overflow_frac: float


def rounded(t: Tensor, spec: TensorRecipe, rounding: str = "nearest-even") -> Tensor:
    """Return ``round(t * scale) / scale`` for ``t`` (n, k) with the dynamic scales of ``spec``: float32 (n, k).

    ``rounding`` is a mode of `quantize`; ``stochastic`` draws from a generator of its own, the same for each call.
    """
    generator = torch.Generator().manual_seed(SEED) if rounding == "stochastic" else None
    return quantize(t.float(), spec.format, scale=_scale(t, spec), rounding=rounding, generator=generator)


def tensor_error(t: Tensor, after: Tensor, spec: TensorRecipe) -> TensorError:
    """Return what became of ``t`` (n, k) where `rounded` made ``after`` of it."""
    size = (t.float() * _scale(t, spec)).abs()
    nonzero = t != 0
    lost = int((nonzero & (after == 0)).sum()) / max(1, int(nonzero.sum()))
    beyond = (size > spec.format.max * OVERFLOW_SLACK).double().mean().item()
    found = ratio_db(t, after.double() - t.double())
    if found is None:
        found = math.inf if nonzero.any() and torch.equal(t.float(), after) else math.nan
        found = -math.inf if nonzero.any() and not after.any() else found
    return TensorError(found, lost, beyond)


def _scale(t: Tensor, spec: TensorRecipe) -> Tensor:
    return operand_scale(t, format_constants(spec.format, scale_format=spec.scale), **spec.scale_options)
