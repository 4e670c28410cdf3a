"""Where the largest elements of a run's blocks lie within their binade, and how many a scale rounded down clamps.

A block's scale by the rule ``floor`` brings its largest element to a significand from 1 to 2 in the format's top
binade. The format ends before 2, at 1.75 in E4M3, and larger significands are clamped. In most tensors the significands
are spread over the binade. In the gradient of the logits they gather in one place (see `altgrad.formats.clamping`). The
histogram shows, for any trained model, which tensors ``floor`` would clamp.

Each snapshot of a run is measured on as many validation tokens as a step has. Gradients are those of the step's loss in
the rebuilt model, in the run's compute dtype. A block is 32 neighbours along the last dimension of an input
(tokens, in), a weight (out, in) or an incoming gradient (tokens, out), as in MX.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor

from altgrad.config import Cell
from altgrad.config.recipe import ROLES
from altgrad.diagnostics.saved import SavedRun
from altgrad.diagnostics.what_if import probe
from altgrad.formats import get_format
from altgrad.formats.clamping import significand
from altgrad.numerics import amax

BLOCK = 32
PARTS = 16  # of a binade, equally wide: no format of up to 8 bits ends within one
COLUMNS = ("step", "layer", "role", "significand", "blocks", "magnitude")


def mantissas(cell: Cell, run_dir: Path, tokens: Path) -> pd.DataFrame:
    """Return a row for each snapshot, tensor and part of a binade, with the columns `COLUMNS`.

    ``significand`` is the start of the part, from 1 to 2. ``blocks`` is the share of the tensor's blocks whose largest
    element has its significand in the part. ``magnitude`` is the share of these elements in the sum over all blocks.
    Blocks of zeros are left out. Raises :class:`UserError` as `altgrad.diagnostics.what_if.probe` does.
    """
    return pd.DataFrame(_rows(cell, run_dir, tokens), columns=list(COLUMNS))


def _rows(cell: Cell, run_dir: Path, tokens: Path) -> Iterator[tuple[object, ...]]:
    of_step = cell.train.grad_accumulation * cell.train.batch * cell.model.context
    dtype = torch.bfloat16 if cell.train.compute == "bf16" else torch.float32
    with SavedRun(cell, run_dir) as run:
        steps = run.model_steps
    for step in steps:
        for layer, tensors in probe(cell, run_dir, tokens, of_step, step).items():
            factor = cell.train.loss_scale * len(tensors.grad) / of_step
            for role in ROLES:
                t = getattr(tensors, role)
                t = t.to(dtype) if role != "grad" else (t * factor).to(dtype)
                for part, blocks, magnitude in histogram(t):
                    yield step, layer, role, part, blocks, magnitude


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
    beyond = table.assign(**{name: table[name].where(table["significand"] >= end, 0.0) for name in COLUMNS[-2:]})
    shares = beyond.groupby(["step", "layer", "role"], sort=False)[list(COLUMNS[-2:])].sum()
    return shares.groupby(["layer", "role"], sort=False).mean().sort_values("magnitude", ascending=False, kind="stable")
