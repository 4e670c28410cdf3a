"""The transformer that every cell trains: a GPT in the GPT-2 shape.

Pre-norm blocks, learned positions, GELU, causal scaled-dot-product attention, a head tied to the token embedding, by
default no biases and no dropout (Radford et al. 2019). From Karpathy's nanoGPT: initial standard deviation 0.02,
residual projections scaled by 1/sqrt(2 * layers). Every matrix product with a weight is an ``nn.Linear`` with a name
that a recipe can address: ``blocks.<n>.attn.qkv``, ``blocks.<n>.attn.out``, ``blocks.<n>.mlp.up``,
``blocks.<n>.mlp.down`` and ``head``. So are attention's own products, ``blocks.<n>.attn.scores`` and
``blocks.<n>.attn.values``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from altgrad.model.layers import linear_layers
from altgrad.model.quantized.attention import LARGEST_PROBABILITY, Product, attend
from altgrad.numerics.compile_utils import materialized

INITIAL_STD = 0.02
SHORT_CONTEXT = 128  # tokens
GELUS = {"exact": "none", "tanh": "tanh"}  # torch's names of the approximation


@dataclass(frozen=True)
class GPTConfig:
    """Size of a :class:`GPT`; ``width`` must be divisible by ``heads``.

    bias: whether linear layers and norms have biases. GPT-2's published weights have them.
    gelu: ``exact`` or ``tanh``, the approximation that GPT-2's published weights need.
    labels: for a classifier of sequences: the weight of each label's positives in the loss. Its head has its own
        weight. Empty for a language model.
    pooling: what a classifier's head sees: the ``mean`` of a sequence's tokens or the ``last`` token.
    end: id of the token that ends a sequence, for a classifier.
    """

    vocab_size: int
    layers: int
    width: int
    heads: int
    context: int
    mlp_ratio: float = 4.0
    dropout: float = 0.0
    bias: bool = False
    gelu: str = "exact"
    labels: tuple[float, ...] = ()
    pooling: str = "mean"
    end: int = 0

    def __post_init__(self) -> None:
        if self.gelu not in GELUS:
            raise ValueError(f"gelu must be one of {', '.join(GELUS)}, not {self.gelu!r}")
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not divisible by heads {self.heads}")


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=config.bias)
        self.out = nn.Linear(config.width, config.width, bias=config.bias)
        self.scores, self.values = Product(), Product(left_amax=LARGEST_PROBABILITY)

    def split(self, qkv: Tensor) -> Tensor:
        """Return queries, keys and values (3, batch, heads, length, width / heads) of (batch, length, 3 width)."""
        batch, length, width = qkv.shape
        return qkv.view(batch, length, 3, self.heads, width // (3 * self.heads)).permute(2, 0, 3, 1, 4)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.split(self.qkv(x))
        dropout = self.dropout if self.training else 0.0
        if not (isinstance(self.scores, Product) and isinstance(self.values, Product)):
            mask = _later_masked(torch.arange(length, device=x.device)) if mask is None else mask
            y = attend((self.scores, self.values), q, k, v, mask, q.shape[-1] ** -0.5, dropout).to(q.dtype)
        elif mask is None:
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        else:
            y = _plain_attention(q, k, v, mask, dropout)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


def _plain_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout: float) -> Tensor:
    """Return what ``scaled_dot_product_attention`` returns, by plain products in float32; ``mask`` is added."""
    with torch.autocast(q.device.type, enabled=False):
        root = q.shape[-1] ** -0.25
        scores = (q.float() * root) @ (k.float() * root).transpose(-2, -1) + mask
        y = F.dropout(torch.softmax(scores, dim=-1), dropout) @ v.float()
    return y.to(q.dtype)


def _causal_mask(positions: Tensor) -> Tensor | None:
    """Return the mask (length, length) for `_plain_attention`, or ``None`` if torch's fused kernel is no slower.

    Forward and backward of one nano layer (16 x 4 heads, 128 tokens, 2 cores) take 8.8 ms compiled from plain
    products and 17.8 ms in torch's fused CPU kernel; from 256 tokens on they are equal. torch's own plain products
    build a mask in every layer and search rows without a score, 3 ms more per step.
    """
    if positions.device.type != "cpu" or len(positions) > SHORT_CONTEXT:
        return None
    return _later_masked(positions)


def _later_masked(positions: Tensor) -> Tensor:
    """Return float32 (length, length): -inf where the column's position is after the row's, else 0."""
    later = positions > positions[:, None]
    zeros = torch.zeros(later.shape, dtype=torch.float32, device=positions.device)
    return materialized(zeros.masked_fill(later, -math.inf))


class MLP(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        hidden = round(config.mlp_ratio * config.width)
        self.approximate = GELUS[config.gelu]
        self.up = nn.Linear(config.width, hidden, bias=config.bias)
        self.down = nn.Linear(hidden, config.width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate=self.approximate))


class Block(nn.Module):
    """Attention and MLP, each after a layer norm and inside a residual connection."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width, bias=config.bias)
        self.attn = Attention(config)
        self.norm2 = nn.LayerNorm(config.width, bias=config.bias)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.dropout(self.attn(self.norm1(x), mask))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """A decoder-only language model; with ``config.labels`` a classifier of sequences on the same blocks.

    The initial weights depend only on the global torch generator: with one seed every recipe and arm starts from the
    same model.
    """

    label_weights: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=config.bias)
        self.head = nn.Linear(config.width, len(config.labels) or config.vocab_size, bias=False)
        self._initialise()
        if config.labels:
            self.register_buffer("label_weights", torch.tensor(config.labels, dtype=torch.float32), persistent=False)
        else:
            self.head.weight = self.tokens.weight

    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                residual = name.endswith(("attn.out.weight", "mlp.down.weight"))
                std = INITIAL_STD / math.sqrt(2 * self.config.layers) if residual else INITIAL_STD
                nn.init.normal_(parameter, std=std)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return logits (batch, length, vocab_size), or with ``targets`` the mean cross-entropy in nats.

        ``tokens`` and ``targets`` are int64 of shape (batch, length), ``length <= context``. The loss is computed in
        float32 whatever the compute dtype.

        A classifier's logits are (batch, labels), its targets float32 of that shape and its loss the mean binary
        cross-entropy. Each sequence needs a token before its first ``end``.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(positions))
        mask = _causal_mask(positions)
        for block in self.blocks:
            x = block(x, mask)
        x = self.norm(x)
        if self.config.labels:
            x = _pooled(x, tokens != self.config.end, self.config.pooling)
        logits = self.head(x)
        return logits if targets is None else self.loss(logits, targets)

    def loss(self, logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        """Return the float32 loss of ``logits`` from `forward`, reduced over tokens or labels as torch's losses do."""
        if self.config.labels:
            weights = self.label_weights if reduction == "mean" else None  # `drawn` labels have no weight
            return F.binary_cross_entropy_with_logits(logits.float(), targets, pos_weight=weights, reduction=reduction)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction=reduction)

    def flops_per_token(self) -> int:
        """Return the number of floating-point operations per token of a training step at full context length.

        It counts one product forward and two backward for each linear layer, attention with its masked products, and
        a classifier's head as if it saw every token.
        """
        linear = sum(layer.weight.numel() for layer in linear_layers(self).values())
        return 6 * linear + 12 * self.config.layers * self.config.context * self.config.width

    def drawn(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        """Return targets for `loss`, drawn from the distribution that `forward`'s logits predict."""
        p = logits.detach().float()
        if self.config.labels:
            return torch.bernoulli(p.sigmoid(), generator=generator)
        return torch.multinomial(p.flatten(0, 1).softmax(-1), 1, generator=generator).flatten()


def _pooled(x: Tensor, inside: Tensor, pooling: str) -> Tensor:
    """Return the mean of ``x`` (batch, length, width) over each sequence's tokens, or its last token: (batch, width).

    ``inside`` (batch, length) is bool. A sequence ends before the first token for which it is ``False``.
    """
    inside = inside.long().cumprod(dim=1)
    if pooling == "last":
        last = torch.arange(x.shape[1], device=x.device) == inside.sum(dim=1, keepdim=True) - 1
        inside = last.long()
    weights = inside.float() / inside.sum(dim=1, keepdim=True)
    return (x * weights.to(x.dtype)[..., None]).sum(dim=1)
