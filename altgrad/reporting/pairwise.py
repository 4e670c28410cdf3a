"""Every pair of several things that are compared with each other, the best of which was picked because it is."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from altgrad.reporting.moderation import fitted
from altgrad.reporting.multiplicity import holm
from altgrad.reporting.runs import Contrast, Runs
from altgrad.reporting.statistics import Difference

T = TypeVar("T")
Pairs = dict[tuple[T, T], Difference]


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
