"""The settings of an optimizer's state that is stored in a format: section ``state`` of an arm."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from altgrad.config.base import FormatSetting, Settings
from altgrad.formats import Format
from altgrad.formats.registry import Codebook, codebook

#: Elements. torchao and bitsandbytes too keep the state of smaller parameters in float32.
LEAST = 4096


class Moment(Settings):
    """How one moment is stored: as the codes of a format, and their scales.

    Formats may be unsigned, such as ``UE4M4``. Those of bitsandbytes and torchao are ``dynamic8``, ``dynamic4``,
    ``unsigned_dynamic8`` and ``unsigned_linear4``. Codes of up to 4 bits are stored two in a byte.
    """

    format: FormatSetting = Field(description="what the moment is rounded to")
    granularity: Literal["tensor", "row", "block"] = Field(
        "block", description="what has a scale of its own: the tensor, a row of its last dimension, a block"
    )
    block: int = Field(256, ge=2, le=1 << 20, description="granularity: block: elements of the flattened tensor")
    scale: Literal["float32", "E8M0"] = Field("float32", description="format of the scale; E8M0 is rounded up")
    rounding: Literal["nearest", "stochastic"] = Field(
        "nearest", description="to the nearest value, or stochastically to one of the two neighbours"
    )
    root: bool = Field(False, description="v: its square root is stored")
    expand: bool = Field(
        False,
        description="COAT's range expansion (Xi et al. 2024, arXiv:2410.19313): magnitudes are raised to the power "
        "that gives them the range of the format",
    )

    def mistakes(self) -> Iterator[str]:
        if self.granularity != "block" and self.block != 256:
            yield f"block: {self.block} is of granularity block, not {self.granularity}; remove it"
        if self.expand and self.scale != "float32":
            yield "expand keeps the largest magnitude itself; it needs scale float32"
        if self.granularity == "block" and self.block % 2:
            yield f"block: {self.block} is odd; take an even number, as two codes of 4 bits share a byte"
        if isinstance(self.format, Format):
            codebook(self.format)  # raises where there is none

    @property
    def codebook(self) -> Codebook:
        return codebook(self.format)


def _moment(value: Any) -> Any:
    """Turn ``m: E4M3`` into ``m: {format: E4M3}``, and ``float32`` into None."""
    if isinstance(value, str):
        return None if value == "float32" else {"format": value}
    return {"format": value} if isinstance(value, Format) else value


StoredMoment = Annotated[Moment | None, BeforeValidator(_moment)]


class State(Settings):
    """How the optimizer stores its state of each parameter between steps; a moment that is left out is float32."""

    m: StoredMoment = Field(None, description="the first moment, or the momentum; a format's name or a section")
    v: StoredMoment = Field(None, description="the second moment, which is not negative")
    least: int = Field(LEAST, ge=0, le=1 << 40, description="parameters of fewer elements keep a float32 state")

    def mistakes(self) -> Iterator[str]:
        if self.m is None and self.v is None:
            yield "name a format for m, for v or for both, or remove state"
        if self.m is not None and self.m.root:
            yield "m.root: only v, which is not negative, has a root; remove it"
        if self.m is not None and isinstance(fmt := self.m.format, Format) and not fmt.signed:
            yield f"m.format: {fmt.name} is unsigned, and a first moment has a sign"

    def of(self, name: str) -> Moment | None:
        """Return how the state tensor ``name`` (such as ``exp_avg``) is stored; ``None``: without a format."""
        return {"exp_avg": self.m, "momentum_buffer": self.m, "exp_avg_sq": self.v}.get(name)
