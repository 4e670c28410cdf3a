"""The comparison itself: each arm against the baseline, each geometry-aware arm against the plain one.

An *arm* here is a grid entry (format or recipe) under one optimizer at one learning rate. The primary
metric is the final validation loss in nats per token; it is named here, before any run is read.
Everything is paired by seed (see :mod:`altgrad.reporting.statistics`), and only completed runs have a
loss: a diverged or missing cell is counted beside the number, never averaged into it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from altgrad.reporting.load import COMPLETED, DIVERGED, MISSING, Study
from altgrad.reporting.statistics import Difference, Noise, noise, paired_difference

PRIMARY = "val_loss"
ARM = ["format", "optimizer", "lr_scale"]
# Fewer paired seeds than this give an indication, whatever the interval says.
CLAIM_SEEDS = 5
# METRICS.md flags a gap to the baseline above these (percent).
TRAIN_GAP_LIMIT, VAL_GAP_LIMIT = 5.0, 10.0

PLAIN_BASES = ("adamw", "sgd")
NULL_STIFFNESS = ("mean", "permuted", "foreign")

Losses = dict[tuple[str, str, float], pd.Series]  # by arm: final validation loss, indexed by seed

SAME, BETTER, WORSE, IDENTICAL, UNJUDGED = "no difference", "better", "worse", "identical", "not judged"


@dataclass(frozen=True)
class Comparison:
    """Every number of the comparison.

    ``results``: a row per (format, optimizer, lr_scale) with counts, means over seeds and the paired
    difference to the baseline at the same optimizer and learning rate. ``best``: a row per (format,
    optimizer) at its own best learning rate, against the baseline at its own. ``gains``: a row per
    (format, geometry-aware or null arm): its loss minus that of the plain arm with weights of the same
    regime, both at their best, and its readings against its controls (see :func:`_gains`).
    ``noise`` is between formats under one arm, ``gain_noise`` between arms in one format, and at least what tuning
    makes (see :func:`_tuning_error`).
    ``references`` names the plain arm of each regime, ``master`` or ``grid``.
    """

    results: pd.DataFrame
    best: pd.DataFrame
    gains: pd.DataFrame
    noise: Noise | None
    gain_noise: Noise | None
    references: dict[str, str]

    @property
    def reference(self) -> str | None:
        """The plain arm whose cells stand for a format: that of master weights where there is one."""
        return next((self.references[regime] for regime in ("master", "grid") if regime in self.references), None)


def regime(arm: dict[str, Any]) -> str:
    """Return what the arm keeps: float32 ``master`` weights, or weights that live on the ``grid``."""
    return arm.get("weights", "master")


def is_plain(arm: dict[str, Any]) -> bool:
    """Whether the arm's updates ignore the format's grid: AdamW or SGD without a stiffness."""
    return arm["base"] in PLAIN_BASES and arm.get("stiffness") is None


def is_null(arm: dict[str, Any]) -> bool:
    """Whether the arm is a control that looks geometry-aware and carries no geometry of the weight."""
    return arm.get("stiffness") in NULL_STIFFNESS


def compare(study: Study) -> Comparison:
    """Return the comparison of everything that completed in ``study``."""
    completed = study.cells[study.cells["status"] == COMPLETED]
    losses = {arm: cells.set_index("seed")[PRIMARY] for arm, cells in completed.groupby(ARM, sort=False)}
    floor = noise(_tables(completed, ["optimizer", "lr_scale"], "format"))
    results = pd.DataFrame([_result(study, arm, cells, floor) for arm, cells in study.cells.groupby(ARM, sort=False)])
    best = _best(study, results, losses, floor)
    at_best = completed.merge(best[ARM], on=ARM)
    references = {}
    for name in study.optimizers:
        if is_plain(study.arm(name)):
            references.setdefault(regime(study.arm(name)), name)
    gain_floor = noise(_tables(at_best, ["format"], "optimizer"))
    if gain_floor is not None:
        gain_floor = replace(gain_floor, least=_tuning_error(at_best, references))
    gains = _gains(study, losses, best, gain_floor, references)
    return Comparison(results, best, gains, floor, gain_floor, references)


def _tuning_error(at_best: pd.DataFrame, references: dict[str, str]) -> float:
    """Return the largest mean gain of an arm where nothing is quantized: 0 without such cells.

    There every arm is its plain form, so that what is left is chance, and that the learning rates of an arm come
    closer to the best one than those of another: a grid of rates a factor of two apart hits it by luck.
    """
    plain = at_best[at_best["quantized_parameters"] == 0]
    largest = 0.0
    for _, cells in plain.groupby("format", sort=False):
        losses = cells.pivot(index="seed", columns="optimizer", values=PRIMARY)
        reference = references.get("master")
        if reference in losses:
            largest = max(largest, losses.sub(losses[reference], axis=0).mean().abs().max())
    return float(largest)


def _tables(cells: pd.DataFrame, within: list[str], arm: str) -> Iterator[pd.DataFrame]:
    """Yield a table of losses, a row per ``arm`` and a column per seed, for each group of ``within``."""
    for _, group in cells.groupby(within, sort=False):
        yield group.pivot(index=arm, columns="seed", values=PRIMARY)


def judge(difference: Difference | None, floor: Noise | None) -> str:
    """Say what a paired difference in loss amounts to.

    Inside the noise floor it is none, whatever its sign, and so it is inside what its own spread over the seeds makes.
    Outside it is an indication, and a finding only with :data:`CLAIM_SEEDS` seeds and a t-interval that excludes zero.
    """
    if difference is None or (floor is None and difference.mean != 0):
        return UNJUDGED
    if difference.mean == 0 and not difference.low < 0:
        return IDENTICAL
    if floor is None or abs(difference.mean) <= max(floor.floor(difference.n), difference.own_floor(floor.dof)):
        return SAME
    direction = WORSE if difference.mean > 0 else BETTER
    firm = difference.n >= CLAIM_SEEDS and difference.excludes_zero
    return direction if firm else f"{direction} (indication)"


def _result(study: Study, arm: tuple[str, str, float], cells: pd.DataFrame, floor: Noise | None) -> dict[str, Any]:
    name, optimizer, lr_scale = arm
    completed = cells[cells["status"] == COMPLETED].set_index("seed")
    row: dict[str, Any] = {
        **dict(zip(ARM, arm, strict=True)), "peak_lr": cells["peak_lr"].iloc[0], "planned": len(cells),
        **{status: int((cells["status"] == status).sum()) for status in (COMPLETED, DIVERGED, MISSING)},
        **{metric: completed[metric].mean() for metric in (PRIMARY, "train_loss", "tokens_per_s")},
        "val_loss_sd": completed[PRIMARY].std(ddof=1), "perplexity": math.exp(completed[PRIMARY].mean()),
    }  # fmt: skip
    others = study.cells[study.cells["status"] == COMPLETED]
    same = (others["optimizer"] == optimizer) & (others["lr_scale"] == lr_scale) & (others["format"] == study.baseline)
    baseline = others[same & (name != study.baseline)].set_index("seed")
    row["difference"] = paired_difference(completed[PRIMARY], baseline[PRIMARY])
    row["verdict"] = judge(row["difference"], floor)
    row["val_gap"] = _gap(completed[PRIMARY], baseline[PRIMARY])
    row["train_gap"] = _gap(completed["train_loss"], baseline["train_loss"])
    return row


def _gap(loss: pd.Series, baseline: pd.Series) -> float:
    """Return the mean over shared seeds of how far the loss is above the baseline's, in percent."""
    return 100 * (loss / baseline - 1).mean()


def _best(study: Study, results: pd.DataFrame, losses: Losses, floor: Noise | None) -> pd.DataFrame:
    """Return a row per (format, optimizer) at the learning rate with most completed seeds, then least loss."""
    order = results.sort_values([COMPLETED, PRIMARY], ascending=[False, True], kind="stable")
    chosen = order.drop_duplicates(["format", "optimizer"]).sort_index().to_dict("records")
    rates = {row["optimizer"]: row["lr_scale"] for row in chosen if row["format"] == study.baseline}
    for row in chosen:
        own = losses.get((row["format"], row["optimizer"], row["lr_scale"]))
        base = losses.get((study.baseline, row["optimizer"], rates.get(row["optimizer"])))
        paired = row["format"] != study.baseline and own is not None and base is not None
        row["difference"] = paired_difference(own, base) if paired else None
        row["verdict"] = judge(row["difference"], floor)
        row["val_gap"] = _gap(own, base) if paired else math.nan
        row["bracket"] = _bracket(study, row)
    return pd.DataFrame(chosen)


def _bracket(study: Study, row: dict[str, Any]) -> str:
    if row[COMPLETED] == 0:
        return "none completed"
    if len(study.lr_scales) == 1:
        return "one learning rate"
    at_edge = row["lr_scale"] in (min(study.lr_scales), max(study.lr_scales))
    return "unbracketed" if at_edge else "bracketed"


def _gains(
    study: Study, losses: Losses, best: pd.DataFrame, floor: Noise | None, references: dict[str, str]
) -> pd.DataFrame:
    """Return a row per format and arm that is not plain, against the plain arm of its regime.

    ``difference`` and ``verdict`` are against ``reference``. ``nulls`` maps each null arm of the grid that differs in
    the stiffness alone to the verdict of the arm against it; ``matched`` is the verdict of the same arm at AdamW's
    update size against the reference, empty where the grid has none; ``bracketed`` tells whether the best learning
    rates of both lie inside the grid's.
    """
    columns = [
        "format", "optimizer", "control", "reference", "difference", "verdict", "nulls", "matched", "bracketed",
    ]  # fmt: skip
    at_best = best.set_index(["format", "optimizer"])

    def against(name: str, optimizer: str, other: str) -> Difference | None:
        own, base = (losses.get((name, arm, at_best.loc[(name, arm), "lr_scale"])) for arm in (optimizer, other))
        return None if own is None or base is None else paired_difference(own, base)

    rows = []
    for name, optimizer in itertools.product(study.formats, study.optimizers):
        arm = study.arm(optimizer)
        reference = references.get(regime(arm))
        if is_plain(arm) or reference is None:
            continue
        difference = against(name, optimizer, reference)
        nulls = {} if is_null(arm) else _relatives(study, optimizer, stiffness=NULL_STIFFNESS)
        matched = [] if arm.get("match_rms") else _relatives(study, optimizer, match_rms=(True,))
        rows.append((
            name, optimizer, is_null(arm), reference, difference, judge(difference, floor),
            {null: judge(against(name, optimizer, null), floor) for null in nulls},
            judge(against(name, matched[0], reference), floor) if matched else "",
            all(at_best.loc[(name, one), "bracket"] == "bracketed" for one in (optimizer, reference)),
        ))  # fmt: skip
    return pd.DataFrame(rows, columns=columns)


def _relatives(study: Study, optimizer: str, **changed: tuple[Any, ...]) -> list[str]:
    """Return the arms that differ from ``optimizer`` in the settings ``changed`` alone, and have one of the values."""

    def rest(arm: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in arm.items() if key not in (*changed, "foreign", "lr", "plain_lr")}

    arm = study.arm(optimizer)
    others = {name: study.arm(name) for name in study.optimizers if name != optimizer}
    return [
        name
        for name, other in others.items()
        if rest(other) == rest(arm) and all(other.get(key) in values for key, values in changed.items())
    ]
