"""How one tensor of a layer is quantized, and the block formats that have a name for all of it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from altgrad.config.base import FormatSetting, Settings
from altgrad.formats import SCALE_FORMATS, Format, get_format

#: Settings that would be ignored without another one: what they are of.
_ACTS = (
    ("block", "granularity", ("block", "tile")),
    ("history", "scaling", ("delayed",)),
    ("reduce", "scaling", ("delayed",)),
)
# Significant bits, exponents of the smallest subnormal number and of the largest binade: of an operand in float32,
# where the product of two must be exact too.
FLOAT32_OPERAND = (24 // 2, -126 - 23, 127)


def _scale_format(name: Any) -> str:
    if name in SCALE_FORMATS:
        return name
    try:
        found = get_format(name)
    except (ValueError, TypeError):
        raise ValueError(
            f"{name!r} is no format of a scale; take float32 or E8M0, or for granularity: block one such as E4M3"
        ) from None
    if not found.rounds_in_float32:
        raise ValueError(f"scales in {name} span more than float32 can round; take one such as E4M3")
    return name


class TensorRecipe(Settings):
    """How one tensor of a layer is quantized: its format, and its scales.

    A scale is a format too. In ``float32`` it brings the tensor's largest magnitude to the format's largest value; in
    ``E8M0``, the powers of two of the OCP MX formats, it does so up to a rounding, and multiplying by it is exact.
    Scales of blocks and tiles stay in the operands of a product. In E8M0 and in a format such as ``E4M3``, which then
    stand under a float32 scale of the tensor as in NVFP4, operands hold them exactly; in float32, as DeepSeek-V3 has
    them, each operand is a quotient rounded to float32 once, and products take float32 operands. Rows and blocks lie
    along the sum of each product, so that a tensor has other scales in the backward products; tiles have the same.

    In place of a tensor's recipe the name of a block format stands for all of it: MXFP8, MXFP8_E5M2, MXFP6_E2M3,
    MXFP6_E3M2, MXFP4, NVFP4 and, for weights, NVFP4_16x16.
    """

    format: FormatSetting = Field(description="a format's name; FORMAT in params.yaml is that of the grid's entry")
    scaling: Literal["dynamic", "delayed", "static"] = Field(
        "dynamic", description="the amax that sets the scale: this tensor's, those of earlier steps, the first one seen"
    )
    granularity: Literal["tensor", "row", "block", "tile"] = Field(
        "tensor",
        description="what has a scale of its own; all but tensor only with scaling: dynamic; of tiles, block x block "
        "elements, forward and backward products get the same values",
    )
    block: int = Field(
        32, ge=1, le=1 << 20, description="granularity: block: elements along the sum of a product; tile: of a side"
    )
    history: int = Field(16, ge=1, le=1024, description="scaling: delayed: steps whose amax is remembered")
    reduce: Literal["max", "most-recent"] = Field("max", description="scaling: delayed: how the history is read")
    scale: Annotated[str, BeforeValidator(_scale_format)] = Field(
        "float32",
        description="format of the scale: float32 or E8M0; for granularity: block or tile also one such as E4M3, under "
        "a float32 scale per tensor",
    )
    scale_rounding: Literal["floor", "ceil", "rceil", "even", "4/6"] = Field(
        "rceil",
        description="scale: E8M0: to a power of two, as the field names it; floor is the OCP MX specification's rule, "
        "ceil and rceil never saturate, even is floor of the amax rounded to the format's spacing. Scales in a format "
        "such as E4M3: 4/6, of two for each block that with the smaller squared error",
    )
    rounding: Literal["nearest", "stochastic", "MS-EDEN"] = Field(
        "nearest",
        description="to nearest even; or while training to one of the two neighbours by chance, right on average, and "
        "to nearest even wherever the model only evaluates or is looked at; grad: MS-EDEN (Quartet II, "
        "arXiv:2601.22813), which also rotates and rounds anew the other factors of both backward products",
    )
    virtual: bool = Field(False, description="weight: the arm sees the format, and no product quantizes to it")

    @model_validator(mode="after")
    def _settings_go_together(self) -> TensorRecipe:
        for name, where, acts in _ACTS:
            if name in self.changed() and (chosen := getattr(self, where)) not in acts:
                value, needed = getattr(self, name), " or ".join(acts)
                raise ValueError(f"{name}: {value} is of {where} {needed}, not {chosen}; set {where} or remove {name}")
        if self.granularity != "tensor" and self.scaling != "dynamic":
            raise ValueError(f"granularity {self.granularity} needs scaling dynamic, not {self.scaling}")
        if self.scale_rounding == "4/6":
            if self.scale in SCALE_FORMATS:
                raise ValueError(f"scale_rounding 4/6 is for scales in a format such as E4M3, not {self.scale}")
            if self.rounding != "nearest":
                raise ValueError("scale_rounding 4/6 compares errors of rounding to nearest; it needs rounding nearest")
        elif self.scale != "E8M0" and self.scale_rounding != "rceil":
            raise ValueError(f"scale_rounding {self.scale_rounding} is to a power of two; it needs scale E8M0")
        if self.rounding == "MS-EDEN" and (self.granularity != "block" or self.block_scale is None or 128 % self.block):
            raise ValueError(
                "rounding MS-EDEN rounds scales of blocks by chance; it needs granularity block, a scale in a format "
                "such as E4M3, and a block that divides 128"
            )
        if self.granularity == "tile" and self.block < 2:
            raise ValueError(f"granularity tile needs block 2 or more, not {self.block}")
        self._require_exact_operands()
        if self.virtual and self.rounding != "nearest":
            raise ValueError(f"virtual needs rounding nearest, not {self.rounding}: nothing is rounded")
        if self.virtual and self.scaling != "dynamic":
            raise ValueError(
                f"virtual needs scaling dynamic, not {self.scaling}: nothing is quantized that remembers its amax"
            )
        return self

    def _require_exact_operands(self) -> None:
        scales = self.block_scale
        if scales is None:
            return
        if not self.keeps_scales:
            raise ValueError(
                f"scale {self.scale} needs granularity block or tile; for granularity {self.granularity} take float32 "
                "or E8M0"
            )
        if isinstance(self.format, Format) and not self.format.fits(*FLOAT32_OPERAND, scales=scales):
            bits, lowest, _ = FLOAT32_OPERAND
            raise ValueError(
                f"no operand holds {self.format.name} times a scale in {self.scale} exactly: together they may have "
                f"{bits} significant bits, above 2^{lowest}; take a scale of fewer bits, or E8M0"
            )

    @property
    def block_scale(self) -> Format | None:
        """The format of the blocks' scales under a float32 scale of the tensor, ``None`` for scales of one level."""
        return None if self.scale in SCALE_FORMATS else get_format(self.scale)

    @property
    def keeps_scales(self) -> bool:
        """Whether the operands keep scales that the products' results are not divided by."""
        return self.granularity in ("block", "tile")

    @property
    def scale_options(self) -> dict[str, Any]:
        """The scale as `altgrad.numerics.operand_scale` takes it."""
        return {
            "granularity": self.granularity, "block": self.block,
            "scale_format": self.scale, "scale_rounding": self.scale_rounding,
        }  # fmt: skip


_MX = {"granularity": "block", "block": 32, "scale": "E8M0"}
#: Formats of blocks by the names that they have elsewhere, for the place of a format's: OCP Microscaling Formats v1.0,
#: and NVFP4 (NVIDIA, arXiv 2509.25149), whose scales stand under a float32 one of the tensor.
BLOCK_FORMATS: dict[str, dict[str, Any]] = {
    "MXFP8": {"format": "E4M3", **_MX}, "MXFP8_E5M2": {"format": "E5M2", **_MX},
    "MXFP6_E2M3": {"format": "E2M3", **_MX}, "MXFP6_E3M2": {"format": "E3M2", **_MX},
    "MXFP4": {"format": "E2M1", **_MX},
    "NVFP4": {"format": "E2M1", "granularity": "block", "block": 16, "scale": "E4M3"},
    "NVFP4_16x16": {"format": "E2M1", "granularity": "tile", "block": 16, "scale": "E4M3"},
}  # fmt: skip


def _tensor(value: Any) -> Any:
    """Let ``weight: E4M3`` stand for ``weight: {format: E4M3}``, a block format for all of it, ``none`` for none."""
    if isinstance(value, str):
        return None if value.lower() == "none" else BLOCK_FORMATS.get(value, {"format": value})
    if isinstance(value, dict) and isinstance(name := value.get("format"), str) and name in BLOCK_FORMATS:
        settings = ", ".join(f"{key}: {its}" for key, its in BLOCK_FORMATS[name].items())
        raise ValueError(f"{name} stands for all of a tensor's settings; write it alone, or {{{settings}}}")
    return {"format": value} if isinstance(value, Format) else value


Quantized = Annotated[TensorRecipe | None, BeforeValidator(_tensor)]
