"""The definition of each metric: name, unit, limit and summary. Pure Python, so that every package can import it.

    metric.Metric -> the rows in table.METRICS

Other packages measure: ``training.monitor`` during a run, ``diagnostics`` from a run's files, ``reporting`` from all
runs together. ``python -m altgrad.metrics`` prints the table.
"""

from altgrad.metrics.metric import Limit, Metric, mean, per_weight
from altgrad.metrics.table import METRICS

__all__ = ["METRICS", "Limit", "Metric", "mean", "per_weight"]
