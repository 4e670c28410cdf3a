"""The settings of an optimizer arm, and which of them go together."""

from __future__ import annotations

from dataclasses import dataclass

from altgrad.formats import Format
from altgrad.optim.stiffness import FORMULAS, SCHEDULES

BASES = ("adamw", "sgd", "riemann_adam", "riemann_sgd", "rung", "madam")
ADAPTIVE = ("adamw", "riemann_adam", "rung", "madam")  # what they leave plain is AdamW's
OWN_UNIT = ("rung", "madam")  # their learning rate is in rungs, or in log |w|
RIEMANNIAN = ("riemann_adam", "riemann_sgd")


@dataclass(frozen=True)
class Arm:
    """An optimizer arm: what happens to quantized weights. Everything else takes the base's plain form.

    Attributes:
        base: ``adamw`` (Loshchilov & Hutter, ICLR 2019), ``sgd``, ``riemann_adam`` and
            ``riemann_sgd`` (Becigneul & Ganea, ICLR 2019, as in geoopt) on `FormatManifold`, ``rung`` (moves whole
            rungs, stochastically rounded), ``madam`` (Bernstein et al., NeurIPS 2020: multiplicative).
        lr: peak learning rate; rungs per step for ``rung``.
        plain_lr: that of everything but the weights of linear layers; None: ``lr``. With one of its own, embeddings
            and norms learn alike whatever is done to the weights, which makes arms comparable.
        betas: decay rates of the moments.
        eps: added to the root of the second moment.
        decay: share of a linear layer's weight that a step at the peak learning rate takes away; other steps take as
            much less as their learning rate is lower. It is apart from the update (Loshchilov & Hutter, ICLR 2019)
            and from ``lr``, so that arms whose learning rates mean different things keep equal shares.
        plain_decay: the same of other matrices, such as embeddings. Vectors do not decay.
        momentum: of ``sgd`` and ``riemann_sgd``.
        stiffness: formula, or None: the arm does not look at the grid.
        acts: on the ``gradient`` before the moments or on the ``update`` after them.
        power: of the stiffness; 2 with ``sgd`` is gradient descent in rungs.
        normalise: ``rms`` divides stiffness by its root mean square over the tensor, so that a learning rate means
            what it means without; ``none``.
        foreign: the other format of the formula of that name.
        schedule: of the exponent a of ``S^a``, S the stiffness, over the run: 1 throughout (``constant``), or from 1
            to 0 (``linear``, ``cosine``), where the arm has become its plain form.
        match_rms: rescale the update to the root mean square of AdamW's, per tensor.
        weights: ``master`` (float32) or ``grid``: weights are representable values all the time.
        rounding: of what is written back to the grid, ``nearest`` or ``stochastic``.
        grid_scale: ``fixed`` by the initial weights, or ``reestimated``: halved or doubled when the largest weight
            has left the range of the grid or its upper quarter.
        max_rungs: most rungs that ``rung`` moves a weight in a step.
    """

    lr: float
    base: str = "adamw"
    plain_lr: float | None = None
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    decay: float = 3e-4
    plain_decay: float = 1.2e-3
    momentum: float = 0.0
    stiffness: str | None = None
    acts: str = "update"
    power: int = 1
    normalise: str = "rms"
    foreign: str | Format | None = None
    schedule: str = "constant"
    match_rms: bool = False
    weights: str = "master"
    rounding: str = "nearest"
    grid_scale: str = "reestimated"
    max_rungs: int = 8

    def __post_init__(self) -> None:
        for name, choices in (
            ("base", BASES), ("acts", ("gradient", "update")), ("normalise", ("rms", "none")), ("schedule", SCHEDULES),
            ("weights", ("master", "grid")), ("rounding", ("nearest", "stochastic")),
            ("grid_scale", ("fixed", "reestimated")),
        ):  # fmt: skip
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} {getattr(self, name)!r} is none of {', '.join(choices)}")
        if self.stiffness is not None and self.stiffness not in FORMULAS:
            raise ValueError(f"stiffness {self.stiffness!r} is none of {', '.join(FORMULAS)}")
        if not self.lr > 0 or not (self.plain_lr is None or self.plain_lr > 0):
            raise ValueError("lr and plain_lr must be above 0")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas {self.betas} must be from 0 to below 1")
        if not (0 <= self.decay < 1 and 0 <= self.plain_decay < 1):
            raise ValueError("decay and plain_decay are shares of a weight per step, from 0 to below 1")
        if self.eps < 0 or not 0 <= self.momentum < 1 or self.max_rungs < 1:
            raise ValueError("eps must be 0 or more, momentum from 0 to below 1, max_rungs 1 or more")
        self._check_combination()

    def _check_combination(self) -> None:
        if (self.stiffness == "foreign") != (self.foreign is not None):
            raise ValueError("stiffness: foreign and foreign: FORMAT need each other")
        if self.stiffness is None or self.base in RIEMANNIAN:
            for name, default in (("acts", "update"), ("power", 1)):
                if getattr(self, name) != default:
                    why = "takes its metric from the stiffness" if self.stiffness else "has no stiffness"
                    raise ValueError(f"{name}: {getattr(self, name)} means nothing to an arm that {why}; remove it")
        if self.base in RIEMANNIAN and self.stiffness is None:
            raise ValueError(f"base {self.base} takes its metric from a stiffness; name a formula")
        if self.base in ("rung", "madam") and self.stiffness is not None:
            raise ValueError(f"base {self.base} has its own idea of a step; remove stiffness")
        if self.base == "rung" and self.weights != "grid":
            raise ValueError("base rung moves weights that live on the grid; set weights: grid")
        if self.base == "rung" and self.match_rms:
            raise ValueError("base rung counts its steps in rungs; match_rms has nothing to match")
        if self.base == "rung" and self.rounding != "stochastic":
            raise ValueError("base rung rounds its steps stochastically; set rounding: stochastic")
        if self.base not in ("sgd", "riemann_sgd") and self.momentum:
            raise ValueError(f"base {self.base} has betas, no momentum")
        if self.weights == "master" and self.rounding != "nearest":
            raise ValueError("rounding is that of weights on the grid; set weights: grid or remove it")

    @property
    def looks_at_grid(self) -> bool:
        """Whether quantized weights are treated unlike others."""
        return self.stiffness is not None or self.weights == "grid" or self.base in ("rung", "madam")

    @property
    def has_adam_moments(self) -> bool:
        """Whether the arm's own moments are those of AdamW on the same gradients."""
        return self.base == "rung" or (self.base == "adamw" and (self.stiffness is None or self.acts == "update"))
