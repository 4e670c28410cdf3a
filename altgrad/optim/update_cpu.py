"""Loops in C++ for a step of an arm on a CPU: `update_cpu.cpp` does what `update` defines, in a half of the time.

The loops leave six things to the rules of `update`: weights with more than one scale, a stiffness of rows, a stiffness
on a schedule, a first moment carried along a metric that is more than a function of each weight, selective rounding,
and Muon's matrix products. Other devices, and machines without a C++ compiler, use the rules for everything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor

from altgrad.config.arms import BASES, FORMULAS, Arm
from altgrad.numerics import loops, scale_rule
from altgrad.optim import state_codec, update, weight_grid
from altgrad.optim.state_codec import MOMENTS, POWER, SCALE, Coding
from altgrad.optim.stiffness import Stiffness
from altgrad.optim.update import State
from altgrad.optim.weight_grid import WeightGrid

SOURCE = Path(__file__).with_name("update_cpu.cpp")
DIRECTIONS = [*dict.fromkeys(base.direction for base in BASES.values())]
UNITS = ("weight", "rungs", "log")
WEIGHTS = ("master", "nearest", "stochastic")
OF_THE_TENSOR = ("permuted", "profile", "rms")  # how stiff a weight is depends on the others


def _settings(arm: Arm, names: Sequence[str], rule: int) -> dict[str, int]:
    """Return what `update_cpu.cpp` reads of an arm whose state is ``names``, in the order in which it is passed."""
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
        "first": not {"exp_avg", "momentum_buffer"}.isdisjoint(names),
        "second": "exp_avg_sq" in names,
        "reference": "reference_avg" in names,
    }


SETTINGS = tuple(_settings(Arm(lr=1.0), (), 0))
DEFINITIONS = "".join([
    state_codec.DEFINITIONS,
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

# Lists hold the tensors that there are: in Python as in C++, an arm without a stiffness passes an empty one.
_REST = (
    "Tensor settings, Tensor numbers, Tensor constants, Tensor(c!)[] held, Tensor[] known, Tensor[] stiffness, "
    "int seed, int tensor, int step) -> ()"
)
torch.library.define("altgrad::arm_step", f"(Tensor(a!) p, Tensor g, Tensor(b!)[] moments, {_REST}")
torch.library.define(
    "altgrad::coded_arm_step",
    f"(Tensor(a!) p, Tensor g, Tensor(b!)[] moments, Tensor(d!)[] scales, Tensor[] codings, {_REST}",
)


@torch.library.register_fake("altgrad::arm_step")
@torch.library.register_fake("altgrad::coded_arm_step")
def _traced(*arguments: object) -> None:
    """Both operators return nothing."""


arm_step = torch.ops.altgrad.arm_step.default
coded_arm_step = torch.ops.altgrad.coded_arm_step.default


def takes(p: Tensor) -> bool:
    """Whether the loops can step a weight like ``p``, if its arm is one of theirs."""
    return p.device.type == "cpu" and p.dtype == torch.float32 and p.is_contiguous()


def available(arm: Arm, p: Tensor, grid: WeightGrid | None) -> bool:
    """Whether the loops can step ``p`` (out, in) by ``arm``; ``grid`` is None for an arm that looks at none."""
    one_scale = grid is None or grid.options.get("granularity", "tensor") == "tensor"
    of_the_tensor = arm.stiffness in OF_THE_TENSOR and BASES[arm.base].metric
    taken = takes(p) and one_scale and arm.stiffness != "row_rms" and not of_the_tensor and arm.schedule == "constant"
    taken = taken and arm.rounding != "selective" and BASES[arm.base].loops
    return taken and loops.load(SOURCE, definitions=DEFINITIONS) is None


class Loops:
    """The loops for one weight.

    Args:
        arm: its settings.
        names: of the tensors of its state, from `update.state_names`.
        grid: the weight's quantization grid.
        stiff: its stiffness, if the arm has one.
        order: the shuffle of the stiffness `permuted`.
        codings: how moments are stored as codes, by name.

    Attributes:
        reads_codes: whether `step` takes the codes; else it takes float32 moments.
    """

    def __init__(
        self, arm: Arm, names: Sequence[str], grid: WeightGrid, stiff: Stiffness | None = None,
        order: Tensor | None = None, codings: Mapping[str, Coding] | None = None,
    ) -> None:  # fmt: skip
        codings = codings or {}
        taken = not BASES[arm.base].metric and all(map(state_codec.takes, codings.values()))
        # What feedback takes of a momentum is known only when a pass over the weights has ended.
        taken = taken and not (arm.feedback and any(map(state_codec.measures, codings.values())))
        self.reads_codes = bool(codings) and taken
        self._names, self._nothing = names, grid.constants[:0]
        self._coded = [name for name in names if name in codings] if self.reads_codes else []
        self._codings = [
            state_codec.packed(name, codings[name]) if name in self._coded else self._nothing
            for name in names if name in MOMENTS
        ]  # fmt: skip
        rule = scale_rule(grid.options.get("scale_format", "float32"), grid.options.get("scale_rounding", "rceil"))
        self._settings = torch.tensor([*_settings(arm, names, rule).values()], dtype=torch.int32)
        self._held = [grid.held] if arm.weights == "quantized" else []
        self._sets_scale = grid.held
        self._constants = grid.constants
        stiffness = (None, None) if stiff is None else (stiff.constants, stiff.numbers)
        self._stiffness = [t for t in (*stiffness, order) if t is not None]

    def step(
        self, p: Tensor, g: Tensor, state: State, numbers: Tensor, stream: tuple[int, int, int],
        remembered: Tensor | None,
    ) -> None:  # fmt: skip
        """Do to ``p``, its state and its held amax what a rule of `update` does.

        Args:
            p: float32, or the codes (uint8) of a weight on its quantization grid, from `WeightGrid.to_stored`.
            g: the gradient.
            state: tensors by name; with ``reads_codes`` codes, scales and powers.
            numbers: of the step, from `step_numbers`.
            stream: seed, tensor and step of the random numbers, as `random.uniform` takes them.
            remembered: the amax (0-d float32) that sets the scale, None where it is that of ``p``.
        """
        known = remembered if self._sets_scale is None else self._sets_scale
        moments, codes = [state[name] for name in self._names], []
        if self._coded:
            scales = [state.get(name + part, self._nothing) for name in self._coded for part in (SCALE, POWER)]
            codes = [scales, self._codings]
        (coded_arm_step if codes else arm_step)(
            p, g.contiguous(), moments, *codes, self._settings, numbers, self._constants, self._held,
            [] if known is None else [known], self._stiffness, *stream,
        )  # fmt: skip
