"""The report's tables of what happened inside the runs: diagnoses, flags raised, first anomalous tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy.special import rel_entr

from altgrad.metrics import METRICS, Metric
from altgrad.reporting import optimizer_roles as roles
from altgrad.reporting.anomalies import Case, tensor
from altgrad.reporting.compare import Comparison
from altgrad.reporting.document import Column, Row, Table, words
from altgrad.reporting.load import MISSING, Study
from altgrad.reporting.select import in_order, per_layer, shown_optimizer
from altgrad.reporting.statistics import interval
from altgrad.reporting.wording import NONE, number, shown, signed, significant, whole

KL_MIXTURE = 1e-6  # share of p that is mixed into q before KL(p || q), so that one empty bin is no infinite divergence
EXPLAIN = "python -m altgrad.diagnostics explain CELL"
COSINE_DECIMALS = 4  # two cosines near 1 differ late
ALONG, SHUFFLED = "natural_kfac_s", "natural_kfac_shuffled"
#: The metrics of the section on geometry that its table shows, and with how many decimals.
GEOMETRY = {"stiffness_spread": 2, "gradient_stiffness_rho": 3, "fisher_stiffness_rho": 3, "natural_kfac_plain": 3,
            ALONG: 3, SHUFFLED: 3}  # fmt: skip
OF_GEOMETRY = ("natural_", "stiffness_", "descent_share", "gradient_stiffness", "fisher_")  # how their names begin


def diagnosis_table(study: Study, comparison: Comparison) -> Table | None:
    """Format x summary metric at the end of the run, mean over seeds, but for what the section on geometry shows."""
    known, optimizer = METRICS | study.metrics, shown_optimizer(study, comparison)
    rows = per_layer(study.summary, study, comparison).dropna(subset="value")
    table = rows.pivot_table(index="metric", columns="format", values="value")
    metrics = [known[name] for name in known if name in table.index and not name.startswith(OF_GEOMETRY)]
    if not metrics:
        return None
    table = table.loc[[metric.name for metric in metrics]].dropna(axis=1, how="all")
    names = in_order(study.formats, table)
    cells = [comparison.behind(name, optimizer) for name in names]
    body: list[Row] = [
        ([metric.head, *_numbers(metric, list(table.loc[metric.name, names]))],
         [None, *(own | {"metric": metric.name} for own in cells)]) for metric in metrics
    ]  # fmt: skip
    note = f"Over all layers at the end of the run, mean over seeds (`{optimizer}`)."
    divergence = divergences(study, comparison)
    if divergence.notna().any():
        body.append((
            ["divergence of weights, bits", *(number(divergence.get(name), 4) for name in names)], [None, *cells]
        ))  # fmt: skip
        note += f" Divergence: Kullback and Leibler's, of |w|, from `{study.baseline}`'s; its own from another seed's."
    return Table.of([words("quantity"), *(Column(name) for name in names)], body, note)


def _numbers(metric: Metric, values: list[float]) -> list[str]:
    """Return the values of a row with equal decimals, such that the largest has three digits."""
    values = [100 * value if metric.is_share else value for value in values]
    if metric.unit == "cosine":
        return [number(value, COSINE_DECIMALS) for value in values]
    largest = max((abs(value) for value in values if shown(value)), default=0.0)
    if largest >= 1e5 or 0 < largest < 1e-3:
        return [significant(value) for value in values]
    decimals = 2 - math.floor(math.log10(largest)) if largest > 0 else 2
    return [number(value, max(0, decimals)) for value in values]


def divergences(study: Study, comparison: Comparison) -> pd.Series:
    """Return by format KL(its run || the baseline's) in bits, mean over layers and seeds; empty without a baseline.

    Of the magnitudes of weights at the end of training, over quarter binades. The baseline's own, where there are two
    seeds, is that to its run with the next seed: how far two runs come apart that differ in nothing else.
    """
    rows = per_layer(study.diagnosis, study, comparison)
    rows = rows[rows["metric"] == "log2_magnitude"]
    counts = rows.pivot_table(index=["format", "seed", "layer"], columns="x", values="value", fill_value=0.0)
    names, seeds = in_order(study.formats, rows["format"]), list(rows["seed"].unique())
    if study.baseline not in names:
        return pd.Series(dtype="float64")
    shares = counts.div(counts.sum(axis=1), axis=0)
    baseline = shares.loc[study.baseline]

    def bits(own: pd.DataFrame) -> float:
        p, q = own.to_numpy(), baseline.reindex(own.index).to_numpy()
        found = rel_entr(p, q + KL_MIXTURE * (p - q)).sum(axis=1) / np.log(2)
        return float(pd.Series(found, own.index).groupby("layer").mean().mean())

    found = {name: bits(shares.loc[name]) for name in names if name != study.baseline}
    if len(seeds) > 1:
        following = dict(zip(seeds, seeds[1:] + seeds[:1], strict=True))
        found[study.baseline] = bits(baseline.rename(index=following, level="seed"))
    return pd.Series(found)


def geometry_table(study: Study, comparison: Comparison) -> Table | None:
    """What the diagnoses say of each format's geometry beside the loss's; None where none was diagnosed.

    A geometry-aware arm descends along S·g, S the spacing of the format's values at each weight. If that geometry were
    the loss's, S·g would lie nearer to the natural gradient F⁻¹g than with the spacings shuffled among the weights.
    """
    optimizer = shown_optimizer(study, comparison)
    found = per_layer(study.summary, study, comparison).dropna(subset="value")
    table = found.pivot_table(index=["format", "seed"], columns="metric", values="value")
    table = table.reindex(columns=list(GEOMETRY)).dropna(subset=[ALONG, SHUFFLED])
    rows = []
    for entry in in_order(study.formats, table.index.get_level_values("format")):
        if roles.is_quantized(study, entry) and not roles.has_even_grid(study, entry):
            own, cells = table.loc[entry], comparison.behind(entry, optimizer)
            mean, low, high = (signed(value, 4) for value in interval(own[ALONG] - own[SHUFFLED]))
            rows.append((
                [f"**{entry}**", *(number(own[name].mean(), digits) for name, digits in GEOMETRY.items()),
                 "not measured" if low == NONE else f"{mean} [{low}, {high}]"],
                [None, *(cells | {"metric": shown} for shown in (*GEOMETRY, [ALONG, SHUFFLED]))],
            ))  # fmt: skip
    columns = [
        words("format"), Column("spread of S, binades"), Column("|g| with S"), Column("Fisher with S"),
        Column("F⁻¹g with g"), Column("with S·g"), Column("with S·g, S shuffled"), Column("S·g minus shuffled [95 %]"),
    ]  # fmt: skip
    note = (
        "S is the spacing of the format's values at each weight; on a uniform grid S is one number, and no row. "
        "Rank correlations of S with the gradient and with the diagonal of the Fisher information, then cosines of the "
        "natural gradient F⁻¹g (Kronecker factors) with three directions of descent. Mean over layers and seeds at the "
        f"end of the run (`{optimizer}`); each interval by itself, over seeds."
    )
    return Table.of(columns, rows, note)


def failures_table(study: Study, found: Sequence[Case]) -> Table | None:
    """Each run that is missing, diverged or ended worse: which tensor left its band first, when the loss showed it."""
    columns = [
        words("cell"), words("what became of it"), words("first to leave its band"), Column("at step"),
        Column("loss at step"), Column("steps before"), Column("healthy runs"),
    ]  # fmt: skip
    missing = study.of_status(MISSING)["reason"]
    rows = [[f"`{key}`", f"missing: {reason}", *[NONE] * 5] for key, reason in missing.items()]
    for case in found:
        first = case.found.excursion
        left = [NONE, NONE] if first is None else [tensor(first), whole(first.step)]
        seen = [NONE if step is None else whole(step) for step in (case.found.loss_step, case.found.lead)]
        rows.append([f"`{case.key}`", case.ended, *left, *seen, str(case.found.peers or NONE)])
    note = (
        "Held against the healthy runs of the same arm, or the limits of the metrics where there are too few; a dash "
        f"where no tensor left its band before the loss did. `{EXPLAIN}` tells it in sentences and draws it."
    )
    return Table(columns, rows, note) if rows else None
