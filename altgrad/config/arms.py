"""An entry of ``optimizers:``. What the settings do is in ``altgrad.optim.Arm``, which also says which go together."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from altgrad.config.section import Name, Section

Beta = Annotated[float, Field(ge=0, lt=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
LearningRate = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]


class Arm(Section):
    """An optimizer arm. Learning rates are peaks; the cell's ``lr_scale`` multiplies ``lr``, and nothing else here."""

    renamed: ClassVar[dict[str, str]] = {
        "weight_decay": (
            "decay and plain_decay, the shares of a weight that a step at the peak learning rate takes away: "
            "write decay: lr x weight_decay, and plain_decay: plain_lr x weight_decay"
        )
    }

    base: Literal["adamw", "sgd", "riemann_adam", "riemann_sgd", "rung", "madam"] = "adamw"
    lr: LearningRate
    plain_lr: LearningRate | None = Field(None, description="of all but the weights of linear layers; default: as lr")
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0, le=1)
    decay: Decay = Field(3e-4, description="share of a linear layer's weight that a step at the peak takes away")
    plain_decay: Decay = Field(1.2e-3, description="the same of other matrices, such as embeddings; vectors keep all")
    momentum: float = Field(0.0, ge=0, lt=1, description="of sgd and riemann_sgd")
    stiffness: Literal["ulp", "mantissa", "smooth", "range", "mean", "permuted", "foreign"] | None = None
    acts: Literal["gradient", "update"] = Field("update", description="before the moments or after them")
    power: int = Field(1, ge=1, le=2, description="of the stiffness")
    normalise: Literal["rms", "none"] = Field("rms", description="what the stiffness of a tensor is divided by")
    foreign: Name | None = Field(None, description="the other format of stiffness: foreign")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="of the stiffness' exponent")
    match_rms: bool = Field(False, description="rescale updates to the size of AdamW's, per tensor")
    weights: Literal["master", "grid"] = Field("master", description="float32, or representable values all the time")
    rounding: Literal["nearest", "stochastic"] = Field("nearest", description="weights: grid: of the write-back")
    grid_scale: Literal["fixed", "reestimated"] = Field("reestimated", description="weights: grid: the grid's scale")
    max_rungs: int = Field(8, ge=1, le=127, description="rung: most rungs in a step")
