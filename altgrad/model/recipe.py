"""Recipes: which layer is quantized how, as rules over layer names.

A recipe is an ordered list of rules; a rule's pattern is a shell glob over the dotted names of the
model's linear layers, and the last rule that matches a layer decides it. A pattern that matches no
layer is an error, because a misspelt pattern would otherwise train an unquantized model under a
quantized model's name.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from altgrad.numerics import Format, get_format

ROLES = ("weight", "input", "grad")


def _require(settings: object, field: str, *choices: str) -> None:
    value = getattr(settings, field)
    if value not in choices:
        raise ValueError(f"{field} must be one of {', '.join(choices)}, not {value!r}")


@dataclass(frozen=True)
class TensorRecipe:
    """How one tensor of a layer is quantized.

    ``scaling``: ``dynamic`` (this tensor's amax), ``delayed`` (amax of earlier steps, read from a
    history of ``history`` values by ``reduce``) or ``static`` (the first amax seen).
    ``scale``: ``fp32``, or ``pow2`` (rounded down to a power of two).
    ``granularity``: one scale per ``tensor``, ``row`` or ``block`` of ``block`` elements, the last two
    dynamic only and along the sum of each product, so that a tensor has other scales in the backward
    products. Block scales are powers of two, as in OCP MX: they stay in the operands, where others would
    cost a rounding.
    """

    format: Format
    scaling: str = "dynamic"
    granularity: str = "tensor"
    block: int = 32
    history: int = 16
    reduce: str = "max"
    scale: str = "fp32"

    def __post_init__(self) -> None:
        _require(self, "scaling", "dynamic", "delayed", "static")
        _require(self, "reduce", "max", "most-recent")
        _require(self, "scale", "fp32", "pow2")
        _require(self, "granularity", "tensor", "row", "block")
        if self.granularity != "tensor" and self.scaling != "dynamic":
            raise ValueError(f"granularity {self.granularity} needs scaling dynamic, not {self.scaling}")
        if self.granularity == "block" and self.scale != "pow2":
            raise ValueError("granularity block needs scale pow2: block scales stay in the operands")
        if self.block < 1:
            raise ValueError(f"block must be at least 1, not {self.block}")
        if self.history < 1:
            raise ValueError(f"history must be at least 1, not {self.history}")


@dataclass(frozen=True)
class LayerRecipe:
    """How a linear layer is quantized; ``None`` leaves that tensor in the compute dtype.

    ``gradient`` through the rounding: ``straight-through``, or ``clipped`` (zero where the tensor was
    clamped). ``accumulate``: precision of the layer's matrix products on the way out, ``bf16`` (what
    FP8 hardware training does) or ``fp32``.
    """

    weight: TensorRecipe | None = None
    input: TensorRecipe | None = None
    grad: TensorRecipe | None = None
    gradient: str = "straight-through"
    accumulate: str = "bf16"

    def __post_init__(self) -> None:
        _require(self, "gradient", "straight-through", "clipped")
        _require(self, "accumulate", "bf16", "fp32")

    @property
    def quantizes(self) -> bool:
        """Whether any tensor of the layer is quantized."""
        return any(getattr(self, role) is not None for role in ROLES)

    def format_names(self) -> dict[str, str | None]:
        """Return ``{"weight": "E4M3", "input": ..., "grad": ...}``."""
        specs = {role: getattr(self, role) for role in ROLES}
        return {role: spec.format.name if spec else None for role, spec in specs.items()}


@dataclass(frozen=True)
class Rule:
    """``layer`` for every layer whose name matches ``pattern``."""

    pattern: str
    layer: LayerRecipe
    required: bool = True


@dataclass(frozen=True)
class Recipe:
    """An ordered list of rules."""

    rules: tuple[Rule, ...]

    @classmethod
    def uniform(cls, format: str | Format, *, grad: str | Format | None = "E5M2", **options: Any) -> Recipe:
        """Quantize weights and inputs of every linear layer in ``format``, incoming gradients in ``grad``.

        A layer called ``head`` (at any depth) keeps its input unquantized, as in FP8 training
        practice. ``options`` are fields of :class:`TensorRecipe`, for all three tensors.
        """
        forward = TensorRecipe(get_format(format), **options)
        backward = None if grad is None else TensorRecipe(get_format(grad), **options)
        head = LayerRecipe(weight=forward, grad=backward)
        return cls(
            (
                Rule("*", LayerRecipe(weight=forward, input=forward, grad=backward)),
                Rule("head", head, required=False),
                Rule("*.head", head, required=False),
            )
        )

    @classmethod
    def from_rules(cls, rules: Iterable[Mapping[str, Any]], formats: Mapping[str, Format]) -> Recipe:
        """Build from the rules of a resolved cell; ``formats`` holds every format that they name."""

        def tensor(spec: Mapping[str, Any] | None) -> TensorRecipe | None:
            return None if spec is None else TensorRecipe(**{**spec, "format": formats[spec["format"]]})

        return cls(
            tuple(
                Rule(
                    rule["layers"],
                    LayerRecipe(
                        **{role: tensor(rule[role]) for role in ROLES},
                        gradient=rule["gradient"],
                        accumulate=rule["accumulate"],
                    ),
                )
                for rule in rules
            )
        )

    def match(self, layers: Iterable[str]) -> dict[str, LayerRecipe]:
        """Return the recipe of each layer that is quantized at all.

        Raises ``ValueError`` when a required pattern matches none of ``layers``.
        """
        names = list(layers)
        matched: dict[str, LayerRecipe] = {}
        for rule in self.rules:
            hits = [name for name in names if fnmatchcase(name, rule.pattern)]
            if rule.required and not hits:
                near = difflib.get_close_matches(rule.pattern, names, n=1, cutoff=0.0)
                hint = f"; the nearest layer is {near[0]}" if near else "; the model has no linear layer"
                raise ValueError(f"pattern {rule.pattern!r} matches no layer{hint}")
            matched.update(dict.fromkeys(hits, rule.layer))
        return {name: matched[name] for name in names if name in matched and matched[name].quantizes}
