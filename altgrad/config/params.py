"""Reading params.yaml into :class:`Params`, and saying what is wrong with it in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from altgrad.common.errors import UserError, did_you_mean, sentences
from altgrad.common.files import read_yaml
from altgrad.config.schema import Params

Model = TypeVar("Model", bound=BaseModel)


def validated(schema: type[Model], values: Any, source: object) -> Model:
    """Return ``values`` as ``schema``; raise :class:`UserError` naming ``source`` and the setting."""
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        raise UserError("\n       ".join(sentences(error, str(source)))) from None


def require_name(name: str, known: dict[str, Any], source: object, setting: str, section: str) -> None:
    """Raise :class:`UserError` unless ``name``, the value of ``setting``, is a key of ``section``."""
    if name not in known:
        raise UserError(f"{source}: {setting}: {name!r} is not in {section}{did_you_mean(name, known)}")


def load_params(path: Path = Path("params.yaml")) -> Params:
    """Read and check params.yaml, including that every preset that is picked by name exists."""
    params = validated(Params, read_yaml(path), path)
    require_name(params.corpus, params.corpora, path, "corpus", "corpora")
    require_name(params.model, params.models, path, "model", "models")
    require_name(params.grid.recipe, params.recipes, path, "grid.recipe", "recipes")
    for i, arm in enumerate(params.grid.optimizers):
        require_name(arm, params.optimizers, path, f"grid.optimizers[{i}]", "optimizers")
    for name, corpus in params.corpora.items():
        fallback = getattr(corpus, "fallback", None)
        if fallback is not None:
            require_name(fallback, params.corpora, path, f"corpora.{name}.fallback", "corpora")
    return params
