"""What every section of settings has in common, and the kinds of values that several share.

A section is declared once and serves three readers: params.yaml and a resolved cell, where formats are names, and
Python, where a name stands for the format that is registered under it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, cast, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)

from altgrad.common.errors import did_you_mean, sentences
from altgrad.formats import Format, get_format


def _key_part(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_.+]{1,40}", name):
        raise ValueError(
            f"{name!r} must be 1 to 40 letters, digits, '_', '.' or '+', because it becomes part of a file name "
            "and '-' joins the parts of a cell's key"
        )
    return name


Name = Annotated[str, AfterValidator(_key_part)]
Fraction = Annotated[float, Field(ge=0, le=1)]

LARGEST = 2**63 - 1  # whole number, which files of other kinds hold too

REGISTERED: Mapping[str, Format] = {}  # as context: no formats of one's own, all names are those of the registry


def as_format(value: Any, info: ValidationInfo) -> Format | str:
    """Return the format that a name stands for; without formats to look it up in, the name."""
    if isinstance(value, Format):
        return value
    if not isinstance(value, str):
        raise ValueError(f"expected a format's name, not {value!r}")
    if info.context is None:
        return _key_part(value)
    return info.context[value] if value in info.context else get_format(value)


if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass

    FormatSetting = Format
else:
    ModelMetaclass = type(BaseModel)
    FormatSetting = Annotated[
        Any, BeforeValidator(as_format), PlainSerializer(lambda f: getattr(f, "name", f), return_type=str),
        WithJsonSchema({"type": "string", "format": "a format's name"}),
    ]  # fmt: skip


class _FromPython(ModelMetaclass):
    """Lets a section be made in Python: names stand for registered formats, and a mistake is a ``ValueError``.

    A metaclass, because type checkers would otherwise refuse a format's name where a `Format` is kept.
    """

    def __call__(cls, **settings: Any) -> Any:
        section = cast("type[BaseModel]", cls)
        try:
            return section.model_validate(settings, context=REGISTERED)
        except ValidationError as error:
            raise ValueError("; ".join(sentences(error, cls.__name__))) from None


class Section(BaseModel, metaclass=_FromPython):
    """Base of every section: unknown settings are errors, values are immutable once read."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _known_settings_of_their_kind(cls, values: Any) -> Any:
        """Name a misspelt setting and its near matches; refuse ``steps: true``, which would count as 1."""
        if isinstance(values, dict):
            for key, value in values.items():
                if key not in cls.model_fields:
                    raise ValueError(f"unknown setting {key!r}{did_you_mean(key, cls.model_fields)}")
                if isinstance(value, bool) and (kind := cls.model_fields[key].annotation) is not bool:
                    words = get_args(kind) if get_origin(kind) is Literal else ()
                    write = f"write {' or '.join(words)}" if words else "it is no truth value"
                    raise ValueError(f"{key} must not be {str(value).lower()}; {write}")
                parts = value if isinstance(value, dict) else dict(enumerate(value if isinstance(value, list) else []))
                for place, number in {key: value, **{f"{key}.{part}": its for part, its in parts.items()}}.items():
                    if isinstance(number, int) and abs(number) > LARGEST:
                        raise ValueError(f"{place} is a whole number beyond 2^63; no setting needs one")
        return values

    def but(self, **changes: Any) -> Self:
        """Return the same section with other values for some settings, checked as any other."""
        return type(self)(**dict(self) | changes)

    def with_formats(self, formats: Mapping[str, Format]) -> Self:
        """Return the same section with names of formats replaced by ``formats``, or else by registered ones.

        Raises ``ValueError`` for what only a format's own properties show to be wrong.
        """
        try:
            return type(self).model_validate(self.model_dump(), context=formats)
        except ValidationError as error:
            raise ValueError("; ".join(sentences(error, ""))) from None

    def changed(self) -> list[str]:
        """Return the names of the settings that have another value than their default."""
        values = dict(self)
        return [
            name for name, field in type(self).model_fields.items()
            if values[name] != field.get_default(call_default_factory=True, validated_data=values)
        ]  # fmt: skip
