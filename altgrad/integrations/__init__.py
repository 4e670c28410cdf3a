"""Other people's training programs: what records their runs, and a module for each framework.

No framework is imported here. Each has a module of its own, which imports it.
"""

from altgrad.integrations.recorder import Recorder

__all__ = ["Recorder"]
