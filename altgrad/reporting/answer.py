"""The answer in plain words: what the grid shows, how sure that is, and what it cannot say.

Every sentence is chosen by the numbers: by the readings of :mod:`altgrad.reporting.claims`. A grid without a
geometry-aware arm leaves the question open.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from altgrad.reporting.claims import (
    BETTER,
    CLAIM_SEEDS,
    FIRM,
    IDENTICAL,
    INDICATED,
    INDICATION,
    SAME,
    UNJUDGED,
    WORSE,
)
from altgrad.reporting.compare import Comparison
from altgrad.reporting.control import TWINS, Control
from altgrad.reporting.document import Block, Bullets, Text
from altgrad.reporting.gain_sentences import gain_blocks
from altgrad.reporting.load import COMPLETED, DIVERGED, MISSING, Study
from altgrad.reporting.lowest import lowest_blocks
from altgrad.reporting.next_seeds import next_seeds
from altgrad.reporting.roles import is_quantized
from altgrad.reporting.simulated import Rates
from altgrad.reporting.why import why
from altgrad.reporting.wording import NONE, joined, plural, signed, significant, whole

QUESTION = "Which 8-bit floating-point format gains most from geometry-aware updates, and why?"


def answer(study: Study, comparison: Comparison, control: Control | None, rates: Rates | None = None) -> list[Block]:
    """Return the blocks of the answer: the question, the costs, the certainty, the scope.

    ``rates`` are those of simulated studies like this one.
    """
    blocks = [*gain_blocks(study, comparison), *_costs(study, comparison), *lowest_blocks(study, comparison)]
    blocks += why(study, comparison)
    certainty = " ".join([*_certainty(study, comparison, rates), *_control(control)])
    blocks += [Text(text) for text in (certainty, next_seeds(study, comparison)) if text]
    blocks.append(Text(_scope(study)))
    return blocks


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
    others = rows[[name != study.baseline and is_quantized(study, name) for name in rows["format"]]]
    if others.empty:
        return [Text(f"Beside the baseline `{study.baseline}` this grid has nothing that is quantized to compare.")]
    measured = [row for row in others.itertuples() if row.claim is not None]
    items = []
    for verdict, label in (
        (SAME, "Not told apart from the baseline"), (IDENTICAL, "Identical to the last bit"),
        (BETTER, "Lower loss than the baseline"), (BETTER + INDICATED, "Lower loss, as an indication"),
        (WORSE, "Higher loss than the baseline"), (WORSE + INDICATED, "Higher loss, as an indication"),
        (UNJUDGED, "Measured, not judged (one seed shows no spread)"),
    ):  # fmt: skip
        group = sorted((row for row in measured if row.claim.verdict == verdict), key=lambda row: row.difference.mean)
        if group:
            items.append(f"{label}: " + ", ".join(_cost(row) for row in group) + ".")
    items += _unmeasured(rows, study.baseline)
    lead = (
        f"What each format costs against `{study.baseline}` under `{optimizer}`, in nats per token of validation loss:"
    )
    return [Text(lead), Bullets(items)]


def _cost(row: Any) -> str:
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


def _certainty(study: Study, comparison: Comparison, rates: Rates | None) -> list[str]:
    """Say how many paired seeds there are, what that allows, how claims are read and how large the noise is."""
    if comparison.answers.paired_seeds is None:
        return []
    claims, (fewest, most) = comparison.answers.claims.values(), comparison.answers.paired_seeds
    if most == 1:
        return [
            (
                "**One paired seed**: chance cannot be told from effect; add seeds before reading anything into a "
                "small difference."
            )
        ]
    seeds = f"{fewest} to {most}" if fewest < most else str(most)
    enough = "enough for a claim" if fewest >= CLAIM_SEEDS else f"a claim takes {CLAIM_SEEDS}, fewer give an indication"
    sentences = [f"**{seeds} paired seeds** in each comparison: {enough}."]
    if len(study.lr_scales) > 1:
        sentences.append(
            "**The learning rates were chosen on these seeds**, so nothing here is more than an indication: repeat "
            "what matters with other seeds at the rates chosen."
        )
    asked = sum(claim.adjusted == claim.adjusted for claim in claims)
    if asked:
        sentences.append(
            f"Of the {plural(asked, 'question')} asked, all that this report calls better or worse would hold together "
            f"19 times in 20 (adjusted p up to {FIRM:g}); an indication has an adjusted p up to {INDICATION:g}, or "
            "fewer seeds."
        )
        if rates is not None:
            sentences.append(
                f"In simulated studies of pure chance ({rates.formats} formats × {rates.arms} arms × {rates.seeds} "
                f"seeds, the worst of all kinds of noise tried) {100 * rates.firm:.1f} % of the reports call something "
                f"better or worse, and {100 * rates.any_claim:.0f} % have an indication or more."
            )
    if comparison.noise is not None:
        sentences.append(
            f"**A/A noise floor** {significant(comparison.noise.floor(fewest))}: two equal arms end this far apart or "
            f"less 19 times in 20 (mean over {plural(fewest, 'paired seed')}, one comparison by itself)."
        )
    return [*sentences, *_seeds_needed(comparison, fewest)]


def _seeds_needed(comparison: Comparison, n: int) -> list[str]:
    """Say how many seeds would resolve one percent of the smallest loss, where today's do not."""
    noise, one_percent = comparison.noise, comparison.best["val_loss"].min() / 100
    seeds = noise.seeds_for(one_percent) if noise else None
    if seeds is None or seeds <= n:
        return []
    return [f"To resolve 1 % of the loss ({significant(one_percent, 2)}) at this noise takes about {seeds} seeds."]


def _control(control: Control | None) -> list[str]:
    if control is None:
        return []
    twins = f"{TWINS[0]} and {TWINS[1]}"
    if control.agrees:
        values = whole(control.values)
        same = f"{twins}, one quantization grid at two scales, agree to the bit in {values} logged values"
        return [f"The control holds: {same}."]
    size = significant(control.max_difference)
    how = "end differently" if size == NONE else f"differ by up to {size}"
    return [
        (
            f"**The control fails**: {twins} must agree to the bit, and {how}. Until that is explained, no number "
            "here can be trusted."
        )
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
