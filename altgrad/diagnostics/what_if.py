"""What if a finished cell were quantized otherwise: every tensor in every split of 8 bits, granularity and rounding.

The tensors are weights, inputs and incoming gradients of every linear layer, from the run's rebuilt model and one probe
batch. The forward pass includes the run's rounding; incoming gradients are those of the mean loss before any rounding.

A tensor is quantized by the functions and the `TensorRecipe` of training, so a run with that recipe has the same
errors. Rows and blocks lie along the last dimension of each tensor. The forward product sums over that dimension, and
so does the product of an incoming gradient with the weight.

`what_if` measures, `recommended` picks the best split for each layer and role, and `as_yaml` writes the choice as a
recipe for params.yaml.

`mantissas` tells how many elements a scale that is rounded down would clamp. A block's scale by the rule ``floor``
brings its largest element to a significand from 1 to 2 in the format's top binade. The format ends before 2, at 1.75 in
E4M3, and larger significands are clamped. In most tensors the significands are spread over the binade. In the gradient
of the logits they gather in one place (see `altgrad.formats.clamping`). The histogram shows, for any trained model,
which tensors ``floor`` would clamp. Each snapshot of a run is measured on as many validation tokens as a step has.
Gradients are those of the step's loss in the rebuilt model, in the run's compute dtype. A block is 32 neighbours along
the last dimension of an input (tokens, in), a weight (out, in) or an incoming gradient (tokens, out), as in MX.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from fractions import Fraction
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
from ruamel.yaml import YAML
from torch import Tensor, nn

from altgrad.common.errors import UserError
from altgrad.config import Cell
from altgrad.config.recipe import HEADS, ROLES, Recipe, Rule, TensorRecipe
from altgrad.diagnostics.analysis import ratio_db
from altgrad.diagnostics.saved import RebuiltModel, SavedRun, StraightThroughLinear
from altgrad.formats import get_format
from altgrad.formats.clamping import significand
from altgrad.numerics import amax, format_constants, operand_scale, quantize
from altgrad.numerics.rounding import OVERFLOW_SLACK

TOKENS = 256  # of the probe batch
SEED = 0  # of stochastic rounding
ROUNDINGS = ("nearest-even", "stochastic")
#: Settings of a recipe by granularity: what has a scale of its own. Blocks are those of OCP MX. ``block`` rounds their
#: scale by the bench's default, ``block_floor`` as the specification says, which saturates.
GRANULARITIES: dict[str, dict[str, Any]] = {
    "tensor": {},
    "row": {"granularity": "row"},
    "block": {"granularity": "block", "block": 32, "scale": "E8M0"},
    "block_floor": {"granularity": "block", "block": 32, "scale": "E8M0", "scale_rounding": "floor"},
}
COLUMNS = (
    "layer", "role", "format", "granularity", "rounding",
    "sqnr_db", "underflow_frac", "overflow_frac", "loss_first", "loss_second",
)  # fmt: skip
BLOCK = 32  # of `mantissas`
PARTS = 16  # of a binade, equally wide: no format of up to 8 bits ends within one
SHARES = ("blocks", "magnitude")
MANTISSA_COLUMNS = ("step", "layer", "role", "significand", *SHARES)


class Probed(NamedTuple):
    """A layer's tensors by role: weight (out, in), input (tokens, in) and incoming gradient grad (tokens, out)."""

    weight: Tensor
    input: Tensor
    grad: Tensor

    def loss_change(self, role: str, error: Tensor) -> tuple[float, float]:
        """Return the first- and second-order loss change (nats per token) if ``error`` is added to the tensor ``role``.

        First order is the inner product of gradient and error. Second order is half the sum of squared errors weighted
        by the diagonal of the empirical Fisher information, with a token as sample (LeCun et al. 1989 used the
        Hessian's). The diagonal is N sum_t (g_t a_t)^2 for a weight and N (dL/da)^2 for an input: g are the incoming
        gradients of the mean loss over N tokens, a the inputs. Both changes are NaN for ``grad``.
        """
        if role == "grad":
            return float("nan"), float("nan")
        grad, seen, tokens = self.grad.double(), self.input.double(), len(self.grad)
        if role == "weight":
            slope, fisher = grad.T @ seen, tokens * (grad.square().T @ seen.square())
        else:
            slope = grad @ self.weight.double()
            fisher = tokens * slope.square()
        error = error.double()
        return (slope * error).sum().item(), 0.5 * (fisher * error.square()).sum().item()


def probe(
    cell: Cell, run_dir: Path, tokens: Path, most: int = TOKENS, step: int | None = None
) -> dict[str, Probed]:  # fmt: skip
    """Return the tensors of each linear layer of a finished run, on at most ``most`` validation tokens.

    ``step`` is the step of a snapshot; ``None`` is the last step. Raises :class:`UserError` for a run that is not
    finished, or whose weights or gradients are not finite.
    """
    with SavedRun(cell, run_dir) as run:
        at = run.cell if step is None else run.cell_at(step)
        rebuilt = RebuiltModel.of(at, run.model(step), tokens, most)
    layers = {name: m for name, m in rebuilt.model.named_modules() if isinstance(m, StraightThroughLinear)}
    seen: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def remember(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        output.retain_grad()
        seen[layer] = inputs[0].detach(), output

    hooks = [layer.register_forward_hook(remember) for layer in layers.values()]
    rebuilt.loss().backward()
    for hook in hooks:
        hook.remove()
    probed = {}
    for name, layer in layers.items():
        inputs, output = seen[layer]
        assert output.grad is not None  # the loss depends on every layer
        tensors = (layer.weight.detach(), inputs, output.grad)
        probed[name] = Probed(*(t.reshape(-1, t.shape[-1]) for t in tensors))
        if not all(t.isfinite().all() for t in probed[name]):
            raise UserError(f"{cell.key}: layer {name} holds values that are not finite, so it cannot be measured")
    return probed


def splits(bits: int) -> tuple[str, ...]:
    """Return the names of the formats of ``bits`` bits by rising exponent bits: ``"E0M7"`` to ``"E7M0"`` for 8."""
    return tuple(f"E{e}M{bits - 1 - e}" for e in range(bits))


SPLITS = splits(8)


def spec_of(fmt: str, granularity: str) -> TensorRecipe:
    """Return the recipe that quantizes a tensor to the format ``fmt`` with the ``granularity``, of `GRANULARITIES`."""
    return TensorRecipe(format=get_format(fmt), **GRANULARITIES[granularity])


def what_if(layers: Mapping[str, Probed], formats: Sequence[str] = SPLITS) -> pd.DataFrame:
    """Return a row for each tensor and each way to quantize it, with the columns `COLUMNS`.

    ``loss_first`` and ``loss_second`` are the two numbers that `Probed.loss_change` returns.
    """
    rows = []
    for (layer, probed), *way in product(layers.items(), ROLES, formats, GRANULARITIES, ROUNDINGS):
        role, fmt, granularity, rounding = way
        t, spec = getattr(probed, role), spec_of(fmt, granularity)
        after = rounded(t, spec, rounding)
        rows.append((layer, *way, *tensor_error(t, after, spec), *probed.loss_change(role, after - t)))
    return pd.DataFrame(rows, columns=list(COLUMNS))


def recommended(table: pd.DataFrame, granularity: str = "tensor") -> Recipe:
    """Return the recipe with the format of highest SQNR, rounded to nearest, for each layer and role.

    ``table`` comes from `what_if`, ``granularity`` is one of `GRANULARITIES`. Of equal formats the one with fewer
    exponent bits is taken. The input of a head is not quantized, as in FP8 training practice. The most common choice is
    the rule for all layers, and each layer with another choice has its own rule.
    """
    rows = table[(table.granularity == granularity) & (table.rounding == "nearest-even") & table.sqnr_db.notna()]
    rows = rows.sort_values("format", kind="stable")
    best = rows.loc[rows.groupby(["layer", "role"], sort=False).sqnr_db.idxmax()].set_index(["layer", "role"]).format
    choices = {}
    for layer in table.layer.unique():
        head = any(fnmatchcase(layer, pattern) for pattern in HEADS)
        roles = [role for role in ROLES if (layer, role) in best.index and not (head and role == "input")]
        choices[layer] = {role: best[layer, role] for role in roles}
    common = Counter(tuple(choice.items()) for choice in choices.values()).most_common(1)[0][0]
    rules = [_rule("*", dict(common), granularity)]
    rules += [_rule(name, choice, granularity) for name, choice in choices.items() if choice != dict(common)]
    return Recipe(rules=tuple(rules))


def as_yaml(recipe: Recipe) -> str:
    """Return YAML for params.yaml with ``recipe`` as the entry ``what_if`` of ``recipes:``."""
    rules = [{"layers": rule.layers} | rule.model_dump(mode="json", exclude_defaults=True) for rule in recipe.rules]
    yaml, text = YAML(typ="safe"), StringIO()
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment] # ruamel.yaml says None
    yaml.dump({"recipes": {"what_if": rules}}, text)
    return text.getvalue()


def _rule(layers: str, choice: Mapping[str, str], granularity: str) -> Rule:
    return Rule(layers=layers, **{role: spec_of(fmt, granularity) for role, fmt in choice.items()})


class TensorError(NamedTuple):
    """Three metrics of a rounded tensor. ``sqnr_db`` is infinite if rounding changed nothing, NaN for all zeros."""

    sqnr_db: float
    underflow_frac: float
    overflow_frac: float


def rounded(t: Tensor, spec: TensorRecipe, rounding: str = "nearest-even") -> Tensor:
    """Return ``round(t * scale) / scale`` for ``t`` (n, k) with the dynamic scales of ``spec``: float32 (n, k).

    ``rounding`` is a mode of `quantize`; ``stochastic`` uses the same random numbers in each call.
    """
    generator = torch.Generator().manual_seed(SEED) if rounding == "stochastic" else None
    return quantize(t.float(), spec.format, scale=_scale(t, spec), rounding=rounding, generator=generator)


def tensor_error(t: Tensor, after: Tensor, spec: TensorRecipe) -> TensorError:
    """Return the errors of ``after``, the result of `rounded` for ``t`` (n, k) and ``spec``."""
    size = (t.float() * _scale(t, spec)).abs()
    nonzero = t != 0
    lost = int((nonzero & (after == 0)).sum()) / max(1, int(nonzero.sum()))
    beyond = (size > spec.format.max * OVERFLOW_SLACK).double().mean().item()
    sqnr = ratio_db(t, after.double() - t.double())
    if sqnr is None:
        sqnr = math.inf if nonzero.any() and torch.equal(t.float(), after) else math.nan
        sqnr = -math.inf if nonzero.any() and not after.any() else sqnr
    return TensorError(sqnr, lost, beyond)


def _scale(t: Tensor, spec: TensorRecipe) -> Tensor:
    return operand_scale(t, format_constants(spec.format, scale_format=spec.scale), **spec.scale_options)


# --- mantissas -------------------------------------------------------------------------------------


def mantissas(cell: Cell, run_dir: Path, tokens: Path) -> pd.DataFrame:
    """Return a row for each snapshot, tensor and part of a binade, with the columns `MANTISSA_COLUMNS`.

    ``significand`` is the start of the part, from 1 to 2. ``blocks`` is the share of the tensor's blocks whose largest
    element has its significand in the part. ``magnitude`` is the share of these elements in the sum over all blocks.
    Blocks of zeros are left out. Raises :class:`UserError` as `probe` does.
    """
    of_step = cell.train.grad_accumulation * cell.train.batch * cell.model.context
    dtype = torch.bfloat16 if cell.train.compute == "bf16" else torch.float32
    with SavedRun(cell, run_dir) as run:
        steps = run.model_steps
    rows = []
    for step in steps:
        for layer, tensors in probe(cell, run_dir, tokens, of_step, step).items():
            factor = cell.train.loss_scale * len(tensors.grad) / of_step
            for role in ROLES:
                t = getattr(tensors, role)
                t = t.to(dtype) if role != "grad" else (t * factor).to(dtype)
                rows += [(step, layer, role, *part) for part in histogram(t)]
    return pd.DataFrame(rows, columns=list(MANTISSA_COLUMNS))


def histogram(t: Tensor) -> Iterator[tuple[float, float, float]]:
    """Yield ``(significand, blocks, magnitude)`` for each of the `PARTS` of a binade, as in `mantissas`.

    Args:
        t: float (n, k), finite.
    """
    largest = amax(t, "block", block=BLOCK).double().flatten()
    largest = largest[largest > 0]
    place = ((largest.frexp().mantissa * 2 - 1) * PARTS).long()
    blocks = torch.bincount(place, minlength=PARTS) / max(1, len(largest))
    magnitude = torch.bincount(place, weights=largest, minlength=PARTS) / largest.sum().clamp(min=1e-300)
    for i in range(PARTS):
        yield 1 + i / PARTS, blocks[i].item(), magnitude[i].item()


def spread_evenly(fmt: str) -> tuple[float, float]:
    """Return the shares of blocks and magnitude that `clamped` has, in per cent, for log-uniform largest elements."""
    end = float(significand(Fraction(get_format(fmt).scale_target)))
    return 100 * math.log2(2 / end), 100 * (2 - end)


def clamped(table: pd.DataFrame, fmt: str) -> pd.DataFrame:
    """Return the shares of ``blocks`` and of ``magnitude`` that the scale rule ``floor`` would clamp in format ``fmt``.

    ``table`` comes from `mantissas`. The result has a row for each layer and role, with the mean over steps; the
    largest share of magnitude is first.
    """
    end = significand(Fraction(get_format(fmt).scale_target))
    beyond = table.assign(**{name: table[name].where(table["significand"] >= end, 0.0) for name in SHARES})
    shares = beyond.groupby(["step", "layer", "role"], sort=False)[list(SHARES)].sum()
    return shares.groupby(["layer", "role"], sort=False).mean().sort_values("magnitude", ascending=False, kind="stable")
