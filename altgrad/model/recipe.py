"""Recipes: which layer is quantized how, as rules over layer names.

A recipe is an ordered list of rules; a rule's pattern is a shell glob over the dotted names of the
model's linear layers, and the last rule that matches a layer decides it. A pattern that matches no
layer is an error, because a misspelt pattern would otherwise train an unquantized model under a
quantized model's name.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import Any

from altgrad.formats import Format, get_format

ROLES = ("weight", "input", "grad")
CHOICES = ("gradient", "accumulate", "save", "backend")  # of a rule, beside its tensors
NATIVE_FORMATS = ("E4M3", "E5M2")
HEADS = ("head", "*.head", "lm_head", "*.lm_head")  # patterns of what is called so, here and in transformers
TORCHAO_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


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
    ``virtual``, for a weight: no product quantizes it, but its optimizer sees this format's grid at the weight's own
    scale. What an arm gains so is not the format's.
    """

    format: Format
    scaling: str = "dynamic"
    granularity: str = "tensor"
    block: int = 32
    history: int = 16
    reduce: str = "max"
    scale: str = "fp32"
    virtual: bool = False

    def __post_init__(self) -> None:
        _require(self, "scaling", "dynamic", "delayed", "static")
        _require(self, "reduce", "max", "most-recent")
        _require(self, "scale", "fp32", "pow2")
        _require(self, "granularity", "tensor", "row", "block")
        if self.granularity != "tensor" and self.scaling != "dynamic":
            raise ValueError(f"granularity {self.granularity} needs scaling dynamic, not {self.scaling}")
        if self.granularity == "block" and self.scale != "pow2":
            raise ValueError("granularity block needs scale pow2: block scales stay in the operands")
        if self.virtual and self.scaling != "dynamic":
            raise ValueError(
                f"virtual needs scaling dynamic, not {self.scaling}: nothing is quantized that remembers its amax"
            )
        if self.block < 1:
            raise ValueError(f"block must be at least 1, not {self.block}")
        if self.history < 1:
            raise ValueError(f"history must be at least 1, not {self.history}")


@dataclass(frozen=True)
class LayerRecipe:
    """How a linear layer is quantized; ``None`` leaves that tensor in the compute dtype.

    ``gradient`` through the rounding: ``straight-through``, or ``clipped`` (zero where the tensor was
    clamped). ``accumulate``: precision of the layer's matrix products on the way out, ``bf16`` (what
    FP8 hardware training does) or ``fp32``. ``save``: what the forward pass leaves for the backward one of
    tensors with one scale, the ``operands`` or their 8-bit ``codes``, with the same results. ``backend``: who
    multiplies, ``emulated`` (a product in bfloat16 or float32, any format) or ``native``
    (``torch._scaled_mm``; E4M3 and E5M2, all three tensors). ``torchao`` hands the layer to torchao's
    float8 recipe of that name instead (see :mod:`altgrad.model.torchao`), which decides everything else.
    """

    weight: TensorRecipe | None = None
    input: TensorRecipe | None = None
    grad: TensorRecipe | None = None
    gradient: str = "straight-through"
    accumulate: str = "bf16"
    save: str = "operands"
    backend: str = "emulated"
    torchao: str | None = None

    def __post_init__(self) -> None:
        _require(self, "gradient", "straight-through", "clipped")
        _require(self, "accumulate", "bf16", "fp32")
        _require(self, "save", "operands", "codes")
        _require(self, "backend", "emulated", "native")
        self._require_alone_if_virtual()
        if self.save == "codes":
            self._require_codes()
        if self.backend == "native":
            self._require_native()
        if self.torchao is not None:
            _require(self, "torchao", *TORCHAO_RECIPES)
            stated = [f.name for f in fields(self) if f.name != "torchao" and getattr(self, f.name) != f.default]
            if stated:
                raise ValueError(f"torchao {self.torchao} leaves no choice of {stated[0]}; leave out one of the two")

    def _require_alone_if_virtual(self) -> None:
        for role in ("input", "grad"):
            if (tensor := getattr(self, role)) is not None and tensor.virtual:
                raise ValueError(f"virtual is for the weight, whose optimizer sees the format; remove it from {role}")
        if self.weight is not None and self.weight.virtual:
            stated = [f.name for f in fields(self) if f.name != "weight" and getattr(self, f.name) != f.default]
            if stated:
                raise ValueError(f"a layer whose weight is virtual quantizes nothing; remove {stated[0]}")

    def _require_codes(self) -> None:
        for role in ("weight", "input"):
            tensor = getattr(self, role)
            if tensor is not None and tensor.granularity != "tensor":
                raise ValueError(
                    f"save codes needs granularity tensor, not {tensor.granularity}: with finer scales the backward "
                    "products quantize the tensor itself anew, so it has to be kept"
                )
            if tensor is not None and tensor.format.bits > 8:
                raise ValueError(f"save codes needs formats of at most 8 bits, and {tensor.format.name} has more")

    def _require_native(self) -> None:
        tensors = [getattr(self, role) for role in ROLES]
        for role, tensor in zip(ROLES, tensors, strict=True):
            if tensor is None or tensor.format.name not in NATIVE_FORMATS:
                stated = "is not quantized" if tensor is None else f"is {tensor.format.name}"
                raise ValueError(f"backend native needs weight, input and grad in E4M3 or E5M2; {role} {stated}")
            if tensor.granularity == "block" or tensor.granularity != tensors[0].granularity:
                raise ValueError("backend native needs one granularity for weight, input and grad: tensor or row")
        names = {role: tensor.format.name for role, tensor in zip(ROLES, tensors, strict=True)}
        for a, b in (("input", "weight"), ("grad", "weight"), ("grad", "input")):
            if names[a] == names[b] == "E5M2":
                raise ValueError(f"backend native has no product of E5M2 and E5M2, which {a} and {b} both are")
        if self.save == "codes":
            raise ValueError("backend native keeps 8-bit operands as it is; leave out save codes")

    @property
    def quantizes(self) -> bool:
        """Whether any tensor of the layer is quantized."""
        tensors = [getattr(self, role) for role in ROLES]
        return self.torchao is not None or any(tensor is not None and not tensor.virtual for tensor in tensors)

    @property
    def virtual_weight(self) -> TensorRecipe | None:
        """The format that the weight's optimizer sees and no product does, ``None`` for any other layer."""
        return self.weight if self.weight is not None and self.weight.virtual else None

    def tensors(self) -> dict[str, TensorRecipe | None]:
        """Return how each of :data:`ROLES` is quantized; for a torchao layer as torchao's own settings say."""
        if self.torchao is not None:
            from altgrad.model.torchao import tensor_recipes  # which imports torchao

            return tensor_recipes(self.torchao)
        return {role: getattr(self, role) for role in ROLES}

    def format_names(self) -> dict[str, str | None]:
        """Return ``{"weight": "E4M3", "input": ..., "grad": ...}``."""
        return {role: spec.format.name if spec else None for role, spec in self.tensors().items()}


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

        A layer called ``head`` or ``lm_head`` (at any depth) keeps its input unquantized, as in FP8 training
        practice. ``options`` are fields of :class:`TensorRecipe`, for all three tensors, or of
        :class:`LayerRecipe`. The native backend has no product with an unquantized input, so there the
        head is quantized like the other layers.
        """
        choices = {name: options.pop(name) for name in CHOICES if name in options}
        forward = TensorRecipe(get_format(format), **options)
        backward = None if grad is None else TensorRecipe(get_format(grad), **options)
        body = LayerRecipe(weight=forward, input=forward, grad=backward, **choices)
        head = body if body.backend == "native" else replace(body, input=None)
        return cls(
            (
                Rule("*", body),
                *(Rule(pattern, head, required=False) for pattern in HEADS),
            )
        )

    @classmethod
    def from_rules(cls, rules: Iterable[Mapping[str, Any]], formats: Mapping[str, Format]) -> Recipe:
        """Build from the rules of a resolved cell; ``formats`` holds every format that they name.

        Raises ``ValueError`` when the installed torchao quantizes otherwise than a rule for it says.
        """

        def tensor(spec: Mapping[str, Any] | None) -> TensorRecipe | None:
            return None if spec is None else TensorRecipe(**{**spec, "format": formats[spec["format"]]})

        def layer(rule: Mapping[str, Any]) -> LayerRecipe:
            tensors = {role: tensor(rule[role]) for role in ROLES}
            torchao = rule.get("torchao")
            if torchao is None:
                return LayerRecipe(**tensors, **{choice: rule[choice] for choice in CHOICES})
            found = LayerRecipe(torchao=torchao)
            if found.tensors() != tensors:
                raise ValueError(
                    f"this torchao's recipe {torchao} quantizes to {found.format_names()} with scales of its own, "
                    "not as altgrad.config.schema says; install torchao 0.18, on a device with OCP formats"
                )
            return found

        return cls(tuple(Rule(rule["layers"], layer(rule)) for rule in rules))

    def match(self, layers: Iterable[str]) -> dict[str, LayerRecipe]:
        """Return the recipe of each layer that is quantized at all, or whose weight has virtual geometry.

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
        kept = [name for name in names if name in matched]
        return {name: found for name in kept if (found := matched[name]).quantizes or found.virtual_weight}
