"""The files that a run leaves, including snapshots of its weights for the diagnoses.

``probes.safetensors`` holds ``weight/<step>/<layer>`` for each linear layer at evenly spaced steps. If the weight's
scale is remembered or held, ``amax/<step>/<layer>`` (0-d, 0 before the first step) is its amax. The other entries of
the model's state are ``state/<step>/<name>``, so that the model can be rebuilt; those of the last step are in
``model.safetensors`` instead. For the last step the file holds ``grad_quantized/<step>/<layer>`` and
``grad_float/<step>/<layer>``: the weight gradient of one fixed batch through the quantized model and through a float32
copy of it. The file's metadata maps each layer to the formats of its three roles.
"""

from __future__ import annotations

import copy
import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow
import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from altgrad.common.files import replacing, write_rows
from altgrad.config.tasks import HISTORY
from altgrad.model import embedded_weights, layer_recipe, linear_layers, unquantize_model
from altgrad.model.layers import is_transposed, quantizer_of
from altgrad.optim.loading import HELD
from altgrad.optim.weight_grid import plain
from altgrad.training.monitor import Measurement


def write_history(path: Path, rows: list[list[Any]], measured: Sequence[str] = ()) -> None:
    """Write ``history.csv``: one row per logged step, with an empty field where a value was not measured.

    The columns are `HISTORY`, then ``measured``, then ``recipe`` if the rows have one more value.
    """
    columns = [*HISTORY, *measured, "recipe"]
    frame = pd.DataFrame(rows, columns=columns[: len(rows[0])] if rows else columns[:-1])
    with replacing(path) as temporary:
        frame.to_csv(temporary, index=False, lineterminator="\n")


def write_monitors(path: Path, rows: list[list[Any]]) -> None:
    """Write ``monitors.parquet``: tidy rows step, layer, role, metric, value."""
    types = [pyarrow.int64(), pyarrow.string(), pyarrow.string(), pyarrow.string(), pyarrow.float64()]
    write_rows(path, rows, pyarrow.schema(zip(Measurement._fields, types, strict=True)))


def write_csv(path: Path, rows: Iterable[Sequence[Any]]) -> None:
    """Write ``rows`` to the CSV file ``path`` atomically; the first row names the columns."""
    with replacing(path) as temporary, open(temporary, "w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write ``tensors``, from any device, to ``path`` atomically.

    The file is made in memory first: safetensors' own writer reports a full disk without an error number.
    """
    content = save({name: plain(t).detach().cpu().contiguous() for name, t in tensors.items()}, metadata)
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def unique_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict and the amax of weights on the quantization grid, each tensor under its first name.

    The tensors are those that the modules hold now. With FSDP2 `state_dict` would return parts of gathered weights.
    """
    lost = {f"{name}.{key}" for name, module in model.named_modules() for key in module._non_persistent_buffers_set}
    buffers = {
        name: t for name, t in model.named_buffers()
        if name not in lost or name.rpartition(".")[2] in ("history", HELD)
    }  # fmt: skip
    return {name: t.detach() for name, t in model.named_parameters()} | buffers


def save_weights(path: Path, model: nn.Module, step: int) -> None:
    """Write a snapshot of the model at ``step`` to ``path``; its tensors are named as in ``probes.safetensors``.

    A weight that a layer shares with an embedding is written once, as the layer's.
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


def moved_since(path: Path, model: nn.Module) -> dict[str, Tensor]:
    """Return the change of each layer's weights (out, in), on the CPU, since the snapshot of step 0 in ``path``.

    A weight that an embedding shares is left out: its rows are tokens, which move as often as they occur.
    """
    start, embedded = load_file(path), embedded_weights(model)
    changes = {}
    for name, layer in linear_layers(model).items():
        if layer.weight not in embedded:
            change = layer.weight.detach().float().cpu() - start[f"weight/0/{name}"]
            changes[name] = change.t() if is_transposed(layer) else change
    return changes


def layer_formats(model: nn.Module) -> dict[str, dict[str, str | None]]:
    """Return by linear layer and role the name of the format, ``None`` for a role that is not quantized."""
    unquantized: dict[str, str | None] = {"weight": None, "input": None, "grad": None}
    return {
        name: recipe.format_names() if (recipe := layer_recipe(layer)) else unquantized
        for name, layer in linear_layers(model).items()
    }


def weight_gradients(
    model: nn.Module, inputs: Tensor, targets: Tensor, device: torch.device, compute: str, factor: float = 1.0
) -> dict[str, Tensor]:  # fmt: skip
    """Return the float32 weight gradient of one batch for each linear layer that trains, by name.

    The loss is multiplied by ``factor``, as in a step, and the gradients are divided by it.
    """
    layers = {name: layer for name, layer in linear_layers(model).items() if layer.weight.requires_grad}
    if not layers:
        return {}
    with torch.autocast(device.type, torch.bfloat16, enabled=compute == "bf16"):
        loss = model(inputs, targets)
    grads = torch.autograd.grad(loss * factor, [layer.weight for layer in layers.values()])
    return {name: g.float().cpu() / factor for name, g in zip(layers, grads, strict=True)}


def float_copy(model: nn.Module) -> nn.Module:
    """Return a copy of ``model`` with the same weights and nothing quantized."""
    return unquantize_model(copy.deepcopy(model))


def write_probes(
    path: Path, snapshots: list[Path], quantized: dict[str, Tensor], unquantized: dict[str, Tensor], step: int,
    formats: dict[str, dict[str, str | None]],
) -> None:  # fmt: skip
    """Join the weight ``snapshots`` and the gradients of ``step`` into ``probes.safetensors``."""
    tensors: dict[str, Tensor] = {}
    for snapshot in snapshots:
        tensors |= load_file(snapshot)
    tensors = {name: t for name, t in tensors.items() if not name.startswith(f"state/{step}/")}
    for label, grads in (("grad_quantized", quantized), ("grad_float", unquantized)):
        tensors |= {f"{label}/{step}/{name}": g for name, g in grads.items()}
    write_tensors(path, tensors, {"layers": json.dumps(formats)})
