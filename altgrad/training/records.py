"""The files of a run: its checkpoints and rows while it is under way, and what it leaves.

**Checkpoints.** A checkpoint is two files, ``step-<n>.safetensors`` with every tensor and ``step-<n>.json`` with
everything else and the SHA-256 of the first. The second is written last, each is renamed into place when complete, and
the two newest pairs are kept. So after a kill at any moment the run resumes from the newest pair that verifies, and
continues with the same bits.

**Rows** are appended to JSON-lines files as they are measured, and can be read during the run. A resumed run drops the
rows after its checkpoint and writes them again, so the finished files do not show the interruption.

**Snapshots** of the weights are for the diagnoses.
``probes.safetensors`` holds ``weight/<step>/<layer>`` for each linear layer at evenly spaced steps. If the weight's
scale is remembered or held, ``amax/<step>/<layer>`` (0-d, 0 before the first step) is its amax. The other entries of
the model's state are ``state/<step>/<name>``, so that the model can be rebuilt; those of the last step are in
``model.safetensors`` instead. For the last step the file holds ``grad_quantized/<step>/<layer>`` and
``grad_float/<step>/<layer>``: the weight gradient of one fixed batch through the quantized model and through a float32
copy of it. The file's metadata maps each layer to the formats of its three roles.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pyarrow
import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save
from torch import Tensor, nn

from altgrad.common.files import replacing, sha256_of, write_json, write_rows
from altgrad.config.tasks import HISTORY
from altgrad.model import embedded_weights, layer_recipe, linear_layers
from altgrad.model.layers import is_transposed, quantizer_of
from altgrad.optim import ArmOptimizer, WeightGrid
from altgrad.optim.loading import HELD
from altgrad.optim.sharded import gather_full, keep_part
from altgrad.optim.weight_grid import plain
from altgrad.training.monitor import Measurement

KEPT = 2  # checkpoints


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


def write_probes(path: Path, snapshots: list[Path], grads: dict[str, Tensor], model: nn.Module, step: int) -> None:
    """Join the weight ``snapshots`` and ``grads`` into ``probes.safetensors``, the last ``step`` being in ``model``."""
    tensors: dict[str, Tensor] = {}
    for snapshot in snapshots:
        tensors |= load_file(snapshot)
    tensors = {name: t for name, t in tensors.items() if not name.startswith(f"state/{step}/")}
    unquantized: dict[str, str | None] = {"weight": None, "input": None, "grad": None}
    formats = {
        name: recipe.format_names() if (recipe := layer_recipe(layer)) else unquantized
        for name, layer in linear_layers(model).items()
    }
    write_tensors(path, tensors | grads, {"layers": json.dumps(formats)})


# --- checkpoints and rows of a run under way ---------------------------------------------------------


class Checkpoint(NamedTuple):
    """A loaded checkpoint: the number of updates done, tensors by the names of `pack`, and the saved JSON state."""

    step: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]


def save_checkpoint(directory: Path, step: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Write the checkpoint of ``step`` into ``directory`` and remove all but the newest two."""
    for later in [s for s in _steps(directory) if s > step]:
        _remove(directory, later)  # unusable: the run resumed from an earlier step
    path = directory / f"step-{step:08d}.safetensors"
    write_tensors(path, tensors)
    write_json(path.with_suffix(".json"), {"step": step, "sha256": sha256_of(path), "state": state})
    for old in sorted(_steps(directory))[:-KEPT]:
        _remove(directory, old)


def load_newest(directory: Path) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest checkpoint that verifies, ``None`` without one, and a sentence on each newer one that fails."""
    problems: list[str] = []
    for step in sorted(_steps(directory), reverse=True):
        path = directory / f"step-{step:08d}.safetensors"
        try:
            record = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
            content = path.read_bytes()
            if record["sha256"] != hashlib.sha256(content).hexdigest():
                raise ValueError("its checksum does not match")
            return Checkpoint(step, load(content), record["state"]), problems
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            problems.append(f"checkpoint of step {step} is unusable ({error}); going back further")
    return None, problems


def _remove(directory: Path, step: int) -> None:
    for suffix in (".json", ".safetensors"):
        (directory / f"step-{step:08d}{suffix}").unlink(missing_ok=True)


def _steps(directory: Path) -> Iterator[int]:
    """Yield each step that has one or both files of a checkpoint."""
    names = (re.fullmatch(r"step-(\d+)\.(json|safetensors)", path.name) for path in directory.glob("step-*"))
    yield from {int(name[1]) for name in names if name}


def pack(model: nn.Module, optimizer: ArmOptimizer) -> dict[str, Tensor]:
    """Return every tensor that decides how training continues, by a flat name.

    Weights and buffers (``model/...``), weights on a quantization grid as their codes (``codes/...``), the optimizer's
    state (``optimizer/<parameter>/<name>``) and the random generators' states (``rng/...``). A tied parameter is stored
    once. If several processes train, all must call this function: they gather sharded tensors from each other.
    """
    on_grid, tensors = _on_grid(model, optimizer), {}
    for name, t in unique_state(model).items():
        if name in on_grid:
            tensors[f"codes/{name}"] = on_grid[name][1].encode(gather_full(t))
        else:
            tensors[f"model/{name}"] = gather_full(t)
    state = optimizer.state_dict()["state"]
    for index, entries in state.items():
        for name, value in entries.items():
            if name != HELD:  # stored with the model's buffers
                tensors[f"optimizer/{index}/{name}"] = gather_full(value)
    tensors["rng/cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors["rng/cuda"] = torch.cuda.get_rng_state()
    return tensors


def unpack(tensors: dict[str, Tensor], model: nn.Module, optimizer: ArmOptimizer) -> None:
    """Restore what :func:`pack` returned into ``model``, ``optimizer`` and the random generators."""
    on_grid = _on_grid(model, optimizer)
    with torch.no_grad():
        for name, target in unique_state(model).items():
            if name not in on_grid:
                keep_part(target, tensors[f"model/{name}"])
        for name, (weight, grid) in on_grid.items():  # their scales are restored by now
            keep_part(weight, grid.decode(tensors[f"codes/{name}"], gather_full(weight)))
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        if name.startswith("optimizer/"):
            _, index, entry = name.split("/", 2)
            state.setdefault(int(index), {})[entry] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    torch.set_rng_state(tensors["rng/cpu"])
    if torch.cuda.is_available() and "rng/cuda" in tensors:
        torch.cuda.set_rng_state(tensors["rng/cuda"])


def _on_grid(model: nn.Module, optimizer: ArmOptimizer) -> dict[str, tuple[nn.Parameter, WeightGrid]]:
    """Return by name each weight that is stored as representable values, with its grid; empty with master weights."""
    if optimizer.arm.weights != "quantized":
        return {}
    return {name: (p, optimizer.grids[p]) for name, p in model.named_parameters() if p in optimizer.grids}


class RowLog:
    """An append-only list of JSON rows, each with its ``step`` first."""

    def __init__(self, path: Path, resume_step: int | None) -> None:
        """Open ``path``; keep its rows up to ``resume_step``. ``None`` starts with no rows."""
        self.path = path
        kept = []
        if resume_step is not None and path.exists():
            kept = [line for line in path.read_text(encoding="utf-8").splitlines() if _step_of(line) <= resume_step]
        with replacing(path) as temporary:
            temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        # Open as long as the run; each line is written at once, for a reader who watches.
        self._file = open(path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115

    def append(self, row: Sequence[Any]) -> None:
        self._file.write(json.dumps(row, allow_nan=False) + "\n")

    def extend(self, rows: Iterable[Sequence[Any]]) -> None:
        """Add rows; a number that JSON cannot hold (NaN, infinity) becomes null."""
        for row in rows:
            self.append([None if isinstance(v, float) and not math.isfinite(v) else v for v in row])

    def sync(self) -> None:
        """Wait until every appended row is on disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def rows(self) -> list[list[Any]]:
        self.sync()
        return [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines()]

    def close(self) -> None:
        self._file.close()


def _step_of(line: str) -> float:
    """Return the step of a row, or infinity for a line that a kill cut off."""
    try:
        return json.loads(line)[0]
    except json.JSONDecodeError:
        return float("inf")
