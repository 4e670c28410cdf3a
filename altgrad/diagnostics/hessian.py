"""Curvature of the loss at a run's final weights: the Hessian of the rebuilt model, whole and layer by layer.

A product with the Hessian is a second backward pass through the straight-through path (see
`altgrad.diagnostics.rebuilt`), so nothing larger than a gradient is ever made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from altgrad.diagnostics.rebuilt import RebuiltModel, second_derivatives

TOLERANCE = 0.05  # of the largest eigenvalue: its residual, relative
SEED = 0
TINY = 1e-12  # of the largest eigenvalue seen: a space that the operator maps into itself ends the iteration


class Spectrum(NamedTuple):
    """Eigenvalues, ascending, as far as they are known, and the largest one's residual over its magnitude.

    An eigenvalue of the operator lies within ``residual * abs(values[-1])`` of ``values[-1]``.
    """

    values: Tensor
    residual: float


@dataclass(frozen=True)
class Curvature:
    """Of one layer, or of the model: ends of the Hessian's spectrum; its trace (Hutchinson), with standard error."""

    spectrum: Spectrum
    trace: float
    trace_error: float


def curvatures(rebuilt: RebuiltModel, steps: int, vectors: int) -> tuple[dict[str, Curvature], Curvature]:
    """Return the curvature of each layer's own block by name, and that of the model over all its parameters.

    ``steps`` are the most Lanczos steps of each, ``vectors`` the random ones for the traces, which all blocks share:
    with signs z, the expectation of z_l (Hz)_l is the trace of block l, as those of different blocks are independent.
    """
    generator = torch.Generator().manual_seed(SEED)
    everything = list(rebuilt.model.parameters())
    place = {id(p): i for i, p in enumerate(everything)}
    with second_derivatives():
        gradients = torch.autograd.grad(rebuilt.loss(), everything, create_graph=True)
        samples = []
        for _ in range(vectors):
            signs = [torch.randint(2, p.shape, generator=generator).float() * 2 - 1 for p in everything]
            images = _product(gradients, everything, signs)
            samples.append([torch.dot(z.flatten(), h.flatten()).double() for z, h in zip(signs, images, strict=True)])
        traces = torch.tensor(samples, dtype=torch.float64)  # (vectors, parameters)
        layers = {}
        for name, layer in rebuilt.layers.items():
            i = place[id(layer.weight)]
            spectrum = _spectrum([gradients[i]], [everything[i]], steps, generator)
            layers[name] = Curvature(spectrum, *mean_and_error(traces[:, i]))
        whole = _spectrum(gradients, everything, steps, generator)
    return layers, Curvature(whole, *mean_and_error(traces.sum(1)))


def _spectrum(
    gradients: Sequence[Tensor], parameters: Sequence[Tensor], steps: int, generator: torch.Generator
) -> Spectrum:
    sizes = [p.numel() for p in parameters]

    def product(vector: Tensor) -> Tensor:
        parts = [part.view_as(p) for part, p in zip(vector.split(sizes), parameters, strict=True)]
        return torch.cat([image.flatten() for image in _product(gradients, parameters, parts)])

    return lanczos(product, torch.randn(sum(sizes), generator=generator, dtype=torch.float32), steps, TOLERANCE)


def _product(gradients: Sequence[Tensor], parameters: Sequence[Tensor], vectors: Sequence[Tensor]) -> list[Tensor]:
    """Return the Hessian of the loss, of which ``gradients`` are the differentiable ones, times ``vectors``."""
    found = torch.autograd.grad(gradients, parameters, vectors, retain_graph=True, materialize_grads=True)
    return [t.detach() for t in found]


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
        diagonal, off = (torch.tensor(given, dtype=torch.float64) for given in (alphas, betas))
        tridiagonal = torch.diag(diagonal) + (torch.diag(off, 1) + torch.diag(off, -1))
        values, vectors = torch.linalg.eigh(tridiagonal)
        top, size = values[-1].abs().item(), values.abs().max().item()
        residual = beta * vectors[-1, -1].abs().item()
        exhausted = beta <= TINY * size or len(basis) == len(start)
        if exhausted or residual <= tolerance * top or len(basis) == steps:
            return Spectrum(values, 0.0 if exhausted or not top else residual / top)
        betas.append(beta)
        basis.append(image / beta)


def mean_and_error(samples: Tensor) -> tuple[float, float]:
    """Return the mean of ``samples`` (k,), k >= 2, and its standard error."""
    return samples.mean().item(), samples.std().item() / len(samples) ** 0.5
