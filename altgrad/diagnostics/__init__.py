"""What happened inside a finished run, measured from its saved files.

    saved.SavedRun -> view.LayerView -> the functions in registry.ANALYSES -> diagnose.diagnose_cell

A metric is one function of a :class:`LayerView` and one row that says what it is, so a new one needs no training to be
rerun.
"""

from altgrad.diagnostics.analysis import Analysis
from altgrad.diagnostics.diagnose import diagnose_cell
from altgrad.diagnostics.registry import ANALYSES
from altgrad.diagnostics.view import Histogram, LayerView

__all__ = ["ANALYSES", "Analysis", "Histogram", "LayerView", "diagnose_cell"]
