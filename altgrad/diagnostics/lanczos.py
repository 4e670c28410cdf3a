"""The ends of a symmetric operator's spectrum, and its trace, from products with vectors alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

TINY = 1e-12  # of the largest eigenvalue seen: a space that the operator maps into itself ends the iteration


class Spectrum(NamedTuple):
    """Eigenvalues, ascending, as far as they are known, and the largest one's residual over its magnitude.

    An eigenvalue of the operator lies within ``residual * abs(values[-1])`` of ``values[-1]``.
    """

    values: Tensor
    residual: float


def lanczos(product: Callable[[Tensor], Tensor], start: Tensor, steps: int, tolerance: float) -> Spectrum:
    """Return Ritz values of a symmetric operator after at most ``steps`` products.

    ``product`` maps a float32 or float64 vector (n,) to one, ``start`` (n,) is not zero. Every vector is made
    orthogonal to all before it, twice, which Lanczos's own recurrence loses in floating point. It ends when
    the residual ``beta |s|`` of the largest Ritz value (Parlett 1998, section 13.2) is below ``tolerance`` times its
    magnitude, or when the space is exhausted.
    """
    basis = [start.double() / start.double().norm()]
    alphas: list[float] = []
    betas: list[float] = []
    while True:
        image = product(basis[-1].to(start.dtype)).double()
        alphas.append(torch.dot(basis[-1], image).item())
        q = torch.stack(basis)  # (steps so far, n)
        for _ in range(2):
            image = image - (q @ image) @ q
        beta = image.norm().item()
        off = torch.tensor(betas, dtype=torch.float64)
        values, vectors = torch.linalg.eigh(torch.diag(torch.tensor(alphas, dtype=torch.float64)) + _sides(off))
        top, size = values[-1].abs().item(), values.abs().max().item()
        residual = beta * vectors[-1, -1].abs().item()
        exhausted = beta <= TINY * size or len(basis) == len(start)
        if exhausted or residual <= tolerance * top or len(basis) == steps:
            return Spectrum(values, 0.0 if exhausted or not top else residual / top)
        betas.append(beta)
        basis.append(image / beta)


def _sides(off: Tensor) -> Tensor:
    return torch.diag(off, 1) + torch.diag(off, -1)


def mean_and_error(samples: Tensor) -> tuple[float, float]:
    """Return the mean of ``samples`` (k,), k >= 2, and its standard error."""
    return samples.mean().item(), samples.std().item() / len(samples) ** 0.5
