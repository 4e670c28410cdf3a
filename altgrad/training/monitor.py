"""The instrumented pass: what happens to each tensor of each layer, seen without touching training.

Every few steps the step's own batch runs once more, eagerly, through the uncompiled model with hooks on its linear
layers. Nothing of it reaches the weights, the gradients, the scaling history or the random numbers, so a run is the
same to the bit whether it is watched or not, and the compiled graph of ordinary steps carries no instruments. The
compiler leaves out some of eager mode's roundings to bfloat16 (of unquantized models too), so what is seen here may
differ from the step itself in the last bits.

Every measurement is a row (step, layer, role, metric, value). Adding one is a line in :func:`tensor_statistics`,
:func:`gradient_statistics` or a hook, and what it is, a row of ``altgrad.metrics``.

Of a divergence it is also said which rows of a layer it is in: features of a tensor that are not finite, or weights
that went far. A row of a weight (out, in) makes one output feature, of which an incoming gradient (tokens, out) has a
column each. The columns of an input (tokens, in) are input features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from altgrad.model import QuantizedLinear, linear_layers, matrix_of
from altgrad.model.gpt import Block
from altgrad.model.layers import quantizer_of
from altgrad.model.quantized.quantizer import Quantizer
from altgrad.numerics.block_statistics import block_statistics
from altgrad.numerics.sums import excess_kurtosis, magnitudes, rounding_sums
from altgrad.optim.sharded import gather_full

SEQUENCES = 4  # the first of a batch: each has an entropy per head and position, and the mean is over all
LOW = 1.0  # nats: a head below it attends to fewer than e = 2.7 tokens
OUTSTANDING = 8.0  # a row stands out that moved that many times as far as the median row of its layer
FEATURES = {"input": "input features", "weight": "output rows", "grad": "output rows"}


class Row(NamedTuple):
    """One measurement."""

    step: int
    layer: str
    role: str
    metric: str
    value: float


def tensor_statistics(t: Tensor, quantizer: Quantizer | None) -> dict[str, float]:
    """Return the health of tensor ``t`` (any shape) under the format that it is quantized to.

    ``amax`` and ``nonfinite`` always; with a quantizer also ``scale``, ``overflow_frac``,
    ``underflow_frac`` and ``sqnr_db``, and what becomes of blocks if each has a scale. Shares and ratios are taken over
    finite elements. A gradient with several scales is seen with those of its product with the weight.
    """
    t = t.detach().reshape(-1, t.shape[-1])
    if quantizer is None:
        seen, rounding = magnitudes(t), None
    else:
        options = quantizer.scaling.options
        seen, rounding = rounding_sums(t, quantizer.constants, quantizer.remembered_amax(), **options)
    count = t.numel() - seen.nonfinite
    statistics = {"amax": seen.amax, "nonfinite": float(seen.nonfinite)}
    if rounding is not None and count:
        statistics |= {
            "scale": rounding.scale,
            "overflow_frac": rounding.overflowed / count,
            "underflow_frac": rounding.vanished / max(1, seen.nonzero),
        }
        if rounding.lost > 0 and seen.squares > 0:
            ratio = seen.squares / rounding.lost
            statistics["sqnr_db"] = 10 * math.log10(ratio) if ratio > 0 else -math.inf
    return statistics if quantizer is None else statistics | _of_blocks(t, quantizer)


def _of_blocks(t: Tensor, quantizer: Quantizer) -> dict[str, float]:
    options = quantizer.scaling.options
    if options["granularity"] not in ("block", "tile"):
        return {}
    found = block_statistics(t, quantizer.constants, **options)
    return {
        "block_saturated_frac": found.saturated, "block_clamped_frac": found.clamped,
        "block_empty_frac": found.empty, "block_scale_limit_frac": found.at_limit, "block_scale_spread": found.spread,
    }  # fmt: skip


def gradient_statistics(grad: Tensor) -> dict[str, float]:
    """Return L2 and L-infinity norm, mean and variance of a parameter's gradient, in float32."""
    grad = grad.detach().float()
    return {
        "l2": grad.norm().item(),
        "linf": grad.abs().amax().item(),
        "mean": grad.mean().item(),
        "var": grad.var(correction=0).item(),
    }


def attention_statistics(q: Tensor, k: Tensor) -> dict[str, float]:
    """Return the mean entropy of causal attention in nats, and the number of heads whose own is below `LOW`.

    Args:
        q: queries (batch, heads, length, width of a head), of which `SEQUENCES` are looked at.
        k: keys, alike.
    """
    heads = head_entropies(q[:SEQUENCES].detach(), k[:SEQUENCES].detach())
    return {"attention_entropy": heads.mean().item(), "attention_low_heads": float((heads < LOW).sum())}


def head_entropies(q: Tensor, k: Tensor) -> Tensor:
    """Return the mean of −Σ p ln p over sequences and positions, for each head: float32 (heads,)."""
    with torch.autocast(q.device.type, enabled=False):
        length, width = q.shape[-2:]
        scores = q.float() @ k.float().transpose(-2, -1) * width**-0.5
    later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    p = torch.softmax(scores.masked_fill(later, -torch.inf), dim=-1)
    return torch.special.entr(p).sum(dim=-1).mean(dim=(0, 2))


Where = dict[str, str]  # by tensor, such as "blocks.0.mlp.up grad", which of its features are not finite, in words
PASS = {"tensors", "outputs"}  # the groups of `monitor:` that take an instrumented pass


class Monitor:
    """Makes the rows of ``model``; ``blocks`` are those whose outputs and attention are watched too."""

    def __init__(self, model: nn.Module, blocks: Mapping[str, Block]) -> None:
        self.model = model
        self.layers = linear_layers(model)
        self.blocks = blocks

    def observe(
        self, step: int, loss: Callable[[], Tensor], groups: Collection[str] = PASS, where: Where | None = None
    ) -> list[Row]:
        """Run ``loss()`` under hooks, for ``tensors`` its backward pass too; return what they saw, in layer order.

        ``where`` takes the features of tensors that are not finite.
        """
        sight = _Sight()
        backward = "tensors" in groups
        with _untouched(self.model), torch.set_grad_enabled(backward), self._hooks(sight, groups):
            found = loss()
            outputs = [output for _, output in sight.outputs]
            grads = torch.autograd.grad(found, outputs, allow_unused=True) if backward else []
        for (name, _), grad in reversed(list(zip(sight.outputs, grads, strict=True))):
            if grad is not None:
                sight.tensor(name, "grad", grad, quantizer_of(self.layers[name], "grad"))
        if where is not None:
            where |= sight.where
        order = {name: i for i, name in enumerate([*self.layers, *self.blocks])}
        roles = ("input", "weight", "grad", "output")
        keys = sorted(sight.seen, key=lambda key: (order[key[0]], roles.index(key[1])))
        return [Row(step, *key, metric, value) for key in keys for metric, value in sight.seen[key].items()]

    def gradients(self, step: int) -> list[Row]:
        """Return the statistics of the layers' present weight gradients, which processes gather together."""
        return [
            Row(step, name, "weight_grad", metric, value)
            for name, layer in self.layers.items()
            if layer.weight.grad is not None
            for metric, value in gradient_statistics(gather_full(layer.weight.grad)).items()
        ]

    @contextmanager
    def _hooks(self, sight: _Sight, groups: Collection[str]) -> Iterator[None]:
        handles = []
        if "tensors" in groups:
            for name, layer in self.layers.items():
                handles.append(layer.register_forward_hook(partial(sight.layer, name)))
        if "outputs" in groups:
            for name, block in self.blocks.items():
                handles.append(block.register_forward_hook(partial(sight.block, name)))
                handles.append(block.attn.qkv.register_forward_hook(partial(sight.attention, name, block.attn.split)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class _Sight:
    """What the hooks of one pass saw: statistics by name and role, and each call's output, to have its gradient.

    ``where`` has the tensors that are not finite.
    """

    def __init__(self) -> None:
        self.seen: dict[tuple[str, str], dict[str, float]] = {}
        self.outputs: list[tuple[str, Tensor]] = []
        self.where: Where = {}

    def tensor(self, name: str, role: str, t: Tensor, quantizer: Quantizer | None) -> None:
        found = tensor_statistics(t, quantizer)
        self.seen[name, role] = found
        if found["nonfinite"]:
            self.where[f"{name} {role}"] = nonfinite_rows(t, role)

    def layer(self, name: str, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        for role, t in (("input", inputs[0]), ("weight", matrix_of(layer))):
            self.tensor(name, role, t, quantizer_of(layer, role))
        # Weights have no gradient here, so that the outputs of the first layers are leaves.
        self.outputs.append((name, output if output.requires_grad else output.requires_grad_()))

    def block(self, name: str, block: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        self.seen[name, "output"] |= {"kurtosis": excess_kurtosis(output)}

    def attention(
        self, name: str, split: Callable[[Tensor], Tensor], layer: nn.Module, inputs: tuple[Tensor, ...], qkv: Tensor
    ) -> None:
        q, k, _ = split(qkv)
        self.seen[name, "output"] = attention_statistics(q, k)


def first_nonfinite(rows: list[Row]) -> str | None:
    """Return ``"blocks.2.mlp.down grad"`` for the first tensor in which a pass saw NaN or infinity.

    Weights come first, which are there before the pass and may be the embedding's too, then inputs in the order of the
    layers and gradients against it, as they are computed.
    """
    bad = [row for row in rows if row.metric == "nonfinite" and row.value > 0]
    forward = [row for role in ("weight", "input") for row in bad if row.role == role]
    backward = [row for row in reversed(bad) if row.role == "grad"]
    return next((f"{row.layer} {row.role}" for row in [*forward, *backward]), None)


def largest_overflow(rows: list[Row]) -> float:
    """Return the largest overflow share among ``rows``, 0 without any."""
    return max((row.value for row in rows if row.metric == "overflow_frac"), default=0.0)


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Show quantizers as the step at hand sees them; leave buffers and random generators as they were.

    Meanwhile no weight has a gradient, whose products are a third of a step's.
    """
    quantized = [module for module in model.modules() if isinstance(module, QuantizedLinear) and module.training]
    learned = [p for p in model.parameters() if p.requires_grad]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        for p in learned:
            p.requires_grad_(False)
        for layer in quantized:
            layer.training = False  # scales from the history as it is, which learns nothing
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            yield
    finally:
        for p in learned:
            p.requires_grad_()
        for layer in quantized:
            layer.training = True
        for buffer, before in buffers:
            buffer.copy_(before)


def nonfinite_rows(t: Tensor, role: str) -> str:
    """Return which features of ``t`` (its rows for a weight, else its last dimension) have a NaN or an infinity.

    Such as ``output rows 3 to 17 (5 of 128)``; "" if none has.
    """
    bad = ~t.detach().reshape(-1, t.shape[-1]).isfinite()
    return in_words(bad.any(dim=1 if role == "weight" else 0), FEATURES[role])


def outstanding_rows(moved: Mapping[str, Tensor]) -> str | None:
    """Return the layer and the rows that moved farthest beside the others of their layer, None where none stands out.

    Such as ``blocks.0.mlp.up output rows 3 to 17 (5 of 128)``. Rows that did not move are left out of the median.

    Args:
        moved: by how much weights (out, in) changed, by layer. What is not finite stands out nowhere.
    """
    found: tuple[float, str] | None = None
    for layer, change in moved.items():
        norms = torch.linalg.vector_norm(change, dim=1, dtype=torch.float64)
        if not (norms > 0).any():
            continue
        beyond = norms / norms[norms > 0].median()
        largest = beyond.max().item()
        if largest > OUTSTANDING and (found is None or largest > found[0]):
            found = largest, f"{layer} {in_words(beyond > OUTSTANDING, FEATURES['weight'])}"
    return None if found is None else found[1]


def in_words(chosen: Tensor, what: str) -> str:
    """Return where ``chosen``, bool of one dimension, holds: ``output rows 3 to 17 (5 of 128)``, "" if nowhere."""
    places = chosen.nonzero().flatten().tolist()
    if not places:
        return ""
    if len(places) == 1:
        return f"{what.removesuffix('s')} {places[0]} (of {len(chosen)})"
    return f"{what} {places[0]} to {places[-1]} ({len(places)} of {len(chosen)})"
