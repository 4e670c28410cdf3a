"""The comparison itself: each entry against the baseline, each geometry-aware arm against the plain one.

A *run* here is a grid entry (format or recipe) under one optimizer at one learning rate, over all seeds. The
primary metric is the final validation loss in nats per token. Everything is paired by seed, and only completed
cells have a loss: a diverged or missing cell is counted beside the number, never averaged into it. What is asked
of the losses and how the answers are read is in :mod:`altgrad.reporting.hypotheses`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from altgrad.reporting import optimizer_roles as roles
from altgrad.reporting.decision_rule import UNTESTED
from altgrad.reporting.hypotheses import BEYOND, CONTROL, COST, GAIN, MATCHED, Answers, answer, ask, losses_of
from altgrad.reporting.load import COMPLETED, DIVERGED, MISSING, Study
from altgrad.reporting.statistics import RUN, PairedLosses, Run


@dataclass(frozen=True)
class Comparison:
    """Every number of the comparison.

    ``best``: a row per (format, optimizer) at its own best learning rate, with counts, means over seeds and the paired
    difference to the baseline at its own, under an optimizer that is not its plain form there.
    ``gains``: a row per (format, arm that is not plain), see :func:`_gains`. ``references`` names the baseline
    optimizer of each, ``reference`` the one whose cells stand for a format. ``best_runs`` has the run behind each row
    of ``best``, ``least`` by arm what its tuning alone makes, see :func:`_tuning_error`.
    """

    best: pd.DataFrame
    gains: pd.DataFrame
    answers: Answers
    runs: PairedLosses[Run]
    best_runs: dict[tuple[str, str], Run]
    references: dict[str, str]
    reference: str | None
    least: dict[str, float]

    @property
    def noise_floor(self) -> float:
        """Half of the 95 % interval of a cost, the median of all; NaN without one."""
        halves = [claim.half_width for (kind, *_), claim in self.answers.claims.items() if kind == COST]
        known = [half for half in halves if half > 0]
        return float(np.median(known)) if known else math.nan

    def behind(self, entry: str, arm: str) -> dict[str, Any]:
        """Return which cells stand for an entry and an arm, as `altgrad.reporting.document` has it."""
        return dict(zip(RUN, self.best_runs[entry, arm], strict=True))


def compare(study: Study) -> Comparison:
    """Return the comparison of everything that completed in ``study``."""
    measure = study.measure
    runs, chosen_by = losses_of(study, measure.column), losses_of(study, measure.on_validation)
    rates = sorted(study.lr_scales)
    best = {
        (entry, arm): chosen_by.best([(entry, arm, rate) for rate in rates], higher_is_better=measure.higher_is_better)
        for entry, arm in itertools.product(study.formats, study.optimizers)
    }
    references = roles.references(study)
    least = _tuning_error(study, runs, best, references)
    answers = answer(
        ask(study, best, references), runs, least, tuned_here=len(rates) > 1, smallest_effect=measure.smallest_effect
    )
    return Comparison(
        _best(study, runs, best, answers), _gains(study, references, answers), answers, runs, best, references,
        roles.main_plain(study), least,
    )  # fmt: skip


def _tuning_error(
    study: Study, runs: PairedLosses[Run], best: Mapping[tuple[str, str], Run], references: Mapping[str, str]
) -> dict[str, float]:
    """Return for each arm the largest mean gain of one with its base where nothing is quantized; 0 without such cells.

    There an arm that needs a format is its plain form, so that what is left is chance, and that the learning rates of
    an arm come closer to the best one than those of another: a grid of rates a factor of two apart hits it by luck.
    That says nothing about other arms, which differ there by more than their rates.
    """
    sizes: dict[str, float] = {}
    bases = {arm: study.arm(arm)["base"] for arm in study.optimizers}
    unquantized = [entry for entry in study.formats if not roles.has_format(study, entry)]
    for (arm, reference), entry in itertools.product(references.items(), unquantized):
        found = runs.difference({best[entry, arm]: 1, best[entry, reference]: -1})
        if found and bases[arm] == bases[reference] and roles.needs_format(study.arm(arm)):
            sizes[bases[arm]] = max(sizes.get(bases[arm], 0.0), abs(found.mean))
    return {arm: sizes.get(bases[arm], 0.0) for arm in references}


def _best(study: Study, runs: PairedLosses[Run], best: Mapping[tuple[str, str], Run], answers: Answers) -> pd.DataFrame:
    """Return a row per (format, optimizer) at its best learning rate."""
    cells = study.cells.assign(**{status: study.cells["status"] == status for status in (COMPLETED, DIVERGED, MISSING)})
    primary = study.measure.column
    completed = cells[list({"val_loss", primary})].where(cells[COMPLETED])
    table = cells.assign(**completed).groupby(RUN, sort=False).agg(
        peak_lr=("peak_lr", "first"), planned=("peak_lr", "size"), completed=(COMPLETED, "sum"),
        diverged=(DIVERGED, "sum"), missing=(MISSING, "sum"), val_loss=("val_loss", "mean"), primary=(primary, "mean"),
        primary_sd=(primary, "std"),
    )  # fmt: skip
    table = table.loc[list(best.values())].reset_index()
    edges, one_rate = (min(study.lr_scales), max(study.lr_scales)), len(study.lr_scales) == 1
    table["bracket"] = [
        "none completed" if not row.completed else "one learning rate" if one_rate
        else "unbracketed" if row.lr_scale in edges else "bracketed" for row in table.itertuples()
    ]  # fmt: skip
    base = study.baseline
    table["difference"] = [
        None if base in (None, entry) or roles.is_plain_in(study, base, arm)
        else runs.difference({run: 1, best[base, arm]: -1}) for (entry, arm), run in best.items()
    ]  # fmt: skip
    table["perplexity"] = np.exp(table["val_loss"]) if study.measure.in_nats else math.nan
    return table


def _gains(study: Study, references: Mapping[str, str], answers: Answers) -> pd.DataFrame:
    """Return a row per format and optimizer that has a baseline optimizer to be held against, ``reference``.

    Where no weight has a format there is none for an optimizer that needs one: it is its plain form.

    ``claim`` is the arm's loss minus the reference's, so below zero is a gain; None if no pair of cells completed.
    ``controls`` has by their names the claims of the arm against its controls, and of the same arm at AdamW's update
    size against the reference; ``beyond`` is the claim of the gain over the gain of the same geometry in the virtual
    ``twin``, None where there is none.
    """
    columns = ["format", "optimizer", "reference", "claim", "controls", "twin", "beyond"]
    rows = []
    for entry, arm in itertools.product(study.formats, references):
        if roles.is_plain_in(study, entry, arm):
            continue
        of_arm = {q: claim for q, claim in answers.claims.items() if q[1:3] == (entry, arm)}
        named = {q: {CONTROL: f"`{q[-1]}`", MATCHED: "RMS-matched"}.get(q[0]) for q in of_arm}
        controls = {name: of_arm[q] for q, name in named.items() if name}
        rows.append((
            entry, arm, references[arm], of_arm.get((GAIN, entry, arm)), controls,
            roles.unquantized_control(study, entry, arm), of_arm.get((BEYOND, entry, arm)),
        ))  # fmt: skip
    return pd.DataFrame(rows, columns=columns)


def compared(study: Study, comparison: Comparison) -> pd.DataFrame:
    """Return what results.csv has: a row per comparison of the report, with its paired t-test alone and its result.

    ``delta`` is ``optimizer``'s loss in ``format`` minus that of ``against``; of a format-specific effect minus the
    same in the unquantized control, ``against``. ``p_adjusted`` is empty where nothing was tested.
    """
    rows = []
    for (kind, entry, *arms), claim in comparison.answers.claims.items():
        own, delta = arms[0] if arms else comparison.reference, claim.difference
        reference = comparison.references.get(str(own))
        against = {COST: study.baseline, BEYOND: roles.unquantized_control(study, entry, own or ""), GAIN: reference,
                   CONTROL: arms[-1] if arms else None, MATCHED: reference}[kind]  # fmt: skip
        half = delta.half_width
        rows.append((
            kind, entry, arms[-1] if kind == MATCHED else own, against, delta.n, delta.mean, delta.mean - half,
            delta.mean + half, delta.mean / delta.error if delta.sd > 0 else None, claim.alone,
            None if claim.outcome in UNTESTED else claim.adjusted, claim.outcome, claim.exploratory,
        ))  # fmt: skip
    columns = ["comparison", "format", "optimizer", "against", "seeds", "delta", "ci_low_alone", "ci_high_alone",
               "t_alone", "p_alone", "p_adjusted", "result", "exploratory"]  # fmt: skip
    return pd.DataFrame(rows, columns=columns)
