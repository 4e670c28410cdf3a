"""Laws of the table of metrics, over formats and random weights.

Oracles: definitions restated in NumPy or SciPy with a search through all values of the format, and
the A/A control, E1M6 being four times E0M7.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
import torch

from altgrad.diagnostics import ANALYSES, Histogram, LayerView
from altgrad.diagnostics.analysis import Curvature, Fisher, GradientNoise, QuantizationGrid, Spectrum, singular_values
from altgrad.diagnostics.diagnose import Row, _flags
from altgrad.formats import get_format
from altgrad.metrics import METRICS

FORMATS = ["E0M7", "E1M6", "E3M4", "E4M3", "E5M2", "E7M0", "E4M3FNUZ", "E2M1", "FP16", "binary8p4e"]
COMPUTE = {analysis.name: analysis.compute for analysis in ANALYSES}
SHARES = [analysis for analysis in ANALYSES if analysis.metric.unit == "share of weights"]


def full_view(fmt: str, seed: int = 0) -> LayerView:
    """A view with everything there is, of normally distributed weights."""
    generator = torch.Generator().manual_seed(seed)
    initial, step, gradient, noise = (torch.randn(24, 16, generator=generator) for _ in range(4))
    weight, previous = initial + 0.2 * step, initial + 0.1 * step
    grids = [QuantizationGrid.of(w, get_format(fmt)) for w in (weight, previous)]
    fisher = Fisher(gradient, noise.square(), initial.T @ initial, step @ step.T)
    curvature = Curvature(Spectrum(torch.tensor([-1.0, 2.0, 5.0]), 0.04), 3.0, 0.5)
    sources = GradientNoise(4.0, {"weight": 0.1, "grad": 0.2}, 0.25, along=0.1, bias=0.1, scatter=0.3)
    return LayerView(
        "layer", 2, weight, grids[0], initial, previous, grids[1], gradient + 0.1 * noise, gradient,
        fisher=fisher, curvature=curvature, model_curvature=curvature, noise=sources,
    )  # fmt: skip


def nearest_values(view: LayerView) -> np.ndarray:
    """Round by searching all values; ties are no concern with random weights."""
    scaled = view.weight.double().numpy().ravel() * view.grid.scale.item()
    values = view.grid.format.values
    return values[np.abs(scaled[:, None] - values[None, :]).argmin(axis=1)]


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_value_is_finite_and_shares_lie_between_0_and_1_and_add_up_to_one(fmt: str) -> None:
    view = full_view(fmt)
    for analysis in ANALYSES:
        found = analysis.compute(view)
        if isinstance(found, Histogram):
            assert list(found.x) == sorted(set(found.x)), analysis.name
            assert all(0 <= value <= 1 for value in found.value), analysis.name
            assert analysis not in SHARES or sum(found.value) == pytest.approx(1.0), analysis.name
        elif found is not None:
            assert math.isfinite(found), analysis.name
            assert analysis not in SHARES or 0 <= found <= 1, analysis.name


@pytest.mark.parametrize("fmt", [name for name in FORMATS if name != "FP16"])
def test_codes_and_errors_agree_with_a_search_through_the_values(fmt: str) -> None:
    view = full_view(fmt)
    rounded = nearest_values(view)
    values, counts = np.unique(rounded, return_counts=True)
    zero = int(np.searchsorted(view.grid.format.values, 0.0))
    rungs = np.searchsorted(view.grid.format.values, values) - zero
    usage = COMPUTE["code_usage"](view)
    assert dict(zip(usage.x, usage.value, strict=True)) == pytest.approx(
        dict(zip(rungs.tolist(), (counts / counts.sum()).tolist(), strict=True))
    )
    assert COMPUTE["code_entropy"](view) == pytest.approx(scipy.stats.entropy(counts, base=2))
    assert COMPUTE["code_used_frac"](view) == len(values) / len(view.grid.format.values)
    scaled = view.weight.double().numpy().ravel() * view.grid.scale.item()
    noise = np.square(scaled - rounded).sum()
    assert COMPUTE["sqnr_db"](view) == pytest.approx(10 * np.log10(np.square(scaled).sum() / noise), abs=1e-4)
    assert COMPUTE["underflow_frac"](view) == np.mean(rounded == 0)
    assert COMPUTE["boundary_frac"](view) == np.mean(np.abs(rounded) >= get_format(fmt).scale_target)


def test_the_control_formats_agree_in_everything_but_their_exponents() -> None:
    one, other = full_view("E0M7"), full_view("E1M6")
    for analysis in ANALYSES:
        if analysis.name != "binade_usage":
            assert analysis.compute(one) == analysis.compute(other), analysis.name


@pytest.mark.parametrize("shape", [(24, 16), (16, 24), (7, 7), (1, 5)])
def test_singular_values_agree_with_a_decomposition(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    expected = torch.linalg.svdvals(matrix.double()).flip(0)
    assert torch.allclose(singular_values(matrix), expected, atol=1e-6)


# --- limits ----------------------------------------------------------------------------------------

# Metric, layer, the last value that is fine, and on which side of it a layer is flagged.
LEVELS = [
    ("underflow_frac", "blocks.0.mlp.up", 0.1, +1),
    ("boundary_frac", "blocks.0.mlp.up", 0.01, +1),
    ("grad_snr_db", "blocks.0.mlp.up", 10.0, -1),
    ("gradient_to_noise", "blocks.0.mlp.up", 3**0.5, -1),
    ("effective_rank_kept", "blocks.0.mlp.up", 0.4, -1),
    ("effective_rank_kept", "blocks.0.attn.out", 0.5, -1),
    ("effective_rank_kept", "head", 0.5, -1),
    ("dead_unit_frac", "blocks.0.mlp.up", 0.2, +1),
    ("hessian_top", "blocks.0.mlp.up", 1000.0, +1),
    ("model_hessian_top", "", 1000.0, +1),
]
ROWS = {analysis.name: analysis.metric for analysis in ANALYSES}


def flagged(metric: str, layer: str, value: float) -> list[float]:
    """Return the limits that a layer with this value at its last step is flagged with."""
    return [flag["limit"] for flag in _flags([Row(layer, ROWS[metric].offline, 300, metric, None, value)])]


def test_a_layer_is_flagged_beyond_the_level_of_each_offline_limit_and_not_at_it() -> None:
    assert {name for name, *_ in LEVELS} == {name for name, row in ROWS.items() if row.limit}
    for metric, layer, level, side in LEVELS:
        assert flagged(metric, layer, level) == flagged(metric, layer, level * (1 - 1e-9 * side)) == [], metric
        assert flagged(metric, layer, level * (1 + 1e-9 * side)) == [level], metric


def test_every_offline_row_of_the_table_has_an_analysis() -> None:
    shared = {analysis.name for analysis in ANALYSES if analysis.row is None}
    assert shared == {name for name, row in METRICS.items() if row.offline}
