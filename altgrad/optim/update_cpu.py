"""C++ loops for an optimizer step on a CPU: `update_cpu.cpp` computes what `update` defines, in half the time.

The loops do not take six things, which the rules of `update` compute: weights with more than one scale, the stiffness
`row_rms`, a stiffness on a schedule, selective rounding, Muon's matrix products, and a metric whose stiffness depends
on the whole tensor. Other devices, and machines without a C++ compiler, use the rules for everything.
"""

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
OF_THE_TENSOR = ("permuted", "profile", "rms")  # formulas in which a weight's stiffness depends on other weights


def _settings(arm: Arm, names: Sequence[str], rule: int) -> dict[str, int]:
    """Return the settings for `update_cpu.cpp`, in their order; ``names``: state tensors; ``rule``: of the scale."""
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

# A list argument is empty if the arm has no such tensors: without a stiffness, ``stiffness`` is [].
torch.library.define(
    "altgrad::arm_step",
    "(Tensor(a!) p, Tensor g, Tensor(b!)[] moments, Tensor(d!)[] scales, Tensor[] codings, Tensor settings, "
    "Tensor numbers, Tensor constants, Tensor(c!)[] held, Tensor[] known, Tensor[] stiffness, int seed, int tensor, "
    "int step) -> ()",
)
torch.library.register_fake("altgrad::arm_step", lambda *arguments: None)
arm_step = torch.ops.altgrad.arm_step.default


def takes(p: Tensor) -> bool:
    """Whether device, dtype and layout of ``p`` suit the loops: a CPU, float32, contiguous."""
    return p.device.type == "cpu" and p.dtype == torch.float32 and p.is_contiguous()


def available(arm: Arm, p: Tensor, grid: WeightGrid | None) -> bool:
    """Whether the loops can step ``p`` (out, in) by ``arm``; ``grid``: its quantization grid, or None."""
    one_scale = grid is None or grid.options.get("granularity", "tensor") == "tensor"
    of_the_tensor = arm.stiffness in OF_THE_TENSOR and BASES[arm.base].metric
    taken = takes(p) and one_scale and arm.stiffness != "row_rms" and not of_the_tensor and arm.schedule == "constant"
    taken = taken and arm.rounding != "selective" and BASES[arm.base].loops
    return taken and loops.load(SOURCE, definitions=DEFINITIONS) is None


class Loops:
    """The C++ loops, set up for one weight.

    Args:
        arm: the optimizer settings.
        names: names of the weight's state tensors, from `update.state_names`.
        grid: the weight's quantization grid.
        stiff: the weight's stiffness; None if the arm has none.
        order: the shuffle of the stiffness `permuted`, else None.
        codings: the coding of each moment stored as codes, by name.

    Attributes:
        reads_codes: `step` takes moments as codes if true, as float32 if false.
    """

    def __init__(
        self, arm: Arm, names: Sequence[str], grid: WeightGrid, stiff: Stiffness | None = None,
        order: Tensor | None = None, codings: Mapping[str, Coding] | None = None,
    ) -> None:  # fmt: skip
        codings = codings or {}
        taken = not BASES[arm.base].metric and all(map(state_codec.takes, codings.values()))
        # Error feedback changes the momentum after its scales are measured, so both do not go together.
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
        """Update ``p``, its state and its held amax in place, as a rule of `update` does.

        Args:
            p: the weight in float32, or its uint8 codes from `WeightGrid.to_stored`.
            g: the gradient.
            state: state tensors by name; if ``reads_codes``, also codes, scales and powers.
            numbers: the step's hyperparameters, from `step_numbers`.
            stream: seed, parameter number and step for the random numbers, as `random.uniform` takes them.
            remembered: the amax (0-d float32) that sets the scale; None means the current amax of ``p``.
        """
        known = remembered if self._sets_scale is None else self._sets_scale
        scales = [state.get(name + part, self._nothing) for name in self._coded for part in (SCALE, POWER)]
        arm_step(
            p, g.contiguous(), [state[name] for name in self._names], scales, self._codings, self._settings, numbers,
            self._constants, self._held, [] if known is None else [known], self._stiffness, *stream,
        )  # fmt: skip
