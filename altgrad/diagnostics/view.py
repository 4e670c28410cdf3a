"""One linear layer at one step, as the metrics see it.

Everything that several metrics need (the scaled weights, their codes, how often each code occurs) is
computed once per view, on first use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from altgrad.diagnostics.fisher import Fisher
from altgrad.diagnostics.hessian import Curvature
from altgrad.diagnostics.noise_sources import GradientNoise
from altgrad.formats import Format
from altgrad.numerics import decode, encode, format_constants, operand_scale, quantize, rung, ulp

T = TypeVar("T")


def needed(field: T | None) -> T:
    """Return a field of a view that the analysis says it needs: without it `measure` does not call the function."""
    assert field is not None
    return field


class Histogram(NamedTuple):
    """Bin positions ``x``, ascending, and the share or level ``value`` of each; empty bins may be left out."""

    x: Sequence[float]
    value: Sequence[float]


class Grid(NamedTuple):
    """A format and the scale with which a tensor is put on it: ``round(t * scale)``."""

    format: Format
    scale: Tensor  # float32, broadcastable to the tensor

    @classmethod
    def of(cls, weight: Tensor, fmt: Format, remembered: Tensor | None = None, **options: Any) -> Grid:
        """Return the quantization grid that the forward product puts ``weight`` (out, in) on: ``target / amax``.

        ``remembered`` (0-d) is the amax where that is not the weight's own of the moment, ``options`` are those of
        `operand_scale`.
        """
        constants = format_constants(fmt, scale_format=options.get("scale_format", "float32"))
        return cls(fmt, operand_scale(weight, constants, remembered, **options))

    def scaled(self, t: Tensor) -> Tensor:
        """Return ``t * scale`` in float32, the product that training rounds."""
        return t.float() * self.scale

    def rounded(self, t: Tensor) -> Tensor:
        """Return ``round(t * scale)``, on the format's own quantization grid."""
        return quantize(self.scaled(t), self.format)

    def rungs(self, t: Tensor) -> Tensor:
        """Return the rung (int32) on which each value of ``t`` lands."""
        return rung(self.scaled(t), self.format)


@dataclass(frozen=True, eq=False)
class LayerView:
    """A layer at a step. What a run does not have is ``None``, and metrics that need it are left out.

    ``weight`` is the float32 master weight, shape (out, in); ``initial`` and ``previous`` are the same
    tensor at step 0 and at the snapshot before (``None`` at step 0). ``grid`` and ``previous_grid``
    are where the quantized path puts the two (``None`` when weights are not quantized). The gradients
    of the weight come from one batch, through the quantized path and in float32.

    ``virtual`` is the quantization grid that an arm sees and no product uses. ``fisher``, ``curvature`` and ``noise``
    are of the final weights in the model rebuilt; a view of the whole model has ``model_curvature`` and no layer.
    """

    layer: str
    step: int
    weight: Tensor | None = None
    grid: Grid | None = None
    initial: Tensor | None = None
    previous: Tensor | None = None
    previous_grid: Grid | None = None
    grad_quantized: Tensor | None = None
    grad_float: Tensor | None = None
    virtual: Grid | None = None
    fisher: Fisher | None = None
    curvature: Curvature | None = None
    noise: GradientNoise | None = None
    model_curvature: Curvature | None = None

    @property
    def geometry(self) -> Grid | None:
        """The quantization grid whose spacing is the weights' stiffness: their own, or a virtual one."""
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
        """The rounded weights on the format's own quantization grid, not divided by the scale again."""
        return quantize(self.scaled, needed(self.grid).format)

    @cached_property
    def code_counts(self) -> np.ndarray:
        """How many weights have each code: int64, shape (2^bits,)."""
        fmt = needed(self.grid).format
        codes = encode(self.on_grid, fmt).flatten().long() & ((1 << fmt.bits) - 1)
        return torch.bincount(codes, minlength=1 << fmt.bits).numpy()

    @cached_property
    def rung_counts(self) -> tuple[np.ndarray, np.ndarray]:
        """The rungs in use, ascending, and how many weights are on each; +0 and -0 are one rung."""
        fmt = needed(self.grid).format
        codes = torch.from_numpy(np.flatnonzero(self.code_counts))
        rungs, owner = np.unique(rung(decode(codes, fmt), fmt).numpy(), return_inverse=True)
        return rungs, np.bincount(owner, weights=self.code_counts[codes.numpy()])

    @cached_property
    def singular_values(self) -> Tensor:
        return singular_values(needed(self.weight))


def entropy(counts: np.ndarray) -> float:
    """Return the entropy in bits of the distribution with these counts."""
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log2(share)).sum() + 0.0)  # + 0.0 turns -0 into 0


def singular_values(matrix: Tensor) -> Tensor:
    """Return the singular values of a 2-d ``matrix``, float64, ascending.

    They are the square roots of the eigenvalues of the smaller Gram matrix: many times faster than a decomposition of
    the matrix itself, and exact to about 1e-8 of the largest, far below what stable and effective rank can show.
    """
    wide = matrix.double()
    gram = wide @ wide.T if wide.shape[0] <= wide.shape[1] else wide.T @ wide
    return torch.linalg.eigvalsh(gram).clamp_min(0).sqrt()
