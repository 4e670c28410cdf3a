"""What every section of params.yaml has in common, and the kinds of values that several share."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from altgrad.config.errors import did_you_mean


def _key_part(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_.+]{1,40}", name):
        raise ValueError(
            f"{name!r} must be 1 to 40 letters, digits, '_', '.' or '+', because it becomes part of a file name "
            "and '-' joins the parts of a cell's key"
        )
    return name


Name = Annotated[str, AfterValidator(_key_part)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """Base of every section: unknown settings are errors, values are immutable once read.

    ``renamed`` maps a setting of earlier versions to a sentence's end: what it is now, and how to convert it.
    """

    renamed: ClassVar[dict[str, str]] = {}

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _known_settings_of_their_kind(cls, values: Any) -> Any:
        """Name a misspelt setting and its near matches; refuse ``steps: true``, which would count as 1."""
        if isinstance(values, dict):
            for key, value in values.items():
                if key in cls.renamed:
                    raise ValueError(f"{key} is now {cls.renamed[key]}")
                if key not in cls.model_fields:
                    raise ValueError(f"unknown setting {key!r}{did_you_mean(key, cls.model_fields)}")
                if isinstance(value, bool) and cls.model_fields[key].annotation is not bool:
                    raise ValueError(f"{key} must not be {str(value).lower()}; it is no truth value")
        return values
