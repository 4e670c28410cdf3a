"""Snapshots for the offline diagnoses: weights at a few steps, gradients of one batch in two paths.

``probes.safetensors`` holds ``weight/<step>/<layer>`` for each linear layer at evenly spaced steps, and where the
weight's scale is remembered or held also its amax as ``amax/<step>/<layer>`` (0-d, 0 before the first step). At each of
these steps but a run's last, which ``model.safetensors`` holds, it has ``state/<step>/<name>`` for every other entry of
the model's state, so that the model can be rebuilt there. From the last of the steps it holds
``grad_quantized/<step>/<layer>`` and ``grad_float/<step>/<layer>``: the weight gradient of one fixed batch through the
quantized model and through a float32 copy of it. Its metadata maps each layer to the formats of its three roles.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from altgrad.model import embedded_weights, layer_recipe, linear_layers, unquantize_model
from altgrad.model.layers import is_transposed, quantizer_of
from altgrad.training.checkpoint import unique_state
from altgrad.training.records import write_tensors


def save_weights(path: Path, model: nn.Module, step: int) -> None:
    """Write the model at ``step`` to ``path``: its linear layers' float32 weights, what holds their scales, the rest.

    A weight that a layer shares with an embedding is there once, as the layer's.
    """
    layers = linear_layers(model)
    places = {layer.weight.data_ptr() for layer in layers.values()}
    rest = {name: t for name, t in unique_state(model).items() if t.data_ptr() not in places}
    tensors = {f"state/{step}/{name}": t for name, t in rest.items()}
    for name, layer in layers.items():
        tensors[f"weight/{step}/{name}"] = layer.weight.float()
        quantizer = quantizer_of(layer, "weight")
        remembered = None if quantizer is None else quantizer.remembered_amax()
        if remembered is not None:
            tensors[f"amax/{step}/{name}"] = remembered.float().reshape(())
    write_tensors(path, tensors)


def moved(path: Path, model: nn.Module) -> dict[str, Tensor]:
    """Return by how much the weights, (out, in) on the CPU, moved since the first `save_weights` to ``path``, by layer.

    Left out is what an embedding shares: its rows are tokens, which move as often as they are seen.
    """
    start, embedded = load_file(path), embedded_weights(model)
    found = {}
    for name, layer in linear_layers(model).items():
        if layer.weight not in embedded:
            difference = layer.weight.detach().float().cpu() - start[f"weight/0/{name}"]
            found[name] = difference.t() if is_transposed(layer) else difference
    return found


def layer_formats(model: nn.Module) -> dict[str, dict[str, str | None]]:
    """Return the format's name, or ``None``, of each role of each linear layer."""
    unquantized: dict[str, str | None] = {"weight": None, "input": None, "grad": None}
    return {
        name: recipe.format_names() if (recipe := layer_recipe(layer)) else unquantized
        for name, layer in linear_layers(model).items()
    }


def gradients(
    model: nn.Module, inputs: Tensor, targets: Tensor, device: torch.device, compute: str, factor: float = 1.0
) -> dict[str, Tensor]:  # fmt: skip
    """Return the weight gradient of one batch for each linear layer that trains, by name, in float32.

    The loss is multiplied by ``factor`` as in a step, and the gradients are divided by it.
    """
    layers = {name: layer for name, layer in linear_layers(model).items() if layer.weight.requires_grad}
    if not layers:
        return {}
    with torch.autocast(device.type, torch.bfloat16, enabled=compute == "bf16"):
        loss = model(inputs, targets)
    found = torch.autograd.grad(loss * factor, [layer.weight for layer in layers.values()])
    return {name: g.float().cpu() / factor for name, g in zip(layers, found, strict=True)}


def float_copy(model: nn.Module) -> nn.Module:
    """Return a copy of ``model`` with plain linear layers: the unquantized path with the same weights."""
    return unquantize_model(copy.deepcopy(model))


def write_probes(
    path: Path, snapshots: list[Path], quantized: dict[str, Tensor], plain: dict[str, Tensor], step: int,
    formats: dict[str, dict[str, str | None]],
) -> None:  # fmt: skip
    """Join the weight ``snapshots`` and the gradients of ``step`` into ``probes.safetensors``."""
    tensors: dict[str, Tensor] = {}
    for snapshot in snapshots:
        tensors |= load_file(snapshot)
    tensors = {name: t for name, t in tensors.items() if not name.startswith(f"state/{step}/")}
    for label, found in (("grad_quantized", quantized), ("grad_float", plain)):
        tensors |= {f"{label}/{step}/{name}": g for name, g in found.items()}
    write_tensors(path, tensors, {"layers": json.dumps(formats)})
