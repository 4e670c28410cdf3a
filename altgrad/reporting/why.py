"""Why: each explanation that a study's data can speak for or against, with its number and what became of it.

A sentence is chosen by the data. An explanation that failed is told like one that held; one that the grid has no
control for is not told at all.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pandas as pd

from altgrad.metrics import METRICS
from altgrad.metrics.metric import ROLES
from altgrad.reporting import roles
from altgrad.reporting.claims import Claim
from altgrad.reporting.compare import Comparison
from altgrad.reporting.document import Block, Bullets, Text
from altgrad.reporting.explain import MEASURES, correlations, explanation
from altgrad.reporting.figures.select import course, per_layer
from altgrad.reporting.load import Study
from altgrad.reporting.nearness import Nearness, nearness
from altgrad.reporting.paired import with_interval
from altgrad.reporting.wording import absent, interval, joined, number, p_value, plural, signed

RATIO, BIAS, LEAST = "gradient_to_noise", "noise_bias", METRICS["gradient_to_noise"].limit
SOURCES = {f"noise_from_{role}": words for role, words in ROLES.items()}
FEWEST = 4  # formats: below that even a perfect order is one that chance makes
MOST_EXACT = 8  # formats: above that the orders are too many to count


def why(study: Study, comparison: Comparison) -> list[Block]:
    """Return a lead and a line per explanation; nothing where there is none to tell of."""
    items = [
        *_gain(study, comparison), *_loss(nearness(study, comparison)), *_noise(study, comparison),
        *_precision(study, comparison),
    ]  # fmt: skip
    return [Text("**Why**, explanation by explanation; each interval is of one difference by itself:"),
            Bullets(items)] if items else []  # fmt: skip


# --- the largest gain, taken apart -----------------------------------------------------------------


def _gain(study: Study, comparison: Comparison) -> list[str]:
    """Take the largest firm gain apart: the format's own part, where the stiffness lies, the learning rate."""
    firm = [
        row
        for row in comparison.gains.dropna(subset="claim").itertuples()
        if row.claim.firm and row.claim.difference.mean < 0 and roles.is_quantized(study, row.format)
    ]
    if not firm:
        return []
    most = min(firm, key=lambda row: row.claim.difference.mean)
    items = [text for text in (_own_grid(most), _place(most), _rate(study, comparison, most)) if text]
    lead = f"`{most.optimizer}` in **{most.format}**, the largest gain ({_gained(most.claim)}), taken apart"
    return [f"{lead}. {' '.join(items)}"] if items else []


def _gained(claim: Claim) -> str:
    return f"{signed(-claim.difference.mean, 4)} {interval(-claim.difference, claim.half_width)}"


def _own_grid(row: Any) -> str:
    if row.beyond is None:
        return ""
    part = _gained(row.beyond)
    if not row.beyond.told_apart:
        return f"The format's own quantization grid: no part that is told apart from nothing ({part})."
    unsure = "" if row.beyond.firm else ", as an indication"
    does = "adds to it" if row.beyond.difference.mean < 0 else "takes from it"
    return f"The format's own quantization grid {does}{unsure} ({part})."


def _place(row: Any) -> str:
    """Say what is lost when the stiffness is shuffled among the weights: the part of where it lies."""
    if not row.nulls:
        return ""
    name, claim = max(row.nulls.items(), key=lambda item: item[1].difference.mean)  # the control that comes nearest
    part = f"{_gained(claim)} beyond `{name}`"
    if not claim.told_apart:
        return f"Which weight has which spacing: no part that is told apart ({part})."
    unsure = "" if claim.firm else ", as an indication"
    makes = "makes a part" if claim.difference.mean < 0 else "costs"
    return f"Which weight has which spacing {makes}{unsure} ({part})."


def _rate(study: Study, comparison: Comparison, most: Any) -> str:
    """Say what the arm gains where values lie evenly, so that its settings alone are at work."""
    gains = comparison.gains[comparison.gains["optimizer"] == most.optimizer].dropna(subset="claim")
    even = [
        row
        for row in gains.itertuples()
        if roles.is_quantized(study, row.format) and roles.has_even_grid(study, row.format)
    ]
    if not even:
        return ""
    row = even[0]
    sure = "" if row.claim.firm else f", {row.claim.verdict}"
    return (
        f"Its learning rate alone, in {row.format}, where the arm takes the plain arm's steps: "
        f"{_gained(row.claim)}{sure}."
    )


# --- the loss's geometry ---------------------------------------------------------------------------


def _loss(found: list[Nearness]) -> list[str]:
    """Say whether the format's geometry resembles the loss's."""
    judged = [row for row in found if len(row.differences) > 1]
    if not judged:
        return []
    nearer = [row for row in judged if row.told > 0]
    farther = [row for row in judged if row.told < 0]
    shown = ", ".join(f"{row.entry} {with_interval(row.differences)}" for row in judged)
    what = (
        "the loss's natural gradient (Kronecker-factored) and the gradient weighted by the format's spacings, against "
        f"the same spacings shuffled among the weights: cosine higher by {shown}"
    )
    apart = f"; told apart in {joined([row.entry for row in nearer + farther])}" if nearer or farther else ""
    plain = all(row.plain > row.along for row in judged)
    beside = "; the gradient itself is nearer than either" if plain else ""
    if nearer:
        verdict = "resembles the format's in " + joined([row.entry for row in nearer])
    else:
        verdict = "is not the format's, as far as this shows"
    return [f"The geometry of the loss {verdict}: {what}{apart}{beside}."]


# --- the gradient's noise --------------------------------------------------------------------------


def _noise(study: Study, comparison: Comparison) -> list[str]:
    """Say how far the gradient is above its quantization noise, and which tensors that comes from."""
    rows = per_layer(study.summary, study, comparison)
    means = rows[rows["metric"].isin([RATIO, BIAS, *SOURCES])].groupby(["format", "metric"])["value"].mean().unstack()
    if RATIO not in means:
        return []
    means = means.reindex(columns=[RATIO, BIAS, *SOURCES]).dropna(subset=RATIO)
    if means.empty:
        return []
    entries = [entry for entry in study.formats if entry in means.index]
    shown = []
    for entry in entries:
        most = means.loc[entry, list(SOURCES)].astype(float).idxmax()
        source = f"from {SOURCES[most]} {number(100 * means.loc[entry, most], 0)} %"
        bias = means.loc[entry, BIAS]
        same = "" if absent(bias) else f", bias {number(100 * bias, 0)} %"
        shown.append(f"{entry} {number(means.loc[entry, RATIO], 1)} ({source}{same})")
    apart = "" if means[BIAS].isna().all() else "; bias is what every batch has of it and no step averages out"
    over = course(study, comparison, RATIO)
    least = pd.concat([over, means[[RATIO]]], axis=1).min(axis=1)  # some have their end alone
    low = [entry for entry in entries if LEAST.crossed("", least[entry])]
    text = (
        "Size of the gradient over its quantization noise at the end, mean over layers, and where most of that comes "
        f"from{apart}: {', '.join(shown)}.{_over_the_run(over)} Below about √3, where quantized training becomes less "
        f"effective (Chmiel et al. 2025, arXiv 2505.19115): {joined(low) or 'none'}."
    )
    return [text]


def _over_the_run(over: pd.DataFrame) -> str:
    if over.empty:
        return ""
    steps = joined([f"{step:g}" for step in over.columns])
    shown = [f"{entry} {' → '.join(number(value, 1) for value in row)}" for entry, row in over.iterrows()]
    return f" After {steps} steps: {', '.join(shown)}."


# --- precision ------------------------------------------------------------------------------------


def _precision(study: Study, comparison: Comparison) -> list[str]:
    """Say what the costs of the formats go with; nothing with fewer than `FEWEST`."""
    table = explanation(study, comparison)
    found = {m: rho for m, (rho, n) in correlations(table).items() if n >= FEWEST and rho == rho}
    if not found:
        return []
    distinct = table.drop_duplicates()
    parts = [
        f"{MEASURES[measure].title} {number(rho, 2)}{_chance(distinct[measure], distinct['cost'])}"
        for measure, rho in found.items()
    ]
    optimizer = comparison.reference or study.optimizers[0]
    rows = comparison.best[comparison.best["optimizer"] == optimizer]
    claims = [row.claim for row in rows.itertuples() if row.claim is not None]
    beyond = sum(claim.told_apart for claim in claims)
    text = (
        f"Precision: rank correlation of a format's cost with its SQNR, {joined(parts)}; near −1, cost falls as "
        f"precision grows. A hint, not a cause: of {plural(len(claims), 'cost')} {beyond} can be told from noise."
    )
    return [text]


def _chance(x: pd.Series, y: pd.Series) -> str:
    """Say how often chance alone orders so few formats as well, by counting all orders."""
    both = pd.concat([x, y], axis=1).dropna().to_numpy()
    if len(both) > MOST_EXACT:
        return ""
    return f" (p {p_value(permutation_p(both[:, 0], both[:, 1]))})"


def permutation_p(x: np.ndarray, y: np.ndarray) -> float:
    """Return the exact two-sided p-value of Spearman's rank correlation: the share of orders of ``y`` that reach it."""
    a, b = (pd.Series(values).rank().to_numpy() - (len(values) + 1) / 2 for values in (x, y))
    reached = abs(float(a @ b)) - 1e-9
    orders = np.array(list(itertools.permutations(b)))
    return float((np.abs(orders @ a) >= reached).sum() / math.factorial(len(b)))
