"""The Fisher information of a layer's weight at a run's final weights: its diagonal, and its Kronecker factors (KFAC).

A sample is a sequence, whose labels are drawn from what the model itself predicts, token by token: so it is the Fisher
information and not the "empirical" one of the corpus's labels (Kunstner et al. 2019, arXiv:1905.12558). It is counted
per token, or label of a classifier, as the loss is, which makes it comparable with the loss's Hessian.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from altgrad.diagnostics.rebuilt import RebuiltModel

SEED = 0
DAMPING = 0.1  # added to the Fisher information, as a share of its mean eigenvalue


@dataclass(frozen=True, eq=False)
class Fisher:
    """What is known of one weight (out, in) on the batch; all float32.

    ``gradient`` (out, in) is that of the mean loss with the corpus's own labels. With g_t the derivative of a
    sequence's summed loss by the layer's output at token t, a_t the layer's input there, N sequences of T tokens
    and labels drawn from the model: ``diagonal`` (out, in) is the sum over sequences of (sum_t g_t a_t^T)^2 over N T,
    ``inputs`` (in, in) the mean of a_t a_t^T and ``outputs`` (out, out) that of g_t g_t^T over all N T tokens, as in
    Martens and Grosse 2015 (arXiv:1503.05671) with tokens taken as independent, the "expand" setting of Eschenhagen et
    al. 2023 (arXiv:2311.00636).
    """

    gradient: Tensor
    diagonal: Tensor
    inputs: Tensor
    outputs: Tensor

    @cached_property
    def natural_diagonal(self) -> Tensor:
        """``g / (F + damping mean(F))`` of the diagonal, element by element (out, in)."""
        return self.gradient / (self.diagonal + DAMPING * self.diagonal.mean())

    @cached_property
    def natural_kfac(self) -> Tensor:
        """``(outputs (x) inputs + damping I)^-1 g`` (out, in); exactly so, in the factors' eigenvectors.

        These in float64: of a run at a rate far too high, inputs of 10^4 beside ones of 1, LAPACK found none in single.
        """
        (a, u), (b, v) = (torch.linalg.eigh(factor.double()) for factor in (self.outputs, self.inputs))
        eigenvalues = a.clamp_min(0)[:, None] * b.clamp_min(0)[None, :]  # of the Kronecker product
        inside = u.T @ self.gradient.double() @ v / (eigenvalues + DAMPING * eigenvalues.mean())
        return (u @ inside @ v.T).to(self.gradient.dtype)


def fishers(rebuilt: RebuiltModel) -> dict[str, Fisher]:
    """Return what there is of each layer of ``rebuilt``, by name; a sequence at a time, so that memory is for one."""
    generator = torch.Generator().manual_seed(SEED)
    layers, inputs = rebuilt.layers, rebuilt.inputs
    gradients = torch.autograd.grad(rebuilt.loss(), [layer.weight for layer in layers.values()])
    sums = {
        name: [torch.zeros_like(layer.weight), *(torch.zeros(n, n, dtype=torch.float32) for n in layer.weight.shape)]
        for name, layer in layers.items()
    }
    rows = dict.fromkeys(layers, 0)
    for row in inputs.split(1):
        with rebuilt.recording():
            logits = rebuilt.model(row)
            loss = rebuilt.model.loss(logits, rebuilt.model.drawn(logits, generator), reduction="sum")
            # A layer is called once for each sequence: this GPT shares none between its blocks.
            seen = {name: layer.seen[0] for name, layer in layers.items()}
        outputs = torch.autograd.grad(loss, [y for _, y in seen.values()])
        for (name, (x, _)), y in zip(seen.items(), outputs, strict=True):
            a, g = (t.detach().flatten(0, -2) for t in (x, y))  # (T, in), (T, out); T is 1 behind pooling
            rows[name] += len(a)
            diagonal, second_g, second_a = sums[name]
            diagonal += (g.T @ a).square_()
            second_g += g.T @ g
            second_a += a.T @ a
    found = {}
    for (name, (diagonal, second_g, second_a)), gradient in zip(sums.items(), gradients, strict=True):
        losses = rebuilt.targets.numel()  # tokens, or labels of all sequences
        found[name] = Fisher(
            gradient, diagonal.detach() / losses, second_a / rows[name], second_g / losses
        )  # fmt: skip
    return found
