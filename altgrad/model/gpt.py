"""The transformer that every cell trains, by default in the shape of GPT-2, by settings in that of Llama or Qwen 3.

GPT-2 (Radford et al. 2019): pre-norm blocks, learned positions, GELU, causal scaled-dot-product attention, a head tied
to the token embedding; here without biases and dropout by default. Llama (Touvron et al. 2023, arXiv:2302.13971) has
RMSNorm, rotary positions and SwiGLU, and since its third version grouped queries; Qwen 3 also normalises queries and
keys. In a mixture of experts each token passes through ``active`` of a block's ``experts``. All shapes start from the
same distribution, that of Karpathy's nanoGPT: standard deviation 0.02, residual projections scaled by
1/sqrt(2 * layers).

Every matrix product with a weight is an ``nn.Linear`` with a name that a recipe can address:
``blocks.<n>.attn.qkv``, ``blocks.<n>.attn.out``, ``blocks.<n>.mlp.up``, ``blocks.<n>.mlp.down`` and ``head``; with
SwiGLU also ``blocks.<n>.mlp.gate``; with experts ``blocks.<n>.mlp.experts.<e>.up`` and so on. The router of a mixture
is no ``nn.Linear``: it stays in float32 in every recipe. Rules may also name attention's own products,
``blocks.<n>.attn.scores`` and ``blocks.<n>.attn.values``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from altgrad.model.layers import linear_layers
from altgrad.model.mixture import Mixture
from altgrad.model.quantized.attention import LARGEST_PROBABILITY, Product, attend
from altgrad.numerics.compile_utils import materialized

INITIAL_STD = 0.02
SHORT_CONTEXT = 128  # tokens
GELUS = {"exact": "none", "tanh": "tanh"}  # torch's names of the approximation
NORMS: dict[str, type[nn.Module]] = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}
POSITIONS = ("learned", "rope")
MLPS = ("gelu", "swiglu", "relu2")


@dataclass(frozen=True)
class GPTConfig:
    """Size and shape of a :class:`GPT`.

    mlp_ratio: hidden units of an MLP, of each expert, as a multiple of ``width``.
    bias: whether linear layers and layer norms have biases. GPT-2's published weights have them.
    gelu: ``exact`` or ``tanh``, the approximation that GPT-2's published weights need.
    norm: ``layer`` (LayerNorm) or ``rms`` (RMSNorm), with ``norm_eps``.
    positions: ``learned``, or ``rope``: rotary (Su et al. 2021, arXiv:2104.09864) with the base ``rope_theta``.
    mlp: ``gelu``, ``swiglu`` (Shazeer 2020, arXiv:2002.05202) or ``relu2``, the squared ReLU.
    kv_heads: number of heads of keys and values, which divides ``heads``; ``None``: as many as heads.
    qk_norm: whether an RMSNorm over each head normalises queries and keys before they are rotated.
    head_dim: features of a head; ``None``: ``width / heads``.
    tied: whether the head of a language model has the token embedding's weight.
    softcap: c of logits ``c tanh(x / c)``; 0 for none.
    experts: number of MLPs in a block, of which each token passes through ``active``; 0 for one MLP for all tokens.
    balance: factor of the load-balancing loss of :class:`Mixture`.
    labels: for a classifier of sequences: the weight of each label's positives in the loss. Its head has its own
        weight. Empty for a language model.
    pooling: what a classifier's head sees: the ``mean`` of a sequence's tokens or the ``last`` token.
    end: id of the token that ends a sequence, for a classifier.

    Raises ``ValueError`` for sizes that do not go together.
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
    norm: str = "layer"
    norm_eps: float = 1e-5
    positions: str = "learned"
    rope_theta: float = 10_000.0
    mlp: str = "gelu"
    kv_heads: int | None = None
    qk_norm: bool = False
    head_dim: int | None = None
    tied: bool = True
    softcap: float = 0.0
    experts: int = 0
    active: int = 2
    balance: float = 0.01
    labels: tuple[float, ...] = ()
    pooling: str = "mean"
    end: int = 0

    def __post_init__(self) -> None:
        for name, known in (("gelu", GELUS), ("norm", NORMS), ("positions", POSITIONS), ("mlp", MLPS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, not {getattr(self, name)!r}")
        if self.head_dim is None and self.width % self.heads:
            raise ValueError(f"width {self.width} is not divisible by heads {self.heads}")
        if self.heads % self.groups:
            raise ValueError(f"heads {self.heads} is not divisible by kv_heads {self.groups}")
        if self.positions == "rope" and self.head_size % 2:
            raise ValueError(f"rotary positions turn pairs of features, and a head has {self.head_size}")
        if self.experts and not 1 <= self.active <= self.experts:
            raise ValueError(f"active must be from 1 to experts {self.experts}, not {self.active}")

    @property
    def head_size(self) -> int:
        """Features of a head."""
        return self.width // self.heads if self.head_dim is None else self.head_dim

    @property
    def groups(self) -> int:
        """Number of heads of keys and values."""
        return self.heads if self.kv_heads is None else self.kv_heads


class Rotary(nn.Module):
    """Rotary positions: turns feature i and i + size / 2 of the token at t by the angle t theta^(-2 i / size).

    The pairs are those of Llama (halves of a head), not of the paper (neighbours).
    """

    cosines: Tensor
    sines: Tensor

    def __init__(self, context: int, size: int, theta: float) -> None:
        super().__init__()
        rates = theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        angles = torch.outer(torch.arange(context, dtype=torch.float64), rates).repeat(1, 2)
        self.register_buffer("cosines", angles.cos().float(), persistent=False)
        self.register_buffer("sines", angles.sin().float(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` (..., length, size), turned, in its dtype; the arithmetic is in float32."""
        length = x.shape[-2]
        first, second = x.float().chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        return (x.float() * self.cosines[:length] + turned * self.sines[:length]).to(x.dtype)


class Attention(nn.Module):
    """Causal multi-head self-attention, with grouped queries where there are fewer heads of keys and values."""

    def __init__(self, config: GPTConfig, rotary: Rotary | None) -> None:
        super().__init__()
        self.heads, self.groups, self.size = config.heads, config.groups, config.head_size
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, (self.heads + 2 * self.groups) * self.size, bias=config.bias)
        self.out = nn.Linear(self.heads * self.size, config.width, bias=config.bias)
        self.scores, self.values = Product(), Product(left_amax=LARGEST_PROBABILITY)
        self.q_norm = nn.RMSNorm(self.size, eps=config.norm_eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(self.size, eps=config.norm_eps) if config.qk_norm else None
        self.rotary = rotary

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, each (batch, heads, length, size), of the output of ``qkv``.

        Queries and keys are normalised and turned where the model does so. A head of keys and values that serves
        several heads of queries is repeated for each.
        """
        sizes = [heads * self.size for heads in (self.heads, self.groups, self.groups)]
        q, k, v = (part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in qkv.split(sizes, dim=-1))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q.float()).to(q.dtype), self.k_norm(k.float()).to(k.dtype)
        if self.rotary is not None:
            q, k = self.rotary(q), self.rotary(k)
        if self.groups < self.heads:
            k, v = (t.repeat_interleave(self.heads // self.groups, dim=1) for t in (k, v))
        return q, k, v

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = self.split(self.qkv(x))
        dropout = self.dropout if self.training else 0.0
        if not (isinstance(self.scores, Product) and isinstance(self.values, Product)):
            mask = _later_masked(torch.arange(x.shape[1], device=x.device)) if mask is None else mask
            y = attend((self.scores, self.values), q, k, v, mask, q.shape[-1] ** -0.5, dropout).to(q.dtype)
        elif mask is None:
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        else:
            y = _plain_attention(q, k, v, mask, dropout)
        return self.out(y.transpose(1, 2).flatten(2))


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
    """Two linear layers with a GELU or a squared ReLU between them; or three, ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        hidden = round(config.mlp_ratio * config.width)
        self.kind, self.approximate = config.mlp, GELUS[config.gelu]
        if self.kind == "swiglu":
            self.gate = nn.Linear(config.width, hidden, bias=config.bias)
        self.up = nn.Linear(config.width, hidden, bias=config.bias)
        self.down = nn.Linear(hidden, config.width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "swiglu":
            return self.down(F.silu(self.gate(x)) * self.up(x))
        if self.kind == "relu2":
            return self.down(F.relu(self.up(x)).square())
        return self.down(F.gelu(self.up(x), approximate=self.approximate))


class Block(nn.Module):
    """Attention and MLP or experts, each after a norm and inside a residual connection."""

    def __init__(self, config: GPTConfig, rotary: Rotary | None) -> None:
        super().__init__()
        self.norm1 = make_norm(config)
        self.attn = Attention(config, rotary)
        self.norm2 = make_norm(config)
        experts = nn.ModuleList(MLP(config) for _ in range(config.experts))
        self.mlp = Mixture(experts, config.width, config.active, config.balance) if config.experts else MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.dropout(self.attn(self.norm1(x), mask))
        return x + self.dropout(self.mlp(self.norm2(x)))


def make_norm(config: GPTConfig) -> nn.Module:
    """Return a norm over ``config.width`` features; an RMSNorm has no bias."""
    if config.norm == "rms":
        return nn.RMSNorm(config.width, eps=config.norm_eps)
    return nn.LayerNorm(config.width, eps=config.norm_eps, bias=config.bias)


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
        rotary = None
        if config.positions == "rope":
            rotary = Rotary(config.context, config.head_size, config.rope_theta)
        else:
            self.positions = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, rotary) for _ in range(config.layers))
        self.norm = make_norm(config)
        self.head = nn.Linear(config.width, len(config.labels) or config.vocab_size, bias=False)
        self._initialise()
        if config.labels:
            self.register_buffer("label_weights", torch.tensor(config.labels, dtype=torch.float32), persistent=False)
        elif config.tied:
            self.head.weight = self.tokens.weight

    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                residual = name.endswith(("attn.out.weight", "down.weight"))
                std = INITIAL_STD / math.sqrt(2 * self.config.layers) if residual else INITIAL_STD
                nn.init.normal_(parameter, std=std)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return logits (batch, length, vocab_size), or with ``targets`` the mean cross-entropy in nats.

        ``tokens`` and ``targets`` are int64 of shape (batch, length), ``length <= context``. The loss is computed in
        float32 whatever the compute dtype. In training its gradient is that of the cross-entropy plus the
        load-balancing loss of a mixture of experts, and its value the cross-entropy alone.

        A classifier's logits are (batch, labels), its targets float32 of that shape and its loss the mean binary
        cross-entropy. Each sequence needs a token before its first ``end``.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens)
        x = self.dropout(x + self.positions(positions) if self.config.positions == "learned" else x)
        mask = _causal_mask(positions)
        for block in self.blocks:
            x = block(x, mask)
        x = self.norm(x)
        if self.config.labels:
            x = _pooled(x, tokens != self.config.end, self.config.pooling)
        logits = self.head(x)
        if self.config.softcap:
            logits = self.config.softcap * torch.tanh(logits.float() / self.config.softcap)
        mixtures = [cast("Mixture", block.mlp) for block in self.blocks] if self.config.experts else []
        penalties = [mixture.take_penalty() for mixture in mixtures if self.training]
        if targets is None:
            return logits
        loss = self.loss(logits, targets)
        for penalty in penalties:
            loss = loss + (penalty - penalty.detach())
        return loss

    def loss(self, logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        """Return the float32 loss of ``logits`` from `forward`, reduced over tokens or labels as torch's losses do."""
        if self.config.labels:
            weights = self.label_weights if reduction == "mean" else None  # `drawn` labels have no weight
            return F.binary_cross_entropy_with_logits(logits.float(), targets, pos_weight=weights, reduction=reduction)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction=reduction)

    def flops_per_token(self, attention: bool = True) -> int:
        """Return the number of floating-point operations per token of a training step at full context length.

        It counts one product forward and two backward for each linear layer, ``attention`` with its masked products,
        and a classifier's head as if it saw every token. Of a mixture it counts the experts that each token passes
        through.
        """
        config, linear = self.config, 0
        for name, layer in linear_layers(self).items():
            linear += layer.weight.numel() * (config.active if ".experts.0." in name else ".experts." not in name)
        linear += config.layers * config.experts * config.width  # routers
        scores = config.context * config.heads * config.head_size if attention else 0
        return 6 * linear + 12 * config.layers * scores

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
