"""What happened inside a finished run, measured from its saved files.

    saved.SavedRun -> analysis.LayerView -> the functions in diagnose.ANALYSES -> diagnose.diagnose_cell

A metric is one function of a :class:`LayerView` and one row that says what it is, so a new one needs no training to be
rerun.
"""

from altgrad.diagnostics.analysis import Analysis, Histogram, LayerView
from altgrad.diagnostics.diagnose import ANALYSES, diagnose_cell

__all__ = ["ANALYSES", "Analysis", "Histogram", "LayerView", "diagnose_cell"]
