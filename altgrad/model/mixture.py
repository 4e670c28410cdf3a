"""A mixture of experts: each token passes through the few MLPs of a block that a router chooses for it."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Router(nn.Module):
    """Chooses ``active`` experts per token by ``x @ weight.T``, in float32 always. Its weight is (experts, width)."""

    def __init__(self, experts: int, width: int, active: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, width))
        self.active = active

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return, for ``x`` (tokens, width), the probabilities of all experts, the chosen ones and their weights.

        probabilities: float32 (tokens, experts). chosen: int64 (tokens, active). weights: float32 of that shape, the
        chosen ones' probabilities divided by their sum, as in Mixtral (arXiv:2401.04088).
        """
        with torch.autocast(x.device.type, enabled=False):
            probabilities = torch.softmax(x.float() @ self.weight.float().t(), dim=-1)
        weights, chosen = probabilities.topk(self.active, dim=-1)
        return probabilities, chosen, weights / weights.sum(dim=-1, keepdim=True)


class Mixture(nn.Module):
    """A mixture of experts without a capacity: each token's output is the weighted sum of those of its experts.

    An expert that no token chooses has gradients of zero. `GPT` trains the router with the load-balancing loss of
    Switch Transformers too (arXiv:2101.03961, equation 4): ``balance * experts * sum_e f_e p_e``, with f_e the share of
    the choices that are for expert e and p_e its mean probability. It is ``balance`` if all experts are chosen alike.

    Args:
        experts: modules from (n, width) to (n, width), for any n, 0 too.
        width: features of a token.
        active: number of experts of each token.
        balance: factor of the load-balancing loss.

    Attributes:
        penalty: that loss of the last forward pass in training, until `GPT` takes it.
    """

    def __init__(self, experts: nn.ModuleList, width: int, active: int, balance: float) -> None:
        super().__init__()
        self.balance = balance
        self.penalty: Tensor | None = None
        self.router = Router(len(experts), width, active)
        self.experts = experts

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        probabilities, chosen, weights = self.router(flat)
        if self.training:
            self.penalty = self.balance * load_balance(probabilities, chosen)
        return self._mixed(flat, chosen, weights).view_as(x)

    def take_penalty(self) -> Tensor:
        """Return `penalty` and forget it."""
        penalty, self.penalty = self.penalty, None
        assert penalty is not None, "the forward pass in training sets it"
        return penalty

    # A graph would be compiled anew for each number of an expert's tokens. torch.compiler.disable loads the compiler.
    @torch._disable_dynamo
    def _mixed(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        order, counts = by_expert(chosen, len(self.experts))
        tokens = order // chosen.shape[1]
        parts = zip(self.experts, x[tokens].split(counts), strict=True)
        y = torch.cat([expert(part) for expert, part in parts]).float() * weights.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(x, dtype=torch.float32).index_add(0, tokens, y)


def by_expert(chosen: Tensor, experts: int) -> tuple[Tensor, list[int]]:
    """Return the places of ``chosen.flatten()``, ordered by expert and then by place, and each expert's number of them.

    chosen: int64 (tokens, active), the experts of each token. Numbers from ``experts`` on come after all others.
    """
    flat = chosen.flatten()
    return flat.argsort(stable=True), torch.bincount(flat, minlength=experts).tolist()


def load_balance(probabilities: Tensor, chosen: Tensor) -> Tensor:
    """Return ``experts * sum_e f_e p_e`` as in :class:`Mixture`, 1 if all experts are chosen alike; differentiable.

    probabilities, chosen: as `Router` returns them.
    """
    experts = probabilities.shape[-1]
    shares = torch.zeros(experts, device=chosen.device).scatter_add(
        0, chosen.flatten(), torch.full((chosen.numel(),), 1 / chosen.numel(), device=chosen.device)
    )
    return experts * (shares * probabilities.mean(dim=0)).sum()
