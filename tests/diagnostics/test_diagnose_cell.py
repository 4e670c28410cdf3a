"""From a run's files to its diagnosis. Oracle: runs that each test writes, and the metrics themselves."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet
import pytest
import torch
from torch import Tensor

from altgrad.common.files import read_json, write_json
from altgrad.config import UserError
from altgrad.diagnostics import ANALYSES, LayerView
from altgrad.diagnostics.analysis import QuantizationGrid
from altgrad.formats import get_format
from altgrad.numerics import compute_scale

LAYERS = ("blocks.0.attn.qkv", "blocks.0.mlp.down", "blocks.2.mlp.up", "blocks.10.mlp.up", "head")
MODEL = {"fisher", "curvature", "model_curvature", "noise"}  # what needs the model itself, which these runs are none of
OF_FILES = [analysis for analysis in ANALYSES if not MODEL & set(analysis.needs)]
SUMMARIZED = {analysis.name for analysis in OF_FILES if analysis.metric.summary}
RunOf = Callable[..., Any]


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def snapshots(steps: tuple[int, ...] = (0, 50, 100), shape: tuple[int, int] = (12, 8)) -> dict[str, dict[int, Tensor]]:
    """Weights of every layer that drift from one step to the next."""
    return {
        layer: {step: noise(*shape, seed=i) + step / 100 * noise(*shape, seed=i + 100) for step in steps}
        for i, layer in enumerate(LAYERS)
    }


def gradients() -> dict[str, tuple[Tensor, Tensor]]:
    return {layer: (noise(12, 8) + 0.1 * noise(12, 8, seed=1), noise(12, 8)) for layer in LAYERS}


def select(frame: pd.DataFrame, **values: object) -> pd.DataFrame:
    for column, value in values.items():
        frame = frame[frame[column] == value]
    return frame


def test_the_table_is_tidy_and_holds_every_metric_of_every_layer(run_of: RunOf) -> None:
    run = run_of(snapshots(), gradients=gradients())
    _, frame = run.diagnose()
    assert list(frame.columns) == ["layer", "role", "step", "metric", "x", "value"]
    types = [str(field.type) for field in pyarrow.parquet.read_schema(run.outputs[1])]
    assert types == ["string", "string", "int64", "string", "double", "double"]
    assert list(dict.fromkeys(frame["layer"])) == list(LAYERS)  # block 10 behind block 2
    roles = {analysis.name: analysis.metric.offline for analysis in OF_FILES}
    assert dict(zip(frame["metric"], frame["role"], strict=True)) == roles
    assert not frame["value"].isna().any()
    assert not frame.duplicated(["layer", "step", "metric", "x"]).any()
    steps = frame.groupby("metric")["step"].unique().map(list)
    assert steps["sqnr_db"] == [0, 50, 100]
    assert steps["init_distance"] == steps["code_stale_frac"] == [50, 100]
    assert steps["grad_snr_db"] == [100]


def test_values_are_those_of_the_metrics(run_of: RunOf) -> None:
    weights = snapshots()
    _, frame = run_of(weights, "E3M4").diagnose()
    now, before, initial = (weights["head"][step] for step in (100, 50, 0))
    fmt = get_format("E3M4")
    view = LayerView("head", 100, now, QuantizationGrid.of(now, fmt), initial, before, QuantizationGrid.of(before, fmt))
    rows = select(frame, layer="head", step=100)
    for analysis in ANALYSES:
        if analysis.metric.offline == "weight":
            found, own = analysis.compute(view), select(rows, metric=analysis.name)
            if isinstance(found, float):
                assert own["value"].tolist() == pytest.approx([found]) and own["x"].isna().all()
            else:
                assert own["x"].tolist() == list(found.x)
                assert own["value"].tolist() == pytest.approx(list(found.value))


def test_the_summary_joins_the_layers_at_the_last_step(run_of: RunOf) -> None:
    run = run_of(snapshots(), gradients=gradients())
    diagnosis, frame = run.diagnose()
    assert diagnosis["key"] == run.key and diagnosis["status"] == "ok"
    assert diagnosis["cell_sha256"] == hashlib.sha256(run.cell.read_bytes()).hexdigest()
    assert set(diagnosis["summary"]) == {analysis.name for analysis in ANALYSES if analysis.metric.summary}
    last = select(frame, step=100)
    assert {name for name, value in diagnosis["summary"].items() if value is not None} == SUMMARIZED
    for name in SUMMARIZED:
        value = diagnosis["summary"][name]
        assert value == pytest.approx(select(last, metric=name)["value"].mean()), name  # layers of one size
    assert list(diagnosis["layers"]) == sorted(LAYERS)
    assert diagnosis["layers"]["head"] == {
        "formats": {"weight": "E4M3", "input": "E4M3", "grad": "E5M2"},
        "shape": [12, 8], "status": "ok", "nonfinite_step": None,
    }  # fmt: skip


def test_a_share_counts_every_weight_alike(run_of: RunOf) -> None:
    """24 weights of which 12 underflow, and 6 of which none does: 12 of 30."""
    lost = torch.tensor([[1.0, 1e-9]]).repeat(12, 1)
    diagnosis, _ = run_of({"a": {0: lost}, "b": {0: torch.ones(3, 2)}}).diagnose()
    assert diagnosis["summary"]["underflow_frac"] == pytest.approx(12 / 30)
    assert {"layer": "a", "metric": "underflow_frac", "value": 0.5, "limit": 0.1} in diagnosis["flags"]
    assert not any(flag["layer"] == "b" and flag["metric"] == "underflow_frac" for flag in diagnosis["flags"])


def test_flags_are_of_the_last_step_with_the_limit_of_the_layer(run_of: RunOf) -> None:
    full, low = torch.eye(8), torch.diag(torch.tensor([4.0] * 3 + [0.1] * 5))  # keeps 0.45 of its effective rank
    weights = {layer: {0: full, 50: full[:1].repeat(8, 1), 100: low} for layer in ("blocks.0.mlp.up", "head")}
    kept = math.exp(torch.special.entr(low.diagonal() / low.diagonal().sum()).sum().item()) / 8
    diagnosis, _ = run_of(weights, None).diagnose()
    assert 0.4 < kept < 0.5
    flag = {"layer": "head", "metric": "effective_rank_kept", "value": pytest.approx(kept), "limit": 0.5}
    assert diagnosis["flags"] == [flag]


def test_the_bytes_are_the_same_every_time_whatever_the_threads(run_of: RunOf) -> None:
    run = run_of(snapshots(), gradients=gradients())
    threads = torch.get_num_threads()
    contents = []
    for count in (1, 2):
        torch.set_num_threads(count)
        run.diagnose()
        assert torch.get_num_threads() == count
        contents.append([path.read_bytes() for path in run.outputs])
    torch.set_num_threads(threads)
    assert contents[0] == contents[1]


# --- runs that ended badly -----------------------------------------------------------------------


def test_nonfinite_weights_are_reported_and_the_rest_is_measured(run_of: RunOf) -> None:
    weights = snapshots()
    weights["head"][100][3, 3] = math.nan
    weights["blocks.2.mlp.up"][50][0, 0] = math.inf
    diagnosis, frame = run_of(weights, gradients=gradients()).diagnose()
    assert diagnosis["status"] == "nonfinite"
    bad = {layer: entry["nonfinite_step"] for layer, entry in diagnosis["layers"].items() if entry["status"] != "ok"}
    assert bad == {"head": 100, "blocks.2.mlp.up": 50}
    assert select(frame, layer="head", step=100)["role"].unique().tolist() == ["weight_grad"]
    assert len(select(frame, layer="blocks.2.mlp.up", step=100, metric="sqnr_db")) == 1
    assert len(select(frame, layer="blocks.2.mlp.up", step=100, metric="code_stale_frac")) == 0
    assert diagnosis["summary"]["sqnr_db"] is not None


def test_a_run_of_nothing_but_nan_has_null_for_every_number(run_of: RunOf) -> None:
    bad = torch.full((12, 8), math.nan)
    diagnosis, frame = run_of({"head": {100: bad}}, gradients={"head": (bad + 1, bad + 2)}).diagnose()
    assert diagnosis["summary"] == {analysis.name: None for analysis in ANALYSES if analysis.metric.summary}
    assert diagnosis["flags"] == [] and diagnosis["status"] == "nonfinite" and len(frame) == 0
    assert list(frame.columns) == ["layer", "role", "step", "metric", "x", "value"]


def test_a_run_that_ended_between_snapshots_is_measured_at_its_end(run_of: RunOf) -> None:
    """The final weights are in model.safetensors; a tied head is not there under its own name."""
    layer = LAYERS[0]
    weights = {name: {0: steps[0]} for name, steps in snapshots().items() if name in (layer, "head")}
    final = {layer: 2 * weights[layer][0]}
    diagnosis, frame = run_of(weights, steps=37, final=final, gradients={"head": gradients()["head"]}).diagnose()
    assert select(frame, layer=layer)["step"].unique().tolist() == [0, 37]
    assert diagnosis["summary"]["init_distance"] == pytest.approx(1.0)
    assert select(frame, layer="head", step=37)["role"].unique().tolist() == ["weight_grad"]
    assert diagnosis["summary"]["grad_snr_db"] is not None


# --- scaling -------------------------------------------------------------------------------------


def test_the_scale_is_the_recipes(run_of: RunOf) -> None:
    """A scale that is held by the first amax saturates grown weights, one of an empty memory is their own; E8M0
    rounds the scale down."""
    start = torch.linspace(-1, 1, 96).reshape(12, 8)
    weights = {"head": {0: start, 100: 2 * start}}
    boundary = {}
    for held in (None, 0.0, 1.0, 2.0):
        run = run_of(weights, "E4M3", amax=None if held is None else {"head": {0: 1.0, 100: held}})
        boundary[held] = run.diagnose()[0]["summary"]["boundary_frac"]
    assert boundary[1.0] > 0.45 and boundary[None] == boundary[0.0] == boundary[2.0] < 0.1
    grown = 1.2 * start
    _, frame = run_of({"head": {0: grown}}, "E4M3", scale="E8M0").diagnose()
    grid = QuantizationGrid(get_format("E4M3"), compute_scale(grown.abs().amax(), "E4M3", scale_format="E8M0"))
    expected = dict(zip(*_usage(LayerView("head", 0, grown, grid)), strict=True))
    own = select(frame, metric="code_usage")
    assert dict(zip(own["x"], own["value"], strict=True)) == pytest.approx(expected)


def _usage(view: LayerView) -> Any:
    return next(analysis for analysis in ANALYSES if analysis.name == "code_usage").compute(view)


# --- files that are not what they should be ------------------------------------------------------


def test_a_missing_or_damaged_file_is_named(run_of: RunOf) -> None:
    run = run_of(snapshots())
    for name in ("probes.safetensors", "model.safetensors", "metrics.json"):
        path: Path = run.folder / name
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
        with pytest.raises(UserError, match=f"{name}.*(is damaged|is not valid JSON)"):
            run.diagnose()
        path.unlink()
        with pytest.raises(UserError, match=f"{name} does not exist"):
            run.diagnose()
        path.write_bytes(content)
    run.diagnose()


def test_a_run_of_other_settings_is_refused(run_of: RunOf) -> None:
    run = run_of(snapshots())
    cell = read_json(run.cell)
    write_json(run.cell, cell | {"rules": [{"layers": "*", "weight": "E5M2"}]})
    with pytest.raises(UserError, match="not a run of today's E4M3-adamw-0-1"):
        run.diagnose()


def test_a_small_models_diagnosis_stays_small(run_of: RunOf) -> None:
    """The default model: 17 layers, 1.3 million weights, three snapshots."""
    shapes = {"attn.qkv": (384, 128), "attn.out": (128, 128), "mlp.up": (512, 128), "mlp.down": (128, 512)}
    layers = {f"blocks.{i}.{name}": shape for i in range(4) for name, shape in shapes.items()} | {"head": (4096, 128)}
    weights = {layer: {step: noise(*shape, seed=step) for step in (0, 150, 300)} for layer, shape in layers.items()}
    run = run_of(weights, gradients={layer: (noise(*s, seed=8), noise(*s, seed=9)) for layer, s in layers.items()})
    run.diagnose()
    assert run.outputs[1].stat().st_size < 200_000
