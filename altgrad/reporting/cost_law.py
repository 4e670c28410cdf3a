"""The cost of a format against parameters and tokens: a law of the baseline's loss, and forms of the cost.

A law of the baseline's loss, ``L(N, D) = E + A / N**a + B / D**b`` (J. Hoffmann et al., arXiv:2203.15556) of parameters
N and tokens D, turns a cost into *effective parameters* (T. Kumar et al., arXiv:2411.04330): a format whose runs have
the loss that the law gives a model of r N parameters has r of the baseline's. N counts all parameters, embeddings too.

Such a cost does not depend on D. `forms` has its rivals, all of them ``k D**e / N**d``. The form is chosen by the error
of costs that it predicts for a size that it was not fitted to.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from altgrad.reporting.markdown import plural

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

    def fittable(self) -> "Sizes":
        """Return these sizes without the formats whose completed runs lack what a law needs."""

        def enough(costs: np.ndarray) -> bool:
            known = np.isfinite(mean(costs))
            names = [name for name, here in zip(self.models, known, strict=True) if here]
            return not Sizes(names, self.parameters[known], self.tokens[known], self.losses, {}).lacks()

        return self._replace(costs={entry: costs for entry, costs in self.costs.items() if enough(costs)})


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
