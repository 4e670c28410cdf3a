"""Other people's training programs: `Recorder` records their runs, and each framework has a module.

Importing the package imports no framework. Only the framework's own module imports it.
"""

from altgrad.integrations.recorder import Recorder

__all__ = ["Recorder"]
