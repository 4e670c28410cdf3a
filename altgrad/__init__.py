"""AltGrad: which 8-bit floating-point format gains most from geometry-aware updates, and why?"""

__version__ = "0.1.0"
