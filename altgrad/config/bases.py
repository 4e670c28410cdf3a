"""The base optimizers of arms, a row each; `altgrad.optim` has their formulas, and its ADD_A_BASE.md adds a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ADAM = ("exp_avg", "exp_avg_sq")
MOMENTUM = ("momentum_buffer",)  # kept where the arm has a momentum, which no other base takes


@dataclass(frozen=True)
class Base:
    """A base optimizer; see the fields. The last three are defaults of an arm, which are those of the base's source."""

    direction: str  # how a step's direction comes from the gradient, which bases may share
    state: tuple[str, ...]  # float32 tensors of a weight's shape that it keeps between steps
    plain: Literal["adamw", "sgd"]  # what moves all else: embeddings, norms, linear layers that are not quantized
    unit: Literal["weight", "rungs", "log"] = "weight"  # of the learning rate: a stiffness goes with the first
    own_step: bool = False  # moves the weights of linear layers unlike its plain form even without a stiffness
    metric: bool = False  # takes the stiffness S for a metric 1/S², along which it carries its first moment
    loops: bool = True  # update_cpu.cpp has its direction
    momentum: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0  # per unit of the learning rate


# Sources of the defaults: torch.optim's AdamW, SGD and Muon (which has Jordan's momentum), geoopt's RiemannianAdam and
# RiemannianSGD, Bernstein's Madam. Rungs are of this project; their rate counts steps, which no decay is a share of.
BASES = {
    "adamw": Base("adam", ADAM, plain="adamw", weight_decay=0.01),
    "sgd": Base("momentum", MOMENTUM, plain="sgd"),
    "riemann_adam": Base("riemann_adam", ADAM, plain="adamw", metric=True),
    "riemann_sgd": Base("momentum", MOMENTUM, plain="sgd", metric=True),
    "rung": Base("adam", ADAM, plain="adamw", unit="rungs", own_step=True),
    "madam": Base("madam", ("exp_avg_sq",), plain="adamw", unit="log", own_step=True),
    "muon": Base("orthogonal", MOMENTUM, "adamw", own_step=True, loops=False, momentum=0.95, weight_decay=0.1),
}
PLAIN = [name for name, base in BASES.items() if base.plain == name]
