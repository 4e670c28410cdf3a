"""What a step does to one weight tensor: a function of tensors, in place, for eager mode and for the compiler.

A rule gets the weight, its gradient, its state and the numbers of the step, and everything about the format as
tensors, so that one compiled graph serves every format, layer and step. The numbers of the step are float32 tensors
too; a Python float would be compiled into the graph. On a CPU `update_cpu` does the same in less time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from altgrad.config.arms import BASES, Arm
from altgrad.numerics import (
    at_coordinate,
    coordinate,
    grid_spacing,
    operand_scale,
    round_to_grid,
    round_to_grid_stochastic,
    scale_from_amax,
    uniform,
)
from altgrad.numerics.constants import MAX
from altgrad.optim.stiffness import evaluate

# Of Newton and Schulz's iteration in Muon, for singular values from 0 to 1: five steps take them to about 1.
MUON_STEPS, MUON_COEFFICIENTS, MUON_EPS = 5, (3.4445, -4.7750, 2.0315), 1e-7
MUON_RMS = 0.2  # of its update, which is AdamW's in training (Liu et al. 2025)
MADAM_CLIP = 10.0  # of g / sqrt(v), as in Bernstein's code; it holds back the first steps after a quiet time
# A quantization grid whose amax changes by a factor of two keeps all its normal values; by any other factor, rounding
# to nearest would multiply every weight by it. It shrinks late, so that it does not go to and fro.
GROWS_ABOVE, SHRINKS_BELOW = 1.0, 0.25

# Places in the tensor of a step's numbers.
LR, DECAY, BETA1, BETA2, UNBIAS1, UNBIAS2, EPS, MOMENTUM, MAX_RUNGS, EXPONENT, UNBIAS_LATER = range(11)


class GridTensors(NamedTuple):
    """A weight's quantization grid as a rule sees it.

    ``constants`` and ``stiff_constants`` from `format_constants`, ``numbers`` and ``order`` from `Stiffness`,
    ``remembered`` the amax that sets the scale or None, ``options`` of `operand_scale`, ``stream`` of this step's
    random numbers as `uniform` takes it, ``held`` the buffer of the amax of weights on the quantization grid.
    """

    constants: Tensor
    stiff_constants: Tensor | None
    numbers: Tensor | None
    order: Tensor | None
    remembered: Tensor | None
    options: dict[str, Any]
    stream: Tensor | None
    held: Tensor | None


NO_GRID = GridTensors(*[None] * 8)  # type: ignore[arg-type] # of an arm that looks at none
State = dict[str, Tensor]
Rule = Callable[[Tensor, Tensor, State, Tensor, GridTensors], None]


def state_names(arm: Arm, reference: bool) -> tuple[str, ...]:
    """Return the float32 tensors of a weight's shape that ``arm`` keeps between steps."""
    own = tuple(name for name in BASES[arm.base].state if arm.momentum or name != "momentum_buffer")
    needs_reference = (reference or arm.match_rms) and not arm.has_adam_moments
    return (*own, *(("reference_avg", "reference_avg_sq") if needs_reference else ()))


def rule_of(arm: Arm, reference: bool) -> Rule:
    """Return the rule of ``arm``; with ``reference`` it also keeps AdamW's moments where they are not its own."""
    keeps_reference = "reference_avg" in state_names(arm, reference)

    def rule(p: Tensor, g: Tensor, state: State, h: Tensor, grid: GridTensors) -> None:
        factor = _factor(arm, p, h, grid)
        if keeps_reference:
            _moments(state["reference_avg"], state["reference_avg_sq"], g, h)
        target = _target(arm, p, g, state, h, grid, factor)
        if factor is not None and BASES[arm.base].metric:
            _transport(arm, p, target, state, h, grid, factor)
        written = target if arm.weights == "master" else _written_back(arm, p, target, grid)
        if arm.feedback:
            _feed_back(arm, target, written, state, h, grid)
        p.copy_(written)

    return rule


def wanted(arm: Arm, p: Tensor, g: Tensor, state: State, h: Tensor, grid: GridTensors) -> Tensor:
    """Return where a step of ``arm`` puts ``p`` before it is rounded to its quantization grid; ``state`` advances."""
    if "reference_avg" in state:
        _moments(state["reference_avg"], state["reference_avg_sq"], g, h)
    return _target(arm, p, g, state, h, grid, _factor(arm, p, h, grid), whole=False)


def unbias_later(beta: float, step: float) -> float:
    """Return the mean of Adam's bias corrections of all steps after ``step``, weighted as a momentum fades.

    That is ``(1 - beta) / beta`` times the sum over k from 1 of ``beta^k / (1 - beta^(step + k))``: as a series of the
    powers of ``beta^(step + 1)``, which ends sooner the later the step.
    """
    terms = int(math.log(1e-9) / ((step + 1) * math.log(beta))) + 1 if beta else 1
    return sum((1 - beta) * beta ** (j * (step + 1)) / (1 - beta ** (j + 1)) for j in range(terms))


def adamw_direction(state: State, h: Tensor) -> Tensor:
    """Return ``m / (sqrt(v) + eps)``, bias-corrected, from the moments of plain gradients in ``state``."""
    own = "reference_avg" not in state
    m, v = (state["exp_avg"], state["exp_avg_sq"]) if own else (state["reference_avg"], state["reference_avg_sq"])
    return _adam(m, v, h)


# --- parts -----------------------------------------------------------------------------------------


def _factor(arm: Arm, p: Tensor, h: Tensor, grid: GridTensors, at: Tensor | None = None) -> Tensor | None:
    """Return ``S^a`` at ``p``, or ``at`` another point, over that of the tensor ``p``.

    S is the stiffness, and a the schedule's exponent: at 0 the factor is 1, and the arm its plain form.
    """
    formula, constants, numbers = arm.stiffness, grid.stiff_constants, grid.numbers
    if formula is None or constants is None or numbers is None:
        return None
    scale = operand_scale(p, grid.constants, grid.remembered, **grid.options)

    def of(t: Tensor) -> Tensor:
        dim = grid.options.get("dim", -1)
        found = evaluate(formula, t, scale, constants, numbers, grid.order, dim)
        return found if arm.schedule == "constant" else found.pow(h[EXPONENT])

    found = of(p)
    unit = _rms(found) if arm.normalise == "rms" else 1.0
    return (found if at is None else of(at)) / unit


def _target(
    arm: Arm, p: Tensor, g: Tensor, state: State, h: Tensor, grid: GridTensors, factor: Tensor | None, *,
    whole: bool = True,
) -> Tensor:  # fmt: skip
    """Advance the moments and return the weight after the step; not ``whole``: of rungs parts too."""
    step, unit = _step(arm, p, g, state, h, factor), BASES[arm.base].unit
    if arm.match_rms:
        size = _rms(step * p if unit == "log" else step)
        step = step * (_rms(adamw_direction(state, h)) / size).nan_to_num(nan=1.0, posinf=1.0)
    if unit == "rungs":
        return _moved_rungs(p, step, h, grid, whole)
    if unit == "log":
        return p * h[DECAY] * torch.exp(-h[LR] * step)
    return p * h[DECAY] - h[LR] * step


def _step(arm: Arm, p: Tensor, g: Tensor, state: State, h: Tensor, factor: Tensor | None) -> Tensor:
    """Advance the moments and return the direction of the step, before the learning rate."""
    base, power = BASES[arm.base], factor if factor is None or arm.power == 1 else factor.square()
    if factor is not None and base.metric:
        g = factor.square() * g
    elif power is not None and arm.acts == "gradient":
        g = power * g
    if base.direction == "adam":
        _moments(state["exp_avg"], state["exp_avg_sq"], g, h)
        step = _adam(state["exp_avg"], state["exp_avg_sq"], h)
    elif base.direction == "riemann_adam":
        assert factor is not None
        m, v = state["exp_avg"], state["exp_avg_sq"]
        m.copy_(m * h[BETA1] + g * (1 - h[BETA1]))
        v.copy_(v * h[BETA2] + (g / factor).square() * (1 - h[BETA2]))  # the square of a length under the metric
        step = _adam(m, v, h)
    elif base.direction == "madam":
        v = state["exp_avg_sq"]
        v.copy_(v * h[BETA2] + g * g * (1 - h[BETA2]))
        ratio = (g / (v * h[UNBIAS2]).sqrt()).nan_to_num(nan=0.0).clamp(-MADAM_CLIP, MADAM_CLIP)
        step = ratio * p.sign()
    else:
        step = g
        if arm.momentum:
            step = state["momentum_buffer"]
            step.copy_(step * h[MOMENTUM] + g)
        if base.direction == "orthogonal":
            step = _orthogonal(g + step * h[MOMENTUM])  # Nesterov's; of its size nothing is left
    if power is not None and arm.acts == "update" and not base.metric:
        step = power * step
    return step


def _moments(m: Tensor, v: Tensor, g: Tensor, h: Tensor) -> None:
    m.copy_(m + (g - m) * (1 - h[BETA1]))
    v.copy_(v * h[BETA2] + g * g * (1 - h[BETA2]))


def _adam(m: Tensor, v: Tensor, h: Tensor) -> Tensor:
    return m * h[UNBIAS1] / ((v * h[UNBIAS2]).sqrt() + h[EPS])


def _orthogonal(m: Tensor) -> Tensor:
    """Return ``m`` (out, in) with its singular values taken to about 1, times what gives it AdamW's root mean square.

    Muon (Jordan et al. 2024) with the scale of Liu et al. 2025 (arXiv:2502.16982), in float32; theirs is in bfloat16.
    """
    a, b, c = MUON_COEFFICIENTS
    tall = m.shape[0] > m.shape[1]
    x = (m.mT if tall else m) / m.norm().clamp_min(MUON_EPS)
    for _ in range(MUON_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return (x.mT if tall else x) * (MUON_RMS * max(m.shape) ** 0.5)


def _transport(arm: Arm, p: Tensor, target: Tensor, state: State, h: Tensor, grid: GridTensors, factor: Tensor) -> None:
    """Carry the first moment along to ``target``: the same number of rungs there."""
    first, there = state.get("momentum_buffer", state.get("exp_avg")), _factor(arm, p, h, grid, at=target)
    if first is not None and there is not None:
        first.copy_(first * (there / factor))


def _moved_rungs(p: Tensor, step: Tensor, h: Tensor, grid: GridTensors, whole: bool) -> Tensor:
    """Return the weight after its rungs, ``max_rungs`` at most, and the decay; ``whole``: a number by chance."""
    scale = _scale_of(_held(grid).max(), grid)
    u = coordinate(p * scale, grid.constants).round()
    wanted = (-h[LR] * step).clamp(-h[MAX_RUNGS], h[MAX_RUNGS])
    wanted = wanted + (coordinate(p * h[DECAY] * scale, grid.constants) - u)
    moved = (wanted + _random(p, grid)).floor() if whole else wanted
    return at_coordinate(u + moved, grid.constants) / scale


def _held(grid: GridTensors) -> Tensor:
    """Return the buffer of the amax of weights that live on the quantization grid."""
    assert grid.held is not None
    return grid.held


def _random(t: Tensor, grid: GridTensors) -> Tensor:
    """Return this step's random numbers, in the shape of ``t``."""
    assert grid.stream is not None
    return uniform(t.shape, grid.stream)


def _scale_of(amax: Tensor, grid: GridTensors) -> Tensor:
    """Return the one scale of weights whose largest magnitude on the quantization grid is ``amax`` (0-d)."""
    kind = {name: grid.options[name] for name in ("scale_format", "scale_rounding") if name in grid.options}
    return scale_from_amax(amax, grid.constants, **kind)


def _written_back(arm: Arm, p: Tensor, target: Tensor, grid: GridTensors) -> Tensor:
    """Return ``target``, where a step takes ``p``, on the quantization grid.

    The grid's scale is changed first where that is asked for and due.
    """
    held = _held(grid)
    amax, present = held.max(), target.abs().amax()
    if arm.held_scale == "reestimated":
        amax = torch.where(present > amax * GROWS_ABOVE, 2 * amax, amax)
        amax = torch.where(present < amax * SHRINKS_BELOW, 0.5 * amax, amax)
    amax = torch.where(amax > 0, amax, present)  # of weights that all began at zero
    held.copy_(amax.expand_as(held))
    scale = _scale_of(amax, grid)
    nearest = round_to_grid(target * scale, grid.constants)
    if arm.rounding == "nearest" or BASES[arm.base].unit == "rungs":
        return nearest / scale
    by_chance = round_to_grid_stochastic(target * scale, grid.constants, _random(target, grid))
    if arm.rounding == "selective":
        spacing = grid_spacing(torch.minimum((p * scale).abs(), grid.constants[MAX]), grid.constants)
        by_chance = torch.where(((target - p) * scale).abs() < spacing / 2, by_chance, nearest)
    return by_chance / scale


def _feed_back(arm: Arm, target: Tensor, written: Tensor, state: State, h: Tensor, grid: GridTensors) -> None:
    """Have the momentum make up for what rounding took of ``target`` (ECO, Nikdan et al. 2026, arXiv:2601.22101).

    What a momentum m still moves a weight by is ``-rate (beta + beta^2 + ...) m``, with ``rate`` that of this element:
    ``w - rate beta / (1 - beta) m`` goes its way as if nothing had been rounded when m loses
    ``(1 - beta) / (beta rate)`` times the error. What of a weight lies beyond the largest value is no error.
    """
    top = grid.constants[MAX] / _scale_of(_held(grid).max(), grid)
    error = torch.maximum(torch.minimum(target, top), -top) - written
    if "momentum_buffer" in state:
        m, beta, rate = state["momentum_buffer"], h[MOMENTUM], h[LR]
    else:
        m, beta = state["exp_avg"], h[BETA1]
        rate = h[LR] * h[UNBIAS_LATER] / ((state["exp_avg_sq"] * h[UNBIAS2]).sqrt() + h[EPS])
    lost = error * (1 - beta) / (beta * rate)
    m.copy_(m - torch.where(lost.isfinite(), lost, 0.0))  # at a rate of zero nothing comes back


def _rms(t: Tensor) -> Tensor:
    """Return the root mean square; compiled sums in float32 are 1e-6 off, which a step would take along."""
    return t.square().mean(dtype=torch.float64).sqrt().float()
