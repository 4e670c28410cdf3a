"""What each metric is: its name, unit, definition, limit and summary. Pure Python, so every package may read it.

    metric.Metric -> the rows in table.METRICS

The functions that measure are elsewhere: ``training.monitor`` and ``training.updates`` while a run goes on,
``diagnostics`` from its files, ``reporting`` from all runs together. ``python -m altgrad.metrics`` prints the table.
"""

from altgrad.metrics.metric import Limit, Metric, mean, per_weight
from altgrad.metrics.table import METRICS

__all__ = ["METRICS", "Limit", "Metric", "mean", "per_weight"]
