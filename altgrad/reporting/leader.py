"""Which entry gains most from an arm, and from which others that cannot be told apart.

The leader is picked because it leads, so every pair of entries counts as a question: the p-values of all differences
between two gains are adjusted together by Holm's step-down. A difference of two gains holds four runs where a gain
holds two; its spread is found from such differences themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from altgrad.reporting import roles
from altgrad.reporting.claims import CLAIM_SEEDS, FIRM, Claim
from altgrad.reporting.compare import Comparison
from altgrad.reporting.load import Study
from altgrad.reporting.pairwise import each_pair, from_the_lowest
from altgrad.reporting.runs import Contrast, Run, Runs


@dataclass(frozen=True)
class Leader:
    """The entry with the largest mean gain, the ``others``, and those of them that are not told apart from it."""

    entry: str
    close: list[str]
    others: list[str]


def leader(study: Study, comparison: Comparison, arm: str) -> Leader | None:
    """Return which quantized entry gains most from ``arm``; ``None`` where fewer than two have a gain to compare."""
    own = comparison.gains[comparison.gains["optimizer"] == arm].dropna(subset="claim")
    gains = {row.format: row.claim for row in own.itertuples() if roles.is_quantized(study, row.format)}
    tuned_here = len(study.lr_scales) > 1
    return leading(gains, comparison.runs, comparison.best_runs, arm, comparison.references[arm], tuned_here=tuned_here)


def leading(
    gains: Mapping[str, Claim], runs: Runs, best: Mapping[tuple[str, str], Run], arm: str, reference: str, *,
    tuned_here: bool,
) -> Leader | None:  # fmt: skip
    """Return the leader among ``gains`` (by entry, losses of ``arm`` minus ``reference``), see :func:`leader`."""
    enter = {entry: claim.difference for entry, claim in gains.items() if not claim.difference.is_zero}
    if len(enter) < 2:
        return None

    def gain(entry: str) -> Contrast:
        return {best[entry, arm]: 1, best[entry, reference]: -1}

    def contrast(a: str, b: str) -> Contrast:
        return {best[a, arm]: 1, best[a, reference]: -1, best[b, arm]: -1, best[b, reference]: 1}

    # A gain of fewer seeds than can make a claim leads nobody, where there are others.
    many = [entry for entry, difference in enter.items() if difference.n >= CLAIM_SEEDS]
    ordered = from_the_lowest({entry: runs.by_seed(gain(entry)) for entry in many or enter})
    if len(ordered) < 2:
        return None
    differences, levels = each_pair(ordered, contrast, runs)
    first, *others = ordered

    def apart(entry: str) -> bool:
        pair = first, entry
        enough = pair in levels and differences[pair].n >= CLAIM_SEEDS and not tuned_here
        return enough and differences[pair].mean < 0 and levels[pair] <= FIRM

    return Leader(first, [entry for entry in others if not apart(entry)], others)
