"""The update rule of each arm: a function that steps one weight tensor in place, in eager mode or compiled.

A rule takes weight, gradient, state, hyperparameters and format as tensors. So one compiled graph serves every format,
layer and step; a Python float would be a constant of the graph. On a CPU `update_cpu` computes the same faster.

In signatures, ``p`` is the weight, ``g`` its gradient and ``h`` the step's hyperparameters, from `step_numbers`.
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

# Muon's Newton-Schulz iteration: five steps take singular values between 0 and 1 to about 1.
MUON_STEPS, MUON_COEFFICIENTS, MUON_EPS = 5, (3.4445, -4.7750, 2.0315), 1e-7
MUON_RMS = 0.2  # root mean square of Muon's update, about that of AdamW's in training (Liu et al. 2025)
MADAM_CLIP = 10.0  # bound of |g| / sqrt(v), as in Bernstein's code: large after a run of small gradients
# The held amax doubles if the weights' amax exceeds GROWS_ABOVE times it, and halves below SHRINKS_BELOW times it. A
# factor of two keeps all normal values of the quantization grid. The gap between the two bounds avoids oscillation.
GROWS_ABOVE, SHRINKS_BELOW = 1.0, 0.25

# Indices into the tensor of a step's hyperparameters.
LR, DECAY, BETA1, BETA2, UNBIAS1, UNBIAS2, EPS, MOMENTUM, MAX_RUNGS, EXPONENT, UNBIAS_LATER = range(11)


class GridTensors(NamedTuple):
    """A weight's quantization grid and stiffness, as tensors for an update rule.

    Attributes:
        constants: the format's constants, from `refined_constants`.
        stiff_constants: the constants of the stiffness's format, from `Stiffness`; None without a stiffness.
        numbers: the parameters of the stiffness, from `Stiffness`; None without a stiffness.
        order: the shuffle of the stiffness `permuted`, else None.
        remembered: the amax that sets the scale; None means the weight's current amax.
        options: keyword arguments of `operand_scale`.
        stream: this step's random stream, as `uniform` takes it; None if nothing is rounded stochastically.
        held: the scale's amax of a weight stored on the grid, a buffer of one element; None for master weights.
    """

    constants: Tensor
    stiff_constants: Tensor | None
    numbers: Tensor | None
    order: Tensor | None
    remembered: Tensor | None
    options: dict[str, Any]
    stream: Tensor | None
    held: Tensor | None


NO_GRID = GridTensors(*[None] * 8)  # type: ignore[arg-type] # for a weight without a grid
State = dict[str, Tensor]
Rule = Callable[[Tensor, Tensor, State, Tensor, GridTensors], None]


def state_names(arm: Arm, reference: bool) -> tuple[str, ...]:
    """Return the names of a weight's state tensors, such as ``("exp_avg", "exp_avg_sq")``; each has its shape.

    With ``reference`` or RMS matching, an arm without Adam moments also keeps AdamW's.
    """
    names = tuple(name for name in BASES[arm.base].state if arm.momentum or name != "momentum_buffer")
    needs_reference = (reference or arm.match_rms) and not arm.has_adam_moments
    return (*names, *(("reference_avg", "reference_avg_sq") if needs_reference else ()))


def rule_of(arm: Arm, reference: bool) -> Rule:
    """Return the update rule of ``arm``, called with the state tensors that `state_names` names."""
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
    """Return the weight after a step of ``arm``, before rounding to the grid. ``state`` advances; ``p`` stays."""
    if "reference_avg" in state:
        _moments(state["reference_avg"], state["reference_avg_sq"], g, h)
    return _target(arm, p, g, state, h, grid, _factor(arm, p, h, grid), rounded=False)


def unbias_later(beta: float, step: float) -> float:
    """Return the mean of Adam's bias corrections over all steps after ``step``, weighted by ``beta^k``.

    The mean is ``(1 - beta) / beta`` times the sum over k from 1 of ``beta^k / (1 - beta^(step + k))``, computed as a
    series in ``beta^(step + 1)``.
    """
    terms = int(math.log(1e-9) / ((step + 1) * math.log(beta))) + 1 if beta else 1
    return sum((1 - beta) * beta ** (j * (step + 1)) / (1 - beta ** (j + 1)) for j in range(terms))


def adamw_direction(state: State, h: Tensor) -> Tensor:
    """Return ``m / (sqrt(v) + eps)``, bias-corrected, from AdamW's moments in ``state`` (the reference if kept)."""
    name = "reference" if "reference_avg" in state else "exp"
    return _adam(state[f"{name}_avg"], state[f"{name}_avg_sq"], h)


# --- parts -----------------------------------------------------------------------------------------


def _factor(arm: Arm, p: Tensor, h: Tensor, grid: GridTensors, at: Tensor | None = None) -> Tensor | None:
    """Return ``S^a`` at ``at`` (default ``p``), divided by RMS(``S^a``) at ``p`` if the arm normalises.

    S is the stiffness and a the schedule's exponent; a = 0 gives 1, the plain update. None without a stiffness.
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
    rounded: bool = True,
) -> Tensor:  # fmt: skip
    """Advance the moments and return the new weight; ``rounded``: base `rung` moves by whole code steps."""
    step, unit = _step(arm, p, g, state, h, factor), BASES[arm.base].unit
    if arm.match_rms:
        size = _rms(step * p if unit == "log" else step)
        step = step * (_rms(adamw_direction(state, h)) / size).nan_to_num(nan=1.0, posinf=1.0)
    if unit == "rungs":
        return _moved_rungs(p, step, h, grid, rounded)
    if unit == "log":
        return p * h[DECAY] * torch.exp(-h[LR] * step)
    return p * h[DECAY] - h[LR] * step


def _step(arm: Arm, p: Tensor, g: Tensor, state: State, h: Tensor, factor: Tensor | None) -> Tensor:
    """Advance the moments and return the step before the learning rate; the weight moves against it."""
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
            step = _orthogonal(g + step * h[MOMENTUM])  # Nesterov's momentum
    if power is not None and arm.acts == "update" and not base.metric:
        step = power * step
    return step


def _moments(m: Tensor, v: Tensor, g: Tensor, h: Tensor) -> None:
    m.copy_(m + (g - m) * (1 - h[BETA1]))
    v.copy_(v * h[BETA2] + g * g * (1 - h[BETA2]))


def _adam(m: Tensor, v: Tensor, h: Tensor) -> Tensor:
    return m * h[UNBIAS1] / ((v * h[UNBIAS2]).sqrt() + h[EPS])


def _orthogonal(m: Tensor) -> Tensor:
    """Return ``m`` (out, in) with all singular values near 1, rescaled to RMS `MUON_RMS`, as AdamW's updates have.

    Muon (Jordan et al. 2024) with the scale of Liu et al. 2025 (arXiv:2502.16982), in float32 instead of bfloat16.
    """
    a, b, c = MUON_COEFFICIENTS
    tall = m.shape[0] > m.shape[1]
    x = (m.mT if tall else m) / m.norm().clamp_min(MUON_EPS)
    for _ in range(MUON_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return (x.mT if tall else x) * (MUON_RMS * max(m.shape) ** 0.5)


def _transport(arm: Arm, p: Tensor, target: Tensor, state: State, h: Tensor, grid: GridTensors, factor: Tensor) -> None:
    """Transport the first moment from ``p`` to ``target`` in place: times ``S(target) / S(p)``."""
    first, there = state.get("momentum_buffer", state.get("exp_avg")), _factor(arm, p, h, grid, at=target)
    if first is not None and there is not None:
        first.copy_(first * (there / factor))


def _moved_rungs(p: Tensor, step: Tensor, h: Tensor, grid: GridTensors, rounded: bool) -> Tensor:
    """Return ``p`` after ``step``, clipped to ``max_rungs``, and decay; ``rounded`` stochastically to code steps."""
    scale = _scale_of(_held(grid).max(), grid)
    u = coordinate(p * scale, grid.constants).round()
    wanted = (-h[LR] * step).clamp(-h[MAX_RUNGS], h[MAX_RUNGS])
    wanted = wanted + (coordinate(p * h[DECAY] * scale, grid.constants) - u)
    moved = (wanted + _random(p, grid)).floor() if rounded else wanted
    return at_coordinate(u + moved, grid.constants) / scale


def _held(grid: GridTensors) -> Tensor:
    assert grid.held is not None
    return grid.held


def _random(t: Tensor, grid: GridTensors) -> Tensor:
    assert grid.stream is not None
    return uniform(t.shape, grid.stream)


def _scale_of(amax: Tensor, grid: GridTensors) -> Tensor:
    """Return the scale that ``amax`` (0-d) gives a weight stored on the grid."""
    kind = {name: grid.options[name] for name in ("scale_format", "scale_rounding") if name in grid.options}
    return scale_from_amax(amax, grid.constants, **kind)


def _written_back(arm: Arm, p: Tensor, target: Tensor, grid: GridTensors) -> Tensor:
    """Return ``target``, the new value of ``p``, rounded to the quantization grid.

    With ``held_scale: reestimated`` the held amax first doubles or halves if needed. Rounding is as the arm says.
    """
    held = _held(grid)
    amax, present = held.max(), target.abs().amax()
    if arm.held_scale == "reestimated":
        amax = torch.where(present > amax * GROWS_ABOVE, 2 * amax, amax)
        amax = torch.where(present < amax * SHRINKS_BELOW, 0.5 * amax, amax)
    amax = torch.where(amax > 0, amax, present)  # all weights began at zero
    held.copy_(amax.expand_as(held))
    scale = _scale_of(amax, grid)
    nearest = round_to_grid(target * scale, grid.constants)
    if arm.rounding == "nearest" or BASES[arm.base].unit == "rungs":
        return nearest / scale
    stochastic = round_to_grid_stochastic(target * scale, grid.constants, _random(target, grid))
    if arm.rounding == "selective":
        spacing = grid_spacing(p * scale, grid.constants)
        stochastic = torch.where(((target - p) * scale).abs() < spacing / 2, stochastic, nearest)
    return stochastic / scale


def _feed_back(arm: Arm, target: Tensor, written: Tensor, state: State, h: Tensor, grid: GridTensors) -> None:
    """Subtract the scaled rounding error from the momentum (ECO, Nikdan et al. 2026, arXiv:2601.22101).

    The momentum m moves a weight by ``-rate (beta + beta^2 + ...) m`` in later steps, with one ``rate`` per element.
    Subtracting ``(1 - beta) / (beta rate)`` times ``target - written`` keeps ``w - rate beta / (1 - beta) m`` as it is
    without rounding. Clipping at the format's largest value does not count as error.
    """
    top = grid.constants[MAX] / _scale_of(_held(grid).max(), grid)
    error = torch.maximum(torch.minimum(target, top), -top) - written
    if "momentum_buffer" in state:
        m, beta, rate = state["momentum_buffer"], h[MOMENTUM], h[LR]
    else:
        m, beta = state["exp_avg"], h[BETA1]
        rate = h[LR] * h[UNBIAS_LATER] / ((state["exp_avg_sq"] * h[UNBIAS2]).sqrt() + h[EPS])
    lost = error * (1 - beta) / (beta * rate)
    m.copy_(m - torch.where(lost.isfinite(), lost, 0.0))  # a rate of zero: no feedback


def _rms(t: Tensor) -> Tensor:
    """Return the root mean square, 0-d float32. It sums in float64: compiled float32 sums are off by 1e-6."""
    return t.square().mean(dtype=torch.float64).sqrt().float()
