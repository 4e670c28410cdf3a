"""Which format and arm end lowest, and from which others that cannot be told apart: the question before a training."""

from __future__ import annotations

from typing import NamedTuple

from altgrad.reporting import roles
from altgrad.reporting.claims import CLAIM_SEEDS, FIRM
from altgrad.reporting.compare import Comparison
from altgrad.reporting.document import Block, Text
from altgrad.reporting.load import Study
from altgrad.reporting.pairwise import each_pair, from_the_lowest
from altgrad.reporting.runs import Run
from altgrad.reporting.wording import joined, number

TOGETHER = "of all, adjusted together and apart from the report's other questions"


class Lowest(NamedTuple):
    """The run of the lowest mean loss, that loss, those not told apart from it, and how many there are beside it.

    ``pairs``: how many differences were adjusted together.
    """

    run: Run
    loss: float
    close: list[Run]
    others: int
    pairs: int


def lowest(study: Study, comparison: Comparison) -> Lowest | None:
    """Return the lowest of all quantized entries and arms at their best rates; ``None`` with fewer than two.

    It is picked because it is the lowest, so that every pair counts as a question: p-values by Holm over all pairs.
    """
    runs, ordered = comparison.runs, ranked(study, comparison)
    if len(ordered) < 2:
        return None
    differences, levels = each_pair(ordered, lambda a, b: {a: 1, b: -1}, runs)
    first, *others = ordered

    def apart(run: Run) -> bool:
        enough = (first, run) in levels and differences[first, run].n >= CLAIM_SEEDS
        lower = enough and differences[first, run].mean < 0
        return lower and len(study.lr_scales) == 1 and levels[first, run] <= FIRM

    return Lowest(
        first, float(runs.of_run(first).mean()), [run for run in others if not apart(run)], len(others), len(levels)
    )


def ranked(study: Study, comparison: Comparison) -> list[Run]:
    """Return the quantized entries and arms at their best rates, of which a seed completed, by mean loss, lowest first.

    Those of fewer seeds than can make a claim come last, where others have more: few seeds are easily lucky.
    """
    runs = comparison.runs
    candidates = [
        run
        for (entry, _), run in comparison.best_runs.items()
        if roles.is_quantized(study, entry) and not roles.is_virtual(study, entry) and runs.completed(run)
    ]
    groups = ([run for run in candidates if (runs.completed(run) >= CLAIM_SEEDS) == many] for many in (True, False))
    return [run for group in groups if group for run in from_the_lowest({run: runs.by_seed({run: 1}) for run in group})]


def lowest_blocks(study: Study, comparison: Comparison) -> list[Block]:
    """Return a sentence."""
    found = lowest(study, comparison)
    if found is None:
        return []
    entry, arm, _ = found.run
    text = f"**To train in one of them**: the lowest loss is {number(found.loss, 4)}, of `{arm}` in **{entry}**"
    pairs = f"{found.pairs} pair{'s' if found.pairs > 1 else ''}"
    if not found.close:
        rest = "the other one is" if found.others == 1 else f"all {found.others} others are"
        return [Text(f"{text}; {rest} told apart from it ({pairs} {TOGETHER}).")]
    by_arm: dict[str, list[str]] = {}
    for other, optimizer, _ in found.close:
        by_arm.setdefault(optimizer, []).append(other)
    named = joined([f"`{optimizer}` in {joined(entries)}" for optimizer, entries in by_arm.items()])
    if len(found.close) == found.others:
        why = "" if len(study.lr_scales) == 1 else ", as rates were chosen on these seeds"
        rest = "the other one is not" if found.others == 1 else f"none of the {found.others} others is"
        return [Text(f"{text}, and {rest} told apart from it{why}.")]
    higher = found.others - len(found.close)
    rest = f"The other {f'{higher} are' if higher > 1 else 'one is'} higher ({pairs} {TOGETHER})"
    return [Text(f"{text}; not told apart from it: {named}. {rest}.")]
