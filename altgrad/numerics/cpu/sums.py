"""The operators of `sums` and `update_sums`, which are loops for a CPU alone: `sums.cpp`."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from altgrad.numerics import rounding
from altgrad.numerics.cpu import definitions, kernels

SOURCE = Path(__file__).with_name("sums.cpp")
DEFINITIONS = definitions.of_module("rounding", rounding, "OVERFLOW_SLACK")
SCHEMAS = {
    "magnitudes": "(Tensor x) -> Tensor",
    "rounding_sums": "(Tensor x, Tensor constants, Tensor scale) -> Tensor",
    "one_scale_sums": "(Tensor x, Tensor constants, Tensor remembered, int rule) -> Tensor",
    "central_moments": "(Tensor x) -> Tensor",
    "update_sums": (
        "(Tensor old, Tensor now, Tensor wanted, Tensor grad, Tensor before, Tensor after, Tensor constants, "
        "int refinement, int lowest, int highest) -> Tensor"
    ),
}
for _name, _schema in SCHEMAS.items():
    torch.library.define(f"altgrad::{_name}", _schema)


def has_loops(x: Tensor) -> bool:
    """Whether there are loops for ``x``, which this loads."""
    kind = x.device.type == "cpu" and x.dtype in (torch.float32, torch.bfloat16)
    return kind and kernels.load(SOURCE, definitions=DEFINITIONS) is None
