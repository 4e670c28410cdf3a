"""What happened inside a finished run, measured from its saved files.

    saved.SavedRun -> analysis.LayerView -> the functions in diagnose.ANALYSES -> diagnose.diagnose_cell

A metric is one function of a :class:`LayerView` and one row that defines it. So a new metric trains no run again.
"""

from altgrad.diagnostics.analysis import Analysis, Histogram, LayerView
from altgrad.diagnostics.diagnose import ANALYSES, diagnose_cell

__all__ = ["ANALYSES", "Analysis", "Histogram", "LayerView", "diagnose_cell"]
