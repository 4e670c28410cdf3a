"""Parameter groups: their settings, the hyperparameters of a step, and torch's AdamW and SGD for the plain form."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from altgrad.config.arms import ADAM, BASES, MOMENTUM, Arm
from altgrad.optim import update
from altgrad.optim.sharded import parts
from altgrad.optim.stiffness import exponent

#: The keys that a parameter group may have.
SETTINGS = ("params", "lr", "weight_decay", "betas", "eps", "momentum", "quantized")


def initial_groups(
    arm: Arm, quantized: Sequence[nn.Parameter], linear: Sequence[nn.Parameter], plain: Iterable[nn.Parameter]
) -> tuple[list[dict[str, Any]], float]:
    """Return the nonempty parameter groups, and the learning rate of embeddings, norms and biases.

    Args:
        arm: the optimizer settings.
        quantized: weights that the arm moves differently from its plain form.
        linear: other weights of linear layers.
        plain: all other parameters; parameters that are also in ``linear`` are skipped here.
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
    """Return a copy of ``group`` with missing settings filled in; add the names of its named parameters to ``names``.

    Missing settings are those of ``arm``, and ``lr``. Raises ``ValueError`` as `ArmOptimizer.add_param_group` does.
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
    """Return the factor that decay multiplies a weight by in this step: ``1 - lr * weight_decay``."""
    return 1 - float(group["lr"]) * float(group["weight_decay"])


def step_numbers(group: dict[str, Any], arm: Arm, step: float, steps: int, refinement: int) -> Tensor:
    """Return the hyperparameters of a step as an (11,) float32 tensor, indexed by `update.LR`, `update.DECAY` etc.

    Args:
        group: the weight's parameter group.
        arm: the optimizer settings.
        step: number of the step, from 1.
        steps: number of steps in the run.
        refinement: grid steps per code step of the format, a factor of a rung arm's ``lr`` and ``max_rungs``.
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
    """Return ``decay / lr``, a ``weight_decay``; ``default`` if ``decay`` is None, and 0 if ``lr`` is 0."""
    if decay is None:
        return default
    return decay / float(lr) if lr else 0.0


# --- the plain form -----------------------------------------------------------------------------------


def step_adamw(
    group: dict[str, Any], params: list[nn.Parameter], states: list[dict[str, Tensor]], sharded: bool
) -> None:
    """Step ``params`` of ``group``, all with gradients, by torch's fused AdamW; of a sharded one, the local part."""
    beta1, beta2 = group["betas"]
    # The fused step ignores strides: a tensor whose strides differ from its state's is copied.
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
    """Step ``params`` of ``group``, all with gradients, by SGD; ``states`` is read only if the group has momentum."""
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
    """Return ``t``, copied if its strides differ from those of ``like``, a tensor without gaps."""
    return t if t.stride() == like.stride() else torch.empty_like(like).copy_(t)
