"""The model's settings: a preset by its sizes or by weights to start from, and what a resolved cell has of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, create_model, model_validator

from altgrad.config.section import Section

LEAST_CONTEXT = 8

# A setting of the model and not of the machine, since a sum over several threads has other bits.
THREADS = Field(1, ge=1, le=4096, description="CPU threads of a cell, which decide its last bits")


class Model(Section):
    """A GPT: its size. The vocabulary comes from the tokenizer."""

    layers: int = Field(ge=1, le=200, description="transformer blocks")
    width: int = Field(ge=8, le=32_768, description="features of a token between the blocks")
    heads: int = Field(ge=1, le=256, description="of the attention; they divide the width")
    context: int = Field(ge=LEAST_CONTEXT, le=131_072, description="tokens per sequence")
    mlp_ratio: float = Field(4.0, gt=0, le=16, description="hidden units of a block's MLP, as a multiple of the width")
    dropout: float = Field(0.0, ge=0, lt=1, description="share of the activations that are dropped in training")
    bias: bool = Field(False, description="of linear layers and norms; GPT-2 has them")
    gelu: Literal["exact", "tanh"] = Field("exact", description="tanh is the approximation that GPT-2 has")
    threads: int = THREADS

    @property
    def sizes(self) -> dict[str, Any]:
        """What the model itself is made with, apart from its vocabulary."""
        return {name: getattr(self, name) for name in Model.model_fields if name != "threads"}

    @model_validator(mode="after")
    def _heads_divide_width(self) -> Model:
        if self.width % self.heads:
            near = [h for h in range(1, self.width + 1) if self.width % h == 0]
            nearest = min(near, key=lambda h: abs(h - self.heads))
            raise ValueError(
                f"width {self.width} is not divisible by heads {self.heads}; "
                f"use heads: {nearest} or width: {-(-self.width // self.heads) * self.heads}"
            )
        if round(self.mlp_ratio * self.width) < 1:
            raise ValueError(f"mlp_ratio {self.mlp_ratio} leaves no hidden unit at width {self.width}; use 4")
        return self


if TYPE_CHECKING:

    class ModelFrom(Section):
        """A GPT that starts from published weights; the checker knows it without `from`, which is a keyword."""

        context: int | None
        dropout: float
        threads: int

else:
    ModelFrom = create_model(
        "ModelFrom", __base__=Section,
        __doc__="A GPT that starts from weights in GPT-2's published layout, whose config.json says its size.",
        **{"from": (str, Field(min_length=1, description="folder with config.json and model.safetensors"))},
        context=(int | None, Field(
            None, ge=LEAST_CONTEXT, description="tokens per sequence; default, and most: the weights' own"
        )),
        dropout=(float, Field(0.0, ge=0, lt=1, description="share of the activations that are dropped in training")),
        threads=(int, THREADS),
    )  # fmt: skip


def _kind_of_model(preset: Any) -> str:
    """Return whether a preset is given by its sizes or by the folder that it starts from."""
    return "from" if isinstance(preset, ModelFrom) or (isinstance(preset, dict) and "from" in preset) else "sizes"


Preset = Annotated[
    Annotated[Model, Tag("sizes")] | Annotated[ModelFrom, Tag("from")], Discriminator(_kind_of_model)
]  # fmt: skip


class Lora(Section):
    """Low-rank adapters of the blocks' linear layers, trained in place of their weights, which are frozen.

    LoRA (arXiv:2106.09685), on weights in whatever a recipe says of them (QLoRA, arXiv:2305.14314).
    """

    rank: int = Field(ge=1, le=4096, description="columns of B and rows of A")
    alpha: float = Field(gt=0, le=1e6, description="alpha / rank is what B A is multiplied by")


class Start(Section):
    """The weights that a cell starts from, as they were when it was resolved."""

    folder: str
    sha256: str = Field(description="of model.safetensors")
    vocab_size: int


class CellModel(Model):
    """The model of a resolved cell."""

    start: Start | None = None
