"""Checkpoints and rows of a run under way, which survive a kill at any moment.

A checkpoint is two files, ``step-<n>.safetensors`` with every tensor and ``step-<n>.json`` with
everything else and the SHA-256 of the first. The second is written last, each is renamed into place
when complete, and the two newest pairs are kept. So after a kill at any moment the run resumes from
the newest pair that verifies, and continues with the same bits.

Rows are appended to JSON-lines files as they are measured, and can be read during the run. A resumed run drops the rows
after its checkpoint and writes them again, so the finished files do not show the interruption.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn

from altgrad.common.files import replacing, sha256_of, write_json
from altgrad.optim import ArmOptimizer, WeightGrid
from altgrad.optim.sharded import gather_full, keep_part
from altgrad.optim.weight_grid import HELD
from altgrad.training.records import unique_state, write_tensors

KEPT = 2


class Checkpoint(NamedTuple):
    """A loaded checkpoint: the number of updates done, tensors by the names of `pack`, and the saved JSON state."""

    step: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]


def save(directory: Path, step: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
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
