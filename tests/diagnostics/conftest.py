"""Shared by the diagnostics tests: a finished run on disk, as small as the test wants it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from altgrad.common.files import read_json, write_json
from altgrad.diagnostics import diagnose_cell
from altgrad.formats import get_format

ARM = {"base": "adamw", "lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "decay": 3e-4, "plain_decay": 1.2e-3}


@dataclass(frozen=True)
class Run:
    """Where a run's files are, and how to diagnose them."""

    root: Path
    key: str

    @property
    def cell(self) -> Path:
        return self.root / "grid" / f"{self.key}.json"

    @property
    def folder(self) -> Path:
        return self.root / "runs" / self.key

    @property
    def outputs(self) -> tuple[Path, Path]:
        return self.root / "diag" / f"{self.key}.json", self.root / "diag" / f"{self.key}.parquet"

    def diagnose(self) -> tuple[dict[str, Any], pd.DataFrame]:
        """Return the content of the two files."""
        diagnose_cell(self.cell, self.folder, *self.outputs)
        return read_json(self.outputs[0]), pd.read_parquet(self.outputs[1])


@pytest.fixture
def run_of(tmp_path: Path) -> Callable[..., Run]:
    """Return a function that writes a cell and its run."""

    def write(
        weights: dict[str, dict[int, Tensor]],
        fmt: str | None = "E4M3",
        *,
        steps: int | None = None,
        gradients: dict[str, tuple[Tensor, Tensor]] | None = None,
        final: dict[str, Tensor] | None = None,
        amax: dict[str, dict[int, float]] | None = None,
        **spec: Any,
    ) -> Run:
        """``weights``: layer -> step -> snapshot; ``gradients``: layer -> (quantized, float32) at the last step;
        ``final``: layer -> weight in model.safetensors; ``amax``: layer -> step -> what its scale is held by;
        ``spec``: more settings of the weights' quantization."""
        last = max(step for snapshots in weights.values() for step in snapshots) if steps is None else steps
        run = Run(tmp_path, f"{fmt or 'bf16'}-adamw-0-1")
        rules = [{"layers": "*", "weight": {"format": fmt, **spec}, "input": fmt, "grad": "E5M2"}] if fmt else []
        names = sorted({fmt, "E5M2"}) if fmt else []
        cell = {
            "key": run.key, "format": fmt or "bf16", "optimizer": "adamw", "seed": 0, "lr_scale": 1,
            "model": {"layers": 1, "width": 8, "heads": 1, "context": 8}, "rules": rules,
            "formats": {name: asdict(get_format(name)) for name in names}, "arm": ARM,
            "train": {"steps": 100}, "monitor": {"every": 10, "probes": 3},
        }  # fmt: skip
        write_json(run.cell, cell)
        write_json(run.folder / "metrics.json", {"outcome": "completed", "steps": last})
        tensors = {f"weight/{s}/{layer}": w for layer, snapshots in weights.items() for s, w in snapshots.items()}
        for layer, (quantized, plain) in (gradients or {}).items():
            tensors |= {f"grad_quantized/{last}/{layer}": quantized, f"grad_float/{last}/{layer}": plain}
        held = [(layer, step, value) for layer, steps in (amax or {}).items() for step, value in steps.items()]
        tensors |= {f"amax/{step}/{layer}": torch.tensor(value) for layer, step, value in held}
        roles = {"weight": fmt, "input": fmt, "grad": "E5M2" if fmt else None}
        metadata = {"layers": json.dumps(dict.fromkeys(weights, roles), sort_keys=True)}
        save_file({name: t.clone() for name, t in tensors.items()}, run.folder / "probes.safetensors", metadata)
        model = {f"{layer}.weight": w for layer, w in (final or {}).items()} | {"norm.weight": torch.ones(2)}
        save_file(model, run.folder / "model.safetensors")
        return run

    return write
