"""Settings: the schema of params.yaml and the resolved cells.

This package imports `altgrad.common` and `altgrad.formats`, and nothing that is slow to import.
"""

from altgrad.common.errors import UserError
from altgrad.config.cell import Cell, cell_key, write_grid
from altgrad.config.params import Params, load_params
from altgrad.config.resolve import Resolver

__all__ = ["Cell", "Params", "Resolver", "UserError", "cell_key", "load_params", "write_grid"]
