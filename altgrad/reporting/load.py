"""What the pipeline left on disk, as typed frames: the cells and their status, histories, monitors, diagnoses.

A cell counts only when its evidence is complete and belongs to the settings in today's grid. A
diagnosis carries the SHA-256 of the resolved cell that it analysed; when that differs from the
cell's file, the run on disk answers a question that is no longer asked, and the cell is *missing*.
Nothing outside the cells of the grid's index is read.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from altgrad.config.files import read_json
from altgrad.metrics import Metric

COMPLETED, DIVERGED, MISSING = "completed", "diverged", "missing"
IDENTITY = ["format", "optimizer", "seed", "lr_scale"]
RUN_FILES = ("metrics.json", "history.csv", "monitors.parquet", "timing.json")
COLUMNS = {
    "history": ["step", "tokens", "lr", "train_loss", "val_loss", "grad_norm", "clipped_frac"],
    "monitors": ["step", "layer", "role", "metric", "value"],
    "diagnosis": ["layer", "role", "step", "metric", "x", "value"],
    "summary": ["metric", "value"],
    "flags": ["layer", "metric", "value", "limit"],
}
NUMBERS = [
    "outcome_step", "steps", "planned_steps", "tokens", "parameters", "quantized_parameters", "peak_lr",
    "train_loss", "val_loss", "val_loss_best", "val_loss_best_step", "perplexity", "clipped_frac",
    "tokens_per_s", "compile_s", "train_s", "total_s", "step_ms_median", "step_ms_p90",
    "peak_memory_mb", "checkpoint_mb",
]  # fmt: skip
TEXTS = ["status", "reason", "signature", "first_nonfinite", "first_rows"]


@dataclass(frozen=True)
class Study:
    """One grid and the evidence on disk for it.

    ``cells`` has a row per cell in grid order, indexed by key: the identity (format, optimizer,
    seed, lr_scale), ``status`` (completed, diverged or missing), ``reason`` (of a missing cell) and
    every number of the run's metrics and timing (NaN where there is none; texts are then empty). ``history``,
    ``monitors``, ``diagnosis`` (each metric at its last step), ``summary`` and ``flags`` are tidy, with
    the identity in front. ``metrics`` are those of the diagnoses that ``altgrad.metrics`` does not know.
    """

    params: dict[str, Any]
    corpus: dict[str, Any]
    resolved: dict[str, dict[str, Any]]
    cells: pd.DataFrame
    history: pd.DataFrame
    monitors: pd.DataFrame
    diagnosis: pd.DataFrame
    summary: pd.DataFrame
    flags: pd.DataFrame
    timing: dict[str, dict[str, Any]]
    metrics: dict[str, Metric] = field(default_factory=dict)

    @property
    def formats(self) -> list[str]:
        """The grid's entries (formats or recipes) in grid order."""
        return list(dict.fromkeys(self.cells["format"]))

    @property
    def optimizers(self) -> list[str]:
        """The optimizer arms in grid order."""
        return list(dict.fromkeys(self.cells["optimizer"]))

    @property
    def seeds(self) -> list[int]:
        """The seeds in grid order."""
        return list(dict.fromkeys(self.cells["seed"]))

    @property
    def lr_scales(self) -> list[float]:
        """The learning-rate scales in grid order."""
        return list(dict.fromkeys(self.cells["lr_scale"]))

    @property
    def baseline(self) -> str | None:
        """The entry that the others are compared with; ``None`` when it is not in this grid."""
        name = self.params["grid"]["baseline"]
        return name if name in self.formats else None

    def arm(self, optimizer: str) -> dict[str, Any]:
        """The resolved settings of an optimizer arm (of its first cell in the grid)."""
        key = self.cells.index[self.cells["optimizer"] == optimizer][0]
        return self.resolved[key]["arm"]

    def entry(self, name: str) -> dict[str, Any]:
        """The resolved settings of a grid entry (of its first cell in the grid)."""
        return self.resolved[self.cells.index[self.cells["format"] == name][0]]

    def count(self, status: str) -> int:
        """Number of cells with this status."""
        return int((self.cells["status"] == status).sum())


def load_study(grid_dir: Path, tokens_dir: Path, runs_dir: Path, diag_dir: Path) -> Study:
    """Read every cell of ``grid_dir/index.json``.

    Raises :class:`altgrad.config.UserError` when the grid or the tokens are not there or a JSON file is
    broken. A cell without a usable run is no error: it is recorded as missing.
    """
    index = read_json(grid_dir / "index.json")
    rows, resolved, timing, own = [], {}, {}, {}
    parts: dict[str, list[pd.DataFrame]] = {name: [] for name in COLUMNS}
    for key in index["cells"]:
        cell = read_json(grid_dir / f"{key}.json")
        resolved[key] = cell
        identity = {name: cell[name] for name in IDENTITY}
        row: dict[str, Any] = {"key": key, **identity, "planned_steps": cell["train"]["steps"]}
        row["peak_lr"] = cell["arm"]["lr"] * cell["lr_scale"]
        row["reason"] = _why_missing(key, grid_dir, runs_dir, diag_dir)
        if row["reason"] is None:
            metrics = read_json(runs_dir / key / "metrics.json")
            timing[key] = read_json(runs_dir / key / "timing.json")
            row |= {name: value for name, value in timing[key].items() if name in NUMBERS}
            row |= {name: value for name, value in metrics.items() if name in NUMBERS + TEXTS}
            row["status"] = metrics["outcome"]
            diagnosis = read_json(diag_dir / f"{key}.json")
            own |= diagnosis.get("metrics", {})  # which those of a kept study need not have
            for name, frame in _frames(runs_dir / key, diagnosis, diag_dir / f"{key}.parquet").items():
                parts[name].append(_identified(frame, identity))
        else:
            row["status"] = MISSING
        rows.append(row)
    columns = ["key", *IDENTITY, *TEXTS, *NUMBERS]
    cells = pd.DataFrame(rows, columns=columns).set_index("key")
    cells[NUMBERS] = cells[NUMBERS].astype("float64")
    cells[TEXTS] = cells[TEXTS].fillna("")
    return Study(
        params=index["params"],
        corpus=read_json(tokens_dir / "meta.json"),
        resolved=resolved,
        cells=cells,
        timing=timing,
        metrics={name: Metric.from_json(name, content) for name, content in own.items()},
        **{name: _joined(frames, COLUMNS[name]) for name, frames in parts.items()},
    )


def _why_missing(key: str, grid_dir: Path, runs_dir: Path, diag_dir: Path) -> str | None:
    """Return why the cell cannot be counted, or ``None`` when its evidence is complete and current."""
    absent = [name for name in RUN_FILES if not (runs_dir / key / name).is_file()]
    if len(absent) == len(RUN_FILES):
        return "not trained"
    if absent:
        return f"incomplete run: no {', '.join(absent)}"
    if not (diag_dir / f"{key}.json").is_file() or not (diag_dir / f"{key}.parquet").is_file():
        return "trained but not diagnosed"
    diagnosed = read_json(diag_dir / f"{key}.json")["cell_sha256"]
    if diagnosed != hashlib.sha256((grid_dir / f"{key}.json").read_bytes()).hexdigest():
        return "stale: the diagnosis is of other settings than today's"
    return None


def _frames(run: Path, diagnosis: dict[str, Any], rows: Path) -> dict[str, pd.DataFrame]:
    summary = diagnosis["summary"]
    return {
        "history": pd.read_csv(run / "history.csv", dtype="float64"),
        "monitors": pd.read_parquet(run / "monitors.parquet"),
        "diagnosis": _at_last_step(pd.read_parquet(rows)),
        "summary": pd.DataFrame({"metric": list(summary), "value": pd.Series(list(summary.values()), dtype="float64")}),
        "flags": pd.DataFrame(diagnosis["flags"], columns=COLUMNS["flags"]),
    }


def _at_last_step(frame: pd.DataFrame) -> pd.DataFrame:
    """Return each metric's rows at the last step that has it: the report shows where a run ended."""
    return frame[frame["step"] == frame.groupby("metric")["step"].transform("max")].reset_index(drop=True)


def _identified(frame: pd.DataFrame, identity: dict[str, Any]) -> pd.DataFrame:
    """Return ``frame`` with the cell's identity as its first columns."""
    for position, (name, value) in enumerate(identity.items()):
        frame.insert(position, name, value)
    return frame


def _joined(frames: list[pd.DataFrame], columns: list[str]) -> pd.DataFrame:
    """Return the frames as one, with exactly these columns; an empty frame when there is none."""
    # A frame without rows carries no dtype worth keeping, and pandas would widen the others to its own.
    filled = [frame for frame in frames if len(frame)]
    if not filled:
        return pd.DataFrame(columns=[*IDENTITY, *columns])
    joined = pd.concat(filled, ignore_index=True)[[*IDENTITY, *columns]]
    for name in ("step", "value", "x", "limit"):
        if name in columns:
            joined[name] = joined[name].astype("float64")
    return joined
