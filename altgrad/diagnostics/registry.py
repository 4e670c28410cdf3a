"""The analyses: which function measures which metric, and what it takes.

To add one: write its function, named as the metric; add its line here and the metric's row to ``altgrad.metrics``.
A function takes a :class:`LayerView` and returns a number, a :class:`Histogram`, or ``None`` where the metric has no
value. It is called only when everything in ``needs`` is there and finite.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from altgrad.diagnostics import codes, distribution, gradients, movement, rank, rounding_error
from altgrad.diagnostics.view import Histogram, LayerView
from altgrad.metrics import METRICS, Metric


class Analysis(NamedTuple):
    """How one metric is computed. ``needs`` names attributes of a view."""

    compute: Callable[[LayerView], float | Histogram | None]
    needs: tuple[str, ...]

    @property
    def name(self) -> str:
        """The metric's name in files and reports: that of the function."""
        return self.compute.__name__

    @property
    def metric(self) -> Metric:
        """What it is that is computed."""
        return METRICS[self.name]


WEIGHT = ("weight",)
QUANTIZED = ("weight", "grid")
GRADIENTS = ("grad_quantized", "grad_float")

ANALYSES: tuple[Analysis, ...] = (
    Analysis(distribution.log2_magnitude, WEIGHT),
    Analysis(distribution.binade_usage, QUANTIZED),
    Analysis(codes.code_usage, QUANTIZED),
    Analysis(codes.code_used_frac, QUANTIZED),
    Analysis(codes.code_entropy, QUANTIZED),
    Analysis(codes.bit_activity, QUANTIZED),
    Analysis(codes.code_stale_frac, (*QUANTIZED, "previous", "previous_grid")),
    Analysis(rounding_error.sqnr_db, QUANTIZED),
    Analysis(rounding_error.misalignment_mean, QUANTIZED),
    Analysis(rounding_error.misalignment, QUANTIZED),
    Analysis(rounding_error.boundary_frac, QUANTIZED),
    Analysis(rounding_error.underflow_frac, QUANTIZED),
    Analysis(rank.stable_rank, WEIGHT),
    Analysis(rank.effective_rank, WEIGHT),
    Analysis(rank.effective_rank_kept, (*WEIGHT, "initial")),
    Analysis(movement.init_distance, (*WEIGHT, "initial")),
    Analysis(movement.init_distance_kept, (*QUANTIZED, "initial")),
    Analysis(codes.init_distance_rungs, (*QUANTIZED, "initial")),
    Analysis(gradients.grad_snr_db, GRADIENTS),
    Analysis(gradients.grad_cosine, GRADIENTS),
)
