"""Settings: the schema of params.yaml, the resolved cells, and errors worth reading.

This package imports no other package of AltGrad, and nothing that is slow to import.
"""

from altgrad.config.cell import Cell, cell_key
from altgrad.config.errors import UserError, did_you_mean, run_stage
from altgrad.config.params import load_params
from altgrad.config.resolve import Resolver, write_grid
from altgrad.config.schema import Params
from altgrad.config.scratch import discard_finished, link_ignored, project_root

__all__ = [
    "Cell", "Params", "Resolver", "UserError",
    "cell_key", "did_you_mean", "discard_finished", "link_ignored", "load_params", "project_root",
    "run_stage", "write_grid",
]  # fmt: skip
