"""Metrics of the geometry, each on a case computed by hand, and their parts against independent oracles.

E2M1 at the scale 1 (see test_metric_values) has the spacings 0.5 up to 2, 1 up to 4, 2 beyond. Oracles: SciPy's ranks,
the natural gradient by a dense inverse, and the stiffness of the arms.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor

from altgrad.diagnostics import ANALYSES, LayerView
from altgrad.diagnostics.analysis import (
    DAMPING,
    Curvature,
    Fisher,
    QuantizationGrid,
    Spectrum,
    shuffled,
    spearman,
)
from altgrad.formats import get_format
from altgrad.optim import stiffness
from tests.diagnostics.test_diagnose_cell import noise

COMPUTE = {analysis.name: analysis.compute for analysis in ANALYSES}
WEIGHT = torch.tensor([[6.0, 0.5, 0.1, -0.1], [0.0, 2.5, -3.0, 1.25]])  # spacings 2 .5 .5 .5, .5 1 1 .5
GRADIENT = torch.tensor([[1.0, 0.0, 0.0, 2.0], [0.0, 0.0, -2.0, 0.0]])
E2M1 = get_format("E2M1")
CURVATURE = {"top", "second", "bottom", "residual", "trace", "trace_error"}
CASES = {  # the metrics that have a case by hand in this file
    "stiffness_field", "stiffness_entropy", "stiffness_spread", "range_low_log2", "range_high_log2",
    "gradient_stiffness_rho", "descent_share", "descent_share_shuffled", "dead_unit_frac",
    "fisher_trace", "fisher_stiffness_rho",
    *(f"natural_{name}_{way}" for name in ("kfac", "diagonal") for way in ("plain", "s", "s2", "shuffled")),
    *(f"{where}hessian_{name}" for where in ("", "model_") for name in CURVATURE),
}  # fmt: skip


def view(weight: Tensor = WEIGHT, fmt: str = "E2M1", **others: object) -> LayerView:
    return LayerView("layer", 10, weight, QuantizationGrid.of(weight, get_format(fmt)), **others)


def test_the_stiffness_field_counts_weights_by_the_binade_of_their_spacing() -> None:
    x, share = COMPUTE["stiffness_field"](view())
    assert list(x) == [-1.0, 0.0, 1.0] and list(share) == [5 / 8, 2 / 8, 1 / 8]
    expected = 5 / 8 * math.log2(8 / 5) + 2 / 8 * 2 + 1 / 8 * 3
    assert COMPUTE["stiffness_entropy"](view()) == pytest.approx(expected)
    mean = (-5 + 1) / 8
    spread = math.sqrt((5 + 1) / 8 - mean**2)
    assert COMPUTE["stiffness_spread"](view()) == pytest.approx(spread)


@pytest.mark.parametrize("fmt", ["E0M7", "E1M6", "E3M4", "E4M3", "E5M2", "E7M0", "E2M1"])
def test_stiffness_is_that_of_the_arms(fmt: str) -> None:
    weight = 0.02 * noise(24, 16)
    made = view(weight, fmt)
    assert torch.allclose(made.stiffness, stiffness(weight, fmt, scale=made.grid.scale), rtol=1e-6, atol=0)


def test_virtual_geometry_has_a_stiffness_and_no_codes() -> None:
    made = LayerView("layer", 10, WEIGHT, virtual=QuantizationGrid.of(WEIGHT, E2M1))
    assert made.grid is None and torch.equal(made.stiffness, view().stiffness)


def test_the_range_of_a_format_in_the_unit_of_the_weights() -> None:
    """E2M1 from 0.5 to 6; half the weights have twice the scale, so a range of half the size."""
    for weight, factor in ((WEIGHT, 1), (WEIGHT / 2, 0.5)):
        assert COMPUTE["range_low_log2"](view(weight)) == pytest.approx(math.log2(factor * 0.5))
        assert COMPUTE["range_high_log2"](view(weight)) == pytest.approx(math.log2(factor * 6))


def test_the_share_of_the_descent_is_the_cosine_of_the_two_directions() -> None:
    """g = 1, 2, -2 where S = 2, 0.5, 1: <g, Sg> = 2 + 2 + 4, |g| = 3, |Sg| = sqrt(4 + 1 + 4) = 3."""
    assert COMPUTE["descent_share"](view(grad_quantized=GRADIENT)) == pytest.approx(8 / 9)
    assert COMPUTE["descent_share"](view(grad_quantized=0 * GRADIENT)) is None
    made, random = view(grad_quantized=GRADIENT), shuffled(view().stiffness)
    expected = (GRADIENT * random * GRADIENT).sum() / (3 * (random * GRADIENT).norm())
    assert COMPUTE["descent_share_shuffled"](made) == pytest.approx(expected.item())


def test_ranks_with_ties_are_scipys() -> None:
    a, b = noise(24, 16), (3 * noise(24, 16, seed=1) + noise(24, 16)).round()
    assert spearman(a, b) == pytest.approx(scipy.stats.spearmanr(a.flatten(), b.flatten()).statistic, rel=1e-9)
    assert spearman(torch.tensor([1.0, 2.0, 9.0]), torch.tensor([0.1, 0.2, 0.3])) == pytest.approx(1)
    assert spearman(a, torch.ones(24, 16)) is None
    made = view(noise(24, 16), "E4M3", grad_quantized=noise(24, 16, seed=3))
    expected = scipy.stats.spearmanr(made.grad_quantized.abs().flatten(), made.stiffness.flatten()).statistic
    assert COMPUTE["gradient_stiffness_rho"](made) == pytest.approx(expected, rel=1e-9)


def test_a_unit_is_dead_whose_row_is_zero() -> None:
    dead = torch.tensor([[0.0, 0.0], [0.0, 1e-30], [0.0, -0.0], [1.0, 1.0]])
    assert COMPUTE["dead_unit_frac"](LayerView("l", 1, grad_quantized=dead)) == 1 / 2


# --- the natural gradient ----------------------------------------------------------------------------


def some_fisher(out: int = 5, inputs: int = 4) -> Fisher:
    a, g = noise(40, inputs).double(), noise(40, out, seed=1).double()
    return Fisher(noise(out, inputs, seed=2).double(), (g.T.square() @ a.square()) / 40, a.T @ a / 40, g.T @ g / 40)


def test_the_natural_gradient_solves_the_damped_fisher_matrix() -> None:
    """Oracle: the Kronecker product in full, (out in)^2, with the weight's elements in row order."""
    fisher = some_fisher()
    matrix = torch.kron(fisher.outputs, fisher.inputs)
    matrix += DAMPING * matrix.trace() / len(matrix) * torch.eye(len(matrix))
    expected = torch.linalg.solve(matrix, fisher.gradient.flatten())
    assert torch.allclose(fisher.natural_kfac.flatten(), expected, rtol=1e-9)
    f = fisher.diagonal
    assert torch.allclose(fisher.natural_diagonal, fisher.gradient / (f + DAMPING * f.mean()))


def test_it_does_so_where_a_few_inputs_are_ten_thousand_times_the_others() -> None:
    """As after a rate far too high, where LAPACK found no eigenvectors in float32 (of a matrix that is not kept)."""
    fisher = some_fisher(6, 8)
    large = torch.tensor([1e4, 3e3, *[1.0] * 6])
    wide = {"inputs": fisher.inputs * large[:, None] * large, "gradient": fisher.gradient / large}
    exact = replace(fisher, **wide)
    single = Fisher(*(getattr(exact, name).float() for name in ("gradient", "diagonal", "inputs", "outputs")))
    matrix = torch.kron(single.outputs.double(), single.inputs.double())
    matrix += DAMPING * matrix.trace() / len(matrix) * torch.eye(len(matrix))
    expected = torch.linalg.solve(matrix, single.gradient.double().flatten())
    assert single.natural_kfac.dtype == torch.float32
    assert torch.allclose(single.natural_kfac.double().flatten(), expected, rtol=1e-5)


def test_alignments_are_cosines_with_the_directions_they_name() -> None:
    """The mean m of F = (1, 2) - DAMPING m is 1.5 - DAMPING m, so F damped is 1 and 2; spacings are 0.5 and 2."""
    weight = torch.tensor([[1.0, 6.0]])
    mean = 1.5 / (1 + DAMPING)
    f = torch.tensor([[1.0, 2.0]]) - DAMPING * mean  # F + DAMPING * mean(F) = 1, 2
    fisher = Fisher(torch.tensor([[1.0, 1.0]]), f, torch.diag(f[0]), torch.ones(1, 1))
    made = view(weight, fisher=fisher)
    for name in ("diagonal", "kfac"):  # F^-1 g = (1, 1/2), with both
        natural = (1.0, 0.5)
        for direction, other in {"plain": (1, 1), "s": (0.5, 2), "s2": (0.25, 4)}.items():
            expected = np.dot(natural, other) / (np.linalg.norm(natural) * np.linalg.norm(other))
            assert COMPUTE[f"natural_{name}_{direction}"](made) == pytest.approx(expected, rel=1e-5), (name, direction)
        random = shuffled(made.stiffness)[0].tolist()  # 0.5 and 2 in either order
        expected = np.dot(natural, random) / (np.linalg.norm(natural) * np.linalg.norm(random))
        assert COMPUTE[f"natural_{name}_shuffled"](made) == pytest.approx(expected, rel=1e-5)
    assert COMPUTE["fisher_trace"](made) == pytest.approx(f.sum().item())
    assert COMPUTE["fisher_stiffness_rho"](made) == pytest.approx(1)


# --- curvature: what the rows are of -----------------------------------------------------------------


def test_curvatures_rows_are_the_ends_of_the_spectrum_and_the_trace() -> None:
    one = Curvature(Spectrum(torch.tensor([-2.0, 0.5, 7.0]), 0.01), 12.0, 3.0)
    expected = {"top": 7.0, "second": 0.5, "bottom": -2.0, "residual": 0.01, "trace": 12.0, "trace_error": 3.0}
    assert set(expected) == CURVATURE
    for name, value in expected.items():
        assert COMPUTE[f"hessian_{name}"](LayerView("l", 1, curvature=one)) == pytest.approx(value)
        assert COMPUTE[f"model_hessian_{name}"](LayerView("", 1, model_curvature=one)) == pytest.approx(value)
    alone = Curvature(Spectrum(torch.ones(1), 0.0), 1.0, 0.0)
    assert COMPUTE["hessian_second"](LayerView("l", 1, curvature=alone)) is None
