"""Report which weights of a model are quantized, which are not, and why, from the modules that the model has now.

A product outside of a layer, such as ``F.linear(x, self.proj.weight)`` in a module's method, is not quantized.
`account` searches the source of the modules' classes for such products, and follows local names back to ``self``. It
does not find layers in a list, weights behind a property, or code outside of modules.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple

from torch import nn

from altgrad.config.recipe import ROLES
from altgrad.model.experts import is_experts, quantizable_layers, router_weights
from altgrad.model.layers import (
    Adapter,
    attention_products,
    embedded_weights,
    has_own_forward,
    is_linear,
    layer_recipe,
    virtual_weight,
)

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
ELEMENTWISE = (nn.LayerNorm, nn.RMSNorm)  # their parameters may be matrices, and are in no product
PRODUCTS = {
    "linear", "matmul", "mm", "bmm", "addmm", "addbmm", "baddbmm", "einsum", "bilinear", "multi_head_attention_forward",
}  # fmt: skip
#: Attributes of a weight that are in no product.
FACTS = {"dtype", "device", "shape", "size", "ndim", "dim", "numel", "requires_grad", "is_cuda", "type"}


@dataclass(frozen=True)
class Account:
    """The result of :func:`account`; ``str`` makes a table. Layers whose names differ only in numbers share a row.

    Attributes:
        quantized: layer or weight of experts -> role -> name of its format, ``None`` if the role is not quantized.
        products: the same for the quantized products of attention.
        left: layer, embedding or parameter -> why it is not quantized.
        unknown: parameter in ``left`` that may be in a product which no recipe reaches -> class of its module.
        shares: ``quantized`` or ``unknown`` -> its share of all elements of weights in products, 0 to 1.
    """

    quantized: dict[str, dict[str, str | None]]
    products: dict[str, dict[str, str | None]]
    left: dict[str, str]
    unknown: dict[str, str]
    shares: dict[str, float]

    @property
    def summary(self) -> str:
        """How much is quantized, as one line: ``"9 layers quantized, 100.0% of ..."``."""
        layers = f"{len(self.quantized)} layer{'' if len(self.quantized) == 1 else 's'}"
        said = f"{layers} quantized, {self.shares['quantized']:.1%} of the weights that take part in products"
        return said + (f"; {len(self.products)} products of attention quantized" if self.products else "")

    def __str__(self) -> str:
        entries = (self.quantized | self.products).items()
        formats = {name: tuple(str(roles[role] or "-") for role in ROLES) for name, roles in entries}
        lines = [self.summary]
        if formats:
            lines += _table(("quantized", "layers", *ROLES), formats)
        if self.left:
            lines += _table(("left", "count", "why"), {name: (why,) for name, why in self.left.items()})
        return "\n".join(lines)


def account(model: nn.Module) -> Account:
    """Return which weights of ``model`` are quantized now, which are not and why.

    A weight takes part in products if it has two or more dimensions and is not only looked up or multiplied element by
    element. In a module of an unknown class, each parameter with two or more dimensions counts. A head that shares an
    embedding's weight is a layer like any other. Adapters are not counted.

    A layer counts as not quantized if a module around it multiplies with its weight and never calls the layer.
    """
    readers = _readers(model)
    found = quantizable_layers(model)
    layers = {name: layer for name, layer in found.items() if name not in readers or readers[name].calls}
    quantized = {name: recipe.format_names() for name, layer in layers.items() if (recipe := layer_recipe(layer))}
    recipes = {name: layer_recipe(product) for name, product in attention_products(model).items()}
    left, routers = {}, router_weights(model)
    for name, layer in layers.items():
        if virtual_weight(layer):
            left[name] = "virtual: its optimizer sees the format, no product does"
        elif name not in quantized:
            is_router = layer.weight in routers
            left[name] = "router: only a rule for routers alone quantizes it" if is_router else "no rule quantizes it"
    for name, module in model.named_modules():
        if isinstance(module, EMBEDDINGS) and name not in readers:
            left[name] = "looked up, no product"
    for name, reader in readers.items():
        left[f"{name}.weight"] = f"{type(reader.module).__name__} multiplies with it itself, past the layer"
    unknown = dict(_unknown(model, layers, readers))
    weights = {layer.weight for layer in layers.values()}
    for name in [name for name, (parameter, _) in unknown.items() if parameter in routers]:
        parameter, module = unknown.pop(name)
        weights.add(parameter)
        left[name] = f"{type(module).__name__}: a router, which stays in high precision"
    for name, (_, module) in unknown.items():
        why = "its forward is not nn.Linear's" if has_own_forward(module) else "its products are not known"
        left.setdefault(name, f"{type(module).__name__}: {why}")
    done = sum(w.numel() for w in {layers[name].weight for name in quantized})
    out_of_reach = sum(p.numel() for p, _ in unknown.values())
    total = max(1, sum(w.numel() for w in weights) + out_of_reach)
    return Account(
        quantized=quantized, left=left,
        products={name: recipe.format_names() for name, recipe in recipes.items() if recipe is not None},
        unknown={name: type(module).__name__ for name, (_, module) in unknown.items()},
        shares={"quantized": done / total, "unknown": out_of_reach / total},
    )  # fmt: skip


class _Reader(NamedTuple):
    """A ``module`` that multiplies with the weight of the ``layer`` inside it; ``calls``: it calls the layer too."""

    module: nn.Module
    layer: Any
    calls: bool


def _unknown(
    model: nn.Module, layers: dict[str, Any], readers: dict[str, _Reader]
) -> Iterator[tuple[str, tuple[nn.Parameter, nn.Module]]]:
    """Yield name and (parameter, its module) of the parameters that may take part in products outside of ``layers``."""
    seen = {layer.weight for layer in layers.values()}
    for name, reader in readers.items():
        weight = reader.layer.weight
        if weight not in seen and name not in layers:
            seen.add(weight)
            yield f"{name}.weight", (weight, reader.module)
    seen |= embedded_weights(model)
    for prefix, module in model.named_modules():
        if is_linear(module) or is_experts(module) or isinstance(module, (*EMBEDDINGS, *ELEMENTWISE, Adapter)):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim >= 2 and parameter not in seen:
                seen.add(parameter)
                yield f"{prefix}.{name}".removeprefix("."), (parameter, module)


def _readers(model: nn.Module) -> dict[str, _Reader]:
    """Return dotted name -> `_Reader` for each layer of ``model`` whose weight a module around it multiplies with."""
    readers = {}
    for prefix, module in model.named_modules():
        kind: Any = type(module)
        for path, calls in _paths_to_weights(kind).items():
            try:
                layer = module.get_submodule(path)
            except AttributeError:
                continue
            if isinstance(getattr(layer, "weight", None), nn.Parameter):
                readers[f"{prefix}.{path}".removeprefix(".")] = _Reader(module, layer, calls)
    return readers


@cache
def _paths_to_weights(cls: type) -> dict[str, bool]:
    """Return path -> whether ``cls`` also calls it, for each submodule whose weight the methods of ``cls`` multiply.

    A path starts from ``self``: ``"block.proj"``.
    """
    members: dict[str, object] = {}
    for base in reversed(cls.__mro__[: cls.__mro__.index(nn.Module)]):
        members |= vars(base)
    methods = [member for member in members.values() if isinstance(member, FunctionType)]
    reading = [method for method in methods if "weight" in method.__code__.co_names]
    paths = {path for method in reading for path in _multiplied(_parsed(method))}
    names = {path.split(".")[0] for path in paths}
    calls = {
        _dotted(node.func)
        for method in methods if names & set(method.__code__.co_names)
        for node in ast.walk(_parsed(method)) if isinstance(node, ast.Call)
    }  # fmt: skip
    return {path: path in calls for path in sorted(paths)}


@cache
def _parsed(method: FunctionType) -> ast.AST:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(method)))
    except (OSError, SyntaxError):  # a method without source
        return ast.Module([], [])


def _multiplied(tree: ast.AST) -> Iterator[str]:
    """Yield the path from ``self`` to each module whose weight takes part in a product in ``tree``."""
    local: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    local.setdefault(target.id, set()).update(_weights(node.value, {}))
    for node in ast.walk(tree):
        is_matmul = isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult)
        called = node.func if isinstance(node, ast.Call) else None
        if is_matmul or getattr(called, "attr", getattr(called, "id", "")) in PRODUCTS:
            yield from _weights(node, local)


def _weights(node: ast.AST, local: dict[str, set[str]]) -> Iterator[str]:
    """Yield the path to each module whose ``weight`` is in the expression ``node``, except in one of its `FACTS`.

    ``local``: name of a local variable -> paths in the expressions that the method assigns to it.
    """
    if isinstance(node, ast.Name):
        yield from local.get(node.id, ())
    if isinstance(node, ast.Attribute):
        if node.attr in FACTS:
            return
        if node.attr == "weight":
            yield from filter(None, [_dotted(node.value)])
            return
    for child in ast.iter_child_nodes(node):
        yield from _weights(child, local)


def _dotted(node: ast.AST) -> str:
    """Return ``"block.proj"`` for ``self.block.proj``, and ``""`` for an expression that does not begin at ``self``."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join(reversed(names)) if isinstance(node, ast.Name) and node.id == "self" else ""


def _table(header: tuple[str, ...], entries: dict[str, tuple[str, ...]]) -> list[str]:
    """Return a table's lines; entries whose names differ only in numbers share a line, with their count."""
    counts: dict[tuple[str, ...], int] = {}
    for name, cells in entries.items():
        key = (re.sub(r"(?<![^.])\d+(?![^.])", "*", name), *cells)
        counts[key] = counts.get(key, 0) + 1
    rows = [header, *((name, str(count), *cells) for (name, *cells), count in counts.items())]
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
