"""Every pair of several things that are compared with each other, the best of which was picked because it is."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from altgrad.reporting.moderation import fitted
from altgrad.reporting.multiplicity import holm
from altgrad.reporting.runs import Contrast, Runs
from altgrad.reporting.statistics import Difference

T = TypeVar("T")
Pairs = dict[tuple[T, T], Difference]


def from_the_lowest(values: Mapping[T, np.ndarray]) -> list[T]:
    """Return the names by their mean over the seeds that all have a value of; over each one's own if they share none.

    One that lost a seed in which all are high would else look lower than it is.
    """
    table = np.array(list(values.values()))
    shared = np.isfinite(table).all(axis=0)
    means = table[:, shared].mean(axis=1) if shared.any() else np.nanmean(table, axis=1)
    names = list(values)
    return [names[place] for place in np.argsort(means, kind="stable")]


def each_pair(
    ordered: Sequence[T], contrast: Callable[[T, T], Contrast], runs: Runs
) -> tuple[Pairs[T], dict[tuple[T, T], float]]:
    """Return the difference of each pair and its p-value, adjusted by Holm's step-down over all of them.

    A pair is there in the order of ``ordered``, unless its two are equal on every seed or share none. The spread is
    found from the differences themselves; where none has one, no p-value is there.
    """
    rows, found = [], {}
    for a, b in itertools.combinations(ordered, 2):
        entering = contrast(a, b)
        difference = runs.difference(entering)
        if difference is not None and not difference.is_zero:
            rows.append(runs.row(entering))
            found[a, b] = difference
    spread = fitted(list(found.values()), np.array(rows))
    return found, holm({pair: spread.p_value(of) for pair, of in found.items()}) if spread else {}
