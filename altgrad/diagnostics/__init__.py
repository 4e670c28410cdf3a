"""What happened inside a finished run, measured from its saved files.

    saved.SavedRun -> view.LayerView -> the table in registry.METRICS -> diagnose.diagnose_cell

A metric is one function of a :class:`LayerView` and one row of the table, so a new one needs no
training to be rerun. ``python -m altgrad.diagnostics`` prints the table.
"""

from altgrad.diagnostics.diagnose import diagnose_cell
from altgrad.diagnostics.registry import METRICS, Limit, Metric
from altgrad.diagnostics.view import Histogram, LayerView

__all__ = ["METRICS", "Histogram", "LayerView", "Limit", "Metric", "diagnose_cell"]
