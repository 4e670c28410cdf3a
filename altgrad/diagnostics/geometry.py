"""The geometry of the loss at a run's final weights: Fisher information and Hessian, beside the format's spacing.

**Fisher information**: its diagonal and Kronecker factors (KFAC). A sample is a sequence with labels drawn from the
model's own prediction, token by token. So this is the true Fisher information, not the "empirical" one of the corpus's
labels (Kunstner et al. 2019, arXiv:1905.12558). Like the loss it is a mean over tokens, or a classifier's labels.

**Hessian**: the Hessian of the rebuilt model's loss, over all parameters and for each layer. Its product with a vector
is a second backward pass through the straight-through path (see `altgrad.diagnostics.saved`). So nothing larger than
a gradient is in memory.

Does the format's spacing S (stiffness) resemble the geometry of the loss? The natural gradient F^-1 g is steepest
descent in the metric of the Fisher information F. Spacing-scaled optimizers descend along S g, or along S^2 g, steepest
descent in the metric 1/S^2. If S resembles the loss's geometry, these directions are nearer to F^-1 g than the controls
are: g itself (``_plain``), and S g with S shuffled (``_shuffled``).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from altgrad.diagnostics.analysis import (
    DAMPING,
    GEOMETRY,
    Analysis,
    Curvature,
    Fisher,
    LayerView,
    Spectrum,
    cosine,
    needed,
    shuffled,
    spearman,
)
from altgrad.diagnostics.saved import RebuiltModel, second_derivatives
from altgrad.metrics import Limit, mean

SEED = 0
TOLERANCE = 0.05  # relative residual of the Hessian's largest eigenvalue
TINY = 1e-12  # of the largest eigenvalue seen: Lanczos ends where the next vector is so small
FISHER = (*GEOMETRY, "fisher")
DIRECTIONS: dict[str, tuple[str, str, Callable[[Tensor, Tensor], Tensor]]] = {
    "plain": ("g", "g itself, the control of a constant S", lambda s, g: g),
    "s": ("S·g", "S·g", lambda s, g: s * g),
    "s2": ("S²·g", "S²·g, the gradient in the metric 1/S²", lambda s, g: s.square() * g),
    "shuffled": (
        "S·g, S shuffled", "S·g with S shuffled among the weights of its layer, the control",
        lambda s, g: shuffled(s) * g,
    ),
}  # fmt: skip
APPROXIMATIONS = {"kfac": "Kronecker factors", "diagonal": "diagonal"}


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


# --- metrics ---------------------------------------------------------------------------------------


def fisher_trace(view: LayerView) -> float:
    """Return the trace of the true Fisher information, which can be compared with the trace of the Hessian."""
    return needed(view.fisher).diagonal.double().sum().item()


def fisher_stiffness_rho(view: LayerView) -> float | None:
    """Return the rank correlation of the Fisher diagonal and the stiffness; ``None`` where either is constant."""
    return spearman(needed(view.fisher).diagonal, view.stiffness)


def _alignment(approximation: str, direction: str) -> Analysis:
    short, words, along = DIRECTIONS[direction]

    def compute(view: LayerView) -> float | None:
        fisher = needed(view.fisher)
        natural: Tensor = getattr(fisher, f"natural_{approximation}")
        return cosine(natural, along(view.stiffness, fisher.gradient))

    compute.__name__ = f"natural_{approximation}_{direction}"
    definition = (
        f"cos of the natural gradient F⁻¹g and {words}; F from its {APPROXIMATIONS[approximation]} at the quantized "
        f"final weights, on `diagnose.fisher_tokens` validation tokens with labels drawn from the model, damped by "
        f"{DAMPING:g} of its mean eigenvalue."
    )
    title = f"natural gradient ({APPROXIMATIONS[approximation]}) with {short}"
    return Analysis.own(compute, FISHER, "cosine", definition, offline="fisher", summary=mean, title=title)


HOW = (
    "of the loss on `diagnose.hessian_tokens` validation tokens, through the straight-through path at the quantized "
    "final weights"
)
TOP = (
    f"Largest eigenvalue of {{}} {HOW}: a lower bound, of residual {100 * TOLERANCE:g} % or less unless Lanczos ends "
    "before, after `diagnose.lanczos` steps."
)
WHERE = {"": ("curvature", "a layer's block of the Hessian"), "model_": ("model_curvature", "the whole Hessian")}
QUANTITIES: dict[str, tuple[str, Limit | None, Callable[[Curvature], float | None]]] = {
    "hessian_top": (TOP, Limit(above=True, value=1000.0), lambda c: c.spectrum.values[-1].item()),
    "hessian_second": (
        "Second largest eigenvalue of {} as the same steps know it, a lower bound.", None,
        lambda c: c.spectrum.values[-2].item() if len(c.spectrum.values) > 1 else None,
    ),
    "hessian_bottom": (
        "Smallest eigenvalue of {} as the same steps know it, an upper bound: below 0 at a saddle.", None,
        lambda c: c.spectrum.values[0].item(),
    ),
    "hessian_residual": (
        "Residual of the largest eigenvalue of {} over its magnitude: an eigenvalue is that near.", None,
        lambda c: c.spectrum.residual,
    ),
    "hessian_trace": (
        f"Trace of {{}} {HOW}; Hutchinson's mean of zᵀHz over `diagnose.hutchinson` vectors of random signs.",
        None, lambda c: c.trace,
    ),
    "hessian_trace_error": ("Standard error of that trace of {} over the vectors.", None, lambda c: c.trace_error),
}  # fmt: skip


def _curvature(where: str, quantity: str) -> Analysis:
    need, what = WHERE[where]
    definition, limit, read = QUANTITIES[quantity]

    def compute(view: LayerView) -> float | None:
        return read(getattr(view, need))

    compute.__name__ = where + quantity
    unit = "ratio" if quantity.endswith("residual") else "1/weight²"
    title = f"{quantity.removeprefix('hessian_').replace('_', ' ')} of {what}"
    return Analysis.own(
        compute, (need,), unit, definition.format(what), offline="loss", summary=mean, limit=limit, title=title
    )


ANALYSES = (
    Analysis.own(
        fisher_trace, ("fisher",), "1/weight²",
        "Trace of the Fisher information of a layer's weight per token, in the weights' own unit, with labels "
        "drawn from the model.",
        offline="fisher", summary=mean, title="trace of the Fisher information",
    ),
    Analysis.own(
        fisher_stiffness_rho, FISHER, "rank correlation",
        "Spearman's correlation of the Fisher information's diagonal and the stiffness S over a layer's weights: "
        "below 0 where the weights that the loss is most sensitive to have the finer spacing.",
        offline="fisher", summary=mean, title="Fisher information with S, rank correlation",
    ),
    *(_alignment(approximation, direction) for approximation in APPROXIMATIONS for direction in DIRECTIONS),
    *(_curvature(where, quantity) for where in WHERE for quantity in QUANTITIES),
)  # fmt: skip
