"""The base class of all settings, and the kinds of values that several sections share.

A section of settings is declared once and used in three places. In params.yaml and in a resolved cell, formats are
names. In Python, the registered `Format` replaces its name.
"""

import re
import reprlib
from collections.abc import Iterable, Mapping
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

LARGEST = 2**63 - 1  # the largest whole number that parquet and safetensors hold
REGISTERED: Mapping[str, Format] = {}  # validation context: every name is looked up in the registry


def _key_part(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_.+]{1,40}", name):
        raise ValueError(
            f"{name!r} must be 1 to 40 letters, digits, '_', '.' or '+', because it becomes part of a file name "
            "and '-' joins the parts of a cell's key"
        )
    return name


def _end_of_key(name: str) -> str:
    _key_part(name.replace("-", "_"))  # the last part of a key may have '-'
    return name


Name = Annotated[str, AfterValidator(_key_part)]
ModelName = Annotated[str, AfterValidator(_end_of_key)]
Fraction = Annotated[float, Field(ge=0, le=1)]


def as_format(value: Any, info: ValidationInfo) -> Format | str:
    """Return the `Format` that ``value`` names; without a validation context, return the name itself.

    The context maps the names of the user's own formats to `Format` objects. The registry has all other names.
    """
    if isinstance(value, Format):
        return value
    if not isinstance(value, str):
        raise ValueError(f"expected a format's name, not {reprlib.repr(value)}")
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
    """Lets Python code make settings: formats' names become registered formats, and a mistake raises ``ValueError``.

    This is a metaclass because type checkers would otherwise refuse a format's name where a `Format` is declared.
    """

    def __call__(cls, **settings: Any) -> Any:
        try:
            return cast("type[BaseModel]", cls).model_validate(settings, context=REGISTERED)
        except ValidationError as error:
            raise ValueError("; ".join(sentences(error, cls.__name__))) from None


class Settings(BaseModel, metaclass=_FromPython):
    """Base class of every section: an unknown setting is an error, and values cannot be changed afterwards.

    A section whose settings can contradict each other overrides `mistakes`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _known_settings_of_their_kind(cls, values: Any) -> Any:
        """Refuse an unknown setting, a truth value for a number (``steps: true``), and whole numbers beyond 2^63."""
        known = {field.alias or name: field for name, field in cls.model_fields.items()}
        for key, value in values.items() if isinstance(values, dict) else ():
            if key not in known:
                raise ValueError(f"unknown setting {key!r}{did_you_mean(key, known)}")
            if isinstance(value, bool) and (kind := known[key].annotation) is not bool:
                words = get_args(kind) if get_origin(kind) is Literal else ()
                write = f"write {' or '.join(words)}" if words else "it is no truth value"
                raise ValueError(f"{key} must not be {str(value).lower()}; {write}")
            parts = value if isinstance(value, dict) else dict(enumerate(value if isinstance(value, list) else []))
            for place, number in {key: value, **{f"{key}.{part}": its for part, its in parts.items()}}.items():
                if isinstance(number, int) and abs(number) > LARGEST:
                    raise ValueError(f"{place} is a whole number beyond 2^63; no setting needs one")
        return values

    def mistakes(self) -> Iterable[str]:
        """Return a sentence for each setting that contradicts another one; the first becomes the error."""
        return ()

    @model_validator(mode="after")
    def _raise_the_first_mistake(self) -> Self:
        for mistake in self.mistakes():
            raise ValueError(mistake)
        return self

    def but(self, **changes: Any) -> Self:
        """Return a copy with other values: ``train.but(steps=10)``. The values are checked as always."""
        return type(self)(**dict(self) | changes)

    def with_formats(self, formats: Mapping[str, Format]) -> Self:
        """Return a copy in which a `Format` replaces each format's name: from ``formats``, else from the registry.

        Raises ``ValueError`` where a format contradicts the other settings.
        """
        try:
            return type(self).model_validate(self.model_dump(), context=formats)
        except ValidationError as error:
            raise ValueError("; ".join(sentences(error, ""))) from None

    def changed(self) -> list[str]:
        """Return the names of the settings whose value is not their default."""
        values = dict(self)
        return [
            name for name, field in type(self).model_fields.items()
            if values[name] != field.get_default(call_default_factory=True, validated_data=values)
        ]  # fmt: skip
