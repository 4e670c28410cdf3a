"""The answer in plain words: what the grid shows, how sure that is, and what it cannot say.

Every sentence is chosen by the numbers. A difference inside the noise floor is called none; fewer
than five seeds make an indication; a grid without a geometry-aware arm leaves the question open.
"""

from __future__ import annotations

import math

import pandas as pd

from altgrad.reporting.compare import (
    BETTER,
    CLAIM_SEEDS,
    IDENTICAL,
    SAME,
    UNJUDGED,
    WORSE,
    Comparison,
    is_plain,
    regime,
)
from altgrad.reporting.control import TWINS, Control
from altgrad.reporting.document import Block, Bullets, Text
from altgrad.reporting.explain import MEASURES, correlations, explanation
from altgrad.reporting.load import COMPLETED, DIVERGED, MISSING, Study
from altgrad.reporting.wording import NONE, joined, number, plural, signed, significant, whole

QUESTION = "Which 8-bit floating-point format gains most from geometry-aware updates, and why?"


def answer(study: Study, comparison: Comparison, control: Control | None) -> list[Block]:
    """Return the blocks of the answer: the question, the costs, the certainty, the scope."""
    blocks: list[Block] = [Text(sentence) for sentence in _main_question(study, comparison)]
    blocks += _costs(study, comparison)
    blocks += [Text(sentence) for sentence in _why(study, comparison)]
    certainty = " ".join([*_certainty(comparison), *_control(control)])
    blocks += [Text(certainty)] if certainty else []
    blocks.append(Text(_scope(study)))
    return blocks


def _main_question(study: Study, comparison: Comparison) -> list[str]:
    aware = [optimizer for optimizer in study.optimizers if not is_plain(study.arm(optimizer))]
    if not aware:
        arms = joined([f"`{name}`" for name in study.optimizers])
        only = f"its only arm is {arms}" if len(study.optimizers) == 1 else f"its arms are {arms}"
        return [
            f"**Open.** No geometry-aware arm is in this grid ({only}), so nothing here says what such updates gain."
        ]
    lines = []
    for arm in aware:
        table = comparison.gains[comparison.gains["optimizer"] == arm]
        if table.empty:
            kind = regime(study.arm(arm))
            lines.append(f"**Open.** This grid has no plain arm with {kind} weights to measure {arm} against.")
        else:
            lines.append(_arm_sentence(comparison, arm, table))
    return lines


def _arm_sentence(comparison: Comparison, arm: str, table: pd.DataFrame) -> str:
    """Say which formats gain from ``arm``, the largest gain first."""
    measured = table.dropna(subset="difference")
    kind = "control arm without geometry" if table["control"].any() else "geometry-aware arm"
    start = f"**`{arm}`** ({kind}) against `{table['reference'].iloc[0]}`:"
    if measured.empty:
        return f"{start} no pair of cells completed."
    ordered = sorted(measured.itertuples(), key=lambda row: row.difference.mean)
    groups = {
        "gain": [row for row in ordered if row.verdict.startswith(BETTER)],
        "loss": [row for row in reversed(ordered) if row.verdict == WORSE],
        "perhaps loss": [row for row in reversed(ordered) if row.verdict.startswith(WORSE) and row.verdict != WORSE],
        "none": [row for row in ordered if row.verdict in (SAME, IDENTICAL)],
        "unjudged": [row for row in ordered if row.verdict == UNJUDGED],
    }

    def listed(rows: list) -> str:
        return joined([f"{row.format} ({signed(-row.difference.mean, 4)})" for row in rows])

    parts = []
    if groups["gain"]:
        sure = all(row.verdict == BETTER for row in groups["gain"])
        lower = "lower loss" if sure else "lower loss, as an indication"
        parts.append(f"{lower}, in nats per token: {listed(groups['gain'])}; {_leader(comparison, ordered)}")
        parts += [text for row in groups["gain"] if (text := _controls(row))]
    if groups["loss"]:
        parts.append(f"higher loss: {listed(groups['loss'])}")
    if groups["perhaps loss"]:
        parts.append(f"higher loss, as an indication: {listed(groups['perhaps loss'])}")
    if groups["none"]:
        parts.append(f"no difference beyond the noise floor: {listed(groups['none'])}")
    if groups["unjudged"]:
        parts.append(f"measured with one seed and not judged: {listed(groups['unjudged'])}")
    return f"{start} {'; '.join(parts)}."


def _controls(row) -> str:
    """Say which controls a gain passed and which it did not; nothing where the grid has none."""
    passed = [null for null, verdict in row.nulls.items() if verdict.startswith(BETTER)]
    failed = [null for null in row.nulls if null not in passed]
    parts = []
    if passed:
        parts.append(f"beats {joined(passed)}")
    if failed:
        parts.append(f"is not told apart from {joined(failed)}")
    if row.matched:
        parts.append(f"at AdamW's update size: {row.matched}")
    return f"{row.format}'s gain {', '.join(parts)}" if parts else ""


def _leader(comparison: Comparison, ordered: list) -> str:
    """Say which format gains most, and from which others that cannot be told apart.

    A difference of two gains holds four runs where a gain holds two: its noise is larger by sqrt(2). Where the arm
    changed nothing to the bit, as in a baseline without quantized weights, there is no gain to compare.
    """
    first, *others = ordered
    noise = comparison.gain_noise
    close = [
        row.format
        for row in others
        if row.verdict != IDENTICAL
        and row.difference.mean - first.difference.mean <= math.sqrt(2) * noise.floor(first.difference.n)
    ]
    if not close:
        return f"{first.format} gains most"
    return f"{first.format} gains most as measured, not told apart from {joined(close)}"


def _costs(study: Study, comparison: Comparison) -> list[Block]:
    """Say what each format costs against the baseline under the plain arm, grouped by reading."""
    optimizer = comparison.reference or study.optimizers[0]
    rows = comparison.best[comparison.best["optimizer"] == optimizer]
    if study.baseline is None:
        wanted = study.params["grid"]["baseline"]
        losses = [f"{row.format} {row.val_loss:.4f}" for row in rows.itertuples() if row.completed]
        measured = f" Final validation loss, in nats per token: {joined(losses)}." if losses else ""
        absent = f"The baseline `{wanted}` is not in this grid, so no format's cost can be measured.{measured}"
        return [Text(" ".join([absent, *_unmeasured(rows, None)]))]
    others = rows[rows["format"] != study.baseline]
    if others.empty:
        return [Text(f"Only the baseline `{study.baseline}` is in this grid: there is nothing to compare it with.")]
    measured = [row for row in others.itertuples() if row.difference is not None]
    items = []
    for verdict, label in (
        (SAME, "No difference beyond the noise floor"), (IDENTICAL, "Identical to the last bit"),
        (BETTER, "Lower loss than the baseline"), (f"{BETTER} (indication)", "Lower loss, as an indication"),
        (WORSE, "Higher loss than the baseline"), (f"{WORSE} (indication)", "Higher loss, as an indication"),
        (UNJUDGED, "Measured, not judged (one seed leaves no noise floor)"),
    ):  # fmt: skip
        group = sorted((row for row in measured if row.verdict == verdict), key=lambda row: row.difference.mean)
        if group:
            items.append(f"{label}: " + ", ".join(_cost(row) for row in group) + ".")
    items += _unmeasured(rows, study.baseline)
    lead = (
        f"What each format costs against `{study.baseline}` under `{optimizer}`, in nats per token of validation loss:"
    )
    return [Text(lead), Bullets(items)]


def _cost(row) -> str:
    text = f"**{row.format}** {signed(row.difference.mean, 4)} ({signed(row.val_gap, 2)} %)"
    return (
        text if row.difference.n == row.planned else f"{text} from {plural(row.difference.n, 'seed')} of {row.planned}"
    )


def _unmeasured(rows: pd.DataFrame, baseline: str | None) -> list[str]:
    """Say which entries diverged, are missing, or have nothing to be compared with."""
    items = []
    for status, label in ((DIVERGED, "Diverged"), (MISSING, "Missing")):
        names = [
            f"**{row['format']}** ({row[status]} of {plural(row['planned'], 'seed')})"
            for row in rows.to_dict("records")
            if row[status]
        ]
        if names:
            items.append(f"{label}: {', '.join(names)}.")
    alone = [
        f"**{row.format}**"
        for row in rows.itertuples()
        if row.completed and row.difference is None and row.format != baseline
    ]
    if alone and baseline is not None:
        items.append(f"Completed, but no baseline cell with the same seed did: {', '.join(alone)}.")
    return items


def _certainty(comparison: Comparison) -> list[str]:
    """Say how many paired seeds there are, what that allows, and how large the noise is."""
    n = max((row.n for row in comparison.best["difference"] if row is not None), default=0)
    floor = comparison.noise
    if n == 0:
        return []
    if n == 1:
        return [
            "**One paired seed**: chance cannot be told from effect; add seeds before reading anything into a "
            "small difference."
        ]
    enough = "enough for a claim" if n >= CLAIM_SEEDS else f"an indication, not a claim (that takes {CLAIM_SEEDS})"
    sentences = [f"**{n} paired seeds**: {enough}."]
    if floor is None:
        return [*sentences, "No noise floor can be estimated: too few arms completed with more than one seed."]
    left_out = f", {plural(floor.unstable, 'unstable arm')} left out" if floor.unstable else ""
    sentences.append(
        f"**A/A noise floor** {significant(floor.floor(n))}: two equal arms end this far apart or less 19 times in 20 "
        f"(mean over {n} paired seeds; estimated from {plural(floor.arms, 'arm')} with {floor.dof} degrees of "
        f"freedom{left_out})."
    )
    return [*sentences, *_seeds_needed(comparison)]


def _seeds_needed(comparison: Comparison) -> list[str]:
    """Say how many seeds would resolve one percent of the smallest loss, where today's do not."""
    noise, one_percent = comparison.noise, comparison.best["val_loss"].min() / 100
    seeds = noise.seeds_for(one_percent)
    if seeds is None or seeds <= noise.seeds:
        return []
    return [f"To resolve 1 % of the loss ({significant(one_percent, 2)}) at this noise takes about {seeds} seeds."]


def _why(study: Study, comparison: Comparison) -> list[str]:
    """Say what the costs go with; nothing with fewer than four formats."""
    found = {m: rho for m, (rho, n) in correlations(explanation(study, comparison)).items() if n >= 4 and rho == rho}
    if not found:
        return []
    parts = [f"{MEASURES[measure].title} {number(rho, 2)}" for measure, rho in found.items()]
    optimizer = comparison.reference or study.optimizers[0]
    rows = comparison.best[comparison.best["optimizer"] == optimizer]
    verdicts = [row.verdict for row in rows.itertuples() if row.difference is not None]
    beyond = sum(verdict.startswith((BETTER, WORSE)) for verdict in verdicts)
    return [
        f"**Why**: the rank correlation between a format's cost and its precision (SQNR) is {joined(parts)}; near −1, "
        "cost falls as precision grows. A hint where to look, not a cause: of "
        f"{plural(len(verdicts), 'cost')} {beyond} can be told from noise."
    ]


def _control(control: Control | None) -> list[str]:
    if control is None:
        return []
    twins = f"{TWINS[0]} and {TWINS[1]}"
    if control.agrees:
        values = whole(control.values)
        return [
            f"The control holds: {twins}, one grid up to a power of two, agree to the bit in {values} logged values."
        ]
    size = significant(control.max_difference)
    how = "end differently" if size == NONE else f"differ by up to {size}"
    return [
        f"**The control fails**: {twins} must agree to the bit, and {how}. Until that is explained, no number "
        "here can be trusted."
    ]


def _scope(study: Study) -> str:
    cells = study.cells
    shape = [
        plural(len(study.formats), "format"),
        plural(len(study.optimizers), "arm"),
        plural(len(study.seeds), "seed"),
    ]
    if len(study.lr_scales) > 1:
        shape.append(plural(len(study.lr_scales), "learning rate"))
    counts = [f"{study.count(status)} {status}" for status in (COMPLETED, DIVERGED, MISSING) if study.count(status)]
    text = f"The grid: {' × '.join(shape)} = {plural(len(cells), 'cell')}, {joined(counts)}."
    completed = cells[cells["status"] == COMPLETED]
    if len(completed):
        text += (
            f" Each trains a GPT of {significant(completed['parameters'].max() / 1e6)} M parameters "
            f"for {whole(cells['planned_steps'].max())} steps "
            f"({significant(completed['tokens'].max() / 1e6)} M tokens) on `{study.corpus['corpus']}`."
        )
    return text
