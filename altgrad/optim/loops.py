"""The CPU's own loops for a step of an arm, `step.cpp`: what `rules` does, twice as fast.

They take every arm but two things: weights with more than one scale, and a first moment carried along a shuffled
metric. For those, on other devices and without a C++ compiler there are the rules.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from altgrad.numerics import kernels
from altgrad.optim.arm import BASES, RIEMANNIAN, Arm
from altgrad.optim.rules import State
from altgrad.optim.stiffness import FORMULAS, Stiffness
from altgrad.optim.weight_grid import WeightGrid

SOURCE = Path(__file__).with_name("step.cpp")
WEIGHTS = ("master", "nearest", "stochastic")

torch.library.define(
    "altgrad::arm_step",
    "(Tensor(a!) p, Tensor g, Tensor(b!) m, Tensor(c!) v, Tensor(d!) reference_m, Tensor(e!) reference_v, "
    "Tensor(f!) held, Tensor settings, Tensor numbers, Tensor constants, Tensor remembered, Tensor stiff_constants, "
    "Tensor stiff_numbers, Tensor order, int first_key, int second_key) -> ()",
)


@torch.library.register_fake("altgrad::arm_step")
def _traced(*arguments: object) -> None:
    """It returns nothing."""


arm_step = torch.ops.altgrad.arm_step.default


def available(arm: Arm, p: Tensor, grid: WeightGrid) -> bool:
    """Whether the loops can step ``p`` (out, in)."""
    if p.device.type != "cpu" or p.dtype != torch.float32 or not p.is_contiguous():
        return False
    one_scale = grid.options.get("granularity", "tensor") == "tensor"
    shuffled_metric = arm.stiffness == "permuted" and arm.base in RIEMANNIAN
    return one_scale and not shuffled_metric and kernels.load(SOURCE) is None


class Loops:
    """The loops for one weight: its arm and grid as the operator wants them."""

    def __init__(self, arm: Arm, grid: WeightGrid, stiff: Stiffness | None, order: Tensor | None) -> None:
        self._nothing = grid.constants[:0]
        self._settings = _settings(arm, grid.options.get("scale_dtype", "fp32"))
        self._held = grid.held if arm.weights == "grid" else self._nothing
        self._remembered = grid.remembered if grid.held is None else lambda: grid.held
        self._constants = grid.constants
        self._stiffness = (
            self._nothing if stiff is None else stiff.constants,
            self._nothing if stiff is None else stiff.numbers,
            self._settings[:0] if order is None else order,
        )

    def step(self, p: Tensor, g: Tensor, state: State, numbers: Tensor, key: tuple[int, int]) -> None:
        """Do to ``p``, its state and its held amax what a rule of `rules` does; ``key`` as in `random.uniform`."""
        nothing = self._nothing
        m = state.get("exp_avg", nothing)
        remembered = self._remembered()
        arm_step(
            p, g.contiguous(), state.get("momentum_buffer", m), state.get("exp_avg_sq", nothing),
            state.get("reference_avg", nothing), state.get("reference_avg_sq", nothing), self._held,
            self._settings, numbers, self._constants, nothing if remembered is None else remembered,
            *self._stiffness, *key,
        )  # fmt: skip


def _settings(arm: Arm, scale_dtype: str) -> Tensor:
    """Return what `step.cpp` has to know of an arm: int32, in the order of its struct."""
    return torch.tensor(
        [
            BASES.index(arm.base),
            0 if arm.stiffness is None else 1 + FORMULAS.index(arm.stiffness),
            arm.acts == "gradient", arm.power, arm.normalise == "rms", arm.momentum > 0, arm.match_rms,
            0 if arm.weights == "master" else WEIGHTS.index(arm.rounding),
            arm.grid_scale == "reestimated", scale_dtype == "pow2",
        ],
        dtype=torch.int32,
    )  # fmt: skip
