"""AltGrad: which 8-bit floating-point format gains most from geometry-aware updates, and why?"""

from altgrad.common.run_table import record

__version__ = "0.1.0"

__all__ = ["__version__", "record"]
