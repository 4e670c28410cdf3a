"""The CPU's own loops for a step of an arm, `update_cpu.cpp`: what `update` does, twice as fast.

They take every arm but six things: weights with more than one scale, a stiffness of rows, one on a schedule, a first
moment carried along a metric that is more than a function of each weight, selective rounding, and Muon's matrix
products. For those, on other devices and without a C++ compiler there are the rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor

from altgrad.config.arms import BASES, FORMULAS, Arm
from altgrad.numerics import loops, scale_rule
from altgrad.optim import state_cpu, update, weight_grid
from altgrad.optim.coded import POWER, SCALE, Coding
from altgrad.optim.stiffness import Stiffness
from altgrad.optim.update import State
from altgrad.optim.weight_grid import WeightGrid

SOURCE = Path(__file__).with_name("update_cpu.cpp")
DIRECTIONS = [*dict.fromkeys(base.direction for base in BASES.values())]
UNITS = ("weight", "rungs", "log")
WEIGHTS = ("master", "nearest", "stochastic")
OF_THE_TENSOR = ("permuted", "profile", "rms")  # how stiff a weight is depends on the others


def _settings(arm: Arm, rule: int) -> dict[str, int]:
    """Return what `update_cpu.cpp` has to know of an arm, in the order in which it is passed."""
    base = BASES[arm.base]
    return {
        "direction": DIRECTIONS.index(base.direction),
        "unit": UNITS.index(base.unit),
        "metric": base.metric,
        "formula": 0 if arm.stiffness is None else 1 + FORMULAS.index(arm.stiffness),
        "on_gradient": arm.acts == "gradient",
        "power": arm.power,
        "rms": arm.normalise == "rms",
        "momentum": arm.momentum > 0,
        "match_rms": arm.match_rms,
        "weights": WEIGHTS.index("master" if arm.weights == "master" else arm.rounding),
        "reestimated": arm.held_scale == "reestimated",
        "feedback": arm.feedback is not None,
        "scale_rule": rule,
    }


SETTINGS = tuple(_settings(Arm(lr=1.0), 0))
DEFINITIONS = "".join([
    state_cpu.DEFINITIONS,
    loops.enumeration("setting", SETTINGS),
    loops.enumeration("direction", DIRECTIONS),
    loops.enumeration("unit", UNITS),
    loops.enumeration("formula", ("none", *FORMULAS)),
    loops.enumeration("weights", WEIGHTS),
    loops.of_module("number", update, "LR DECAY BETA1 BETA2 UNBIAS1 UNBIAS2 EPS MOMENTUM MAX_RUNGS UNBIAS_LATER"),
    loops.of_module("weight_grid", weight_grid, "ABOVE"),
    loops.of_module("rule", update, "MADAM_CLIP GROWS_ABOVE SHRINKS_BELOW"),
    loops.of_module(  # the function of this name hides the module
        "stiffness", import_module("altgrad.optim.stiffness"),
        "PER_BINADE SMALLEST_NORMAL PER_RANGE KNEE SLOPE FLOOR SMALLEST LARGEST TINY LEAST_RMS",
    ),
])  # fmt: skip

torch.library.define(
    "altgrad::arm_step",
    "(Tensor(a!) p, Tensor g, Tensor(b!) m, Tensor(c!) v, Tensor(d!) reference_m, Tensor(e!) reference_v, "
    "Tensor(f!) held, Tensor settings, Tensor numbers, Tensor constants, Tensor remembered, Tensor stiff_constants, "
    "Tensor stiff_numbers, Tensor order, Tensor(g!) m_scale, Tensor(h!) v_scale, Tensor(i!) m_power, "
    "Tensor(j!) v_power, Tensor m_coding, Tensor v_coding, int seed, int tensor, int step) -> ()",
)
torch.library.define(
    "altgrad::arm_steps",
    "(Tensor(a!)[] p, Tensor[] g, Tensor(b!)[] m, Tensor(c!)[] v, Tensor(d!)[] m_scale, Tensor(e!)[] v_scale, "
    "Tensor(f!)[] m_power, Tensor(g!)[] v_power, Tensor settings, Tensor numbers, Tensor constants, Tensor nothing, "
    "Tensor m_coding, Tensor v_coding, int seed, Tensor places, int step) -> ()",
)


@torch.library.register_fake("altgrad::arm_step")
@torch.library.register_fake("altgrad::arm_steps")
def _traced(*arguments: object) -> None:
    """It returns nothing."""


arm_step = torch.ops.altgrad.arm_step.default
arm_steps = torch.ops.altgrad.arm_steps.default


def takes(p: Tensor) -> bool:
    """Whether the loops can step a weight like ``p`` by an arm of theirs."""
    return p.device.type == "cpu" and p.dtype == torch.float32 and p.is_contiguous()


def available(arm: Arm, p: Tensor, grid: WeightGrid | None) -> bool:
    """Whether the loops can step ``p`` (out, in); without a grid, of an arm that looks at none."""
    one_scale = grid is None or grid.options.get("granularity", "tensor") == "tensor"
    of_the_tensor = arm.stiffness in OF_THE_TENSOR and BASES[arm.base].metric
    taken = takes(p) and one_scale and arm.stiffness != "row_rms" and not of_the_tensor and arm.schedule == "constant"
    taken = taken and arm.rounding != "selective" and BASES[arm.base].loops
    return taken and loops.load(SOURCE, definitions=DEFINITIONS) is None


class Loops:
    """The loops for one weight: its arm and quantization grid as the operator wants them."""

    def __init__(
        self, arm: Arm, grid: WeightGrid, stiff: Stiffness | None, order: Tensor | None,
        codings: Mapping[str, Coding] | None = None,
    ) -> None:  # fmt: skip
        self._nothing = grid.constants[:0]
        codings = codings or {}
        taken = not BASES[arm.base].metric and all(map(state_cpu.takes, codings.values()))
        # What feedback takes of a momentum is known only when a pass over the weights has ended.
        taken = taken and not (arm.feedback and any(map(state_cpu.measures, codings.values())))
        self._codings = {name: state_cpu.packed(name, coding) for name, coding in codings.items()} if taken else {}
        self.reads_codes = bool(self._codings)
        rule = scale_rule(grid.options.get("scale_format", "float32"), grid.options.get("scale_rounding", "rceil"))
        self._settings = torch.tensor([*_settings(arm, rule).values()], dtype=torch.int32)
        self._held = grid.held if arm.weights == "quantized" else self._nothing
        self._sets_scale = grid.held
        self._constants = grid.constants
        self._stiffness = (
            self._nothing if stiff is None else stiff.constants,
            self._nothing if stiff is None else stiff.numbers,
            self._settings[:0] if order is None else order,
        )

    def step(
        self, p: Tensor, g: Tensor, state: State, numbers: Tensor, stream: tuple[int, int, int],
        remembered: Tensor | None,
    ) -> None:  # fmt: skip
        """Do to ``p``, its state and its held amax what a rule of `update` does; ``stream`` as in `random.uniform`.

        ``p`` is float32, or has the codes (uint8) of a weight on its quantization grid, as `WeightGrid.to_stored` has
        them.

        ``remembered`` is the amax (0-d float32) that sets the scale, None where it is that of ``p``.
        """
        nothing = self._nothing
        remembered = remembered if self._sets_scale is None else self._sets_scale
        first = "momentum_buffer" if "momentum_buffer" in state else "exp_avg"
        arm_step(
            p, g.contiguous(), state.get(first, nothing), state.get("exp_avg_sq", nothing),
            state.get("reference_avg", nothing), state.get("reference_avg_sq", nothing), self._held,
            self._settings, numbers, self._constants, nothing if remembered is None else remembered,
            *self._stiffness,
            *(state.get(name + part, nothing) for part in (SCALE, POWER) for name in (first, "exp_avg_sq")),
            *(self._codings.get(name, nothing) for name in (first, "exp_avg_sq")), *stream,
        )  # fmt: skip

    def step_each(
        self, weights: Sequence[Tensor], gradients: Sequence[Tensor], states: Sequence[State], places: Sequence[int],
        numbers: Tensor, seed: int, step: int,
    ) -> None:  # fmt: skip
        """Do what `step` does for each of several weights, without a grid, whose streams differ by their ``places``."""
        nothing = self._nothing
        first = "momentum_buffer" if "momentum_buffer" in states[0] else "exp_avg"
        arm_steps(
            weights, [g.contiguous() for g in gradients],
            *([state.get(name + part, nothing) for state in states] for part in ("", SCALE, POWER) for name in (
                first, "exp_avg_sq")),
            self._settings, numbers, self._constants, nothing,
            *(self._codings.get(name, nothing) for name in (first, "exp_avg_sq")), seed, torch.tensor(places), step,
        )  # fmt: skip
