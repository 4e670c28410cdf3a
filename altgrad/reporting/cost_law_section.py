"""The part of a report or a page on the cost of formats by size and tokens: a figure, and tables of costs and laws."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from altgrad.reporting.cost_law import (
    LAW,
    RESAMPLES,
    SEEDS,
    Cost,
    Law,
    Resamples,
    Shares,
    Sizes,
    effective,
    ends,
    fit,
    fit_cost,
    forms,
    left_out_errors,
    mean,
    resampled,
)
from altgrad.reporting.figures import drawing, legend, looks, save, tiles
from altgrad.reporting.load import PrimaryMetric
from altgrad.reporting.markdown import (
    NONE,
    Block,
    Column,
    Picture,
    Table,
    integer,
    listed,
    number,
    significant,
    words,
)
from altgrad.reporting.statistics import interval


def described(
    sizes: Sizes, metric: PrimaryMetric, baseline: str, folder: Path, name: str
) -> list[Block | None]:
    """Draw the costs into ``folder``; return the figure, the costs, and the laws' tables or what they need.

    Args:
        sizes: what was measured.
        metric: what it is, the validation loss or another.
        baseline: the grid entry that costs are measured against.
        folder: of the figure.
        name: of the figure.
    """
    text = sizes.lacks() if metric.in_nats else f"Effective parameters are of the loss, not of {metric.full}."
    blocks: list[Block | None] = [text]
    costs: dict[str, Cost] = {}
    enough = sizes.fittable()
    if not text and not enough.costs:
        blocks = [f"No {metric.entry} completed in enough models for a law of its cost."]
    elif not text:
        law = fit(sizes, mean(sizes.losses))
        resamples, errors = resampled(sizes, law), left_out_errors(enough, law)
        form = next(iter(errors))
        costs = {entry: fit_cost(sizes, mean(values), forms(law)[form]) for entry, values in enough.costs.items()}
        left = [entry for entry in sizes.costs if entry not in costs]
        blocks = [
            forms_table(metric.entry, errors), costs_table(metric.entry, sizes, costs, form, resamples),
            f"Not fitted, since too few models completed: {listed(left)}." if left else None,
            f"Effective parameters are not known: no law {LAW} fits the loss of `{baseline}`." if law is None else
            shares_table(metric.entry, baseline, sizes, law, effective(enough, law, resamples)),
        ]  # fmt: skip
    with drawing():
        save(cost_figure(metric, sizes, costs), folder, name)
    caption = (
        f"{metric.labelled(f'Final {metric.full} minus that of `{baseline}`')}, paired by seed, with its 95 % "
        f"interval, a colour per size. Lines {'are the best form of the cost' if costs else 'join means'}."
    )
    picture = Picture(name, f"Cost of each {metric.entry} by tokens per parameter", caption)
    return [picture, measured_table(metric, baseline, sizes), *blocks]


def measured_table(metric: PrimaryMetric, baseline: str, sizes: Sizes) -> Table:
    """Return a row per model: parameters, tokens, the baseline's metric, and the mean cost of each format."""
    rows = []
    for i, (name, n, d) in enumerate(zip(sizes.models, sizes.parameters, sizes.tokens, strict=True)):
        costs = [mean(of_format)[i] for of_format in sizes.costs.values()]
        size = [integer(n), significant(d / 1e6), significant(d / n, 2), number(mean(sizes.losses)[i], 4)]
        rows.append([name, *size, *(number(cost, 4) for cost in costs)])
    note = f"Of each {metric.entry}: its {metric.full} minus that of {baseline}, paired by seed, mean over seeds."
    note += f" {NONE}: no completed run." * any(NONE in row for row in rows)
    heads = ["parameters", "M tokens", "tokens per parameter", f"{metric.noun} of {baseline}", *sizes.costs]
    return Table([words("model"), *map(Column, heads)], rows, note)


def forms_table(noun: str, errors: Mapping[str, Mapping[str, float]]) -> Table:
    """Return a row per format: the error of each form of its cost, the best form first."""
    rows = [
        [f"**{entry}**", *(significant(of_form[entry], 2) for of_form in errors.values())]
        for entry in next(iter(errors.values()))
    ]
    note = (
        "Root mean square error, in nats per token, of the costs of a size that are predicted from the other sizes. A "
        "cost is k D^e / N^d: without exponents (constant), with d = e (tokens per parameter), with any two "
        "(arXiv:2505.14302), and, if a law of the loss fits, with its exponents a and b for d and e (arXiv:2501.02423) "
        "or with its a alone (effective parameters, arXiv:2411.04330). The first form has the least errors, taken as "
        "shares of each format's costs."
    )
    return Table([words(noun), *map(Column, errors)], rows, note)


def costs_table(noun: str, sizes: Sizes, costs: Mapping[str, Cost], form: str, resamples: Resamples) -> Table:
    """Return a row per format: the factor and the exponents of its cost."""
    rows, of_two = [], partial(number, digits=2)
    for entry, cost in costs.items():
        again = [fit_cost(sizes, mean(sizes.costs[entry][:, seeds]), forms(law)[form]) for seeds, law in resamples]
        row = [f"**{entry}**"]
        for name, text in (("factor", significant), ("d", of_two), ("e", of_two)):
            low, high = ends([getattr(one, name) for one in again])
            row.append(text(getattr(cost, name)) + f" ({text(low)} to {text(high)})" * (low == low))
        rows.append(row)
    note = f"The form with the least errors, {form}: k is the cost at N = 1 and D = 1, in millions; 95 % intervals."
    head = [Column("k"), Column("d"), Column("e")]
    return Table([words(noun), *head], rows, note)


def shares_table(noun: str, baseline: str, sizes: Sizes, law: Law, shares: Shares) -> Table:
    """Return a row per format: its effective parameters in per cent of the baseline's, with their interval."""
    rows = [
        [f"**{entry}**", number(100 * share, 1), NONE if low != low else f"{100 * low:.1f} to {100 * high:.1f}"]
        for entry, (share, low, high) in shares.items()
    ]
    note = (
        f"Least squares over {len(sizes.models)} models: the loss of `{baseline}` is {law.least:.4g} + "
        f"{significant(law.size)} / N^{law.a:.3f} + {significant(law.length)} / D^{law.b:.3f}, to within "
        f"{significant(law.residual, 2)} (rms), of all parameters N and tokens D. A format has r N for N, at any D. "
        f"Intervals, from {SEEDS} seeds up: {RESAMPLES} resamples of {sizes.losses.shape[1]}; few make them too narrow."
    )
    head = f"effective parameters, % of {baseline}'s"
    return Table([words(noun), Column(head), words("95 % interval")], rows, note)


def cost_figure(metric: PrimaryMetric, sizes: Sizes, fitted: Mapping[str, Cost]) -> Figure:
    """Return the figure, a panel per format: mean cost with its interval by tokens per parameter, a mark per model.

    A line of each size is the fitted cost, from its first completed model to its last, or joins the means where none is
    fitted. Where no two models have the same size, one line joins all.
    """
    alike, rank = np.unique(sizes.parameters, return_inverse=True)
    apart = len(alike) == len(rank)
    names = [sizes.models[i] for i in np.argsort(rank)] if apart else [f"{significant(n / 1e6)} M" for n in alike]
    styles, x = looks(names), sizes.tokens / sizes.parameters
    lines = [np.argsort(x)] if apart else [np.flatnonzero(rank == size) for size in range(len(alike))]
    labels = "tokens per parameter", metric.labelled(metric.delta)
    figure, shown = tiles([*sizes.costs], 2.2, *labels, sharey=False)
    for axes, (entry, costs) in zip(shown, sizes.costs.items(), strict=True):
        axes.axhline(0, color="black", linewidth=0.9)
        points = np.array([interval(of_model) for of_model in costs])
        for models in (line[np.isfinite(points[line, 0])] for line in lines):
            if not len(models):
                continue
            n, d, y = sizes.parameters[models], sizes.tokens[models], points[models, 0]
            if entry in fitted:
                n, d = (n, d) if apart else (n[:1], np.geomspace(d.min(), d.max(), 40))
                y = fitted[entry].at(n, d)
            color = "grey" if apart else styles[names[rank[models[0]]]].color
            axes.plot(d / n, y, color=color, linewidth=1.2)
        for i, (middle, low, high) in enumerate(points):
            style = styles[names[rank[i]]]
            axes.plot([x[i], x[i]], [low, high], color=style.color, linewidth=1)
            axes.plot(x[i], middle, **style.line(linestyle="none", markersize=5))
        axes.set_xscale("log")
        axes.xaxis.set(major_locator=LogLocator(numticks=5), minor_locator=NullLocator(), major_formatter="{x:g}")
    legend(figure, styles, names, linestyle="none")
    return figure
