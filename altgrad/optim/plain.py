"""The plain forms, AdamW and SGD, which step a group of parameters at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from altgrad.config.arms import ADAM, MOMENTUM
from altgrad.optim.groups import share_kept
from altgrad.optim.sharded import parts


def step_adamw(
    group: dict[str, Any], present: list[nn.Parameter], states: list[dict[str, Tensor]], sharded: bool
) -> None:
    """Step those ``present`` of ``group`` by torch's fused AdamW; what of them is sharded, in part."""
    beta1, beta2 = group["betas"]
    # It goes through memory in one order, whatever the strides: what lies otherwise than its state is copied.
    own, gradients = parts(present, sharded), parts([p.grad for p in present], sharded)
    moments, squares = (parts([state[name] for state in states], sharded) for name in ADAM)
    weights = own
    if not all(map(Tensor.is_contiguous, (*own, *gradients, *moments))):
        weights, gradients = (list(map(_laid_out, ts, moments)) for ts in (own, gradients))
    adamw(
        weights, gradients, moments, squares, [],
        [s["step"] for s in states], fused=True, amsgrad=False, beta1=beta1, beta2=beta2, lr=group["lr"],
        weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
    )  # fmt: skip
    if weights is not own:
        for p, w in zip(own, weights, strict=True):
            if w is not p:
                p.copy_(w)


def step_sgd(
    group: dict[str, Any], present: list[nn.Parameter], states: list[dict[str, Tensor]], sharded: bool
) -> None:
    """Step those ``present`` of ``group`` by SGD; ``states`` are read where the group has a momentum."""
    if not present:
        return
    weights, steps = parts(present, sharded), parts([p.grad for p in present], sharded)
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
