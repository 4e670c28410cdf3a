"""The comparison itself: each entry against the baseline, each geometry-aware arm against the plain one.

A *run* here is a grid entry (format or recipe) under one optimizer at one learning rate, over all seeds. The
primary metric is the final validation loss in nats per token. Everything is paired by seed, and only completed
cells have a loss: a diverged or missing cell is counted beside the number, never averaged into it. What is asked
of the losses and how the answers are read is in :mod:`altgrad.reporting.claims`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from altgrad.reporting import roles
from altgrad.reporting.claims import BEYOND, COST, FOREIGN, GAIN, MATCHED, NULL, Answers, answer, ask
from altgrad.reporting.load import COMPLETED, DIVERGED, MISSING, Study, every_rule
from altgrad.reporting.moderation import Spread
from altgrad.reporting.runs import RUN, Run, Runs


@dataclass(frozen=True)
class Comparison:
    """Every number of the comparison.

    ``best``: a row per (format, optimizer) at its own best learning rate, with counts, means over seeds and the paired
    difference to the baseline at its own, and ``claim`` where that is one of the report's questions.
    ``gains``: a row per (format, arm that is not plain), see :func:`_gains`. ``references`` names the baseline
    optimizer of each, ``reference`` the one whose cells stand for a format. ``best_runs`` has the run behind each row
    of ``best``, ``least`` by arm what its tuning alone makes, see :func:`_tuning_error`.
    """

    best: pd.DataFrame
    gains: pd.DataFrame
    answers: Answers
    runs: Runs
    best_runs: dict[tuple[str, str], Run]
    references: dict[str, str]
    reference: str | None
    least: dict[str, float]

    @property
    def noise(self) -> Spread | None:
        """The spread of the costs: between formats under one arm."""
        return self.answers.spreads[COST]

    def behind(self, entry: str, arm: str) -> dict[str, Any]:
        """Return which cells stand for an entry and an arm, as `altgrad.reporting.document` has it."""
        return dict(zip(RUN, self.best_runs[entry, arm], strict=True))


def compare(study: Study) -> Comparison:
    """Return the comparison of everything that completed in ``study``."""
    runs, measure = Runs.of(study), study.measure
    chosen_by = Runs.of(study, measure.on_validation)  # a rate that test documents chose would be too good on them
    best = {
        (entry, arm): chosen_by.best(
            ((entry, arm, rate) for rate in sorted(study.lr_scales)), higher_is_better=measure.higher_is_better
        )
        for entry, arm in itertools.product(study.formats, study.optimizers)
    }
    references = roles.references(study)
    tuned_here = len(study.lr_scales) > 1
    least = _tuning_error(study, runs, best, references)
    smallest = measure.smallest_effect
    answers = answer(ask(study, best, references), runs, least, tuned_here=tuned_here, smallest_effect=smallest)
    return Comparison(
        _best(study, runs, best, answers), _gains(study, references, answers), answers, runs, best, references,
        roles.main_plain(study), least,
    )  # fmt: skip


def _tuning_error(
    study: Study, runs: Runs, best: Mapping[tuple[str, str], Run], references: Mapping[str, str]
) -> dict[str, float]:
    """Return for each arm the largest mean gain of one with its base where nothing is quantized; 0 without such cells.

    There every arm is its plain form, so that what is left is chance, and that the learning rates of an arm come
    closer to the best one than those of another: a grid of rates a factor of two apart hits it by luck. That says
    nothing about arms of another base, which differ there by more than their rates.
    """
    unquantized = [entry for entry in study.formats if not every_rule(study.entry(entry))]
    sizes: dict[str, float] = {}
    for arm, reference in references.items():
        base = study.arm(reference)["base"]
        if study.arm(arm)["base"] == base:
            for entry in unquantized:
                found = runs.difference({best[entry, arm]: 1, best[entry, reference]: -1})
                sizes[base] = max(sizes.get(base, 0.0), abs(found.mean) if found else 0.0)
    return {arm: sizes.get(study.arm(arm)["base"], 0.0) for arm in references}


def _best(study: Study, runs: Runs, best: Mapping[tuple[str, str], Run], answers: Answers) -> pd.DataFrame:
    """Return a row per (format, optimizer) at its best learning rate."""
    cells = study.cells.assign(**{status: study.cells["status"] == status for status in (COMPLETED, DIVERGED, MISSING)})
    primary = study.measure.column
    completed = cells[list({"val_loss", primary})].where(cells[COMPLETED])
    table = cells.assign(**completed).groupby(RUN, sort=False).agg(
        peak_lr=("peak_lr", "first"), planned=("peak_lr", "size"), completed=(COMPLETED, "sum"),
        diverged=(DIVERGED, "sum"), missing=(MISSING, "sum"), val_loss=("val_loss", "mean"), primary=(primary, "mean"),
        primary_sd=(primary, "std"),
    ).reset_index()  # fmt: skip
    at = dict(zip(zip(*(table[name] for name in RUN), strict=True), table.to_dict("records"), strict=True))
    plain, rows = roles.main_plain(study), []
    for (entry, arm), run in best.items():
        base = None if study.baseline in (None, entry) else best.get((study.baseline, arm))
        rows.append(at[run] | {
            "difference": runs.difference({run: 1, base: -1}) if base else None,
            "claim": answers.of(COST, entry) if arm == plain else None,
            "perplexity": math.exp(at[run]["val_loss"]) if study.measure.in_nats else math.nan,
            "bracket": _bracket(study, run, runs),
        })  # fmt: skip
    return pd.DataFrame(rows)


def _bracket(study: Study, run: Run, runs: Runs) -> str:
    if runs.completed(run) == 0:
        return "none completed"
    if len(study.lr_scales) == 1:
        return "one learning rate"
    return "unbracketed" if run[2] in (min(study.lr_scales), max(study.lr_scales)) else "bracketed"


def _gains(study: Study, references: Mapping[str, str], answers: Answers) -> pd.DataFrame:
    """Return a row per format and optimizer that has a baseline optimizer to be held against, ``reference``.

    ``claim`` is the arm's loss minus the reference's, so below zero is a gain; None if no pair of cells completed.
    ``nulls`` and ``foreign`` map each such control of the grid to the claim of the arm against it; ``matched`` is the
    claim of the same arm at AdamW's update size against the reference; ``beyond`` that of the gain over the gain of the
    same geometry in the virtual ``twin``, None where there is none.
    """
    columns = ["format", "optimizer", "reference", "claim", "nulls", "foreign", "matched", "twin", "beyond"]
    twins, rows = roles.unquantized_controls(study), []
    for entry, arm in itertools.product(study.formats, references):

        def against(kind: str, entry: str = entry, arm: str = arm) -> dict[str, Any]:
            return {q[3]: claim for q, claim in answers.claims.items() if q[:3] == (kind, entry, arm)}

        rows.append((
            entry, arm, references[arm], answers.of(GAIN, entry, arm), against(NULL), against(FOREIGN),
            next(iter(against(MATCHED).values()), None), twins.get(entry), answers.of(BEYOND, entry, arm),
        ))  # fmt: skip
    return pd.DataFrame(rows, columns=columns)
