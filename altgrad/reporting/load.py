"""Read what the pipeline left on disk as typed frames: cells and their status, histories, monitors, diagnoses.

A cell counts only if all its files are there and belong to the settings in today's grid. A diagnosis carries the
SHA-256 of the resolved cell that it analysed. Where that differs from the cell's file, the settings have changed since
the run, and the cell is *missing*. Only the cells of the grid's index are read.
The grid's settings select the primary metric, the number that its runs are compared by. A study has the cells of one
model, so that no comparison leaves its model; `joined` has those of all models, to list them.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import pandas as pd

from altgrad.common.files import read_json, sha256_of
from altgrad.config.tasks import HISTORY, ON_TEST, ON_VALIDATION, Compared
from altgrad.metrics import Metric
from altgrad.reporting.statistics import HIGHER, LOWER, SMALLEST_EFFECT

COMPLETED, DIVERGED, MISSING = "completed", "diverged", "missing"
IDENTITY = ["format", "optimizer", "seed", "lr_scale"]
RUN_FILES = ("metrics.json", "history.csv", "monitors.parquet", "timing.json")
COLUMNS = {
    "history": list(HISTORY),
    "monitors": ["step", "layer", "role", "metric", "value"],
    "diagnosis": ["layer", "role", "step", "metric", "x", "value"],
    "summary": ["metric", "value"],
    "flags": ["layer", "metric", "value", "limit"],
}
MAPPINGS = ("resolved", "timing", "switches", "metrics")  # the attributes of a study by key or name
FLOATS = [*HISTORY, *ON_VALIDATION.values(), "value", "x", "limit"]
NUMBERS = [
    "outcome_step", "steps", "planned_steps", "tokens", "parameters", "quantized_parameters", "peak_lr",
    "train_loss", "val_loss", "val_loss_best", "val_loss_best_step", "perplexity", "clipped_frac",
    "tokens_per_s", "tflops", "gpu_busy", "compile_s", "train_s", "total_s", "step_ms_median", "step_ms_p90",
    "peak_memory_mb", "checkpoint_mb", "bytes_per_parameter",
]  # fmt: skip
TEXTS = ["status", "reason", "signature", "first_nonfinite", "first_rows"]
LOSS = Compared()
SMALLEST_SHARE = 0.005  # smallest effect of interest in F1 and the like: half a percentage point


@dataclass(frozen=True)
class PrimaryMetric:
    """The metric that is compared, the validation loss by default.

    Attributes:
        final, on_validation, title, unit, higher_is_better: as in `altgrad.config.tasks.Compared`. The learning rate is
            chosen, and curves are drawn, by the metric on validation data.
        entry: the report's noun for a grid entry, "format" or "configuration".
        smallest_effect: the smallest effect of interest, in the metric's unit.
    """

    final: str = LOSS.final
    on_validation: str = LOSS.on_validation
    title: str = LOSS.title
    unit: str = LOSS.unit
    higher_is_better: bool = LOSS.higher_is_better
    entry: str = "format"
    smallest_effect: float = SMALLEST_EFFECT

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> Self:
        """Return the primary metric that ``params``, the settings in a grid's index, select."""
        compared = Compared.of(params)
        return cls(*compared, smallest_effect=SMALLEST_SHARE if compared.higher_is_better else SMALLEST_EFFECT)

    @property
    def noun(self) -> str:
        """The short name, as in "Δ loss"."""
        return self.title.removeprefix("validation ")

    @property
    def full(self) -> str:
        """The title, followed by "of test documents" if the metric is measured on the test split."""
        return f"{self.title} of test documents" if self.final.startswith("test_") else self.title

    @property
    def outcomes(self) -> tuple[str, str]:
        """The outcomes of a better and of a worse result: "lower" and "higher", or the reverse."""
        return (HIGHER, LOWER) if self.higher_is_better else (LOWER, HIGHER)

    @property
    def direction(self) -> str:
        """A sentence that says which way is better."""
        text = self.labelled(f"{self.delta} is method minus reference, paired by seed")
        return f"{text}: {'above' if self.higher_is_better else 'below'} zero is better."

    @property
    def delta(self) -> str:
        """The name of a difference: method minus reference."""
        return f"Δ {self.noun}"

    @property
    def in_nats(self) -> bool:
        """Whether the unit is nats per token, so that there is a perplexity."""
        return self.unit == LOSS.unit

    def with_unit(self, text: str) -> str:
        """Return ``text`` with a comma and the unit at its end, if there is a unit."""
        return f"{text}, {self.unit}" if self.unit else text

    def labelled(self, text: str) -> str:
        """Return ``text`` with the unit in brackets behind it, if there is a unit."""
        return f"{text} ({self.unit})" if self.unit else text


def _values(column: str) -> cached_property[list[Any]]:
    """Return a property of a study: the distinct values in ``column`` of its cells, in grid order."""
    return cached_property(lambda study: list(dict.fromkeys(study.cells[column])))


@dataclass(frozen=True)
class Study:
    """A grid and what its runs left on disk.

    Attributes:
        params, corpus: the settings in the grid's index; tokens/meta.json, such as the sizes of the splits.
        resolved: the resolved settings of each cell by key.
        cells: a row per cell in grid order, indexed by key: format, optimizer, seed and lr_scale, then ``status``
            (completed, diverged or missing), ``reason`` (of a missing cell) and the numbers of the run's metrics and
            timing. A missing number is NaN, a missing text is empty.
        history, monitors, diagnosis, summary, flags: tidy frames that begin with the same four columns; ``diagnosis``
            has each metric at its last step.
        timing: timing.json by key.
        metrics: the metrics of the diagnoses that `altgrad.metrics` does not know.
        primary: the primary metric.
        switches: by key, the changes of recipe during the run, as in its metrics.json.
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
    primary: PrimaryMetric = field(default_factory=PrimaryMetric)
    switches: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    formats = _values("format")  # or recipes: the grid's entries
    optimizers = _values("optimizer")
    seeds = _values("seed")
    lr_scales = _values("lr_scale")

    @property
    def models(self) -> list[str]:
        """The names of the grid's models: that of ``model``, empty where it has no other, then ``grid.models``."""
        further = self.params["grid"].get("models", [])
        return [next(name for name in self.params["model"] if name not in further), *further] if further else [""]

    @cached_property
    def baseline(self) -> str | None:
        """The entry that the others are compared with; ``None`` if this grid does not have it."""
        name = self.params["grid"]["baseline"]
        return name if name in self.formats else None

    def arm(self, optimizer: str) -> dict[str, Any]:
        """Return the resolved settings of an optimizer, from its first cell."""
        return self.resolved[self.cells.index[self.cells["optimizer"] == optimizer][0]]["arm"]

    def entry(self, name: str) -> dict[str, Any]:
        """Return the resolved settings of a grid entry, from its first cell."""
        return next(cell for cell in self.resolved.values() if cell["format"] == name)

    def last_rules(self, name: str) -> list[dict[str, Any]]:
        """Return the quantization rules at the end of a grid entry's first cell."""
        cell = self.entry(name)
        switches = self.switches.get(cell["key"]) if "schedule" in cell else None
        return cell["schedule"][switches[-1]["place"] - 1]["rules"] if switches else cell["rules"]

    def of_status(self, status: str) -> pd.DataFrame:
        """Return the rows of ``cells`` with ``status`` (completed, diverged or missing)."""
        return self.cells[self.cells["status"] == status]


def every_rule(cell: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the quantization rules of a resolved cell, and of the recipes that it changes to during its run."""
    return [rule for recipe in (cell, *cell.get("schedule", [])) for rule in recipe["rules"]]


def load_studies(data: Path) -> dict[str, Study]:
    """Return the study of each model of the grid in ``data``, by the model's name; that of ``model`` is the first."""
    first = load_study(data)
    return {first.models[0]: first} | {name: load_study(data, name) for name in first.models[1:]}


def joined(studies: Mapping[str, Study]) -> Study:
    """Return one study with the cells of all ``studies``. Behind the optimizer of a further model stands its name.

    So each optimizer is of one model, as ``adamw (nano)``. The result is for lists of runs, not for comparisons.
    """
    both, *others = studies.values()
    for model, study in zip([*studies][1:], others, strict=True):
        changed = {name: getattr(both, name) | getattr(study, name) for name in MAPPINGS}
        for name in ("cells", *COLUMNS):
            rows = getattr(study, name)
            parts = [getattr(both, name), rows.assign(optimizer=rows["optimizer"] + f" ({model})")]
            filled = [part for part in parts if len(part)] or parts[:1]
            changed[name] = pd.concat(filled, ignore_index=name != "cells")
        both = replace(both, **changed)
    return both


def load_study(data: Path, model: str | None = None) -> Study:
    """Return the study in ``data``, the pipeline's folder. A cell without a usable run is recorded as missing.

    ``model``: the one of ``grid.models`` whose cells are read; ``None`` for the grid's ``model``.
    Raises :class:`altgrad.config.UserError` if the grid or the tokens do not exist, or a JSON file is broken.
    """
    grid_dir, runs_dir, diag_dir = (data / name for name in ("grid", "runs", "diag"))
    index = read_json(grid_dir / "index.json")
    measured = [*ON_VALIDATION.values(), *ON_TEST.values(), "read_frac"] if "task" in index["params"] else []
    columns = COLUMNS | {"history": [*COLUMNS["history"], *(set(measured) & set(ON_VALIDATION.values()))]}
    numbers, parts = [*NUMBERS, *measured], {name: list[pd.DataFrame]() for name in COLUMNS}
    rows, resolved, timing, switches = [], {}, {}, {}
    defined: dict[str, dict[str, Any]] = {}
    for key in index["cells"]:
        cell = read_json(grid_dir / f"{key}.json")
        if cell.get("model_name") != model:
            continue
        resolved[key] = cell
        identity = {name: cell[name] for name in IDENTITY}
        row = {"key": key, **identity, "planned_steps": cell["train"]["steps"]}
        row |= {"peak_lr": cell["arm"]["lr"] * cell["lr_scale"], "status": MISSING}
        rows.append(row)
        row["reason"] = _why_missing(key, grid_dir, runs_dir, diag_dir)
        if row["reason"] is None:
            metrics, diagnosis = read_json(runs_dir / key / "metrics.json"), read_json(diag_dir / f"{key}.json")
            timing[key] = read_json(runs_dir / key / "timing.json")
            row |= {name: value for name, value in timing[key].items() if name in NUMBERS}
            row |= {name: value for name, value in metrics.items() if name in numbers + TEXTS}
            row["status"] = metrics["outcome"]
            if "switches" in metrics:
                switches[key] = metrics["switches"]
            defined |= diagnosis.get("metrics", {})  # a kept study need not have them
            for name, table in _tables(runs_dir / key, diagnosis, diag_dir / f"{key}.parquet").items():
                parts[name].append(table.assign(**identity))
    cells = pd.DataFrame(rows, columns=["key", *IDENTITY, *TEXTS, *numbers]).set_index("key")
    cells = cells.astype(dict.fromkeys(numbers, "float64")).fillna(dict.fromkeys(TEXTS, ""))
    return Study(
        params=index["params"],
        corpus=read_json(data / "tokens/meta.json"),
        resolved=resolved,
        cells=cells,
        timing=timing,
        switches=switches,
        metrics={name: Metric.from_json(name, content) for name, content in defined.items()},
        primary=PrimaryMetric.of(index["params"]),
        **{name: _frame(tables, columns[name]) for name, tables in parts.items()},
    )


def _why_missing(key: str, grid_dir: Path, runs_dir: Path, diag_dir: Path) -> str | None:
    """Return why the cell is missing, or ``None`` if its files are complete and current."""
    absent = [name for name in RUN_FILES if not (runs_dir / key / name).is_file()]
    if absent:
        return "not trained" if len(absent) == len(RUN_FILES) else f"incomplete run: no {', '.join(absent)}"
    if not all((diag_dir / f"{key}.{end}").is_file() for end in ("json", "parquet")):
        return "trained but not diagnosed"
    if read_json(diag_dir / f"{key}.json")["cell_sha256"] != sha256_of(grid_dir / f"{key}.json"):
        return "stale: the diagnosis is of other settings than today's"
    return None


def _tables(run: Path, diagnosis: dict[str, Any], rows: Path) -> dict[str, pd.DataFrame]:
    """Return the rows of one cell; of the diagnosis each metric at its last step, which shows where the run ended."""
    measured = pd.read_parquet(rows)
    return {
        "history": pd.read_csv(run / "history.csv", float_precision="round_trip"),
        "monitors": pd.read_parquet(run / "monitors.parquet"),
        "diagnosis": measured[measured["step"] == measured.groupby("metric")["step"].transform("max")],
        "summary": pd.DataFrame(diagnosis["summary"].items(), columns=COLUMNS["summary"]),
        "flags": pd.DataFrame(diagnosis["flags"], columns=COLUMNS["flags"]),
    }


def _frame(tables: list[pd.DataFrame], columns: list[str]) -> pd.DataFrame:
    """Return the tables as one frame with these columns, empty if there are none."""
    wanted = [table[[*IDENTITY, *columns]] for table in tables if len(table)]
    if not wanted:
        return pd.DataFrame(columns=[*IDENTITY, *columns])
    frame = pd.concat(wanted, ignore_index=True)
    return frame.astype({name: "float64" for name in FLOATS if name in columns})


def prune(data: Path) -> list[Path]:
    """Remove the outputs of cells that are not in ``data/grid/index.json``; return the removed paths, sorted.

    When a stage is removed, DVC leaves its outputs on disk: ``data/runs/<key>/``, ``data/diag/<key>.json`` and
    ``data/diag/<key>.parquet``. Other files, such as a ``.gitignore``, stay.
    """
    keys = set(read_json(data / "grid/index.json")["cells"])
    runs = [path for path in (data / "runs").glob("*/") if path.name not in keys]
    diagnoses = [path for end in ("json", "parquet") for path in (data / "diag").glob(f"*.{end}")]
    diagnoses = [path for path in diagnoses if path.stem not in keys]
    for path in runs:
        shutil.rmtree(path)
    for path in diagnoses:
        path.unlink()
    return sorted([*runs, *diagnoses])
