"""Diagnose one cell from its saved files: write a tidy table and a summary.

``<key>.parquet`` has the columns layer, role, step, metric, x, value; x is the position of a histogram's bin and null
for a number. ``<key>.json`` has the SHA-256 of the resolved cell, by which the report recognizes a stale diagnosis. It
also has the summary over layers at the last step, the flags, and the definitions of metrics that ``altgrad.metrics``
lacks. The same files always give the same bytes.
"""

import importlib
import math
import pkgutil
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
import torch
from torch import Tensor

from altgrad.common.files import sha256_of, write_json, write_rows
from altgrad.config import Cell
from altgrad.config.schema import Diagnose
from altgrad.diagnostics.analysis import Analysis, Histogram, LayerView, needed
from altgrad.diagnostics.geometry import curvatures, fishers
from altgrad.diagnostics.gradients import gradient_noises
from altgrad.diagnostics.saved import RebuiltModel, SavedRun
from altgrad.metrics import METRICS, Metric

OK, NONFINITE = "ok", "nonfinite"
FIRST = ("weights", "gradients", "geometry")  # modules whose rows come first in a diagnosis
USERS = ("diagnose", "__main__")  # modules that use the analyses of the others
WHOLE_MODEL = ""  # in place of a layer's name
TENSORS = ("weight", "initial", "previous", "grad_quantized", "grad_float")
TEXT, WHOLE, NUMBER = pyarrow.string(), pyarrow.int64(), pyarrow.float64()
SCHEMA = pyarrow.schema(
    {"layer": TEXT, "role": TEXT, "step": WHOLE, "metric": TEXT, "x": NUMBER, "value": NUMBER}.items()
)


class Row(NamedTuple):
    """One measurement, a row of ``<key>.parquet``."""

    layer: str
    role: str
    step: int
    metric: str
    x: float | None
    value: float


def _declared() -> tuple[Analysis, ...]:
    """Return all ``ANALYSES`` of the modules in this folder; raises ``ValueError`` unless each has exactly one row."""
    package = __name__.rpartition(".")[0]
    names = [module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)])]
    names = [*FIRST, *(name for name in names if name not in (*FIRST, *USERS))]
    modules = [importlib.import_module(f"{package}.{name}") for name in names]
    analyses = tuple(analysis for module in modules for analysis in getattr(module, "ANALYSES", ()))
    for analysis in analyses:
        name, row = analysis.name, analysis.row
        if [other.name for other in analyses].count(name) > 1 or (row is not None and name in METRICS):
            raise ValueError(f"metric {name} has two homes")
        if row is None and name not in METRICS:
            raise ValueError(f"metric {name} has no row: give its analysis one")
        if row is not None and (row.name != name or row.offline is None):
            raise ValueError(f"metric {name}: its row must have the name of its function, and the role as offline")
    return analyses


ANALYSES = _declared()


def diagnose_cell(
    cell_path: Path, run_dir: Path, json_path: Path, parquet_path: Path,
    tokens: Path | None = None, settings: Diagnose | None = None,
) -> None:  # fmt: skip
    """Diagnose the run in ``run_dir`` of the resolved cell at ``cell_path``; write both files, the JSON last.

    ``tokens`` is the folder of token files. With ``None`` every metric that needs the model is left out. Otherwise the
    model is rebuilt, and ``settings`` says how many validation tokens it is measured on: Fisher information and
    Hessian at the final weights, gradient noise at each snapshot. Snapshots with a weight or loss that is not finite
    are left out.

    A tensor that holds NaN or infinity, as after a divergence, is not measured; its layer and the cell then have the
    status ``nonfinite``. Raises :class:`altgrad.config.UserError` if a file of the run is missing or damaged.
    """
    cell = Cell.read(cell_path)
    rows: list[Row] = []
    layers: dict[str, dict[str, Any]] = {}
    with _one_thread(), SavedRun(cell, run_dir) as run:
        around = {} if tokens is None else _around(run, tokens, settings or Diagnose())
        for layer, formats in run.formats.items():
            entry = layers[layer] = {"formats": formats, "shape": None, "status": OK, "nonfinite_step": None}
            for view in run.views(layer):
                entry["shape"] = entry["shape"] or next(list(t.shape) for t in _tensors(view).values())
                finite = _finite(view)
                if finite is not view and entry["status"] == OK:
                    entry |= {"status": NONFINITE, "nonfinite_step": view.step}
                rows += measure(replace(finite, **around.get((layer, view.step), {})))
        whole = WHOLE_MODEL, run.last_step
        rows += measure(LayerView(*whole, **around.get(whole, {})))
        numbers = [row for row in rows if row.x is None]
        last = [row for row in numbers if row.step == run.last_step]
    write_rows(parquet_path, rows, SCHEMA)
    diagnosis = {
        "key": cell.key,
        "cell_sha256": sha256_of(cell_path),
        "status": OK if all(entry["status"] == OK for entry in layers.values()) else NONFINITE,
        "summary": {a.name: _summary(a.metric, last, layers) for a in ANALYSES if a.metric.summary},
        "flags": list(_flags(last)),
        "metrics": {a.name: a.row.to_json() for a in ANALYSES if a.row},
        "layers": layers,
    }
    write_json(json_path, diagnosis)


def measure(view: LayerView) -> Iterator[Row]:
    """Yield the rows of each metric for which ``view`` has all fields in ``needs``, in the order of `ANALYSES`."""
    for analysis in ANALYSES:
        if any(getattr(view, need) is None for need in analysis.needs):
            continue
        result = analysis.compute(view)
        identity = (view.layer, needed(analysis.metric.offline), view.step, analysis.name)
        if isinstance(result, Histogram):
            yield from (Row(*identity, float(x), float(value)) for x, value in zip(*result, strict=True))
        elif result is not None and math.isfinite(result):
            yield Row(*identity, None, result)


def _around(run: SavedRun, tokens: Path, settings: Diagnose) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the fields of `LayerView` that need the rebuilt model, by layer and step.

    ``noise`` is measured at every snapshot, the other fields at the last step only.
    """
    around: defaultdict[tuple[str, int], dict[str, Any]] = defaultdict(dict)
    last = run.last_step
    if rebuilt := _rebuilt(run, tokens, settings.fisher_tokens, last):
        for name, fisher in fishers(rebuilt).items():
            around[name, last]["fisher"] = fisher
    for step in run.model_steps:
        if _rebuilt(run, tokens, settings.noise_tokens, step):
            state, most = run.model(step), settings.noise_tokens
            for name, noise in gradient_noises(run.cell_at(step), state, tokens, most, apart=step == last).items():
                around[name, step]["noise"] = noise
    if rebuilt := _rebuilt(run, tokens, settings.hessian_tokens, last):
        layers, whole = curvatures(rebuilt, settings.lanczos, settings.hutchinson)
        for name, curvature in layers.items():
            around[name, last]["curvature"] = curvature
        around[WHOLE_MODEL, last]["model_curvature"] = whole
    return around


def _rebuilt(run: SavedRun, tokens: Path, count: int, step: int) -> RebuiltModel | None:
    """Return the model after ``step`` with ``count`` validation tokens.

    Returns ``None`` if ``count`` is 0, or a weight or the loss is not finite.
    """
    saved = run.model(step) if count else {}
    if not saved or not all(t.isfinite().all() for t in saved.values()):
        return None
    rebuilt = RebuiltModel.of(run.cell_at(step), saved, tokens, count)
    with torch.no_grad():
        return rebuilt if rebuilt.loss().isfinite() else None


@contextmanager
def _one_thread() -> Iterator[None]:
    """Run PyTorch on one thread, so that the order of sums, and the bytes, do not depend on the number of threads.

    One thread is also faster for matrices of this size, above all beside a training that uses every core.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _tensors(view: LayerView) -> dict[str, Tensor]:
    return {name: t for name in TENSORS if (t := getattr(view, name)) is not None}


def _finite(view: LayerView) -> LayerView:
    """Return ``view`` with ``None`` for each tensor that holds NaN or infinity; ``view`` itself if there is none."""
    without: dict[str, Any] = {name: None for name, t in _tensors(view).items() if not t.isfinite().all()}
    return replace(view, **without) if without else view


def _summary(metric: Metric, last: list[Row], layers: dict[str, dict[str, Any]]) -> float | None:
    """Return ``metric`` summarized over the layers with a row in ``last``; ``None`` if no layer has one."""
    rows = [row for row in last if row.metric == metric.name]
    sizes = [math.prod(layers[row.layer]["shape"]) if row.layer != WHOLE_MODEL else 1 for row in rows]
    return metric.summary([row.value for row in rows], sizes) if rows and metric.summary else None


def _flags(last: list[Row]) -> Iterator[dict[str, Any]]:
    """Yield a flag for each value in ``last`` that is beyond its metric's limit, in the order of `ANALYSES`."""
    for metric, limit in [(a.name, a.metric.limit) for a in ANALYSES if a.metric.limit]:
        for row in last:
            if row.metric == metric and limit.crossed(row.layer, row.value):
                yield {"layer": row.layer, "metric": metric, "value": row.value, "limit": limit.of(row.layer)}
