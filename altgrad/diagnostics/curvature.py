"""Second-order quantities of the loss at a run's final weights: Fisher information, and curvature (the Hessian).

**Fisher information**: its diagonal and Kronecker factors (KFAC). A sample is a sequence with labels drawn from the
model's own prediction, token by token. So this is the true Fisher information, not the "empirical" one of the corpus's
labels (Kunstner et al. 2019, arXiv:1905.12558). Like the loss it is a mean over tokens, or a classifier's labels.

**Hessian**: the Hessian of the rebuilt model's loss, over all parameters and for each layer. Its product with a vector
is a second backward pass through the straight-through path (see `altgrad.diagnostics.rebuilt`). So nothing larger than
a gradient is in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from altgrad.diagnostics.rebuilt import RebuiltModel, second_derivatives

SEED = 0
DAMPING = 0.1  # added to the Fisher information, as a share of its mean eigenvalue
TOLERANCE = 0.05  # relative residual of the Hessian's largest eigenvalue
TINY = 1e-12  # of the largest eigenvalue seen: Lanczos ends where the next vector is so small


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


def fishers(rebuilt: RebuiltModel) -> dict[str, Fisher]:
    """Return the Fisher information of each layer of ``rebuilt``, by name. One sequence is in memory at a time."""
    generator = torch.Generator().manual_seed(SEED)
    layers, inputs = rebuilt.layers, rebuilt.inputs
    gradients = torch.autograd.grad(rebuilt.loss(), [layer.weight for layer in layers.values()])
    sums = {
        name: [torch.zeros_like(layer.weight), *(torch.zeros(n, n, dtype=torch.float32) for n in layer.weight.shape)]
        for name, layer in layers.items()
    }
    rows = dict.fromkeys(layers, 0)
    for row in inputs.split(1):
        logits = rebuilt.model(row)
        loss = rebuilt.model.loss(logits, rebuilt.model.drawn(logits, generator), reduction="sum")
        # A layer is called once for each sequence: this GPT shares none between its blocks.
        seen = {name: layer.seen for name, layer in layers.items()}
        grads = torch.autograd.grad(loss, [y for _, y in seen.values()])
        for (name, (x, _)), grad in zip(seen.items(), grads, strict=True):
            a, g = (t.detach().flatten(0, -2) for t in (x, grad))  # (T, in), (T, out); T is 1 behind pooling
            rows[name] += len(a)
            diagonal, second_g, second_a = sums[name]
            diagonal += (g.T @ a).square_()
            second_g += g.T @ g
            second_a += a.T @ a
    losses = rebuilt.targets.numel()  # tokens, or labels of all sequences
    return {
        name: Fisher(gradient, diagonal.detach() / losses, second_a / rows[name], second_g / losses)
        for (name, (diagonal, second_g, second_a)), gradient in zip(sums.items(), gradients, strict=True)
    }


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


def curvatures(rebuilt: RebuiltModel, steps: int, vectors: int) -> tuple[dict[str, Curvature], Curvature]:
    """Return the `Curvature` of each layer's block of the Hessian, by layer name, and the `Curvature` of the model.

    ``steps`` is the largest number of Lanczos steps, ``vectors`` the number of random vectors for the traces. All
    blocks share the vectors: with independent signs z the expectation of z_l (Hz)_l is the trace of block l.
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
    """Return the Hessian times ``vectors``. ``gradients`` are those of the loss, made with ``create_graph=True``."""
    images = torch.autograd.grad(gradients, parameters, vectors, retain_graph=True, materialize_grads=True)
    return [t.detach() for t in images]


def lanczos(product: Callable[[Tensor], Tensor], start: Tensor, steps: int, tolerance: float) -> Spectrum:
    """Return Ritz values of a symmetric operator after at most ``steps`` products.

    ``product`` maps a float32 or float64 vector (n,) to another; ``start`` (n,) is not zero. Every vector is made
    orthogonal to all before it, twice, since Lanczos's recurrence loses orthogonality in floating point. The iteration
    ends early if the space is exhausted, or if the residual ``beta |s|`` of the largest Ritz value (Parlett 1998,
    section 13.2) is at most ``tolerance`` times its magnitude.
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
