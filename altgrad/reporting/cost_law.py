"""The cost of a format against parameters and tokens: a law of the baseline's loss, and forms of the cost.

A law of the baseline's loss, ``L(N, D) = E + A / N**a + B / D**b`` (J. Hoffmann et al., arXiv:2203.15556) of parameters
N and tokens D, turns a cost into *effective parameters* (T. Kumar et al., arXiv:2411.04330): a format whose runs have
the loss that the law gives a model of r N parameters has r of the baseline's. N counts all parameters, embeddings too.

Such a cost does not depend on D. `forms` has its rivals, all of them ``k D**e / N**d``. The form is chosen by the error
of costs that it predicts for a size that it was not fitted to.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from altgrad.reporting.figures import drawing, legend, looks, save, tiles
from altgrad.reporting.load import PrimaryMetric
from altgrad.reporting.markdown import NONE, Block, Column, Picture, Table, integer, number, plural, significant, words
from altgrad.reporting.statistics import interval

POINTS, APART = 6, 3  # models that a law of five parameters needs; different sizes, lengths and tokens per parameter
EXPONENTS = np.linspace(0.04, 2, 50)  # where the exponents of the law are looked for
RESAMPLES, SEEDS = 200, 3  # of an interval, and the fewest seeds of one
LAW = "E + A / N^a + B / D^b"
EFFECTIVE = "effective parameters"  # the form of a cost that does not depend on the tokens
COST_EXPONENTS = np.linspace(-1, 2, 61)  # where the exponents of a cost are looked for
Resamples = Sequence[tuple[np.ndarray, "Law | None"]]
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
    n, d = tuple(sizes.parameters / sizes.parameters[0]), tuple(sizes.tokens / sizes.tokens.min())
    around, width = [EXPONENTS, EXPONENTS], EXPONENTS[1] - EXPONENTS[0]
    for _ in range(3):
        a, b, columns, inverse = _columns(n, d, *map(tuple, around))
        solved = inverse @ losses
        errors = (((columns @ solved[..., None])[..., 0] - losses) ** 2).mean(axis=1)
        errors[(solved[:, 1:] <= 0).any(axis=1)] = np.inf
        best = int(errors.argmin())
        if not np.isfinite(errors[best]) or {a[best], b[best]} & {EXPONENTS[0], EXPONENTS[-1]}:
            return None
        around = [np.linspace(centre - width, centre + width, 11) for centre in (a[best], b[best])]
        width /= 5
    least, size, length = solved[best] * [1, sizes.parameters[0] ** a[best], sizes.tokens.min() ** b[best]]
    return Law(least, size, a[best], length, b[best], float(np.sqrt(errors[best])))


@lru_cache(maxsize=8)  # all resamples of the seeds begin with the same grid, whose inverse takes most of the time
def _columns(n: tuple[float, ...], d: tuple[float, ...], *around: tuple[float, ...]) -> tuple[np.ndarray, ...]:
    """Return the pairs of exponents, a and b, with the columns 1, n^-a and d^-b of each pair and their inverse."""
    a, b = (grid.ravel() for grid in np.meshgrid(*around))
    columns = np.stack([np.ones((len(a), len(n))), n ** -a[:, None], d ** -b[:, None]], axis=-1)
    return a, b, columns, np.linalg.pinv(columns)


class Cost(NamedTuple):
    """A format's cost in nats per token: ``factor * D**e / N**d`` of N million parameters and D million tokens.

    Each is a number, or an array that broadcasts with parameters and tokens.
    """

    factor: Any
    d: Any
    e: Any

    def at(self, parameters: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return the costs of models with these parameters and tokens."""
        return np.asarray(self.factor * (tokens / 1e6) ** self.e * (parameters / 1e6) ** -self.d)


Exponents = tuple[np.ndarray, np.ndarray]  # pairs d, e of a `Cost`, (pairs,) each


def forms(law: Law | None) -> dict[str, Exponents]:
    """Return the exponents that each form of a cost allows, by the form's name, from those of the baseline's law.

    Effective parameters are those of Kumar et al.; X. Sun et al. (arXiv:2501.02423) have the law's own exponents, and
    M. Chen et al. (arXiv:2505.14302) any two. Without a law its two forms are left out.
    """
    free = [grid.ravel() for grid in np.meshgrid(COST_EXPONENTS, COST_EXPONENTS)]
    of_law = {} if law is None else {
        EFFECTIVE: (np.array([law.a]), np.zeros(1)), "law's exponents": (np.array([law.a]), np.array([law.b])),
    }  # fmt: skip
    return {
        "constant": (np.zeros(1), np.zeros(1)), **of_law,
        "tokens per parameter": (COST_EXPONENTS, COST_EXPONENTS), "any exponents": (free[0], free[1]),
    }  # fmt: skip


def fit_cost(sizes: Sizes, costs: np.ndarray, allowed: Exponents) -> Cost:
    """Return the cost with ``allowed`` exponents and the least squared error of ``costs`` (models,).

    A NaN among the costs is left out; the cost is NaN where there is nothing else.
    """
    known = np.isfinite(costs)
    if not known.any():
        return Cost(np.nan, np.nan, np.nan)
    d, e = (values[:, None] for values in allowed)
    shapes = Cost(1, d, e).at(sizes.parameters[known], sizes.tokens[known])
    factors = shapes @ costs[known] / (shapes**2).sum(axis=1)
    best = int(((factors[:, None] * shapes - costs[known]) ** 2).sum(axis=1).argmin())
    return Cost(float(factors[best]), float(allowed[0][best]), float(allowed[1][best]))


def left_out_error(sizes: Sizes, costs: np.ndarray, allowed: Exponents) -> float:
    """Return the root mean square error of the costs (models,) of each size, predicted from those of the others."""
    errors = []
    for size in np.unique(sizes.parameters):
        out = sizes.parameters == size
        predicted = fit_cost(sizes, np.where(out, np.nan, costs), allowed).at(sizes.parameters, sizes.tokens)
        errors.append((predicted - costs)[out])
    return _rms(np.concatenate(errors))


def _rms(values: np.ndarray) -> float:
    """Return the root mean square of ``values`` without NaN; NaN where there is nothing else."""
    known = values[np.isfinite(values)]
    return float(np.sqrt((known**2).mean())) if known.size else np.nan


def left_out_errors(sizes: Sizes, law: Law | None) -> dict[str, dict[str, float]]:
    """Return `left_out_error` by form and format; the first form is the one whose errors are least.

    A format's errors count as shares of the root mean square of its costs, so that none decides by its size alone. A
    format without costs, or whose costs are all 0, has no say.
    """
    costs = {entry: mean(of_format) for entry, of_format in sizes.costs.items()}
    found = {
        form: {entry: left_out_error(sizes, cost, allowed) for entry, cost in costs.items()}
        for form, allowed in forms(law).items()
    }

    def of_all(form: str) -> float:
        shares = ((error, _rms(costs[entry])) for entry, error in found[form].items() if np.isfinite(error))
        return sum((error / size) ** 2 for error, size in shares if size > 0)

    return {form: found[form] for form in sorted(found, key=of_all)}


def mean(values: np.ndarray) -> np.ndarray:
    """Return the mean over seeds, (models,), of ``values`` (models, seeds); NaN is left out."""
    return pd.DataFrame(values).mean(axis=1).to_numpy()


def resampled(sizes: Sizes, law: Law | None) -> Resamples:
    """Return resamples of the seeds, each with the law that is fitted to it, or without one where ``law`` is None.

    There are none with fewer than `SEEDS` seeds, and none if more than one resample in twenty has no law.
    """
    chance, count = np.random.default_rng(0), sizes.losses.shape[1]
    drawn = np.atleast_2d(chance.integers(0, count, (RESAMPLES if count >= SEEDS else 0, count)))
    if law is None:
        return [(seeds, None) for seeds in drawn]
    fitted = [(seeds, fit(sizes, mean(sizes.losses[:, seeds]))) for seeds in drawn]
    laws = [(seeds, again) for seeds, again in fitted if again is not None]
    return laws if len(laws) >= 0.95 * len(drawn) else []


def ends(values: list[float]) -> tuple[float, float]:
    """Return the ends of the 95 % interval of what resamples have; NaN without any, or if more than 5 % are NaN."""
    finite = [value for value in values if np.isfinite(value)]
    if not finite or len(finite) < 0.95 * len(values):
        return np.nan, np.nan
    low, high = np.quantile(finite, [0.025, 0.975])
    return float(low), float(high)


def effective(sizes: Sizes, law: Law, resamples: Resamples) -> Shares:
    """Return by format its effective parameters as a share of the baseline's, and the ends of the 95 % interval."""
    return {
        entry: (
            law.effective(sizes.parameters, mean(costs)),
            *ends([again.effective(sizes.parameters, mean(costs[:, seeds])) for seeds, again in resamples if again]),
        )
        for entry, costs in sizes.costs.items()
    }


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
    if not text:
        law = fit(sizes, mean(sizes.losses))
        resamples, errors = resampled(sizes, law), left_out_errors(sizes, law)
        form = next(iter(errors))
        costs = {entry: fit_cost(sizes, mean(values), forms(law)[form]) for entry, values in sizes.costs.items()}
        blocks = [
            forms_table(metric.entry, errors), costs_table(metric.entry, sizes, costs, form, resamples),
            f"Effective parameters are not known: no law {LAW} fits the loss of `{baseline}`." if law is None else
            shares_table(metric.entry, baseline, sizes, law, effective(sizes, law, resamples)),
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
        for i, (middle, *ends) in enumerate(points):
            style = styles[names[rank[i]]]
            axes.plot([x[i], x[i]], ends, color=style.color, linewidth=1)
            axes.plot(x[i], middle, **style.line(linestyle="none", markersize=5))
        axes.set_xscale("log")
        axes.xaxis.set(major_locator=LogLocator(numticks=5), minor_locator=NullLocator(), major_formatter="{x:g}")
    legend(figure, styles, names, linestyle="none")
    return figure
