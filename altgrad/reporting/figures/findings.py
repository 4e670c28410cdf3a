"""When a figure has something to tell: a study in which nothing is out of the ordinary there does without it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd

from altgrad.metrics import METRICS
from altgrad.reporting import roles
from altgrad.reporting.compare import Comparison
from altgrad.reporting.figures.select import course, late, per_layer, shown_optimizer
from altgrad.reporting.load import Study

A_BIT = 6.02  # dB of SQNR
IDLE_BIT = 0.05  # bits of entropy: a bit of the code that next to no weight changes
NEAR_THE_LINE = 2  # times the level at which a gradient is lost in its quantization noise
EVEN = 0.25, 0.01  # the mean distance to the rounded value where weights ignore the grid, and how near counts as that


@dataclass(frozen=True)
class Findings:
    """Whether a study has findings for a figure, and ``otherwise``, what is said in its place where it has none."""

    found: Callable[[Study, Comparison], bool]
    otherwise: str


def beyond_limit(metric: str, otherwise: str) -> Findings:
    """Findings where the mean over seeds of some layer and role crosses the limit of ``metric``."""
    limit = METRICS[metric].bound

    def found(study: Study, comparison: Comparison) -> bool:
        frames = [late(per_layer(study.monitors, study, comparison)), per_layer(study.diagnosis, study, comparison)]
        keys = ["format", "layer", "role"]
        for frame in frames:
            rows = frame[frame["metric"] == metric].dropna(subset="value")
            means = rows.groupby([*keys, "step"])["value"].mean()
            if any(limit.crossed(layer, value) for (_, layer, _, _), value in means.items()):
                return True
        return False

    return Findings(found, otherwise.format(level=METRICS[metric].level))


def moves(metric: str, least: float, otherwise: str) -> Findings:
    """Findings where the median layer of some format and role moves by ``least`` or more from first pass to last."""

    def found(study: Study, comparison: Comparison) -> bool:
        rows = per_layer(study.monitors, study, comparison)
        rows = rows[rows["metric"] == metric].dropna(subset="value")
        middle = rows.groupby(["format", "role", "step"])["value"].median().groupby(level=["format", "role"])
        return bool(((middle.last() - middle.first()).abs() >= least).any())

    return Findings(found, otherwise)


def _noise_matters(study: Study, comparison: Comparison) -> bool:
    over = course(study, comparison, "gradient_to_noise")
    return bool((over.min(axis=1) < NEAR_THE_LINE * METRICS["gradient_to_noise"].bound.value).any())


def _holds_values(study: Study, comparison: Comparison) -> bool:
    return roles.regime(study.arm(shown_optimizer(study, comparison))) == "quantized"


def _idle_bits(study: Study, comparison: Comparison) -> bool:
    rows = _diagnosed(study, comparison, "bit_activity")
    return bool((rows.groupby(["format", "x"])["value"].mean() < IDLE_BIT).any())


def _uneven(study: Study, comparison: Comparison) -> bool:
    middle, near = EVEN
    means = _diagnosed(study, comparison, "misalignment_mean").groupby("format")["value"].mean()
    return bool(((means - middle).abs() > near).any())


def _diagnosed(study: Study, comparison: Comparison, metric: str) -> pd.DataFrame:
    rows = per_layer(study.diagnosis, study, comparison)
    return rows[rows["metric"] == metric].dropna(subset="value")


PRECISION_MOVES = moves("sqnr_db", A_BIT, "the precision of no role moves by as much as a bit during training")
ROUNDS_TO_ZERO = beyond_limit("underflow_frac", "in no layer does more than {level} round to zero")
NOISY_GRADIENT = beyond_limit("grad_snr_db", "the gradients of all layers agree with float32's to {level} or better")
NOISE_MATTERS = Findings(_noise_matters, "no gradient comes near its quantization noise, on average over layers")
HEAVY_TAILS = beyond_limit("kurtosis", "the mean over seeds of no block is above {level}")
HELD_VALUES = Findings(_holds_values, "the weights shown are float32 masters, which need not keep to the values")
IDLE_BITS = Findings(_idle_bits, "no bit of a code is idle")
UNEVEN = Findings(_uneven, "weights lie between the values as chance has it, a quarter of a spacing off on average")
