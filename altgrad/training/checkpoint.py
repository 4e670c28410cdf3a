"""Checkpoints that survive being killed at any moment.

A checkpoint is two files, ``step-<n>.safetensors`` with every tensor and ``step-<n>.json`` with
everything else and the SHA-256 of the first. The second is written last, each is renamed into place
when complete, and the two newest pairs are kept: whatever the moment of a kill or the state of the
disk, the newest pair that verifies is a moment of the run from which it continues with the same bits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from altgrad.common.files import sha256_of, write_json
from altgrad.optim import ArmOptimizer, WeightGrid
from altgrad.optim.sharded import gather_full, keep_part
from altgrad.optim.weight_grid import HELD
from altgrad.training.records import write_tensors

KEPT = 2


class Checkpoint(NamedTuple):
    """A loaded checkpoint: the number of updates done, tensors by name, and plain state."""

    step: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]


def save(directory: Path, step: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Write the checkpoint of ``step`` into ``directory`` and remove all but the newest two."""
    for later in [s for s in _steps(directory) if s > step]:
        _remove(directory, later)  # unusable, or the run would not be back at this step
    path = directory / f"step-{step:08d}.safetensors"
    write_tensors(path, tensors)
    write_json(path.with_suffix(".json"), {"step": step, "sha256": sha256_of(path), "state": state})
    for old in sorted(_steps(directory))[:-KEPT]:
        _remove(directory, old)


def load_newest(directory: Path) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest checkpoint that verifies, and a sentence about each newer one that did not."""
    problems: list[str] = []
    for step in sorted(_steps(directory), reverse=True):
        path = directory / f"step-{step:08d}.safetensors"
        try:
            record = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
            if record["sha256"] != sha256_of(path):
                raise ValueError("its checksum does not match")
            return Checkpoint(step, load_file(path), record["state"]), problems
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            problems.append(f"checkpoint of step {step} is unusable ({error}); going back further")
    return None, problems


def _remove(directory: Path, step: int) -> None:
    for suffix in (".json", ".safetensors"):
        (directory / f"step-{step:08d}{suffix}").unlink(missing_ok=True)


def _steps(directory: Path) -> Iterator[int]:
    """Yield the steps of which either file is there."""
    names = (re.fullmatch(r"step-(\d+)\.(json|safetensors)", path.name) for path in directory.glob("step-*"))
    yield from {int(name[1]) for name in names if name}


def pack(model: nn.Module, optimizer: ArmOptimizer) -> dict[str, Tensor]:
    """Return every tensor that decides how training continues, by a flat name.

    Weights and buffers (``model/...``), weights that live on a quantization grid as their codes (``codes/...``), the
    optimizer's state (``optimizer/<parameter>/<name>``) and the random generators' states (``rng/...``). A tied
    parameter is stored once. What processes have parts of they gather, each in its turn.
    """
    on_grid, tensors = _on_grid(model, optimizer), {}
    for name, t in unique_state(model).items():
        if name in on_grid:
            tensors[f"codes/{name}"] = on_grid[name][1].encode(gather_full(t))
        else:
            tensors[f"model/{name}"] = gather_full(t)
    state = optimizer.state_dict()["state"]
    for index, entries in state.items():
        own = {name: value for name, value in entries.items() if name != HELD}  # which is the model's here
        tensors.update({f"optimizer/{index}/{name}": gather_full(value) for name, value in own.items()})
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
        for name, (weight, grid) in on_grid.items():  # by the scales, which are back now
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
    """Return the weights that are representable values all the time, by name, with their quantization grids."""
    if optimizer.arm.weights != "quantized":
        return {}
    return {name: (p, optimizer.grids[p]) for name, p in model.named_parameters() if p in optimizer.grids}


def unique_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict, and the amax of weights on the quantization grid, each tensor under its first name.

    They are those that the modules have at the moment, where `state_dict` would put parts in the place of whole ones.
    """
    lost = {f"{name}.{key}" for name, module in model.named_modules() for key in module._non_persistent_buffers_set}
    buffers = {
        name: t for name, t in model.named_buffers()
        if name not in lost or name.rpartition(".")[2] in ("history", HELD)
    }  # fmt: skip
    return {name: t.detach() for name, t in model.named_parameters()} | buffers
