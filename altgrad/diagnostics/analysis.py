"""An analysis: how one metric is computed, and what it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from altgrad.diagnostics.view import Histogram, LayerView
from altgrad.metrics import METRICS, Metric

WEIGHT = ("weight",)
QUANTIZED = ("weight", "grid")
GEOMETRY = ("weight", "geometry")
GRADIENTS = ("grad_quantized", "grad_float")


class Analysis(NamedTuple):
    """How one metric is computed.

    ``compute`` takes a :class:`LayerView` and returns a number, a :class:`Histogram`, or ``None`` where the metric has
    no value. ``needs`` names attributes of the view: it is called only when all of them are there and finite. ``row``
    says what it is, unless ``altgrad.metrics`` has a row of that name.
    """

    compute: Callable[[LayerView], float | Histogram | None]
    needs: tuple[str, ...]
    row: Metric | None = None

    @classmethod
    def own(
        cls, compute: Callable[[LayerView], float | Histogram | None], needs: tuple[str, ...], unit: str,
        definition: str, **row: Any,
    ) -> Analysis:  # fmt: skip
        """Return an analysis with a `Metric` of its own, called like the function; ``row`` are that one's fields."""
        return cls(compute, needs, Metric(compute.__name__, unit, definition, **row))

    @property
    def name(self) -> str:
        """The metric's name in files and reports: that of the function."""
        return self.compute.__name__

    @property
    def metric(self) -> Metric:
        return METRICS[self.name] if self.row is None else self.row
