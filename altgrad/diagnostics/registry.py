"""The table of metrics. To add one: write its function, add its row.

A function takes a :class:`LayerView` and returns a number, a :class:`Histogram`, or ``None`` where
its definition has no value. It is called only when everything in ``needs`` is there and finite. Its
docstring is its definition.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from altgrad.diagnostics import codes, distribution, gradients, movement, rank, rounding_error
from altgrad.diagnostics.view import Histogram, LayerView

Summarize = Callable[[Sequence[float], Sequence[int]], float]


def mean(values: Sequence[float], _: Sequence[int]) -> float:
    """Every layer counts the same."""
    return sum(values) / len(values)


def per_weight(values: Sequence[float], weights: Sequence[int]) -> float:
    """Every weight counts the same: the share over all layers together."""
    return sum(v * n for v, n in zip(values, weights, strict=True)) / sum(weights)


class Limit(NamedTuple):
    """A layer is flagged when its value is ``above`` (else below) ``value``; ``strict`` layers have their own."""

    above: bool
    value: float
    strict: float | None = None

    def of(self, layer: str) -> float:
        """Return the limit for ``layer``."""
        return self.strict if self.strict is not None and is_strict(layer) else self.value

    def crossed(self, layer: str, value: float) -> bool:
        """Return whether ``value`` is beyond the limit for ``layer``."""
        return value > self.of(layer) if self.above else value < self.of(layer)

    def __str__(self) -> str:
        strict = "" if self.strict is None else f" ({self.strict:g} in {' and '.join(STRICT_LAYERS)})"
        return f"{'above' if self.above else 'below'} {self.value:g}{strict}"


STRICT_LAYERS = ("*attn.out", "*head")  # held to the tighter limit


def is_strict(layer: str) -> bool:
    """Return whether ``layer`` is a head or an attention output."""
    return any(fnmatchcase(layer, pattern) for pattern in STRICT_LAYERS)


class Metric(NamedTuple):
    """A row of the table. ``needs`` names attributes of a view; ``summary`` joins the layers' values at the end."""

    compute: Callable[[LayerView], float | Histogram | None]
    unit: str
    role: str
    needs: tuple[str, ...]
    summary: Summarize | None = None
    limit: Limit | None = None

    @property
    def name(self) -> str:
        """The name in files and reports: that of the function."""
        return self.compute.__name__

    @property
    def definition(self) -> str:
        """The function's docstring on one line."""
        return " ".join(inspect.getdoc(self.compute).split())


WEIGHT = ("weight",)
QUANTIZED = ("weight", "grid")
GRADIENTS = ("grad_quantized", "grad_float")

# Healthy training concentrates weights too: after the default 300 steps in bf16 the head keeps 0.61 of
# its initial effective rank, attention outputs 0.70 and more. Only well below that is it a sign.
RANK_KEPT = Limit(above=False, value=0.4, strict=0.5)

METRICS: tuple[Metric, ...] = (
    Metric(distribution.log2_magnitude, "share of weights", "weight", WEIGHT),
    Metric(distribution.binade_usage, "share of weights", "weight", QUANTIZED),
    Metric(codes.code_usage, "share of weights", "weight", QUANTIZED),
    Metric(codes.code_used_frac, "share of values", "weight", QUANTIZED, mean),
    Metric(codes.code_entropy, "bit", "weight", QUANTIZED, mean),
    Metric(codes.bit_activity, "bit", "weight", QUANTIZED),
    Metric(codes.code_stale_frac, "share of weights", "weight", (*QUANTIZED, "previous", "previous_grid"), per_weight),
    Metric(rounding_error.sqnr_db, "dB", "weight", QUANTIZED, mean),
    Metric(rounding_error.misalignment_mean, "ulp", "weight", QUANTIZED, per_weight),
    Metric(rounding_error.misalignment, "share of weights", "weight", QUANTIZED),
    Metric(
        rounding_error.boundary_frac, "share of weights", "weight", QUANTIZED, per_weight, Limit(above=True, value=0.01)
    ),
    Metric(
        rounding_error.underflow_frac, "share of weights", "weight", QUANTIZED, per_weight, Limit(above=True, value=0.1)
    ),
    Metric(rank.stable_rank, "directions", "weight", WEIGHT, mean),
    Metric(rank.effective_rank, "directions", "weight", WEIGHT, mean),
    Metric(rank.effective_rank_kept, "ratio", "weight", (*WEIGHT, "initial"), mean, RANK_KEPT),
    Metric(movement.init_distance, "ratio", "weight", (*WEIGHT, "initial"), mean),
    Metric(movement.init_distance_kept, "ratio", "weight", (*QUANTIZED, "initial"), mean),
    Metric(codes.init_distance_rungs, "rungs", "weight", (*QUANTIZED, "initial"), per_weight),
    Metric(gradients.grad_snr_db, "dB", "weight_grad", GRADIENTS, mean, Limit(above=False, value=10.0)),
    Metric(gradients.grad_cosine, "cosine", "weight_grad", GRADIENTS, mean),
)
