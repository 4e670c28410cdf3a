"""Recipes: which layer is quantized how, as rules over layer names.

A recipe is an ordered list of rules. A rule's pattern is a shell glob over the dotted names of the model's linear
layers, and the last rule that matches a layer decides it. A pattern that matches no layer is an error, because a
misspelt pattern would otherwise train an unquantized model under a quantized model's name.

A `Rule` is an entry of ``recipes:`` in params.yaml, and of a `Recipe` in Python.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, model_validator

from altgrad.common.errors import did_you_mean
from altgrad.common.files import read_yaml
from altgrad.config.base import Settings
from altgrad.config.tensor_recipe import BLOCK_FORMATS, Quantized, TensorRecipe
from altgrad.formats import Format

T = TypeVar("T")
PUBLISHED = Path(__file__).with_name("recipes.yaml")
ROLES = ("weight", "input", "grad")
#: Names of the blocks and tiles that hardware multiplies, by granularity, size and scale. Both operands need one name.
NATIVE_BLOCKS = {
    ("block", 32, "E8M0"): "MXFP8",
    **{(kind, 128, scale): "blocks of 128" for kind in ("block", "tile") for scale in ("float32", "E8M0")},
    ("block", 16, "E4M3"): "NVFP4",
    ("tile", 16, "E4M3"): "NVFP4",
}
#: Formats that hardware multiplies, by the kind of scales. It applies scales of tensors and rows to the product.
NATIVE_FORMATS = {
    "granularity tensor": ("E4M3", "E5M2"), "granularity row": ("E4M3", "E5M2"),
    "MXFP8": ("E4M3",), "blocks of 128": ("E4M3",), "NVFP4": ("E2M1",),
}  # fmt: skip
HEADS = ("head", "*.head", "lm_head", "*.lm_head")  # patterns of layers with this name, here and in transformers
#: Patterns for any model, by the bench's own pattern: the layers of a numbered module are a block's layers.
FOR_ANY_MODEL = {"head": HEADS, "blocks.*": ("*[0-9].*",)}
#: Names of attention's products Q K^T and P V in a model: a pattern reaches them if it ends in one of these.
PRODUCTS = ("scores", "values")
_UNSAID: Any = object()

_ROWS = {"format": "E4M3", "granularity": "row", "scale": "E8M0"}
#: What torchao's float8 recipes quantize, and how, for readers without torchao. `altgrad.model.torchao` compares this
#: table with torchao and refuses a layer that torchao would quantize otherwise. The scales of ``weight`` and ``input``
#: are for the forward product, those of ``grad`` for its product with the weight. ``rowwise_with_gw_hp`` computes the
#: weight's gradient from unquantized tensors.
TORCHAO_RECIPES: dict[str, dict[str, dict[str, str]]] = {
    "tensorwise": {"weight": {"format": "E4M3"}, "input": {"format": "E4M3"}, "grad": {"format": "E5M2"}},
    "rowwise": {"weight": _ROWS, "input": _ROWS, "grad": _ROWS},
    "rowwise_with_gw_hp": {"weight": _ROWS, "input": _ROWS, "grad": _ROWS},
}


def _native_kind(role: str, tensor: TensorRecipe) -> str | None:
    """Return the kind of the scales, such as ``"granularity row"`` or ``"MXFP8"``; ``None`` if no hardware has it."""
    if tensor.granularity in ("tensor", "row"):
        return f"granularity {tensor.granularity}"
    if tensor.granularity == "tile" and role != "weight":
        return None
    return NATIVE_BLOCKS.get((tensor.granularity, tensor.block, tensor.scale))


class LayerRecipe(Settings):
    """How a linear layer is quantized; a tensor without a recipe stays in the compute dtype.

    ``torchao`` names a float8 recipe of torchao, which then quantizes the layer (see :mod:`altgrad.model.torchao`).
    Validation fills ``weight``, ``input`` and ``grad`` as that recipe has them, and refuses all other settings.
    """

    weight: Quantized = Field(
        None, description="of the layer, or a product's right factor (keys, values); none: not quantized"
    )
    input: Quantized = Field(
        None,
        description="what the layer is called with, or a product's left factor (queries, probabilities); none: not "
        "quantized",
    )
    grad: Quantized = Field(
        None, description="the incoming gradient of the layer's or product's output; none: not quantized"
    )
    gradient: Literal["straight-through", "clipped", "relu"] = Field(
        "straight-through",
        description="through the rounding; clipped is zero where the tensor was clamped, relu that of the input where "
        "it is not positive",
    )
    accumulate: Literal["bf16", "float32"] = Field(
        "bf16",
        description="of the layer's products on the way out; bf16 is what FP8 hardware training does; attention's own "
        "products are always float32",
    )
    save: Literal["operands", "codes"] = Field(
        "operands", description="kept of tensors with one scale for the backward pass, with the same results"
    )
    backend: Literal["emulated", "native"] = Field(
        "emulated",
        description="who multiplies: bf16 or float32 products, any format; or FP8 hardware, E4M3 and E5M2 with scales "
        "of tensors or rows, E4M3 with those of MXFP8 (Blackwell) or of blocks of 128 (Hopper), NVFP4 (Blackwell)",
    )
    hadamard: Literal[0, 16] = Field(
        0, description="input and gradient are rotated for the weight's gradient, so many tokens at a time; 0: not"
    )
    torchao: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = Field(
        None, description="torchao's float8 recipe, as a baseline"
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_in_what_torchao_quantizes(cls, values: Any) -> Any:
        name = values.get("torchao") if isinstance(values, dict) else None
        recipe = TORCHAO_RECIPES.get(name, {}) if isinstance(name, str) else {}
        left_out = {role: dict(settings) for role, settings in recipe.items() if values.get(role) is None}
        return values | left_out if left_out else values

    def mistakes(self) -> Iterator[str]:
        """Yield a sentence for each setting that contradicts another one."""
        if (name := self.torchao) is not None:
            for role, settings in TORCHAO_RECIPES[name].items():
                tensor = getattr(self, role)
                if tensor is None or tensor.model_dump() != TensorRecipe.model_validate(settings).model_dump():
                    yield f"torchao: {name} decides {role} itself; remove {role} or torchao"
            for setting in ("gradient", "accumulate", "save", "backend", "hadamard"):
                if setting in self.changed():
                    yield f"torchao: {name} has no setting {setting}; remove {setting} or torchao"
            return
        tensors = {role: tensor for role, tensor in self.tensors().items() if tensor is not None}
        for role, tensor in tensors.items():
            if tensor.virtual and role != "weight":
                yield f"virtual is for the weight, whose optimizer sees the format; remove it from {role}"
            if tensor.rounding == "MS-EDEN" and role != "grad":
                yield f"rounding MS-EDEN is for grad, whose products it rotates; remove it from {role}"
            if tensor.scaling != "dynamic" and role != "weight" and self.hadamard:
                needed = f"hadamard {self.hadamard} needs scaling dynamic"
                yield f"{needed}, not {tensor.scaling} of {role}, which is rotated"
            if self.save == "codes" and role != "grad":
                if tensor.granularity != "tensor":
                    yield (
                        f"save codes needs granularity tensor, not {tensor.granularity}: with finer scales the "
                        "backward products quantize the tensor itself anew, so it has to be kept"
                    )
                if isinstance(tensor.format, Format) and not tensor.format.has_bytes:
                    has = "has more" if tensor.format.bits > 8 else "has no code left for NaN"
                    yield f"save codes needs formats of at most 8 bits, and {tensor.format.name} {has}"
        if self.hadamard and self.gradient != "straight-through":
            yield f"hadamard {self.hadamard} needs gradient straight-through"
        if self.hadamard and self.grad is not None and self.grad.rounding == "MS-EDEN":
            yield "rounding MS-EDEN rotates both backward products itself; remove hadamard"
        if self.virtual_weight is not None:
            for setting in self.changed():
                if setting in LayerRecipe.model_fields and setting != "weight":
                    yield f"a layer whose weight is virtual quantizes nothing; remove {setting}"
        if self.backend == "native":
            yield from self._native_mistakes(tensors)

    def _native_mistakes(self, tensors: Mapping[str, TensorRecipe]) -> Iterator[str]:
        """Yield a sentence for each setting that ``backend: native`` cannot have, because no hardware has it."""
        needed = "backend native needs weight, input and grad in E4M3 or E5M2, or all in NVFP4"
        names = {role: getattr(tensor.format, "name", None) for role, tensor in tensors.items()}  # None: not yet known
        for role in ROLES:
            if role not in tensors:
                yield f"{needed}; {role} is not quantized"
            elif names[role] and not any(names[role] in formats for formats in NATIVE_FORMATS.values()):
                yield f"{needed}; {role} is {names[role]}"
        kinds = {_native_kind(role, tensor) for role, tensor in tensors.items()}
        kind = kinds.pop()
        if kinds or kind is None:
            yield (
                "backend native needs one granularity for weight, input and grad: tensor, row, block of 32 with scale "
                "E8M0 (MXFP8), block of 16 with scale E4M3 (NVFP4), or block of 128 with scale float32 or E8M0, of the "
                "weight also tile of 16 or 128"
            )
            return
        for role, name in names.items():
            if name and name not in NATIVE_FORMATS[kind]:
                formats = " and ".join(NATIVE_FORMATS[kind])
                yield f"backend native multiplies {kind} in {formats} alone; {role} is {name}"
        if tensors["grad"].rounding == "MS-EDEN":
            yield "backend native has no MS-EDEN, whose products round what they are given anew"
        for a, b in (("input", "weight"), ("grad", "weight"), ("grad", "input")):
            if names[a] == names[b] == "E5M2":
                yield f"backend native has no product of E5M2 and E5M2, which {a} and {b} both are"
        if self.save == "codes":
            yield "backend native keeps 8-bit operands as it is; leave out save codes"

    def tensors(self) -> dict[str, TensorRecipe | None]:
        return {role: getattr(self, role) for role in ROLES}

    @property
    def quantizes(self) -> bool:
        return any(tensor is not None and not tensor.virtual for tensor in self.tensors().values())

    @property
    def virtual_weight(self) -> TensorRecipe | None:
        """The weight's recipe if it is virtual: the optimizer sees the format, no product uses it. Else ``None``."""
        return self.weight if self.weight is not None and self.weight.virtual else None

    def on(self, layers: str, *, required: bool = True) -> Rule:
        """Return the `Rule` with these settings for the layers whose names match the glob ``layers``."""
        return Rule(
            layers=layers, required=required, **{name: getattr(self, name) for name in LayerRecipe.model_fields}
        )

    def format_names(self) -> dict[str, str | None]:
        return {role: tensor.format.name if tensor else None for role, tensor in self.tensors().items()}


class Rule(LayerRecipe):
    """How the linear layers whose name matches ``layers`` are quantized; the last matching rule wins.

    A pattern that ends in ``scores`` or ``values``, such as ``blocks.*.attn.scores``, is for attention's products too.
    """

    layers: str = Field(
        min_length=1, description="glob over names such as blocks.0.attn.qkv, or blocks.0.attn.scores"
    )
    required: bool = Field(True, description="false: the pattern may match no layer")
    last: float = Field(
        1.0, gt=0, le=1, description="of the layers that match, in the model's order, the last share, rounded up"
    )

    @property
    def reaches_products(self) -> bool:
        """Whether the pattern's last part is the name of one of attention's products."""
        return self.layers.rpartition(".")[2] in PRODUCTS

    def mistakes(self) -> Iterator[str]:
        yield from super().mistakes()
        tensors = {role: tensor for role, tensor in self.tensors().items() if tensor is not None}
        if not self.reaches_products:
            for role, tensor in tensors.items():
                if tensor.granularity == "head":
                    yield f"granularity head of {role} is for attention's products, and {self.layers!r} is for layers"
            return
        have_no = f"attention's products, which {self.layers!r} is for, have no"
        refused = {"backend": "native", "hadamard": 16, "torchao": self.torchao or "-", "gradient": "relu"}
        for setting, value in refused.items():
            if getattr(self, setting) == value:
                yield f"{have_no} {setting} {value}; remove {setting}"
        for role, tensor in tensors.items():
            for setting, what in {"granularity": "tile", "rounding": "MS-EDEN", "virtual": True}.items():
                if getattr(tensor, setting) == what:
                    yield f"{have_no} {setting} {what}; change {setting} of {role}"

    @property
    def layer(self) -> LayerRecipe:
        return LayerRecipe.model_construct(**{name: getattr(self, name) for name in LayerRecipe.model_fields})


def last_matching(
    names: Sequence[str], rules: Iterable[tuple[str, float, T]], routers: Collection[str] = ()
) -> dict[str, T]:  # fmt: skip
    """Return, by name, the value of the last rule that decides the name; names that no rule decides are left out.

    A rule is (glob, share, value). Of the names that match the glob, it decides the last ``share``, rounded up. A rule
    that matches any other name decides none of ``routers``.
    """
    values: dict[str, T] = {}
    for pattern, share, value in rules:
        hits = [name for name in names if fnmatchcase(name, pattern)]
        hits = [name for name in hits if name not in routers] or hits
        values.update(dict.fromkeys(hits[-math.ceil(len(hits) * share) :], value))
    return values


_RULES = "such as Rule(layers='*', weight='E4M3')"


def _listed(value: Any) -> Any:
    """Return a list of rules as a tuple; raise ``ValueError`` for a single rule, a name and anything else."""
    if isinstance(value, (str, Mapping, Settings)) or not isinstance(value, Iterable):
        raise ValueError(f"expected a list of rules, [{_RULES.removeprefix('such as ')}], not {_shown(value)}")
    return tuple(value)


def _rule(value: Any) -> Any:
    """Return ``value`` if it is a rule or a mapping; else raise ``ValueError``, which says what to write."""
    if isinstance(value, (Rule, Mapping)):
        return value
    if isinstance(value, LayerRecipe):
        raise ValueError("a LayerRecipe names no layers; add .on('*'), or the pattern of those that it is for")
    raise ValueError(f"expected a rule, {_RULES}, not {_shown(value)}")


def _shown(value: Any) -> str:
    return f"a {type(value).__name__}" if isinstance(value, (Settings, Mapping)) else repr(value)


class Recipe(Settings):
    """An ordered list of rules: ``Recipe(rules=[Rule(layers="*", weight="E4M3"), ...])``.

    A rule may also be the mapping of its settings. A mistake raises ``ValueError``, which names the rule by its place.
    """

    rules: Annotated[tuple[Annotated[Rule, BeforeValidator(_rule)], ...], BeforeValidator(_listed)]

    @classmethod
    def named(cls, name: str) -> Recipe:
        """Return a published recipe, such as ``NVFP4``; ``recipes.yaml`` beside this file has them all.

        A grid entry of that name trains the same recipe, on the same layers of the bench's model. In other models a
        head is a layer called ``head`` or ``lm_head`` (at any depth), and blocks are numbered modules. An unknown name
        raises ``ValueError`` with the nearest names.
        """
        published = published_recipes()
        if name not in published:
            raise ValueError(f"no published recipe is called {name!r}{did_you_mean(name, published)}")
        rules = [Rule(**settings) for settings in published[name]]
        return cls(rules=tuple(
            rule.but(layers=pattern, required=rule.layers not in FOR_ANY_MODEL)
            for rule in rules for pattern in FOR_ANY_MODEL.get(rule.layers, (rule.layers,))
        ))  # fmt: skip

    @classmethod
    def uniform(cls, format: str | Format, *, grad: str | Format | None = _UNSAID, **options: Any) -> Recipe:
        """Return a recipe for every linear layer: weights and inputs in ``format``, incoming gradients in ``grad``.

        A layer called ``head`` or ``lm_head`` (at any depth) keeps its input unquantized, as in FP8 training practice.
        The native backend has no product with an unquantized input, so there the head is like the other layers.

        Args:
            format: a format or its name, or the name of a block format such as MXFP8, which includes its scales.
            grad: the same for gradients; None leaves them unquantized. Default: E5M2; with a block format, required.
            options: fields of :class:`TensorRecipe`, for all three tensors, or of :class:`LayerRecipe`.
        """
        if grad is _UNSAID:
            if isinstance(format, str) and format in BLOCK_FORMATS:
                published = max((name for name in published_recipes() if format.startswith(name)), key=len)
                raise ValueError(
                    f"Recipe.uniform({format!r}) does not say the format of gradients; take "
                    f"Recipe.named({published!r}), the recipe as published, or write grad={published!r}, say"
                )
            grad = "E5M2"
        choices = {name: options.pop(name) for name in LayerRecipe.model_fields if name in options}

        def tensor(name: str | Format) -> TensorRecipe:
            block = BLOCK_FORMATS.get(name) if isinstance(name, str) else None
            return TensorRecipe(**(block or {"format": name}) | options)

        forward = tensor(format)
        body = {"weight": forward, "grad": None if grad is None else tensor(grad), **choices}
        head = body | ({"input": forward} if choices.get("backend") == "native" else {})
        rules = [Rule(layers="*", input=forward, **body)]
        rules += [Rule(layers=layers, required=False, **head) for layers in HEADS]
        return cls(rules=tuple(rules))

    def match(
        self, layers: Iterable[str], products: Iterable[str] | None = None, routers: Collection[str] = ()
    ) -> dict[str, LayerRecipe]:  # fmt: skip
        """Return, by name, the recipe of each layer or product that is quantized or has a virtual weight.

        Args:
            layers: names of linear layers.
            products: names of attention's products; None if the caller is for layers alone.
            routers: layers that choose experts. Only a rule whose pattern matches routers alone decides them.

        Raises ``ValueError`` when a required pattern matches none of the names.
        """
        names, of_products = list(layers), list(products or ())
        every = names + of_products
        for rule in self.rules if products is not None else [r for r in self.rules if not r.reaches_products]:
            candidates = every if rule.reaches_products else names
            if rule.required and not any(fnmatchcase(name, rule.layers) for name in candidates):
                such = f"; one that the model has is {names[0]}" if names else "; the model has no linear layer"
                raise ValueError(f"pattern {rule.layers!r} matches no layer{did_you_mean(rule.layers, every, such)}")
        matched = last_matching(names, ((rule.layers, rule.last, rule.layer) for rule in self.rules), routers)
        reaching = [rule for rule in self.rules if rule.reaches_products]
        matched |= last_matching(of_products, ((rule.layers, rule.last, rule.layer) for rule in reaching))
        kept = [name for name in every if name in matched]
        return {name: found for name in kept if (found := matched[name]).quantizes or found.virtual_weight}


@cache
def published_recipes() -> dict[str, list[dict[str, Any]]]:
    """Return, by the recipe's name, the rules of each published recipe: settings of `Rule` with names of formats."""
    return read_yaml(PUBLISHED)
