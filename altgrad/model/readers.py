"""Which layers' weights the code around them multiplies with itself, past what the layers compute.

``F.linear(x, self.proj.weight)`` in a module's method is a product that no quantized layer sees. It is looked for in
the source of the modules' classes, from the call of a product to ``self``, over local names. A layer of a list, a
weight behind a property and code outside of modules are not found.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple

from torch import nn

PRODUCTS = {
    "linear", "matmul", "mm", "bmm", "addmm", "addbmm", "baddbmm", "einsum", "bilinear", "multi_head_attention_forward",
}  # fmt: skip
#: Of a weight, what is no part of a product.
FACTS = {"dtype", "device", "shape", "size", "ndim", "dim", "numel", "requires_grad", "is_cuda", "type"}


class Reader(NamedTuple):
    """A module whose code multiplies with the weight of a ``layer`` in it, and whether that code calls the layer too.

    A layer here is any module with a ``weight``, an embedding too.
    """

    module: nn.Module
    layer: Any
    calls: bool


def readers_of_weights(model: nn.Module) -> dict[str, Reader]:
    """Return the layers of ``model`` whose weight the code of a module around them multiplies with, by dotted name."""
    found = {}
    for prefix, module in model.named_modules():
        kind: Any = type(module)
        for path, calls in _read_past(kind).items():
            try:
                layer = module.get_submodule(path)
            except AttributeError:
                continue
            if isinstance(getattr(layer, "weight", None), nn.Parameter):
                found[f"{prefix}.{path}".removeprefix(".")] = Reader(module, layer, calls)
    return found


@cache
def _read_past(cls: type) -> dict[str, bool]:
    """Return the paths from ``self`` to modules whose weight methods of ``cls`` multiply with -> called there too?"""
    members: dict[str, object] = {}
    for base in reversed(cls.__mro__[: cls.__mro__.index(nn.Module)]):
        members |= vars(base)
    methods = [member for member in members.values() if isinstance(member, FunctionType)]
    readers = [method for method in methods if "weight" in method.__code__.co_names]
    paths = {path for method in readers for path in _multiplied(_parsed(method))}
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
    except (OSError, SyntaxError):  # made by a program, or without a file
        return ast.Module([], [])


def _multiplied(tree: ast.AST) -> Iterator[str]:
    """Yield the paths from ``self`` to what has a weight that takes part in a product."""
    local: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    local.setdefault(target.id, set()).update(_weights(node.value, {}))
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            yield from _weights(node, local)
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in PRODUCTS:
                yield from _weights(node, local)


def _weights(node: ast.AST, local: dict[str, set[str]]) -> Iterator[str]:
    """Yield the paths to the modules whose ``weight`` is in an expression, other than by a fact about it."""
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
    """Return ``"block.proj"`` for ``self.block.proj``, and nothing for what does not begin at ``self``."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join(reversed(names)) if isinstance(node, ast.Name) and node.id == "self" else ""
