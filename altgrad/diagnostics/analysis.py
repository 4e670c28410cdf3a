"""The view of a layer that metrics are computed from, the declaration of a metric, and functions that metrics share.

What a view has of the loss (`Fisher`, `Curvature`, `GradientNoise`) is measured in `geometry` and `gradients`.

A view computes the scaled weights, their codes and the counts of the codes once, when a metric first uses them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from altgrad.formats import Format
from altgrad.metrics import METRICS, Metric
from altgrad.numerics import decode, encode, format_constants, operand_scale, permutation, quantize, rung, ulp

SEED = 0
DAMPING = 0.1  # added to the Fisher information, as a share of its mean eigenvalue
# Usual needs of an analysis.
WEIGHT = ("weight",)
QUANTIZED = ("weight", "grid")
GEOMETRY = ("weight", "geometry")
GRADIENTS = ("grad_quantized", "grad_float")

T = TypeVar("T")


def needed(field: T | None) -> T:
    """Return ``field``, a field of a view that the analysis names in ``needs``; ``None`` raises ``AssertionError``."""
    assert field is not None
    return field


class Histogram(NamedTuple):
    """Bin positions ``x``, ascending, and the share or level ``value`` of each bin; empty bins may be left out."""

    x: Sequence[float]
    value: Sequence[float]


class QuantizationGrid(NamedTuple):
    """A format and the scale with which a tensor is rounded to it: ``round(t * scale)``."""

    format: Format
    scale: Tensor  # float32, broadcastable to the tensor

    @classmethod
    def of(cls, weight: Tensor, fmt: Format, remembered: Tensor | None = None, **options: Any) -> Self:
        """Return the format and scale by which the forward product quantizes ``weight`` (out, in).

        ``remembered`` (0-d) is the amax that sets the scale, ``None`` for the present amax of ``weight``. ``options``
        are keyword arguments of `operand_scale`.
        """
        constants = format_constants(fmt, scale_format=options.get("scale_format", "float32"))
        return cls(fmt, operand_scale(weight, constants, remembered, **options))

    def scaled(self, t: Tensor) -> Tensor:
        """Return ``t * scale`` in float32, the product that training rounds."""
        return t.float() * self.scale

    def rounded(self, t: Tensor) -> Tensor:
        """Return ``round(t * scale)``: values of the format, not divided by the scale."""
        return quantize(self.scaled(t), self.format)

    def rungs(self, t: Tensor) -> Tensor:
        """Return the rung (int32, integer position on the number line) that each value of ``t`` rounds to."""
        return rung(self.scaled(t), self.format)


@dataclass(frozen=True, eq=False)
class Fisher:
    """The Fisher information of one weight (out, in) on the batch; all tensors are float32.

    ``gradient`` (out, in) is the gradient of the mean loss with the corpus's labels. The other fields use N sequences
    of T tokens with labels drawn from the model. a_t is the layer's input at token t, and g_t the derivative of a
    sequence's summed loss by the layer's output there. ``diagonal`` (out, in) is the sum over sequences of
    (sum_t g_t a_t^T)^2, divided by N T. ``inputs`` (in, in) is the mean of a_t a_t^T over all N T tokens, ``outputs``
    (out, out) the mean of g_t g_t^T. These are the factors of Martens and Grosse 2015 (arXiv:1503.05671) with tokens
    taken as independent, the "expand" setting of Eschenhagen et al. 2023 (arXiv:2311.00636).
    """

    gradient: Tensor
    diagonal: Tensor
    inputs: Tensor
    outputs: Tensor

    @cached_property
    def natural_diagonal(self) -> Tensor:
        """``g / (F + damping mean(F))`` with F = ``diagonal``, element by element (out, in)."""
        return self.gradient / (self.diagonal + DAMPING * self.diagonal.mean())

    @cached_property
    def natural_kfac(self) -> Tensor:
        """``(outputs (x) inputs + damping I)^-1 g`` (out, in), computed exactly in the factors' eigenvectors.

        The eigenvectors are computed in float64: in float32 LAPACK failed for inputs of 10^4 beside inputs of 1.
        """
        (a, u), (b, v) = (torch.linalg.eigh(factor.double()) for factor in (self.outputs, self.inputs))
        eigenvalues = a.clamp_min(0)[:, None] * b.clamp_min(0)[None, :]  # of the Kronecker product
        inside = u.T @ self.gradient.double() @ v / (eigenvalues + DAMPING * eigenvalues.mean())
        return (u @ inside @ v.T).to(self.gradient.dtype)


class Spectrum(NamedTuple):
    """Estimated eigenvalues (Ritz values), ascending, and the residual of the largest divided by its magnitude.

    An eigenvalue of the operator lies within ``residual * abs(values[-1])`` of ``values[-1]``.
    """

    values: Tensor
    residual: float


@dataclass(frozen=True)
class Curvature:
    """Estimated eigenvalues of a layer's or the model's Hessian, and its trace (Hutchinson) with standard error."""

    spectrum: Spectrum
    trace: float
    trace_error: float


class GradientNoise(NamedTuple):
    """Squared Frobenius norms of a layer's weight gradient (``signal``) and of its quantization noise.

    ``causes`` has the noise with one role quantized alone, by role. ``together`` is the noise with all roles quantized,
    and ``along`` the inner product of the gradient with that noise. ``bias`` is the part of ``together`` that all
    batches share, ``scatter`` the part that differs between batches of training's size. Both are NaN if not measured.
    """

    signal: float
    causes: dict[str, float]
    together: float
    along: float
    bias: float = math.nan
    scatter: float = math.nan


@dataclass(frozen=True, eq=False)
class LayerView:
    """A layer at a step. A field that the run lacks is ``None``, and metrics that need it are left out.

    ``weight`` is the float32 master weight, shape (out, in); ``initial`` and ``previous`` are the same tensor at step 0
    and at the snapshot before (``None`` at step 0). ``grid`` and ``previous_grid`` are their quantization grids
    (``None`` when weights are not quantized). ``grad_quantized`` and ``grad_float`` are gradients of the weight on one
    batch, through the quantized path and in float32.

    ``virtual`` is the quantization grid that only the optimizer sees: no product uses it. ``fisher`` and ``curvature``
    are measured at the final weights in the rebuilt model, ``noise`` at every snapshot. A view of the whole model has
    the layer ``""`` and ``model_curvature``.
    """

    layer: str
    step: int
    weight: Tensor | None = None
    grid: QuantizationGrid | None = None
    initial: Tensor | None = None
    previous: Tensor | None = None
    previous_grid: QuantizationGrid | None = None
    grad_quantized: Tensor | None = None
    grad_float: Tensor | None = None
    virtual: QuantizationGrid | None = None
    fisher: Fisher | None = None
    curvature: Curvature | None = None
    noise: GradientNoise | None = None
    model_curvature: Curvature | None = None

    @property
    def geometry(self) -> QuantizationGrid | None:
        """The quantization grid whose spacing is the weights' stiffness: ``grid``, or else ``virtual``."""
        return self.virtual if self.grid is None else self.grid

    @cached_property
    def stiffness(self) -> Tensor:
        """The spacing of `geometry` at each weight, in the weight's own unit: float32, shape (out, in)."""
        grid = needed(self.geometry)
        return ulp(grid.scaled(needed(self.weight)), grid.format) / grid.scale

    @cached_property
    def scaled(self) -> Tensor:
        return needed(self.grid).scaled(needed(self.weight))

    @cached_property
    def on_grid(self) -> Tensor:
        """The rounded weights as values of the format, still multiplied by the scale."""
        return quantize(self.scaled, needed(self.grid).format)

    @cached_property
    def code_counts(self) -> np.ndarray:
        """How many weights have each code: int64, shape (2^bits,)."""
        fmt = needed(self.grid).format
        codes = encode(self.on_grid, fmt).flatten().long() & ((1 << fmt.bits) - 1)
        return torch.bincount(codes, minlength=1 << fmt.bits).numpy()

    @cached_property
    def rung_counts(self) -> tuple[np.ndarray, np.ndarray]:
        """The rungs in use, ascending, and the number of weights on each; +0 and -0 are one rung."""
        fmt = needed(self.grid).format
        codes = torch.from_numpy(np.flatnonzero(self.code_counts))
        rungs, owner = np.unique(rung(decode(codes, fmt), fmt).numpy(), return_inverse=True)
        return rungs, np.bincount(owner, weights=self.code_counts[codes.numpy()])

    @cached_property
    def singular_values(self) -> Tensor:
        return singular_values(needed(self.weight))


class Analysis(NamedTuple):
    """How one metric is computed.

    ``compute`` takes a :class:`LayerView` and returns a number, a :class:`Histogram`, or ``None`` where the metric has
    no value. `measure` calls ``compute`` only if all fields of the view that ``needs`` names are present and finite.
    ``row`` is the metric's definition; ``None`` if `altgrad.metrics.METRICS` has it.
    """

    compute: Callable[[LayerView], float | Histogram | None]
    needs: tuple[str, ...]
    row: Metric | None = None

    @classmethod
    def own(
        cls, compute: Callable[[LayerView], float | Histogram | None], needs: tuple[str, ...], unit: str,
        definition: str, **row: Any,
    ) -> Self:  # fmt: skip
        """Return an analysis with a new `Metric` named after ``compute``; ``row`` has further `Metric` fields."""
        return cls(compute, needs, Metric(compute.__name__, unit, definition, **row))

    @property
    def name(self) -> str:
        """The metric's name in files and reports: the name of the function ``compute``."""
        return self.compute.__name__

    @property
    def metric(self) -> Metric:
        return METRICS[self.name] if self.row is None else self.row


def cosine(a: Tensor, b: Tensor) -> float | None:
    """Return the cosine of two tensors of one shape, ``None`` when either is zero."""
    a, b = a.double().flatten(), b.double().flatten()
    norms = (a.norm() * b.norm()).item()
    return (a @ b).item() / norms if norms else None


def ratio_db(signal: Tensor, noise: Tensor) -> float | None:
    """Return 10 log10(sum of signal^2 / sum of noise^2), ``None`` when either sum is zero."""
    powers = [t.double().square().sum().item() for t in (signal, noise)]
    return 10 * math.log10(powers[0] / powers[1]) if all(powers) else None


def shuffled(t: Tensor) -> Tensor:
    """Return ``t`` with its elements permuted. The permutation depends on the number of elements alone."""
    return t.flatten()[permutation(t.numel(), SEED, 0)].view_as(t)


def spearman(a: Tensor, b: Tensor) -> float | None:
    """Return Spearman's rank correlation of two tensors of one shape, ``None`` when either is constant.

    Ties, of which stiffness has many, share the mean of their ranks.
    """
    ranks = [torch.from_numpy(pd.Series(t.double().flatten().numpy()).rank().to_numpy(copy=True)) for t in (a, b)]
    return cosine(*(rank - rank.mean() for rank in ranks))


def entropy(counts: np.ndarray) -> float:
    """Return the entropy in bits of the distribution with the ``counts``, which are not all zero."""
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log2(share)).sum() + 0.0)  # + 0.0 turns -0 into 0


def singular_values(matrix: Tensor) -> Tensor:
    """Return the singular values of a 2-d ``matrix``, float64, ascending.

    They are computed as square roots of the eigenvalues of the smaller Gram matrix. This is many times faster than a
    decomposition of ``matrix``, and exact to about 1e-8 of the largest singular value.
    """
    wide = matrix.double()
    gram = wide @ wide.T if wide.shape[0] <= wide.shape[1] else wide.T @ wide
    return torch.linalg.eigvalsh(gram).clamp_min(0).sqrt()
