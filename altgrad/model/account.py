"""What of a model is quantized, what is left, and why: read off the model as it is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from altgrad.config.recipe import ROLES
from altgrad.model.layers import (
    embedded_weights,
    has_own_forward,
    is_linear,
    layer_recipe,
    linear_layers,
    virtual_weight,
)
from altgrad.model.lora import Adapter
from altgrad.model.readers import Reader, readers_of_weights

LOOKED_UP = (nn.Embedding, nn.EmbeddingBag)
ELEMENTWISE = (nn.LayerNorm, nn.RMSNorm)  # whose parameters may be matrices, and take part in no product


@dataclass(frozen=True)
class Account:
    """What :func:`account` found; ``str`` makes a table of it, layers that differ in numbers alone as one row.

    Attributes:
        quantized: layer -> role -> name of its format, ``None`` where the role is not quantized.
        left: layer, embedding or parameter -> why it is not quantized.
        unknown: those parameters of ``left`` that take part in products which no recipe reaches -> the class of
            their module.
        shares: ``quantized`` and ``unknown`` -> share of the weights that take part in products, by elements.
    """

    quantized: dict[str, dict[str, str | None]]
    left: dict[str, str]
    unknown: dict[str, str]
    shares: dict[str, float]

    @property
    def summary(self) -> str:
        """How much is quantized, in one line."""
        layers = f"{len(self.quantized)} layer{'' if len(self.quantized) == 1 else 's'}"
        return f"{layers} quantized, {self.shares['quantized']:.1%} of the weights that take part in products"

    def __str__(self) -> str:
        formats = {name: tuple(str(found[role] or "-") for role in ROLES) for name, found in self.quantized.items()}
        lines = [self.summary]
        if formats:
            lines += _table(("quantized", "layers", *ROLES), formats)
        if self.left:
            lines += _table(("left", "count", "why"), {name: (why,) for name, why in self.left.items()})
        return "\n".join(lines)


def account(model: nn.Module) -> Account:
    """Return what of ``model`` is quantized at this moment, what is left and why; before surgery all is left.

    A weight takes part in products if it has two dimensions or more and is not just looked up or multiplied
    element by element; a head that shares an embedding's weight is a layer like any other. Of a module that is
    not known, each such parameter is taken to be one. Adapters (`altgrad.model.lora`) are beside the weights.

    Where code around a layer multiplies with its weight itself, that product is not quantized: ``left`` says so, and a
    layer that this code never calls is not quantized at all. `altgrad.model.readers` says what of this is found.
    """
    readers = readers_of_weights(model)
    layers = {name: layer for name, layer in linear_layers(model).items() if name not in readers or readers[name].calls}
    quantized = {name: recipe.format_names() for name, layer in layers.items() if (recipe := layer_recipe(layer))}
    left = {}
    for name, layer in layers.items():
        if virtual_weight(layer):
            left[name] = "virtual: its optimizer sees the format, no product does"
        elif name not in quantized:
            left[name] = "no rule quantizes it"
    for name, module in model.named_modules():
        if isinstance(module, LOOKED_UP) and name not in readers:
            left[name] = "looked up, no product"
    for name, reader in readers.items():
        left[f"{name}.weight"] = f"{type(reader.module).__name__} multiplies with it itself, past the layer"
    unknown = dict(_unknown(model, layers, readers))
    for name, (_, module) in unknown.items():
        left.setdefault(name, f"{type(module).__name__}: {_why_unknown(module)}")
    weights = {layer.weight for layer in layers.values()}
    done = sum(w.numel() for w in {layers[name].weight for name in quantized})
    out_of_reach = sum(p.numel() for p, _ in unknown.values())
    every = max(1, sum(w.numel() for w in weights) + out_of_reach)
    return Account(
        quantized=quantized, left=left,
        unknown={name: type(module).__name__ for name, (_, module) in unknown.items()},
        shares={"quantized": done / every, "unknown": out_of_reach / every},
    )  # fmt: skip


def _unknown(
    model: nn.Module, layers: dict[str, Any], readers: dict[str, Reader]
) -> Iterator[tuple[str, tuple[nn.Parameter, nn.Module]]]:
    """Yield the parameters that may take part in products outside of ``layers``, with their modules."""
    seen = {layer.weight for layer in layers.values()}
    for name, reader in readers.items():
        weight = reader.layer.weight
        if weight not in seen and name not in layers:
            seen.add(weight)
            yield f"{name}.weight", (weight, reader.module)
    seen |= embedded_weights(model)
    for prefix, module in model.named_modules():
        if is_linear(module) or isinstance(module, (*LOOKED_UP, *ELEMENTWISE, Adapter)):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim >= 2 and parameter not in seen:
                seen.add(parameter)
                yield f"{prefix}.{name}".removeprefix("."), (parameter, module)


def _why_unknown(module: nn.Module) -> str:
    return "its forward is not nn.Linear's" if has_own_forward(module) else "its products are not known"


def _table(header: tuple[str, ...], entries: dict[str, tuple[str, ...]]) -> Iterable[str]:
    """Return lines in columns, of entries that differ in numbers of their names alone one line, with their count."""
    counts: dict[tuple[str, ...], int] = {}
    for name, cells in entries.items():
        key = (re.sub(r"(?<![^.])\d+(?![^.])", "*", name), *cells)
        counts[key] = counts.get(key, 0) + 1
    rows = [header, *((name, str(count), *cells) for (name, *cells), count in counts.items())]
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
