"""Formats of the user's own in params.yaml, and the definition of any format in a cell's file."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, PlainSerializer, Tag, WithJsonSchema

from altgrad.config.base import Settings
from altgrad.formats import FloatFormat, Format, definition, from_definition


class OwnFloat(Settings):
    """A floating-point format of the user's own (see `altgrad.formats.FloatFormat`)."""

    exponent_bits: int = Field(ge=0, le=8, description="E; at most 16 bits in all with the sign")
    mantissa_bits: int = Field(ge=0, le=15, description="M")
    bias: int | None = Field(
        None, ge=-200, le=200, description="default 2^(E-1) - 1; under a float32 scale that follows the tensor it "
        "changes nothing, since the scale follows the format's range too"
    )  # fmt: skip
    specials: Literal["finite", "fn", "ieee", "fnuz", "p3109"] = Field(
        "finite", description="what the top codes mean: numbers, or NaN and infinity as in these standards"
    )

    def format(self, name: str) -> Format:
        return FloatFormat(name, **self.model_dump())


class OwnValues(Settings):
    """A format of the user's own that is a table of values (see `altgrad.formats.Format.of_values`)."""

    values: list[float] | str = Field(
        description="the numbers, ascending, each rounded to float32 first; or a file with them, such as "
        "data/formats/mine.csv: numbers between commas, spaces or line ends"
    )
    symmetric: bool = Field(False, description="the format also has the negative of each value")
    ties: Literal["even", "away", "up"] = Field(
        "even", description="where the middle of two values is rounded to: the even code, away from zero, or up"
    )
    scale_to: float | str = Field("max", description="as in recipes; what a recipe says counts before this")

    def format(self, name: str) -> Format:
        values = _read_numbers(Path(self.values)) if isinstance(self.values, str) else self.values
        return Format.of_values(name, values, symmetric=self.symmetric, ties=self.ties, scale_to=self.scale_to)


def _read_numbers(path: Path) -> list[float]:
    try:
        return [float(word) for word in path.read_text(encoding="utf-8").replace(",", " ").split()]
    except FileNotFoundError:
        raise ValueError(f"values: there is no file {path}") from None
    except ValueError as error:
        raise ValueError(f"values: {path} is no list of numbers: {error}") from None


OwnFormat = Annotated[
    Annotated[OwnFloat, Tag("of bits")] | Annotated[OwnValues, Tag("of values")],
    Discriminator(lambda its: "of values" if isinstance(its, OwnValues) or "values" in its else "of bits"),
]

FormatDefinition = Annotated[
    Any, BeforeValidator(lambda its: its if isinstance(its, Format) else from_definition(its)),
    PlainSerializer(definition, return_type=dict), WithJsonSchema({"type": "object"}),
]  # fmt: skip
