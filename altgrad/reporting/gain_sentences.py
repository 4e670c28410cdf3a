"""What each arm gains, in words: where, how sure, which entry most, and whether the format has a part in it."""

from __future__ import annotations

from typing import Any

import pandas as pd

from altgrad.reporting import roles
from altgrad.reporting.claims import BETTER, EXPLORATORY, GAIN, IDENTICAL, INDICATED, SAME, UNJUDGED, WORSE, Claim
from altgrad.reporting.compare import Comparison
from altgrad.reporting.document import Block, Bullets, Text
from altgrad.reporting.leader import leader
from altgrad.reporting.load import DIVERGED, Study
from altgrad.reporting.wording import joined, signed

READINGS = (
    (BETTER, "Lower loss"), (BETTER + INDICATED, "Lower loss, as an indication"),
    (BETTER + EXPLORATORY, "Lower loss (exploratory)"), (WORSE, "Higher loss"),
    (WORSE + INDICATED, "Higher loss, as an indication"), (WORSE + EXPLORATORY, "Higher loss (exploratory)"),
    (SAME, "Not told apart"), (IDENTICAL, "Identical to the last bit"),
    (UNJUDGED, "Measured, not judged (one seed shows no spread)"),
)  # fmt: skip


def gain_blocks(study: Study, comparison: Comparison) -> list[Block]:
    """Return the headline, then a lead and a list of findings for every arm that is neither plain nor a control.

    Where all arms are controls, they are told of too; what they gain beside others stands in the table of gains.
    """
    aware = [optimizer for optimizer in study.optimizers if not roles.is_plain(study.arm(optimizer))]
    if not aware:
        arms = joined([f"`{name}`" for name in study.optimizers])
        only = f"its only arm is {arms}" if len(study.optimizers) == 1 else f"its arms are {arms}"
        return [Text(
            f"**Open.** No geometry-aware arm is in this grid ({only}), so nothing here says what such updates gain."
        )]  # fmt: skip
    blocks: list[Block] = _headline(study, comparison)
    told = [arm for arm in aware if not roles.is_control(study.arm(arm))] or aware
    for arm in told:
        if arm not in comparison.references:
            base = roles.PLAIN_FORM[study.arm(arm)["base"]]
            missing = f"plain `{base}` arm with `weights: {roles.regime(study.arm(arm))}`"
            blocks.append(Text(f"**Open.** This grid has no {missing} to measure `{arm}` against."))
            continue
        table = comparison.gains[comparison.gains["optimizer"] == arm]
        lead = f"**`{arm}`** ({roles.kind(study.arm(arm))}) against `{comparison.references[arm]}`:"
        measured = table.dropna(subset="claim")
        if measured.empty:
            blocks.append(Text(f"{lead} no pair of cells completed."))
            continue
        findings = Bullets(_findings(study, comparison, arm, measured))
        blocks += [Text(f"{lead} what its loss is lower by, in nats per token."), findings]
    return blocks


def _headline(study: Study, comparison: Comparison) -> list[Block]:
    """Say in a sentence which format gains most and whether the gain is its own; nothing where no gain is firm."""
    gains = comparison.gains.dropna(subset="claim")
    gained = [row for row in gains.itertuples() if row.claim.firm and row.claim.difference.mean < 0]
    firm = [row for row in gained if roles.is_quantized(study, row.format)]
    if not firm:
        return []
    most = min(firm, key=lambda row: row.claim.difference.mean)
    own = [row.format for row in firm if row.beyond is not None and row.beyond.firm and row.beyond.difference.mean < 0]
    known = [row.format for row in firm if row.beyond is not None]
    gain = f"`{most.optimizer}` lowers the loss most in **{most.format}** ({signed(-most.claim.difference.mean, 4)})"
    found = leader(study, comparison, most.optimizer)
    rivals = [entry for entry in (found.entry, *found.close) if entry != most.format] if found else []
    close = f", not told apart from {joined(rivals)}" if rivals else ""
    verb = "gains" if len(own) == 1 else "gain"
    if own:
        return [Text(f"**{joined(own)} {verb} by the format's own geometry.** {gain}{close}.")]
    if not known:
        want = "for want of virtual twins"
        if any(row.twin for row in firm):
            want = "since no virtual twin completed in the same arms"
        lead = f"**Whether a format gains by its own geometry is open**, {want}."
        return [Text(f"{lead} {gain}{close}.")]
    lent = comparison.answers.of(GAIN, most.twin, most.optimizer) if most.twin else None
    size = signed(-lent.difference.mean, 4) if lent else ""
    without = f" On weights that nothing quantizes the same geometry gains {size}." if lent else ""
    return [Text(f"**No format is shown to gain by its own geometry.** {gain}{close}.{without}")]


def _findings(study: Study, comparison: Comparison, arm: str, measured: pd.DataFrame) -> list[str]:
    rows = sorted(measured.itertuples(), key=lambda row: row.claim.difference.mean)
    items = []
    lent = [row for row in rows if roles.is_virtual(study, row.format)]
    others = [row for row in rows if not roles.is_virtual(study, row.format)]
    for verdict, label in READINGS:
        group = [row for row in others if row.claim.verdict == verdict]
        if group:
            items.append(f"{label}: {', '.join(_gain(study, row.format, row.claim) for row in group)}.")
    items += _diverged(study, comparison, arm)
    gained = [row for row in rows if row.claim.told_apart and row.claim.difference.mean < 0]
    if any(roles.is_quantized(study, row.format) for row in gained):
        items += _most(study, comparison, arm, {row.format for row in gained if row.claim.firm})
    controls = _controls([row for row in gained if not roles.is_virtual(study, row.format)])
    items += [f"Controls: {'; '.join(controls)}."] if controls else []
    if lent:
        texts = [f"{_gain(study, row.format, row.claim)} ({row.claim.verdict})" for row in lent]
        items.append(f"The same geometry on weights that nothing quantizes: {', '.join(texts)}.")
    return items + _beyond(study, comparison, gained, comparison.references[arm], arm)


def _gain(study: Study, entry: str, claim: Claim) -> str:
    count, seeds = claim.difference.n, len(study.seeds)
    return (
        f"**{entry}** {signed(-claim.difference.mean, 4)}{f' from {count} of {seeds} seeds' if count < seeds else ''}"
    )


def _diverged(study: Study, comparison: Comparison, arm: str) -> list[str]:
    """Say in which entries runs of the arm diverged, at the rate that stands for it if any seed completed there."""
    cells = study.cells[(study.cells["optimizer"] == arm) & (study.cells["status"] == DIVERGED)]
    found = []
    for entry in study.formats:
        run = comparison.best_runs.get((entry, arm))
        own = cells[cells["format"] == entry]
        own = own[own["lr_scale"] == run[2]] if run else own
        if count := own["seed"].nunique():
            found.append(f"**{entry}** ({count} of {len(study.seeds)} seeds)")
    return [f"Diverged: {', '.join(found)}."] if found else []


def _most(study: Study, comparison: Comparison, arm: str, firm: set[str]) -> list[str]:
    """Say which format gains most, and from which others that cannot be told apart."""
    found = leader(study, comparison, arm)
    if found is None:
        return []
    if not found.close and found.entry in firm:
        return [f"**{found.entry} gains most.**"]
    if not found.close:
        return [f"{found.entry} gains most, as an indication."]
    if len(found.close) == len(found.others):
        return [f"{found.entry} gains most as measured, not told apart from any other."]
    return [f"{found.entry} gains most as measured, not told apart from {joined(found.close)}."]


def _controls(rows: list) -> list[str]:
    """Say which controls the gains passed and which they did not, formats alike together; nothing without controls."""
    formats: dict[str, list[str]] = {}
    for row in rows:
        for text in _passed(row):
            formats.setdefault(text, []).append(row.format)
    return [f"{text} in {joined(names)}" for text, names in formats.items()]


def _passed(row: Any) -> list[str]:
    parts = []
    for claims, better, worse, same in (
        (row.nulls, "beats", "is beaten by", "not told apart from"),
        (row.foreign, "beats the foreign geometry of", "is beaten by the foreign geometry of",
         "not told apart from the foreign geometry of"),
    ):  # fmt: skip
        for name, claim in claims.items():
            passed = claim.told_apart and claim.difference.mean < 0
            reading = better if passed else worse if claim.told_apart else same
            reading = "not judged against" if claim.verdict == UNJUDGED else reading
            unsure = " (indication)" if claim.told_apart and not claim.firm else ""
            parts.append(f"{reading} `{name}`{unsure}")
    if row.matched is not None:
        size = signed(-row.matched.difference.mean, 4)
        parts.append(f"at AdamW's update size {size} ({row.matched.verdict})")
    return parts


def _beyond(study: Study, comparison: Comparison, gained: list, plain: str, arm: str) -> list[str]:
    """Say what a gain has beyond what the same geometry gains without the format, or that nothing here tells."""
    known, even, unknown = [], [], []
    for row in gained:
        if row.beyond is not None:
            text = f"**{row.format}** {signed(-row.beyond.difference.mean, 4)} ({row.beyond.verdict})"
            known.append(text)
        elif roles.has_even_grid(study, row.format):
            even.append(row.format)
        elif roles.is_quantized(study, row.format):
            unknown.append(row.format)
    items = []
    if known:
        items.append(
            f"The format's own part, what a gain has beyond that of the same geometry without it: {', '.join(known)}."
        )
    if even:
        rates = [_rate(study, comparison, even[0], name) for name in (arm, plain)]
        why = f"its learning rate ({rates[0]:g} for {rates[1]:g})" if rates[0] != rates[1] else "its other settings"
        items.append(
            f"Values lie evenly in {joined(even)}, so that `{arm}` takes the steps of `{plain}` there: what it gains "
            f"is made by {why}, and as much of the other gains may be."
        )
    if unknown:
        items.append(
            f"Whether the format has a part in it is open for {joined(unknown)}: no virtual twin that completed shows "
            "what the same geometry gains without it."
        )
    return items


def _rate(study: Study, comparison: Comparison, entry: str, arm: str) -> float:
    """Return the learning rate of the run that stands for an arm in an entry."""
    cells = study.cells
    run = (cells["format"] == entry) & (cells["optimizer"] == arm)
    run &= cells["lr_scale"] == comparison.best_runs[entry, arm][2]
    return float(cells.loc[run, "peak_lr"].iloc[0])
