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
    """Return the adjusted p-value of each question: the smallest joint level at which it is answered.

    Args:
        p_values: of every question, controls among them.
        controls: by primary question, the questions that are asked once it is answered. A question is the control
            of one other at most. All that are nobody's control are primary.
    """
    controls = controls or {}
    names = list(p_values)
    place = {name: i for i, name in enumerate(names)}
    dependent = {place[one] for own in controls.values() for one in own}
    primary = [i for i in range(len(names)) if i not in dependent]
    weights, passes = np.zeros(len(names)), np.zeros((len(names), len(names)))
    weights[primary] = 1 / max(1, len(primary))
    for i, name in enumerate(names):
        heirs = [place[one] for one in controls.get(name, ())] or [j for j in primary if j != i]
        if heirs:
            passes[i, heirs] = 1 / len(heirs)
    return dict(zip(names, _answered(np.array([p_values[name] for name in names]), weights, passes), strict=True))


def holm(p_values: Mapping[Question, float]) -> dict[Question, float]:
    """Return p-values adjusted by Holm's step-down: `adjusted` without controls."""
    return adjusted(p_values)


def _answered(p: np.ndarray, weights: np.ndarray, passes: np.ndarray) -> np.ndarray:
    """Return the adjusted p-values of algorithm 2 of Bretz et al. 2009; at most 1."""
    found, level = np.ones(len(p)), 0.0
    open_ = np.ones(len(p), dtype=bool)
    weights, passes = weights.copy(), passes.copy()
    while open_.any():
        needed = np.where(open_ & (weights > 0), p / np.where(weights > 0, weights, 1), np.inf)
        j = int(needed.argmin())
        level = max(level, float(needed[j]))
        if level >= 1:
            break
        found[j] = level
        open_[j] = False
        weights = weights + weights[j] * passes[j]
        there_and_back = passes[:, j] * passes[j]
        through = passes + np.outer(passes[:, j], passes[j])
        left = 1 - there_and_back
        passes = np.where(left[:, None] > 1e-12, through / np.where(left > 1e-12, left, 1)[:, None], 0.0)
        weights[j] = 0
        passes[j], passes[:, j] = 0, 0
        np.fill_diagonal(passes, 0)
    return found
