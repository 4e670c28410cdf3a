"""The settings of an optimizer arm, an entry of ``optimizers:``, and which of them go together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import Field, model_validator

from altgrad.config.bases import BASES, MOMENTUM, PLAIN
from altgrad.config.section import FormatSetting, Section
from altgrad.config.state import State

Beta = Annotated[float, Field(ge=0, lt=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
LearningRate = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
Formula = Literal["ulp", "mantissa", "smooth", "range", "mean", "permuted", "foreign", "profile", "rms", "row_rms"]
Schedule = Literal["constant", "linear", "cosine"]

FORMULAS = get_args(Formula)
FORMAT_FREE = ("profile", "rms", "row_rms")  # formulas of the weights' sizes alone


def _of_base(setting: str) -> Any:
    """Return a default factory that looks ``setting`` up in the base of the arm."""
    return lambda settings: getattr(BASES[settings.get("base", "adamw")], setting)  # absent where it is none


if TYPE_CHECKING:
    BaseName = str
else:
    BaseName = Literal[tuple(BASES)]


class Arm(Section):
    """An optimizer arm: what happens to the weights of linear layers. Everything else takes the base's plain form.

    An arm that needs a format (a stiffness of its spacing, weights on its quantization grid) acts on the weights that
    have one. Any other, such as ``muon``, acts on the weights of all linear layers, quantized or not.

    Bases: ``adamw`` (Loshchilov & Hutter, ICLR 2019), ``sgd``, ``riemann_adam`` and ``riemann_sgd`` (Becigneul & Ganea,
    ICLR 2019, as in geoopt) on `FormatManifold`, ``rung`` (moves whole code steps, stochastically rounded), ``madam``
    (Bernstein et al., NeurIPS 2020: multiplicative), ``muon`` (Jordan et al. 2024: the momentum made orthogonal, at
    the size of AdamW's updates as Liu et al. 2025 have it).

    Decay is apart from the update, as Loshchilov and Hutter have it: ``weight_decay`` times the learning rate, as of
    torch's AdamW. In place of it ``decay`` and ``plain_decay`` say the shares themselves, so that arms whose learning
    rates mean different things keep equal shares of their weights. With a ``plain_lr`` of its own, embeddings and norms
    learn alike whatever is done to the weights, which makes arms comparable.
    """

    lr: LearningRate = Field(
        description="peak learning rate, which the cell's lr_scale multiplies; in rungs per step for rung, in log |w| "
        "for madam"
    )
    base: BaseName = Field("adamw", description="the optimizer")
    plain_lr: LearningRate | None = Field(
        None, description="peak learning rate of all but the weights of linear layers; default: lr"
    )
    betas: tuple[Beta, Beta] = Field(default_factory=_of_base("betas"), description="decay rates of the two moments")
    eps: float = Field(1e-8, ge=0, le=1, description="added to the root of the second moment")
    weight_decay: float | None = Field(
        None,
        ge=0,
        le=1e6,
        description="times the learning rate the share of a matrix that a step takes away, as of torch's AdamW; "
        "vectors do not decay; default: the base's, of its plain form where that acts",
    )
    decay: Decay | None = Field(
        None,
        description="in place of weight_decay: share of a linear layer's weight that a step at the peak learning rate "
        "takes away, whatever that is; others take as much less as their learning rate is lower",
    )
    plain_decay: Decay | None = Field(
        None, description="goes with decay: the same of other matrices, such as embeddings"
    )
    momentum: float = Field(
        default_factory=_of_base("momentum"), ge=0, lt=1, description="of sgd, riemann_sgd and muon, Nesterov's there"
    )
    stiffness: Formula | None = Field(None, description="formula; without one the arm does not look at the spacing")
    acts: Literal["gradient", "update"] = Field("update", description="before the moments or after them")
    power: int = Field(1, ge=1, le=2, description="of the stiffness; 2 with sgd is gradient descent in rungs")
    normalise: Literal["rms", "none"] = Field(
        "rms", description="what the stiffness of a tensor is divided by: its root mean square, or nothing"
    )
    foreign: FormatSetting | None = Field(None, description="the other format of stiffness: foreign")
    knee: float | None = Field(
        None, ge=0, le=62, description="stiffness: profile: where it levels off, in binades below the largest weight"
    )
    slope: float | None = Field(
        None, ge=0, le=2, description="stiffness: profile: the power of a weight's size that it follows above its knee"
    )
    schedule: Schedule = Field(
        "constant",
        description="of the exponent a of S^a over the run: 1 throughout, or from 1 to 0, where the arm has become its "
        "plain form",
    )
    match_rms: bool = Field(
        False, description="rescale the update to the root mean square of AdamW's, tensor by tensor"
    )
    weights: Literal["master", "quantized"] = Field(
        "master", description="what the optimizer keeps: float32 weights, or values on the quantization grid"
    )
    store: Literal["float32", "codes"] = Field(
        "float32",
        description="weights: quantized: what they lie in between steps; codes take a byte, and are not compiled",
    )
    rounding: Literal["nearest", "stochastic", "selective"] = Field(
        "nearest",
        description="weights: quantized: of what is written back; selective: stochastic where a step is below half the "
        "spacing at its weight, so that nearest would lose it, and nearest elsewhere",
    )
    feedback: Literal["momentum"] | None = Field(
        None,
        description="weights: quantized: the momentum makes up for what writing back rounded away, as in ECO (Nikdan "
        "et al. 2026); without it that is lost",
    )
    held_scale: Literal["fixed", "reestimated"] = Field(
        "reestimated",
        description="weights: quantized: the scale of the initial weights; or halved or doubled when the largest "
        "weight has left the range or its upper quarter",
    )
    max_rungs: int = Field(8, ge=1, le=1 << 15, description="rung: the most rungs that a weight moves in a step")
    state: State | None = Field(None, description="formats of the moments of all parameters; none: float32")

    @model_validator(mode="after")
    def _settings_go_together(self) -> Arm:
        base, row = self.base, BASES[self.base]
        if (self.decay is None) != (self.plain_decay is None):
            raise ValueError("decay and plain_decay need each other")
        if self.decay is not None and self.weight_decay is not None:
            raise ValueError("weight_decay times the learning rate and decay mean two shares; remove one of them")
        if (self.stiffness == "foreign") != (self.foreign is not None):
            raise ValueError("stiffness: foreign and foreign: FORMAT need each other")
        if {self.knee is not None, self.slope is not None} != {self.stiffness == "profile"}:
            raise ValueError("stiffness: profile and its knee and slope need each other")
        if self.stiffness == "rms" and (self.normalise == "rms" or self.match_rms):
            setting, off = ("match_rms", "false") if self.match_rms else ("normalise: rms", "none")
            raise ValueError(f"stiffness: rms is one number per tensor, which {setting} takes out; set it to {off}")
        if self.stiffness is None or row.metric:
            of_spacing = ("acts", "power") if row.metric else ("acts", "power", "normalise", "schedule")
            for name in of_spacing:
                if name in self.changed():
                    why = "takes its metric from the stiffness" if self.stiffness else "has no stiffness"
                    raise ValueError(f"{name}: {getattr(self, name)} means nothing to an arm that {why}; remove it")
        if row.metric and self.stiffness is None:
            raise ValueError(f"base {base} takes its metric from a stiffness; name a formula")
        if not self.has_own_step and base not in PLAIN:
            raise ValueError(f"base {base} without a stiffness would be its plain form; name a formula")
        if row.unit != "weight" and self.stiffness is not None:
            raise ValueError(f"base {base} has its own idea of a step; remove stiffness")
        if row.unit == "rungs" and self.weights != "quantized":
            raise ValueError(f"base {base} moves weights that live on the quantization grid; set weights: quantized")
        if row.unit == "rungs" and self.match_rms:
            raise ValueError(f"base {base} counts its steps in rungs; match_rms has nothing to match")
        if row.unit == "rungs" and self.rounding != "stochastic":
            raise ValueError(f"base {base} rounds its steps stochastically; set rounding: stochastic")
        if self.momentum and row.state != MOMENTUM:
            raise ValueError(f"base {base} has betas, no momentum")
        for name in ("betas", "eps"):
            if row.plain == "sgd" and not self.match_rms and name in self.changed():
                raise ValueError(f"base {base} has a momentum, no {name}; remove {name}")
        if row.unit != "rungs" and "max_rungs" in self.changed():
            raise ValueError(f"max_rungs is of base rung, not {base}; remove it")
        for name in ("rounding", "store", "feedback", "held_scale"):
            if self.weights == "master" and name in self.changed():
                what = f"{name}: {getattr(self, name)} is of weights on the quantization grid"
                raise ValueError(f"{what}; set weights: quantized or remove it")
        if self.feedback and (base not in PLAIN or self.stiffness is not None or self.match_rms):
            raise ValueError("feedback: momentum is of adamw and sgd, without stiffness and match_rms; remove it")
        if self.feedback and not (self.momentum if row.state == MOMENTUM else self.betas[0]):
            raise ValueError("feedback: momentum needs one; set momentum, or with adamw the first of betas, above 0")
        self._require_kept_state()
        return self

    def _require_kept_state(self) -> None:
        kept = {*BASES[self.base].state, *BASES[BASES[self.base].plain].state}
        if not self.momentum:
            kept.discard(*MOMENTUM)
        for name, held in (("m", {"exp_avg", *MOMENTUM}), ("v", {"exp_avg_sq"})):
            if self.state is not None and getattr(self.state, name) is not None and not kept & held:
                without = " without momentum" if name == "m" else ""
                raise ValueError(f"base {self.base}{without} keeps no {name}; remove state.{name}")

    @property
    def has_own_step(self) -> bool:
        """Whether the arm moves any weight unlike its plain form."""
        return self.stiffness is not None or self.weights == "quantized" or BASES[self.base].own_step

    @property
    def needs_format(self) -> bool:
        """Whether the arm moves only weights that have a format unlike its plain form."""
        return self.weights == "quantized" or self.stiffness not in (None, *FORMAT_FREE)

    @property
    def weight_decays(self) -> tuple[float, float]:
        """``weight_decay``, or its default: of the weights that the arm acts on, and of its plain form."""
        row = BASES[self.base]
        own, plain = row.weight_decay, BASES[row.plain].weight_decay
        return (own, plain) if self.weight_decay is None else (self.weight_decay, self.weight_decay)

    @property
    def shares(self) -> tuple[float, float]:
        """The shares of a linear layer's weight and of an embedding that a step at the peak rate takes away."""
        if self.decay is not None and self.plain_decay is not None:
            return self.decay, self.plain_decay
        own, plain = self.weight_decays
        return self.lr * own, (self.lr if self.plain_lr is None else self.plain_lr) * plain

    @property
    def plain_form(self) -> Arm:
        """What steps all that the arm does not treat by its quantization grid."""
        shared = ("lr", "betas", "eps", "momentum", "state")
        row = BASES[self.base]
        kept = {name: getattr(self, name) for name in shared if name != "momentum" or row.plain == "sgd"}
        return Arm(base=row.plain, **kept)

    @property
    def has_adam_moments(self) -> bool:
        """Whether the arm's own moments are those of AdamW on the same gradients."""
        untouched = self.feedback is None and (self.stiffness is None or self.acts == "update")
        return BASES[self.base].direction == "adam" and untouched
