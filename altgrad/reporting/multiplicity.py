"""How sure a sentence is that was picked from many: p-values adjusted for all the questions of a report.

A report asks its *primary* questions side by side. Of m of them each begins with the m-th part of the 5 %
that all may err together. A question that is answered hands its part on: a gain first to its own controls
(which are asked of nothing else), everything else to the primary questions still open. Without controls
this is Holm's step-down (S. Holm, Scandinavian Journal of Statistics 6, 1979). With them it is the graphical
procedure of F. Bretz, W. Maurer, W. Brannath and M. Posch, "A graphical approach to sequentially rejective
multiple test procedures", Statistics in Medicine 28, 2009, which keeps the chance of any false answer at
5 % whichever of the questions have no effect behind them and however their data depend on each other.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

import numpy as np

Question = TypeVar("Question", bound=Hashable)


def adjusted(
    p_values: Mapping[Question, float], controls: Mapping[Question, Sequence[Question]] | None = None
) -> dict[Question, float]:
    """Return the adjusted p-value of each question: the smallest joint level at which it is answered; at most 1.

    Args:
        p_values: of every question, controls among them.
        controls: by primary question, the questions that are asked once it is answered. A question is the control
            of one other at most. All that are nobody's control are primary.
    """
    names, controls = list(p_values), controls or {}
    place = {name: i for i, name in enumerate(names)}
    dependent = {one for own in controls.values() for one in own}
    primary = [name for name in names if name not in dependent]
    p, weights = np.array(list(p_values.values())), np.array([name not in dependent for name in names], float)
    weights /= max(1, len(primary))
    passes = np.zeros((len(names), len(names)))
    for name in names:
        heirs = controls.get(name) or [one for one in primary if one != name]
        passes[place[name], [place[heir] for heir in heirs]] = 1 / max(1, len(heirs))
    found, level, still_open = dict.fromkeys(names, 1.0), 0.0, np.ones(len(names), bool)
    while still_open.any():  # algorithm 2 of Bretz et al. 2009
        needed = np.where(still_open & (weights > 0), p / np.where(weights > 0, weights, 1), np.inf)
        j = int(needed.argmin())
        level = max(level, float(needed[j]))
        if level >= 1:
            break
        found[names[j]], still_open[j] = level, False
        weights = weights + weights[j] * passes[j]
        through, left = passes + np.outer(passes[:, j], passes[j]), 1 - passes[:, j] * passes[j]
        passes = np.where(left[:, None] > 1e-12, through / np.where(left > 1e-12, left, 1)[:, None], 0.0)
        weights[j] = passes[j] = passes[:, j] = 0
        np.fill_diagonal(passes, 0)
    return found
