"""The definition of each metric: name, unit, limit and summary. Pure Python, so that every package can import it.

Other packages measure: ``training.monitor`` during a run, ``diagnostics`` from a run's files, ``reporting`` from all
runs together. ``python -m altgrad.metrics`` prints the table.
"""

from altgrad.metrics.table import METRICS, Limit, Metric, mean, per_weight

__all__ = ["METRICS", "Limit", "Metric", "mean", "per_weight"]
