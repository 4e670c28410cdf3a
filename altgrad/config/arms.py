"""The settings of an optimizer arm (an entry of ``optimizers:``), its base optimizers, and which settings go together.

`altgrad.optim` has the formulas of the bases. Its ADD_A_BASE.md says how to add a base.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import Field

from altgrad.config.base import FormatSetting, Settings
from altgrad.config.state import State

ADAM = ("exp_avg", "exp_avg_sq")
MOMENTUM = ("momentum_buffer",)  # only bases with this state take a momentum; at momentum 0 nothing is kept


@dataclass(frozen=True)
class Base:
    """A base optimizer. ``momentum``, ``betas`` and ``weight_decay`` are an arm's defaults, from the base's source."""

    direction: str  # name of the formula that makes a step's direction from the gradient; bases may share a formula
    state: tuple[str, ...]  # float32 tensors of a weight's shape that the base keeps between steps
    plain: Literal["adamw", "sgd"]  # updates everything else: embeddings, norms, linear layers without a format
    unit: Literal["weight", "rungs", "log"] = "weight"  # unit of the learning rate; a stiffness needs "weight"
    own_step: bool = False  # updates weights of linear layers unlike its plain form even without a stiffness
    metric: bool = False  # uses the stiffness S as a metric 1/S², and transports its first moment along this metric
    loops: bool = True  # update_cpu.cpp computes the direction too
    momentum: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0  # per unit of the learning rate


# Sources of the defaults: torch.optim's AdamW, SGD and Muon (which has Jordan's momentum), geoopt's RiemannianAdam and
# RiemannianSGD, Bernstein's Madam. `rung` is this project's; its rate counts code steps, which cannot scale a decay.
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

Decay = Annotated[float, Field(ge=0, lt=1)]
LearningRate = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
Formula = Literal["ulp", "mantissa", "smooth", "range", "mean", "permuted", "foreign", "profile", "rms", "row_rms"]

FORMULAS = get_args(Formula)
OF_FLOATS = ("mantissa", "smooth")  # formulas that need mantissa bits
FORMAT_FREE = ("profile", "rms", "row_rms")  # formulas of the weights' sizes alone

if TYPE_CHECKING:
    BaseName = str
else:
    BaseName = Literal[tuple(BASES)]


def _of_base(setting: str) -> Any:
    """Return a default factory for ``setting``: the value that the arm's base has for it."""
    return lambda settings: getattr(BASES[settings.get("base", "adamw")], setting)  # no base if its name was refused


class Arm(Settings):
    """An optimizer arm: how the weights of linear layers move. Everything else moves by the base's plain form.

    An arm that needs a format (a stiffness of its spacing, weights on its quantization grid) acts on the weights that
    have one. Any other, such as ``muon``, acts on the weights of all linear layers, quantized or not.

    Bases: ``adamw`` (Loshchilov & Hutter, ICLR 2019), ``sgd``, ``riemann_adam`` and ``riemann_sgd`` (Becigneul & Ganea,
    ICLR 2019, as in geoopt) on `FormatManifold`, ``rung`` (moves whole code steps, stochastically rounded), ``madam``
    (Bernstein et al., NeurIPS 2020: multiplicative), ``muon`` (Jordan et al. 2024: an orthogonal momentum, scaled to
    AdamW's updates as in Liu et al. 2025).

    Decay is decoupled from the update (Loshchilov & Hutter). A step takes away a share of each weight: ``weight_decay``
    times the learning rate, as in torch's AdamW. ``decay`` and ``plain_decay`` state the shares themselves, so arms
    whose learning rates differ in meaning keep equal shares of their weights. With a ``plain_lr`` embeddings and norms
    learn at the same rate in every arm, which makes arms comparable.
    """

    lr: LearningRate = Field(
        description="peak learning rate, which the cell's lr_scale multiplies; base rung: rungs per step; base madam: "
        "step of log |w|"
    )
    base: BaseName = Field("adamw", description="the base optimizer")
    plain_lr: LearningRate | None = Field(
        None, description="peak learning rate of everything but the weights of linear layers; default: lr"
    )
    betas: tuple[Decay, Decay] = Field(default_factory=_of_base("betas"), description="decay rates of the two moments")
    eps: float = Field(1e-8, ge=0, le=1, description="added to the root of the second moment")
    weight_decay: float | None = Field(
        None, ge=0, le=1e6,
        description="share of a matrix that a step takes away, per unit of the learning rate, as in torch's AdamW; "
        "vectors do not decay; default: that of the base, or of its plain form where that acts",
    )  # fmt: skip
    decay: Decay | None = Field(
        None,
        description="instead of weight_decay: share of a linear layer's weight that a step at the peak learning rate "
        "takes away; other steps take less, in proportion to their learning rate",
    )
    plain_decay: Decay | None = Field(None, description="with decay: the same for other matrices, such as embeddings")
    momentum: float = Field(
        default_factory=_of_base("momentum"), ge=0, lt=1,
        description="bases sgd, riemann_sgd and muon: decay rate of the momentum, which is Nesterov's in muon",
    )  # fmt: skip
    stiffness: Formula | None = Field(
        None, description="formula of the factor of each weight's update; none: the arm does not look at the spacing"
    )
    acts: Literal["gradient", "update"] = Field(
        "update", description="what the stiffness multiplies: the gradient before the moments, or the update after them"
    )
    power: int = Field(1, ge=1, le=2, description="power of the stiffness; 2 with sgd is gradient descent in rungs")
    normalise: Literal["rms", "none"] = Field(
        "rms", description="divide the stiffness of a tensor by its root mean square, or by nothing"
    )
    foreign: FormatSetting | None = Field(None, description="stiffness: foreign: the format that it is taken from")
    knee: float | None = Field(
        None, ge=0, le=62, description="stiffness: profile: where it levels off, in binades below the largest weight"
    )
    slope: float | None = Field(
        None, ge=0, le=2, description="stiffness: profile: above the knee it is a weight's size to this power"
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant",
        description="exponent a of the stiffness S^a over the run: 1 throughout, or falling from 1 to 0, where the arm "
        "is its plain form",
    )
    match_rms: bool = Field(
        False, description="rescale the update of each tensor to the root mean square of AdamW's update"
    )
    weights: Literal["master", "quantized"] = Field(
        "master", description="what the optimizer keeps: float32 weights, or values on the quantization grid"
    )
    store: Literal["float32", "codes"] = Field(
        "float32", description="weights: quantized: how they are stored between steps; codes take a byte each, and "
        "are not compiled",
    )  # fmt: skip
    rounding: Literal["nearest", "stochastic", "selective"] = Field(
        "nearest",
        description="weights: quantized: how a new weight is rounded; selective: stochastically where a step is below "
        "half the spacing at its weight, so that nearest would lose it, and to nearest elsewhere",
    )
    feedback: Literal["momentum"] | None = Field(
        None, description="weights: quantized: add the rounding error to the momentum, as in ECO (Nikdan et al. 2026); "
        "none: it is lost",
    )  # fmt: skip
    held_scale: Literal["fixed", "reestimated"] = Field(
        "reestimated",
        description="weights: quantized: keep the scale of the initial weights; or halve or double it when the largest "
        "weight has left the range or its upper quarter",
    )
    max_rungs: int = Field(8, ge=1, le=1 << 15, description="base rung: the most rungs that a weight moves in a step")
    state: State | None = Field(None, description="formats of the moments of all parameters; none: float32")

    def mistakes(self) -> Iterator[str]:
        """Yield a sentence for each setting that contradicts another one."""
        base, row = f"base {self.base}", BASES[self.base]
        changed = self.changed()
        for names, unused, why in self._unused_settings():
            yield from (f"{name}: {getattr(self, name)} {why}" for name in names if unused and name in changed)
        if (self.decay is None) != (self.plain_decay is None):
            yield "decay and plain_decay need each other"
        if self.decay is not None and self.weight_decay is not None:
            yield "weight_decay times the learning rate and decay mean two shares; remove one of them"
        if (self.stiffness == "foreign") != (self.foreign is not None):
            yield "stiffness: foreign and foreign: FORMAT need each other"
        if {self.knee is not None, self.slope is not None} != {self.stiffness == "profile"}:
            yield "stiffness: profile and its knee and slope need each other"
        if self.stiffness == "rms" and self.match_rms:
            yield "stiffness: rms is one number per tensor, which match_rms takes out; set it to false"
        if self.stiffness == "rms" and self.normalise == "rms":
            yield "stiffness: rms is one number per tensor, which normalise: rms takes out; set it to none"
        if row.metric and self.stiffness is None:
            yield f"{base} takes its metric from a stiffness; name a formula"
        if not self.has_own_step and self.base not in PLAIN:
            yield f"{base} without a stiffness would be its plain form; name a formula"
        if row.unit != "weight" and self.stiffness is not None:
            yield f"{base} has its own unit of a step, which no stiffness scales; remove stiffness"
        if row.unit == "rungs" and self.weights != "quantized":
            yield f"{base} moves weights that live on the quantization grid; set weights: quantized"
        if row.unit == "rungs" and self.match_rms:
            yield f"{base} counts its steps in rungs; match_rms has nothing to match"
        if row.unit == "rungs" and self.rounding != "stochastic":
            yield f"{base} rounds its steps stochastically; set rounding: stochastic"
        if self.feedback and (self.base not in PLAIN or self.stiffness is not None or self.match_rms):
            yield "feedback: momentum is of adamw and sgd, without stiffness and match_rms; remove it"
        if self.feedback and not (self.momentum if row.state == MOMENTUM else self.betas[0]):
            yield "feedback: momentum needs one; set momentum, or with adamw the first of betas, above 0"
        kept = {*row.state, *BASES[row.plain].state} - (set() if self.momentum else {*MOMENTUM})
        if self.state is not None and self.state.m is not None and not kept & {"exp_avg", *MOMENTUM}:
            yield f"{base} without momentum keeps no m; remove state.m"
        if self.state is not None and self.state.v is not None and "exp_avg_sq" not in kept:
            yield f"{base} keeps no v; remove state.v"

    def _unused_settings(self) -> Iterator[tuple[tuple[str, ...], bool, str]]:
        """Yield (names, unused, message): settings that only some arms use, and whether this arm leaves them unused."""
        row, nothing = BASES[self.base], "means nothing to an arm that"
        of_stiffness = ("acts", "power", "normalise", "schedule")
        yield of_stiffness, self.stiffness is None, f"{nothing} has no stiffness; remove it"
        yield ("acts", "power"), row.metric, f"{nothing} takes its metric from the stiffness; remove it"
        yield ("momentum",), row.state != MOMENTUM, f"{nothing} has base {self.base}; remove it, or set betas"
        without_moments = row.plain == "sgd" and not self.match_rms
        yield ("betas", "eps"), without_moments, f"{nothing} has base {self.base}; remove it, or set momentum"
        yield ("max_rungs",), row.unit != "rungs", f"is of base rung, not {self.base}; remove it"
        why = "is of weights on the quantization grid; set weights: quantized or remove it"
        yield ("rounding", "store", "feedback", "held_scale"), self.weights == "master", why

    @property
    def has_own_step(self) -> bool:
        """Whether the arm updates any weight differently than its `plain_form` does."""
        return self.stiffness is not None or self.weights == "quantized" or BASES[self.base].own_step

    @property
    def needs_format(self) -> bool:
        """Whether the arm acts only on weights that have a format. Its `plain_form` then updates all others."""
        return self.weights == "quantized" or self.stiffness not in (None, *FORMAT_FREE)

    @property
    def weight_decays(self) -> tuple[float, float]:
        """Weight decay per unit of the learning rate: (for weights that the arm acts on, for all others)."""
        row = BASES[self.base]
        own, plain = row.weight_decay, BASES[row.plain].weight_decay
        return (own, plain) if self.weight_decay is None else (self.weight_decay, self.weight_decay)

    @property
    def shares(self) -> tuple[float, float]:
        """The shares that decay removes in a step at the peak rate: (of a linear layer's weight, of an embedding)."""
        if self.decay is not None and self.plain_decay is not None:
            return self.decay, self.plain_decay
        own, plain = self.weight_decays
        return self.lr * own, (self.lr if self.plain_lr is None else self.plain_lr) * plain

    @property
    def plain_form(self) -> Arm:
        """The AdamW or SGD arm that updates everything on which this arm does not act."""
        shared = ("lr", "betas", "eps", "momentum", "state")
        row = BASES[self.base]
        kept = {name: getattr(self, name) for name in shared if name != "momentum" or row.plain == "sgd"}
        return Arm(base=row.plain, **kept)

    @property
    def has_adam_moments(self) -> bool:
        """Whether the arm's moments equal the moments of AdamW for the same gradients."""
        untouched = self.feedback is None and (self.stiffness is None or self.acts == "update")
        return BASES[self.base].direction == "adam" and untouched
