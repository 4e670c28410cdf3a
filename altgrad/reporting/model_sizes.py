"""A grid of several models: the results of each, and the cost of a format against the tokens per parameter.

A law of the baseline's loss, ``L(N, D) = E + A / N**a + B / D**b`` (J. Hoffmann et al., arXiv:2203.15556) of parameters
N and tokens D, turns a cost into *effective parameters* (T. Kumar et al., arXiv:2411.04330): a format whose runs have
the loss that the law gives a model of r N parameters has r of the baseline's. N counts all parameters, embeddings too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from altgrad.reporting import optimizer_roles as roles
from altgrad.reporting.compare import Comparison
from altgrad.reporting.figures import drawing, legend, looks, panels, save
from altgrad.reporting.load import COMPLETED, Study
from altgrad.reporting.markdown import NONE, Block, Column, Picture, Table, number, plural, significant, words
from altgrad.reporting.statistics import interval
from altgrad.reporting.summary import certainty, costs_table, gains_table, headline
from altgrad.reporting.tables import results_table

FIGURE = "cost_by_model"
POINTS, APART = 6, 3  # models that a law of five parameters needs; different sizes, lengths and tokens per parameter
EXPONENTS = np.linspace(0.04, 2, 50)  # where the exponents of the law are looked for
RESAMPLES, SEEDS = 200, 3  # of an interval, and the fewest seeds of one
Sections = dict[str, list[Block | None]]
Shares = Mapping[str, tuple[float, float, float]]


class Sizes(NamedTuple):
    """The runs of the baseline optimizer in models where the baseline completed, the smallest model first.

    Attributes:
        models: names.
        parameters, tokens: float64, (models,).
        losses: the baseline's final primary metric, float64, (models, seeds); NaN for a run that did not complete.
        costs: by quantized format, its metric minus the baseline's with the same seed; likewise.
    """

    models: list[str]
    parameters: np.ndarray
    tokens: np.ndarray
    losses: np.ndarray
    costs: dict[str, np.ndarray]

    def lacks(self) -> str:
        """Return a sentence that says what a law needs and this grid lacks; an empty text if it has enough."""
        apart = [len(np.unique(values)) for values in (self.parameters, self.tokens, self.tokens / self.parameters)]
        text = (
            f"Effective parameters need a law of five parameters, so at least {POINTS} models with {APART} sizes, "
            f"{APART} numbers of tokens and {APART} of tokens per parameter; completed are "
            f"{plural(len(self.models), 'model')} with {apart[0]}, {apart[1]} and {apart[2]}."
        )
        return text if len(self.models) < POINTS or min(apart) < APART else ""


def sizes_of(studies: Mapping[str, Study], comparisons: Mapping[str, Comparison]) -> Sizes:
    """Return the measured sizes; each run is at the best learning rate of its model."""
    rows = []
    for name, study in studies.items():
        runs, best, arm = comparisons[name].runs, comparisons[name].best_runs, str(comparisons[name].reference)
        base = best.get((str(study.baseline), arm))
        if base is not None and runs.completed(base):
            cells = study.of_status(COMPLETED)
            cells = cells[(cells["format"] == base[0]) & (cells["optimizer"] == arm) & (cells["lr_scale"] == base[2])]
            quantized = [entry for entry in study.formats if entry != base[0] and roles.is_quantized(study, entry)]
            costs = {entry: runs.by_seed({best[entry, arm]: 1, base: -1}) for entry in quantized}
            rows.append((cells["parameters"].max(), cells["tokens"].max(), name, runs.by_seed({base: 1}), costs))
    rows.sort(key=lambda row: row[:2])
    parameters, tokens, losses = (np.array([row[i] for row in rows]) for i in (0, 1, 3))
    by_format = {entry: np.array([row[4][entry] for row in rows]) for entry in (rows[0][4] if rows else ())}
    return Sizes([row[2] for row in rows], parameters, tokens, losses, by_format)


class Law(NamedTuple):
    """``least + size / N**a + length / D**b`` (nats per token), and the root mean square of what it leaves."""

    least: float
    size: float
    a: float
    length: float
    b: float
    residual: float

    def effective(self, parameters: np.ndarray, costs: np.ndarray) -> float:
        """Return r, by least squares: ``size / (r N)**a`` is ``size / N**a`` plus the cost; NaN if no r has it.

        ``parameters``, ``costs``: (models,); a model whose cost is NaN is left out.
        """
        known = np.isfinite(costs)
        share = self.size * parameters[known] ** -self.a
        factor = 1 + (share @ costs[known]) / (share @ share) if known.any() else np.nan  # r ** -a
        return float(factor ** (-1 / self.a)) if factor > 0 else np.nan


def fit(sizes: Sizes, losses: np.ndarray) -> Law | None:
    """Return the law with the least squared error of ``losses`` (models,); ``None`` unless loss falls in N and in D.

    For each pair of exponents, the other three are a linear least-squares problem. The pair is the best of a grid
    (`EXPONENTS` squared), which is then made finer around it twice. A pair at the end of `EXPONENTS` is no minimum.
    """
    n, d = sizes.parameters / sizes.parameters[0], sizes.tokens / sizes.tokens.min()
    around, width = [EXPONENTS, EXPONENTS], EXPONENTS[1] - EXPONENTS[0]
    for _ in range(3):
        a, b = (grid.ravel() for grid in np.meshgrid(*around))
        columns = np.stack([np.ones((len(a), len(n))), n ** -a[:, None], d ** -b[:, None]], axis=-1)
        solved = np.linalg.pinv(columns) @ losses
        errors = (((columns @ solved[..., None])[..., 0] - losses) ** 2).mean(axis=1)
        errors[(solved[:, 1:] <= 0).any(axis=1)] = np.inf
        best = int(errors.argmin())
        if not np.isfinite(errors[best]) or {a[best], b[best]} & {EXPONENTS[0], EXPONENTS[-1]}:
            return None
        around = [np.linspace(centre - width, centre + width, 11) for centre in (a[best], b[best])]
        width /= 5
    least, size, length = solved[best] * [1, sizes.parameters[0] ** a[best], sizes.tokens.min() ** b[best]]
    return Law(least, size, a[best], length, b[best], float(np.sqrt(errors[best])))


def mean(values: np.ndarray) -> np.ndarray:
    """Return the mean over seeds, (models,), of ``values`` (models, seeds); NaN is left out."""
    return pd.DataFrame(values).mean(axis=1).to_numpy()


def effective(sizes: Sizes, law: Law) -> Shares:
    """Return by format its effective parameters as a share of the baseline's, and the ends of the 95 % interval.

    The law is fitted anew to each resample of the seeds. The ends are NaN with fewer than `SEEDS` seeds, and if more
    than one resample in twenty has no law.
    """
    chance, count = np.random.default_rng(0), sizes.losses.shape[1]
    drawn = [chance.integers(0, count, count) for _ in range(RESAMPLES if count >= SEEDS else 0)]
    laws = [(seeds, again) for seeds in drawn if (again := fit(sizes, mean(sizes.losses[:, seeds]))) is not None]
    found = {}
    for entry, costs in sizes.costs.items():
        shares = np.array([again.effective(sizes.parameters, mean(costs[:, seeds])) for seeds, again in laws])
        shares = shares[np.isfinite(shares)]
        enough = len(shares) >= max(1, 0.95 * len(drawn))
        low, high = np.quantile(shares, [0.025, 0.975]) if enough else (np.nan, np.nan)
        found[entry] = law.effective(sizes.parameters, mean(costs)), float(low), float(high)
    return found


def sections(studies: Mapping[str, Study], comparisons: Mapping[str, Comparison], folder: Path) -> Sections:
    """Return the report's sections on the models of a grid, by title; none for a grid of one model.

    The first has the figure, which is drawn into ``folder``, and the effective parameters or a sentence on what they
    need. One follows for each model but the first, whose results stand elsewhere.
    """
    found: Sections = {}
    for name, study in [*studies.items()][1:]:
        of = study, comparisons[name]
        tables = costs_table(*of), gains_table(*of), results_table(*of)
        found[f"Model {name}"] = [headline(*of), *tables, certainty(*of, chance=None)]
    sizes, study = sizes_of(studies, comparisons), next(iter(studies.values()))
    if not (found and sizes.costs):
        return found
    metric, law = study.primary, None
    text = sizes.lacks() if metric.in_nats else f"Effective parameters are of the loss, not of {metric.full}."
    if not text:
        law = fit(sizes, mean(sizes.losses))
        text = "" if law else "No law fits whose loss falls with parameters and tokens: no effective parameters."
    shares = effective(sizes, law) if law else {}
    with drawing():
        save(cost_figure(study, sizes, law, shares), folder, FIGURE)
    caption = (
        f"{metric.labelled(f'Final {metric.full} minus that of `{study.baseline}`')}, paired by seed, with its 95 % "
        f"interval; larger marks are larger models. Lines {'are the law' if law else 'join means'}."
    )
    picture = Picture(FIGURE, f"Cost of each {metric.entry} by tokens per parameter, a mark per model", caption)
    return {"Cost by model": [picture, shares_table(study, sizes, law, shares) if law else text], **found}


def shares_table(study: Study, sizes: Sizes, law: Law, shares: Shares) -> Table:
    """Return a row per format: its effective parameters in per cent of the baseline's, with their interval."""
    rows = [
        [f"**{entry}**", number(100 * share, 1), NONE if low != low else f"{100 * low:.1f} to {100 * high:.1f}"]
        for entry, (share, low, high) in shares.items()
    ]
    note = (
        f"Least squares over {len(sizes.models)} models: the loss of `{study.baseline}` is {law.least:.4g} + "
        f"{significant(law.size)} / N^{law.a:.3f} + {significant(law.length)} / D^{law.b:.3f}, to within "
        f"{significant(law.residual, 2)} (rms), of all parameters N and tokens D. A format has r N for N, at any D. "
        f"Intervals, from {SEEDS} seeds up: {RESAMPLES} resamples of {sizes.losses.shape[1]}; few make them too narrow."
    )
    head = f"effective parameters, % of {study.baseline}'s"
    return Table([words(study.primary.entry), Column(head), words("95 % interval")], rows, note)


def cost_figure(study: Study, sizes: Sizes, law: Law | None, shares: Shares) -> Figure:
    """Return the figure: mean cost with its interval by tokens per parameter, a mark per format and model.

    Lines join the models of one size; where no two have the same size, all models.
    """
    styles, x = looks(study.formats), sizes.tokens / sizes.parameters
    alike, rank = np.unique(sizes.parameters, return_inverse=True)
    lines = [np.flatnonzero(rank == size) for size in range(len(alike))] if len(alike) < len(x) else [np.argsort(x)]
    figure, ((axes,),) = panels(1, 1, 3.6)
    axes.axhline(0, color="black", linewidth=0.9)
    for entry, costs in sizes.costs.items():
        points = np.array([interval(of_model) for of_model in costs])
        of_law = law and law.size * sizes.parameters**-law.a * (shares[entry][0] ** -law.a - 1)
        line = points[:, 0] if of_law is None else of_law
        for models in lines:
            axes.plot(x[models], line[models], **styles[entry].line(marker="", linewidth=1.2))
        for i, (middle, *ends) in enumerate(points):
            axes.plot([x[i], x[i]], ends, color=styles[entry].color, linewidth=1)
            axes.plot(x[i], middle, **styles[entry].line(linestyle="none", markersize=4 + 8 * rank[i] / len(alike)))
    for place in np.unique(x):
        names = [name for name, at in zip(sizes.models, x, strict=True) if at == place]
        axes.text(place, 1.01, ", ".join(names), transform=axes.get_xaxis_transform(), rotation=25, ha="center")
    axes.set(xscale="log", xlabel="tokens per parameter", ylabel=study.primary.labelled(study.primary.delta))
    axes.xaxis.set(major_locator=LogLocator(subs=(1, 2, 5)), minor_locator=NullLocator(), major_formatter="{x:g}")
    legend(figure, styles, list(sizes.costs))
    return figure
