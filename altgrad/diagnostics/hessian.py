"""Curvature of the loss at a run's final weights: the Hessian of the rebuilt model, whole and layer by layer.

A product with the Hessian is a second backward pass through the straight-through path (see
`altgrad.diagnostics.rebuilt`), so nothing larger than a gradient is ever made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from altgrad.diagnostics.lanczos import Spectrum, lanczos, mean_and_error
from altgrad.diagnostics.rebuilt import RebuiltModel, second_derivatives

TOLERANCE = 0.05  # of the largest eigenvalue: its residual, relative
SEED = 0


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
    weights = {name: layer.weight for name, layer in rebuilt.layers.items()}
    place = {id(p): i for i, p in enumerate(everything)}
    with second_derivatives():
        gradients = torch.autograd.grad(rebuilt.loss(), everything, create_graph=True)
        own = {name: place[id(weight)] for name, weight in weights.items()}
        samples = []
        for _ in range(vectors):
            signs = [torch.randint(2, p.shape, generator=generator).float() * 2 - 1 for p in everything]
            images = _product(gradients, everything, signs)
            samples.append([torch.dot(z.flatten(), h.flatten()).double() for z, h in zip(signs, images, strict=True)])
        traces = torch.tensor(samples, dtype=torch.float64)  # (vectors, parameters)
        layers = {}
        for name, i in own.items():
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

    return lanczos(product, torch.randn(sum(sizes), generator=generator), steps, TOLERANCE)


def _product(gradients: Sequence[Tensor], parameters: Sequence[Tensor], vectors: Sequence[Tensor]) -> list[Tensor]:
    """Return the Hessian of the loss, of which ``gradients`` are the differentiable ones, times ``vectors``."""
    found = torch.autograd.grad(gradients, parameters, vectors, retain_graph=True, materialize_grads=True)
    return [t.detach() for t in found]
