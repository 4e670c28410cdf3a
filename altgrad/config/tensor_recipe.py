"""How one tensor of a layer is quantized, and the block formats whose name stands for all of its settings."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from altgrad.config.base import FormatSetting, Settings
from altgrad.formats import SCALE_FORMATS, FloatFormat, Format, get_format

#: (setting, another setting, the values of the other setting with which the first one acts)
_ACTS = (
    ("block", "granularity", ("block", "tile")),
    ("history", "scaling", ("delayed",)),
    ("reduce", "scaling", ("delayed",)),
)
# What an operand in float32 may have: significant bits (half of float32's, so that the product of two operands is exact
# too), the exponent of the smallest subnormal number, and the exponent of the largest binade.
FLOAT32_OPERAND = (24 // 2, -126 - 23, 127)


def _scale_format(name: Any) -> str:
    if name in SCALE_FORMATS:
        return name
    try:
        fmt = get_format(name)
    except (ValueError, TypeError):
        raise ValueError(
            f"{name!r} is no format of a scale; take float32 or E8M0, or for granularity: block one such as E4M3"
        ) from None
    if not isinstance(fmt, FloatFormat):
        raise ValueError(f"scales are in a float format such as E4M3, and {name} is a table of values")
    if not fmt.rounds_in_float32:
        raise ValueError(f"scales in {name} span more than float32 can round; take one such as E4M3")
    return name


class TensorRecipe(Settings):
    """How one tensor of a layer is quantized: its format, and its scales.

    A scale has a format too. A ``float32`` scale brings the tensor's largest magnitude to the format's largest value.
    An ``E8M0`` scale is a power of two, as in the OCP MX formats; it is rounded, and multiplying by it is exact.
    Scales of blocks and tiles stay in the operands of a product. Operands hold E8M0 scales exactly, and scales in a
    format such as ``E4M3``, which are multiplied by a float32 scale of the tensor as in NVFP4. With float32 scales of
    blocks, as in DeepSeek-V3, each operand is a quotient rounded to float32 once, and products take float32 operands.
    Rows and blocks lie along the sum of each product, so the backward products have other scales; tiles have the same.

    The name of a block format stands for all settings of a tensor: MXFP8, MXFP8_E5M2, MXFP6_E2M3, MXFP6_E3M2, MXFP4,
    NVFP4 and, for weights, NVFP4_16x16.
    """

    format: FormatSetting = Field(description="a format's name; FORMAT in params.yaml is that of the grid's entry")
    scaling: Literal["dynamic", "delayed", "static"] = Field(
        "dynamic", description="the amax that sets the scale: this tensor's, those of earlier steps, the first one seen"
    )
    granularity: Literal["tensor", "row", "block", "tile", "head"] = Field(
        "tensor",
        description="what has a scale of its own; all but tensor only with scaling: dynamic; of tiles, block x block "
        "elements, forward and backward products get the same values; head, over batch and tokens, is for attention's "
        "products",
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
        description="scale: E8M0: the rule of rounding to a power of two; floor is the OCP MX specification's, ceil "
        "and rceil never saturate, even is floor of the amax rounded to the format's spacing. Scales in a format such "
        "as E4M3: 4/6 takes, of two scales for each block, the one with the smaller squared error",
    )
    rounding: Literal["nearest", "stochastic", "MS-EDEN"] = Field(
        "nearest",
        description="nearest even; or stochastic while training, and nearest wherever the model only evaluates or is "
        "looked at; grad: MS-EDEN (Quartet II, arXiv:2601.22813), which also rotates and rounds anew the other factors "
        "of both backward products",
    )
    scale_to: float | str | None = Field(
        None,
        description="what the scale brings the tensor to: max, its largest magnitude to the format's; a number such as "
        "1, its largest magnitude to that; or 1 of rms, the root of its mean square to that; default: the format's own",
    )
    virtual: bool = Field(False, description="weight: the arm sees the format, and no product quantizes to it")

    def model_post_init(self, context: Any) -> None:
        if self.scale_to is not None and isinstance(self.format, Format):
            object.__setattr__(self, "format", self.format.scaled_to(self.scale_to))

    def mistakes(self) -> Iterator[str]:
        if self.of_rms and self.scaling != "dynamic":
            yield f"scale_to {self.format.scale_to} needs scaling dynamic, not {self.scaling}: histories are of amax"
        if self.of_rms and self.block_scale is not None:
            yield f"scale_to {self.format.scale_to} is for scales in float32 or E8M0, not {self.scale}; set scale_to"
        for name, where, acts in _ACTS:
            if name in self.changed() and (chosen := getattr(self, where)) not in acts:
                value, needed = getattr(self, name), " or ".join(acts)
                yield f"{name}: {value} is of {where} {needed}, not {chosen}; set {where} or remove {name}"
        if self.granularity != "tensor" and self.scaling != "dynamic":
            yield f"granularity {self.granularity} needs scaling dynamic, not {self.scaling}"
        if self.scale_rounding == "4/6":
            if self.scale in SCALE_FORMATS:
                yield f"scale_rounding 4/6 is for scales in a format such as E4M3, not {self.scale}"
            if self.rounding != "nearest":
                yield "scale_rounding 4/6 compares errors of rounding to nearest; it needs rounding nearest"
        elif self.scale != "E8M0" and self.scale_rounding != "rceil":
            yield f"scale_rounding {self.scale_rounding} is to a power of two; it needs scale E8M0"
        if self.rounding == "MS-EDEN" and (self.granularity != "block" or self.block_scale is None or 128 % self.block):
            yield (
                "rounding MS-EDEN rounds scales of blocks stochastically; it needs granularity block, a scale in a "
                "format such as E4M3, and a block that divides 128"
            )
        if self.granularity == "tile" and self.block < 2:
            yield f"granularity tile needs block 2 or more, not {self.block}"
        if self.block_scale is not None and not self.keeps_scales:
            other = f"for granularity {self.granularity} take float32 or E8M0"
            yield f"scale {self.scale} needs granularity block or tile; {other}"
        if self.block_scale is not None and isinstance(self.format, Format):
            bits, lowest, _ = FLOAT32_OPERAND
            if not self.format.fits(*FLOAT32_OPERAND, scales=self.block_scale):
                yield (
                    f"no operand holds {self.format.name} times a scale in {self.scale} exactly: together they may "
                    f"have {bits} significant bits, above 2^{lowest}; take a scale of fewer bits, or E8M0"
                )
        if self.virtual and self.rounding != "nearest":
            yield f"virtual needs rounding nearest, not {self.rounding}: nothing is rounded"
        if self.virtual and self.scaling != "dynamic":
            yield f"virtual needs scaling dynamic, not {self.scaling}: nothing is quantized that remembers its amax"

    @property
    def block_scale(self) -> Format | None:
        """The format of the blocks' scales if the tensor has a float32 scale too, as in NVFP4; else ``None``."""
        return None if self.scale in SCALE_FORMATS else get_format(self.scale)

    @property
    def of_rms(self) -> bool:
        """Whether the root mean square sets the scale."""
        return isinstance(self.format, Format) and self.format.scale_statistic == "rms"

    @property
    def keeps_scales(self) -> bool:
        """Whether the operands of a product keep their scales. Otherwise the product is divided by the scales."""
        return self.granularity in ("block", "tile")

    @property
    def scale_options(self) -> dict[str, Any]:
        """The scale's settings, as keyword arguments of `altgrad.numerics.operand_scale`."""
        return {
            "granularity": self.granularity, "block": self.block,
            "scale_format": self.scale, "scale_rounding": self.scale_rounding,
            **({"statistic": "rms"} if self.of_rms else {}),
        }  # fmt: skip


_MX = {"granularity": "block", "block": 32, "scale": "E8M0"}
#: Settings of tensors by the names that others have for them: OCP Microscaling Formats v1.0, and NVFP4 (NVIDIA, arXiv
#: 2509.25149), whose scales are multiplied by a float32 scale of the tensor.
BLOCK_FORMATS: dict[str, dict[str, Any]] = {
    "MXFP8": {"format": "E4M3", **_MX}, "MXFP8_E5M2": {"format": "E5M2", **_MX},
    "MXFP6_E2M3": {"format": "E2M3", **_MX}, "MXFP6_E3M2": {"format": "E3M2", **_MX},
    "MXFP4": {"format": "E2M1", **_MX},
    "NVFP4": {"format": "E2M1", "granularity": "block", "block": 16, "scale": "E4M3"},
    "NVFP4_16x16": {"format": "E2M1", "granularity": "tile", "block": 16, "scale": "E4M3"},
}  # fmt: skip


def _tensor(value: Any) -> Any:
    """Turn ``weight: E4M3`` into ``weight: {format: E4M3}``, a block format into its settings, ``none`` into None."""
    if isinstance(value, str):
        return None if value.lower() == "none" else BLOCK_FORMATS.get(value, {"format": value})
    if isinstance(value, dict) and isinstance(name := value.get("format"), str) and name in BLOCK_FORMATS:
        settings = ", ".join(f"{key}: {its}" for key, its in BLOCK_FORMATS[name].items())
        raise ValueError(f"{name} stands for all of a tensor's settings; write it alone, or {{{settings}}}")
    return {"format": value} if isinstance(value, Format) else value


Quantized = Annotated[TensorRecipe | None, BeforeValidator(_tensor)]
