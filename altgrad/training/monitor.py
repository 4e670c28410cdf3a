"""Live measurements of one training step: its tensors, its gradients, and its update of the weights.

**Tensors and outputs** (`TensorMonitor`). Every few steps the step's own batch runs once more through the uncompiled
model, with hooks on its linear layers. This instrumented pass changes no weight, gradient, amax history or random
number. So a run has the same bits whether it is watched or not, and the compiled graph has no hooks. The compiler
leaves out some of eager mode's roundings to bfloat16, so the pass may differ from the step in the last bits.

**Updates** (`UpdateMonitor`). Metrics of the weights before and after a step: float32 master weights, or weights stored
as representable values. If the format is virtual, rungs are counted in that format. Codes are then those of the finer
grid that stored weights lie on, or of the format itself for master weights. ``rungs_2^-6`` is the mean over the weights
with 2^-6 <= |w_old| < 2^-5; the first and last binade include all weights beyond them.

Every measurement is a row (step, layer, role, metric, value). To add one, add a line to :func:`tensor_statistics`,
:func:`gradient_statistics`, :func:`update_statistics` or a hook, and its definition to ``altgrad.metrics``.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from altgrad.model import linear_layers, matrix_of
from altgrad.model.gpt import Block
from altgrad.model.layers import quantizer_of
from altgrad.model.mixture import Mixture, load_balance
from altgrad.model.quantized.linear import QuantizedModule
from altgrad.model.quantized.quantizer import Quantizer
from altgrad.numerics.sums import (
    LOWEST_BINADE,
    UpdateSums,
    block_statistics,
    excess_kurtosis,
    magnitudes,
    rounding_sums,
    update_sums,
)
from altgrad.optim import ArmOptimizer
from altgrad.optim.sharded import gather_full
from altgrad.optim.weight_grid import weight_grids
from altgrad.training.outcome import nonfinite_rows

SEQUENCES = 4  # of a batch: attention entropy is measured on the first four
LOW = 1.0  # nats: a head with less entropy attends to fewer than e = 2.7 tokens
PASS = {"tensors", "outputs"}  # the groups of `monitor:` that need an instrumented pass
ROLE_ORDER = ("input", "weight", "grad", "output")


class Measurement(NamedTuple):
    """A row of ``monitors.parquet``."""

    step: int
    layer: str
    role: str
    metric: str
    value: float


def tensor_statistics(t: Tensor, quantizer: Quantizer | None) -> dict[str, float]:
    """Return metrics of tensor ``t`` (any shape) by name, and of its rounding by ``quantizer``.

    ``amax`` and ``nonfinite`` are always there. With a quantizer ``scale``, ``overflow_frac``, ``underflow_frac`` and
    ``sqnr_db`` are added, and ``block_*`` if each block has a scale. Shares and ratios are over finite elements. If a
    gradient has several scales, those of its product with the weight are used.
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
    """Return L2 and L-infinity norm, mean and variance of a parameter's gradient by name, computed in float32."""
    grad = grad.detach().float()
    return {
        "l2": grad.norm().item(),
        "linf": grad.abs().amax().item(),
        "mean": grad.mean().item(),
        "var": grad.var(correction=0).item(),
    }


def attention_statistics(q: Tensor, k: Tensor) -> dict[str, float]:
    """Return the mean entropy of causal attention in nats, and the number of heads with a mean entropy below `LOW`.

    Args:
        q: queries (batch, heads, length, width of a head); only the first `SEQUENCES` of the batch are used.
        k: keys, of the same shape.
    """
    q, k = q[:SEQUENCES].detach(), k[:SEQUENCES].detach()
    with torch.autocast(q.device.type, enabled=False):
        length, width = q.shape[-2:]
        scores = q.float() @ k.float().transpose(-2, -1) * width**-0.5
    later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    p = torch.softmax(scores.masked_fill(later, -torch.inf), dim=-1)
    heads = torch.special.entr(p).sum(dim=-1).mean(dim=(0, 2))  # the mean of −Σ p ln p, for each head
    return {"attention_entropy": heads.mean().item(), "attention_low_heads": float((heads < LOW).sum())}


class TensorMonitor:
    """Measures the tensors of ``model``'s linear layers in instrumented passes, and the outputs of ``blocks``.

    After a pass ``nonfinite`` maps the name of each tensor with NaN or infinity to the rows that hold them. An entry is
    ``"blocks.0.mlp.up grad": "output rows 3 to 17 (5 of 128)"``.
    """

    def __init__(self, model: nn.Module, blocks: Mapping[str, Block]) -> None:
        self.model, self.blocks = model, blocks
        self.layers = linear_layers(model)
        self.nonfinite: dict[str, str] = {}
        self._seen: dict[tuple[str, str], dict[str, float]] = {}  # metrics by layer and role
        self._outputs: list[tuple[str, Tensor]] = []  # (layer, output) per call; gradients of the outputs are measured

    def observe(self, step: int, loss: Callable[[], Tensor], groups: Collection[str] = PASS) -> list[Measurement]:
        """Run ``loss()`` with hooks, and its backward pass if ``tensors`` is in ``groups``; return rows by layer."""
        self._seen, self._outputs, self.nonfinite = {}, [], {}
        backward = "tensors" in groups
        with _untouched(self.model), torch.set_grad_enabled(backward), self._hooks(groups):
            value = loss()
            outputs = [output for _, output in self._outputs]
            grads = torch.autograd.grad(value, outputs, allow_unused=True) if backward else []
        for (name, _), grad in reversed(list(zip(self._outputs, grads, strict=True))):
            if grad is not None:
                self._measure(name, "grad", grad, quantizer_of(self.layers[name], "grad"))
        self._outputs = []
        order = {name: i for i, name in enumerate([*self.layers, *self.blocks])}
        keys = sorted(self._seen, key=lambda key: (order[key[0]], ROLE_ORDER.index(key[1])))
        return [Measurement(step, *key, metric, value) for key in keys for metric, value in self._seen[key].items()]

    def gradients(self, step: int) -> list[Measurement]:
        """Return the statistics of the layers' weight gradients. If several processes train, all must call this."""
        return [
            Measurement(step, name, "weight_grad", metric, value)
            for name, layer in self.layers.items()
            if layer.weight.grad is not None
            for metric, value in gradient_statistics(gather_full(layer.weight.grad)).items()
        ]

    @contextmanager
    def _hooks(self, groups: Collection[str]) -> Iterator[None]:
        handles = []
        if "tensors" in groups:
            for name, layer in self.layers.items():
                handles.append(layer.register_forward_hook(partial(self._layer, name)))
        if "outputs" in groups:
            for name, block in self.blocks.items():
                handles.append(block.register_forward_hook(partial(self._block, name)))
                handles.append(block.attn.qkv.register_forward_hook(partial(self._attention, name, block.attn.split)))
                if isinstance(block.mlp, Mixture):
                    handles.append(block.mlp.router.register_forward_hook(partial(self._router, name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _measure(self, name: str, role: str, t: Tensor, quantizer: Quantizer | None) -> None:
        statistics = self._seen[name, role] = tensor_statistics(t, quantizer)
        if statistics["nonfinite"]:
            self.nonfinite[f"{name} {role}"] = nonfinite_rows(t, role)

    def _layer(self, name: str, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        for role, t in (("input", inputs[0]), ("weight", matrix_of(layer))):
            self._measure(name, role, t, quantizer_of(layer, role))
        # Weights require no gradient here, so the outputs of the first layers are leaves.
        self._outputs.append((name, output if output.requires_grad else output.requires_grad_()))

    def _block(self, name: str, block: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        self._seen[name, "output"] |= {"kurtosis": excess_kurtosis(output)}

    def _attention(
        self, name: str, split: Callable[[Tensor], tuple[Tensor, ...]], layer: nn.Module, inputs: tuple[Tensor, ...],
        qkv: Tensor,
    ) -> None:  # fmt: skip
        q, k, _ = split(qkv)
        self._seen[name, "output"] = attention_statistics(q, k)

    def _router(self, name: str, router: nn.Module, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        self._seen[name, "output"] |= {"expert_balance": load_balance(*output[:2]).item()}


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Inside, quantizers use the scales that the step will use; at exit buffers and random generators are restored.

    Inside, no weight requires a gradient: weight gradients would take a third of a step's products.
    """
    quantized = [module for module in model.modules() if isinstance(module, QuantizedModule) and module.training]
    learned = [p for p in model.parameters() if p.requires_grad]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        for p in learned:
            p.requires_grad_(False)
        for layer in quantized:
            layer.training = False  # scales come from the amax history, which stays unchanged
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            yield
    finally:
        for p in learned:
            p.requires_grad_()
        for layer in quantized:
            layer.training = True
        for buffer, before in buffers:
            buffer.copy_(before)


def first_nonfinite(rows: list[Measurement]) -> str | None:
    """Return the first tensor with NaN or infinity in a pass, such as ``"blocks.2.mlp.down grad"``, or ``None``.

    Weights come first, since they exist before the pass and the head's may be the embedding's. Inputs follow in the
    order of the layers, then gradients in the reverse order.
    """
    bad = [row for row in rows if row.metric == "nonfinite" and row.value > 0]
    forward = [row for role in ("weight", "input") for row in bad if row.role == role]
    backward = [row for row in reversed(bad) if row.role == "grad"]
    return next((f"{row.layer} {row.role}" for row in [*forward, *backward]), None)


def largest_overflow(rows: list[Measurement]) -> float:
    """Return the largest ``overflow_frac`` among ``rows``, 0 without any."""
    return max((row.value for row in rows if row.metric == "overflow_frac"), default=0.0)


class UpdateMonitor:
    """Measures the change of the weights of ``model``'s linear layers in a step of ``optimizer``.

    If several processes have parts of the weights, each measures the whole weights, so all of them must watch together.
    """

    def __init__(self, model: nn.Module, optimizer: ArmOptimizer) -> None:
        self.optimizer = optimizer
        self.weights = {name: layer.weight for name, layer in linear_layers(model).items()}
        on_grid = optimizer.arm.weights == "quantized"
        self.grids = optimizer.grids if on_grid else weight_grids(model, on_grid=False)

    @contextmanager
    def watching(self, step: int, rows: list[Measurement]) -> Iterator[None]:
        """Measure the optimizer's step that is taken inside, and append the measurements to ``rows`` at exit."""
        before = {name: self._before(w) for name, w in self.weights.items() if w.grad is not None}
        yield
        for name, (old, *on_grid) in before.items():
            weight = self.weights[name]
            new = gather_full(weight).detach()
            statistics = moved(old, new)
            if weight in self.grids:
                statistics |= self._on_grid(weight, old, new, *on_grid)
            rows += [Measurement(step, name, "update", metric, value) for metric, value in statistics.items()]

    def _before(self, weight: nn.Parameter) -> tuple[Any, ...]:
        """Return ``(weight,)`` before the step; with a quantization grid also its scale and `ArmOptimizer.wanted`."""
        old = gather_full(weight).detach().clone()
        grid = self.grids.get(weight)
        return (old,) if grid is None else (old, grid.scale(old), self.optimizer.wanted(weight))

    def _on_grid(
        self, weight: nn.Parameter, old: Tensor, new: Tensor, scale: Tensor, wanted: Tensor | None
    ) -> dict[str, float]:
        grid = self.grids[weight]
        sums = update_sums(
            old, new, new if wanted is None else wanted, gather_full(weight.grad), scale, grid.scale(new),
            grid.constants, grid.refinement,
        )  # fmt: skip
        statistics = update_statistics(sums)
        adamw = self.optimizer.adamw_direction(weight)
        if adamw is not None:
            update = new - old * self.optimizer.decay(weight)
            cosine = torch.cosine_similarity(update.flatten().double(), adamw.flatten().double(), dim=0)
            statistics["cosine_adamw"] = -cosine.item()
        return statistics


def moved(old: Tensor, new: Tensor) -> dict[str, float]:
    """Return ``update_l2`` of a step from ``old`` to ``new``, and ``update_size`` unless ``old`` is zero."""
    size, length = (magnitudes(t).squares ** 0.5 for t in (new - old, old))
    return {"update_l2": size} | ({"update_size": size / length} if length > 0 else {})


def update_statistics(sums: UpdateSums) -> dict[str, float]:
    """Return the metrics of a weight's step on its quantization grid by name; ratios over zero are left out."""
    count = sum(sums.counts)
    statistics = {"rungs": sum(sums.rungs) / count, "representability_gap": sums.gap / count}
    if sums.wanted:
        statistics["stall_ratio"] = sums.stalled / sums.wanted
    if sums.flips:
        statistics["update_success"] = sums.descending / sums.flips
    for i, (number, total) in enumerate(zip(sums.counts, sums.rungs, strict=True)):
        if number:
            statistics[f"rungs_2^{i + LOWEST_BINADE}"] = total / number
    return statistics
