"""Groups of parameters: their settings, the numbers of a step, and torch's AdamW and SGD for the plain form."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from altgrad.config.arms import ADAM, BASES, MOMENTUM, Arm
from altgrad.optim import update
from altgrad.optim.sharded import parts
from altgrad.optim.stiffness import exponent

#: What a group may say.
SETTINGS = ("params", "lr", "weight_decay", "betas", "eps", "momentum", "quantized")


def initial_groups(
    arm: Arm, quantized: Sequence[nn.Parameter], linear: Sequence[nn.Parameter], plain: Iterable[nn.Parameter]
) -> tuple[list[dict[str, Any]], float]:
    """Return the groups that are not empty, and the learning rate of embeddings, norms and biases.

    Args:
        arm: the settings.
        quantized: weights that the arm steps unlike its plain form.
        linear: other weights of linear layers.
        plain: all other parameters; those of ``linear`` among them are left out.
    """
    inside = set(linear)
    plain = [p for p in plain if p not in inside]
    plain_lr = arm.lr if arm.plain_lr is None else arm.plain_lr
    linear_lr = arm.lr if BASES[arm.base].unit == "weight" else plain_lr
    own_decay, plain_decay = arm.weight_decays
    groups = [
        {"params": list(quantized), "lr": arm.lr, "weight_decay": _per_rate(arm.decay, arm.lr, own_decay),
         "quantized": True},
        {"params": list(linear), "lr": linear_lr, "weight_decay": _per_rate(arm.decay, linear_lr, plain_decay)},
        {"params": [p for p in plain if p.ndim >= 2], "lr": plain_lr},
        {"params": [p for p in plain if p.ndim < 2], "lr": plain_lr},
    ]  # fmt: skip
    return [group for group in groups if group["params"]], plain_lr


def completed(group: dict[str, Any], arm: Arm, lr: float, names: dict[nn.Parameter, str]) -> dict[str, Any]:
    """Return ``group`` with the arm's settings for what it lacks; add its named parameters to ``names``.

    Raises ``ValueError`` as `ArmOptimizer.add_param_group` says.
    """
    group = dict(group)
    params = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
    names.update((p[1], p[0]) for p in params if isinstance(p, tuple))
    params = group["params"] = [p[1] if isinstance(p, tuple) else p for p in params]
    if unknown := group.keys() - SETTINGS:
        known = ", ".join(SETTINGS)
        raise ValueError(f"no setting {sorted(unknown)[0]!r} of a group of parameters; there are {known}")
    quantized = group.setdefault("quantized", False)
    for p in params:
        if quantized and p.dtype == torch.float16:
            raise ValueError(
                f"a weight of shape {tuple(p.shape)} is float16, in which its updates are lost: keep parameters in "
                "float32 and use autocast, or have them in bfloat16"
            )
    matrices = all(p.ndim >= 2 for p in params)
    group.setdefault("lr", lr)
    decay = _per_rate(arm.plain_decay, group["lr"], arm.weight_decays[1]) if matrices else 0.0
    group.setdefault("weight_decay", decay)
    group["fused"] = BASES[arm.base].plain == "adamw" and not quantized
    return {"betas": arm.betas, "eps": arm.eps, "momentum": arm.momentum, **group}


def share_kept(group: dict[str, Any]) -> float:
    """Return the share of a weight that the decay of this step leaves."""
    return 1 - float(group["lr"]) * float(group["weight_decay"])


def step_numbers(group: dict[str, Any], arm: Arm, step: float, steps: int, refinement: int) -> Tensor:
    """Return the numbers that `update` reads, float32, at the places that it names.

    Args:
        group: of the weight.
        arm: its settings.
        step: from 1.
        steps: of the run.
        refinement: of the weight's quantization grid; settings in rungs count code steps of the format.
    """
    beta1, beta2 = group["betas"]
    numbers = [0.0] * 11
    per_rung = refinement if BASES[arm.base].unit == "rungs" else 1
    numbers[update.LR] = group["lr"] * per_rung
    numbers[update.DECAY] = share_kept(group)
    numbers[update.BETA1], numbers[update.BETA2] = beta1, beta2
    numbers[update.UNBIAS1], numbers[update.UNBIAS2] = 1 / (1 - beta1**step), 1 / (1 - beta2**step)
    numbers[update.EPS], numbers[update.MOMENTUM] = group["eps"], group["momentum"]
    numbers[update.MAX_RUNGS] = arm.max_rungs * per_rung
    numbers[update.UNBIAS_LATER] = update.unbias_later(beta1, step) if arm.feedback else 0.0
    numbers[update.EXPONENT] = exponent(arm.schedule, min(1.0, (step - 1) / max(1, steps - 1)))
    return torch.tensor(numbers, dtype=torch.float32)


def _per_rate(decay: float | None, lr: float, default: float) -> float:
    """Return the ``weight_decay`` whose share at the rate ``lr`` is ``decay``, or the ``default``; 0 at rate 0."""
    if decay is None:
        return default
    return decay / float(lr) if lr else 0.0


# --- the plain form -----------------------------------------------------------------------------------


def step_adamw(
    group: dict[str, Any], params: list[nn.Parameter], states: list[dict[str, Tensor]], sharded: bool
) -> None:
    """Step ``params`` of ``group``, which have gradients, by torch's fused AdamW; sharded ones in part."""
    beta1, beta2 = group["betas"]
    # It goes through memory in one order, whatever the strides. A tensor with other strides than its state is copied.
    weights, gradients = parts(params, sharded), parts([p.grad for p in params], sharded)
    moments, squares = (parts([state[name] for state in states], sharded) for name in ADAM)
    laid_out = weights
    if not all(map(Tensor.is_contiguous, (*weights, *gradients, *moments))):
        laid_out, gradients = (list(map(_laid_out, ts, moments)) for ts in (weights, gradients))
    adamw(
        laid_out, gradients, moments, squares, [],
        [s["step"] for s in states], fused=True, amsgrad=False, beta1=beta1, beta2=beta2, lr=group["lr"],
        weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
    )  # fmt: skip
    for p, w in zip(weights, laid_out, strict=True) if laid_out is not weights else ():
        if w is not p:
            p.copy_(w)


def step_sgd(group: dict[str, Any], params: list[nn.Parameter], states: list[dict[str, Tensor]], sharded: bool) -> None:
    """Step ``params`` of ``group``, which have gradients, by SGD; ``states`` are read if the group has a momentum."""
    if not params:
        return
    weights, steps = parts(params, sharded), parts([p.grad for p in params], sharded)
    if group["momentum"]:
        moments = parts([state[MOMENTUM[0]] for state in states], sharded)
        torch._foreach_mul_(moments, group["momentum"])
        torch._foreach_add_(moments, steps)
        steps = moments
    torch._foreach_mul_(weights, share_kept(group))
    torch._foreach_add_(weights, steps, alpha=-float(group["lr"]))


def _laid_out(t: Tensor, like: Tensor) -> Tensor:
    """Return ``t`` with the strides of ``like``, which has no gaps."""
    return t if t.stride() == like.stride() else torch.empty_like(like).copy_(t)
