"""What training keeps in memory for each parameter, by the tensors that are allocated."""

from __future__ import annotations

from torch import nn

from altgrad.model import linear_layers
from altgrad.optim import ArmOptimizer
from altgrad.optim.coded import POWER, SCALE
from altgrad.optim.grids import quantizer_of
from altgrad.optim.sharded import local
from altgrad.optim.stored import stored_bytes

ROLES = {"exp_avg": "m", "momentum_buffer": "m", "exp_avg_sq": "v"}


def bytes_per_parameter(model: nn.Module, optimizer: ArmOptimizer) -> dict[str, float]:
    """Return bytes per parameter, by role, and their sum as ``bytes_per_parameter``; of what this process has.

    ``bytes_masters``: weights in full precision that a product quantizes anew; ``bytes_weights``: all others.
    ``bytes_m`` and ``bytes_v`` have the scales of codes with them, and ``bytes_other_state`` what else an optimizer
    keeps, such as the moments of AdamW beside an arm's. Gradients are there after a step.
    """
    quantized = {layer.weight for layer in linear_layers(model).values() if quantizer_of(layer, "weight") is not None}
    held, count = dict.fromkeys(("weights", "masters", "grads", "m", "v", "other_state"), 0), 0
    for p in model.parameters():
        master = p in quantized and not optimizer.holds(p)
        held["masters" if master else "weights"] += stored_bytes(local(p))
        held["grads"] += 0 if p.grad is None else local(p.grad).nbytes
        count += local(p).numel()
        for name, t in optimizer.state.get(p, {}).items():
            role = ROLES.get(name.removesuffix(SCALE).removesuffix(POWER), "other_state")
            held[role] += local(t).nbytes
    return {f"bytes_{name}": total / count for name, total in held.items()} | {
        "bytes_per_parameter": sum(held.values()) / count
    }
