"""Tables of what happened inside the runs: diagnoses, updates, flags, and first anomalous tensors."""

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy.special import rel_entr

from altgrad.metrics import METRICS, Metric
from altgrad.reporting import optimizer_roles as roles
from altgrad.reporting.anomalies import TENSORS, Case, tensor
from altgrad.reporting.compare import Comparison, in_order, per_layer, shown_optimizer
from altgrad.reporting.figures.layers import COSINE, RUNGS, STALL, recorded
from altgrad.reporting.load import DIVERGED, IDENTITY, MISSING, Study
from altgrad.reporting.markdown import NONE, Column, Table, integer, number, shown, signed, significant, words
from altgrad.reporting.statistics import interval

KL_MIXTURE = 1e-6  # share of p in q before KL(p || q), so that one empty bin is no infinite divergence
EXPLAIN = "python -m altgrad.diagnostics explain CELL"
COSINE_DECIMALS = 4  # cosines near 1 differ only in late decimals
ALONG, SHUFFLED = "natural_kfac_s", "natural_kfac_shuffled"
#: The metrics that `geometry_table` shows, and the number of decimals of each.
GEOMETRY = {"stiffness_spread": 2, "gradient_stiffness_rho": 3, "fisher_stiffness_rho": 3, "natural_kfac_plain": 3,
            ALONG: 3, SHUFFLED: 3}  # fmt: skip
FLAGS = [*IDENTITY, "what", "layer", "value", "limit"]
OF_GEOMETRY = ("natural_", "stiffness_", "descent_share", "gradient_stiffness", "fisher_")  # prefixes of names


def diagnosis_table(study: Study, comparison: Comparison) -> Table | None:
    """Return a row per diagnosed metric and a column per format, means over seeds; metrics of geometry are left out."""
    known, optimizer = METRICS | study.metrics, shown_optimizer(study, comparison)
    rows = per_layer(study.summary, study, comparison).dropna(subset="value")
    table = rows.pivot_table(index="metric", columns="format", values="value")
    metrics = [known[name] for name in known if name in table.index and not name.startswith(OF_GEOMETRY)]
    if not metrics:
        return None
    table = table.loc[[metric.name for metric in metrics]].dropna(axis=1, how="all")
    names = in_order(study.formats, table)
    body = [[metric.head, *_numbers(metric, list(table.loc[metric.name, names]))] for metric in metrics]
    note = f"Over all layers at the end of the run, mean over seeds (`{optimizer}`)."
    divergence = divergences(study, comparison)
    if divergence.notna().any():
        body.append(["divergence of weights, bits", *(number(divergence.get(name), 4) for name in names)])
        note += f" Divergence: Kullback and Leibler's, of |w|, from `{study.baseline}`'s; its own from another seed's."
    return Table([words("quantity"), *(Column(name) for name in names)], body, note)


def _numbers(metric: Metric, values: list[float]) -> list[str]:
    """Return the texts of a row's values, with equal decimals such that the largest value has three digits."""
    values = [100 * value if metric.is_share else value for value in values]
    if metric.unit == "cosine":
        return [number(value, COSINE_DECIMALS) for value in values]
    largest = max((abs(value) for value in values if shown(value)), default=0.0)
    if largest >= 1e5 or 0 < largest < 1e-3:
        return [significant(value) for value in values]
    decimals = 2 - math.floor(math.log10(largest)) if largest > 0 else 2
    return [number(value, max(0, decimals)) for value in values]


def divergences(study: Study, comparison: Comparison) -> pd.Series:
    """Return the divergence KL(format || baseline) of weights by format, in bits; empty without a baseline.

    It compares histograms of |w| at the end of training, in quarter binades, and is a mean over layers and seeds. The
    baseline's value is the divergence from its own run with the next seed: the effect of the seed alone.
    """
    rows = per_layer(study.diagnosis, study, comparison)
    rows = rows[rows["metric"] == "log2_magnitude"]
    counts = rows.pivot_table(index=["format", "seed", "layer"], columns="x", values="value", fill_value=0.0)
    names, seeds = in_order(study.formats, rows["format"]), list(rows["seed"].unique())
    if study.baseline not in names:
        return pd.Series(dtype="float64")
    shares = counts.div(counts.sum(axis=1), axis=0)
    baseline = shares.loc[study.baseline]

    def bits(run: pd.DataFrame) -> float:
        p, q = run.to_numpy(), baseline.reindex(run.index).to_numpy()
        by_row = rel_entr(p, q + KL_MIXTURE * (p - q)).sum(axis=1) / np.log(2)
        return float(pd.Series(by_row, run.index).groupby("layer").mean().mean())

    by_format = {name: bits(shares.loc[name]) for name in names if name != study.baseline}
    if len(seeds) > 1:
        following = dict(zip(seeds, seeds[1:] + seeds[:1], strict=True))
        by_format[study.baseline] = bits(baseline.rename(index=following, level="seed"))
    return pd.Series(by_format)


def geometry_table(study: Study, comparison: Comparison) -> Table | None:
    """Return a row per quantized format: how its spacing relates to the loss's geometry; None if none was diagnosed.

    A spacing-scaled optimizer descends along S·g, where S is the spacing of the format's values at each weight. If the
    loss had the format's geometry, S·g would be nearer to the natural gradient F⁻¹g than S·g with S shuffled.
    """
    optimizer = shown_optimizer(study, comparison)
    rows = per_layer(study.summary, study, comparison).dropna(subset="value")
    table = rows.pivot_table(index=["format", "seed"], columns="metric", values="value")
    table = table.reindex(columns=list(GEOMETRY)).dropna(subset=[ALONG, SHUFFLED])
    body = []
    for entry in in_order(study.formats, table.index.get_level_values("format")):
        if roles.is_quantized(study, entry) and not roles.has_even_grid(study, entry):
            by_seed = table.loc[entry]
            mean, low, high = (signed(value, 4) for value in interval(by_seed[ALONG] - by_seed[SHUFFLED]))
            values = [number(by_seed[name].mean(), digits) for name, digits in GEOMETRY.items()]
            values.append("not measured" if low == NONE else f"{mean} [{low}, {high}]")
            body.append([f"**{entry}**", *values])
    if not body:
        return None
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
    return Table(columns, body, note)


def failures_table(study: Study, cases: Sequence[Case]) -> Table | None:
    """Return a row per missing, diverged or worse run, with its first anomalous tensor; None without such runs."""
    columns = [
        words("cell"), words("what became of it"), words("first to leave its band"), Column("at step"),
        Column("loss at step"), Column("steps before"), Column("healthy runs"),
    ]  # fmt: skip
    missing = study.of_status(MISSING)["reason"]
    rows = [[f"`{key}`", f"missing: {reason}", *[NONE] * 5] for key, reason in missing.items()]
    for case in cases:
        anomaly, first = case.anomaly, case.anomaly.excursion
        left = [NONE, NONE] if first is None else [tensor(first), integer(first.step)]
        rows.append([f"`{case.key}`", case.ended, *left, integer(anomaly.loss_step), integer(anomaly.lead),
                     str(anomaly.peers or NONE)])  # fmt: skip
    note = (
        "Held against the healthy runs of the same arm, or the limits of the metrics where there are too few; a dash "
        f"where no tensor left its band before the loss did. `{EXPLAIN}` tells it in sentences and draws it."
    )
    return Table(columns, rows, note) if rows else None


def updates_table(study: Study, comparison: Comparison) -> Table | None:
    """Return by optimizer and format the cosine with AdamW's update, the code steps, and the share of kept codes."""
    rows = recorded(study, comparison)
    if rows.empty:
        return None
    means = rows.groupby(["metric", "optimizer", "format"])["value"].mean()
    formats, arms = in_order(study.formats, rows["format"]), in_order(study.optimizers, rows["optimizer"])

    def cell(arm: str, name: str) -> str:
        cosine, rungs, stall = (means.get((metric, arm, name), np.nan) for metric in (COSINE, RUNGS, STALL))
        text = f"{number(cosine, 2)} / {significant(rungs, 2)} / {number(100 * stall, 0)}"
        return NONE if np.isnan(rungs) else text

    body = [[f"**{arm}**", *(cell(arm, name) for name in formats)] for arm in arms]
    note = (
        "Cosine between the update, weight decay aside, and AdamW's on the same gradients / code steps that a weight "
        "moves in a step / updates that leave the weight's code, in %: of master weights the code of their quantized "
        "view, and a later step may change it. Means over quantized weights, layers, the watched steps of the second "
        "half of the run, and seeds."
    )
    if len(study.of_status(DIVERGED)):
        note += " Runs that diverged are left out."
    return Table([words("arm"), *(Column(name) for name in formats)], body, note)


def raised(study: Study) -> pd.DataFrame:
    """Return the flags: a row per measurement of the monitors or diagnoses that is beyond the limit of its metric.

    The columns are the run's identity, ``what`` was measured, the ``layer`` ("" for the whole run), the worst ``value``
    and the ``limit``.
    """
    parts = [_watched(study, role, metric) for metric in METRICS.values() for role in metric.watched]
    parts += [_beyond(_gradient_ratio(study), "gradient_ratio"), _beyond(study.cells, "clipped_frac")]
    known = METRICS | study.metrics
    what = {name: flag_name(known[name], known[name].offline or "") for name in study.flags["metric"].unique()}
    parts.append(study.flags.assign(what=study.flags["metric"].map(what)))
    filled = [part[FLAGS] for part in parts if len(part)]
    return pd.concat(filled, ignore_index=True) if filled else pd.DataFrame(columns=FLAGS)


def _watched(study: Study, role: str, metric: Metric) -> pd.DataFrame:
    """Return a flag for each run and layer in which any instrumented pass was beyond the limit of ``metric``."""
    rows = study.monitors[(study.monitors["role"] == role) & (study.monitors["metric"] == metric.name)]
    limit = metric.bound
    crossed = [limit.crossed(layer, value) for layer, value in zip(rows["layer"], rows["value"], strict=True)]
    layers = rows.loc[crossed].groupby([*IDENTITY, "layer"], sort=False)["value"]
    worst = (layers.max() if limit.above else layers.min()).reset_index()
    return worst.assign(what=flag_name(metric, role), limit=worst["layer"].map(limit.of))


def _gradient_ratio(study: Study) -> pd.DataFrame:
    """Return by run the largest ratio over steps of first and last layer's gradient norms (larger over smaller)."""
    rows = study.monitors[
        (study.monitors["role"] == "weight_grad") & (study.monitors["metric"] == "l2") & (study.monitors["value"] > 0)
    ]
    if rows.empty:
        return pd.DataFrame(columns=[*IDENTITY, "gradient_ratio"])
    ends = rows.groupby([*IDENTITY, "step"], sort=False)["value"].agg(["first", "last"])
    ratio = (ends["first"] / ends["last"]).map(lambda r: max(r, 1 / r)).groupby(IDENTITY, sort=False).max()
    return ratio.rename("gradient_ratio").reset_index()


def _beyond(runs: pd.DataFrame, name: str) -> pd.DataFrame:
    """Return a flag for each row of ``runs`` whose column ``name`` is beyond that metric's limit."""
    limit = METRICS[name].bound
    rows = runs.loc[[limit.crossed("", value) for value in runs[name]]].rename(columns={name: "value"})
    return rows.assign(what=flag_name(METRICS[name]), layer="", limit=limit.value)


def flag_name(metric: Metric, role: str = "") -> str:
    """Return the text of a flag, such as ``sqnr_db of inputs (dB)``; without ``role`` the metric is of a whole run."""
    return f"{metric.name}{f' of {TENSORS[role]}' if role else ''} ({metric.unit})"
