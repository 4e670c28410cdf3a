"""The comparison of a study: each entry with the baseline, each optimizer with its baseline optimizer.

A *run* is a grid entry (format or recipe) with an optimizer at one learning rate, over all seeds. Runs are paired by
seed. A *cell* is one run with one seed. Only completed cells have a loss: diverged and missing cells are counted, never
averaged. `ask` states every question before `answer` answers any. Other functions select the rows that figures and
tables show.

*Primary* questions share the 5 % by which all results of a report together may err:

- the cost of each quantized entry (format or recipe) against the baseline, under the baseline optimizer;
- the gain of each optimizer that is no control over its baseline optimizer, in each entry whose weights have a format.

*Controls* are asked once a gain is significant (see `altgrad.reporting.statistics.adjusted`): the optimizer against
each shuffled or mean control, and against one with a foreign format's spacing; its RMS-matched form against the
baseline optimizer; and the format-specific effect, which is the gain minus that in the unquantized control.

Everything else is *exploratory*, such as the gain of a control, and adjusted per optimizer.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from altgrad.reporting import optimizer_roles as roles
from altgrad.reporting.load import COMPLETED, DIVERGED, IDENTITY, MISSING, Study
from altgrad.reporting.statistics import (
    IDENTICAL,
    RUN,
    SEEDS,
    SMALLEST_EFFECT,
    TUNED_HERE,
    Contrast,
    PairedLosses,
    Result,
    Run,
    adjusted,
    judge,
)

BYTES = "bytes_per_parameter"
COST, GAIN, BEYOND, CONTROL, MATCHED = "cost", "gain", "beyond", "control", "matched"
Question = tuple[str, ...]  # (COST, entry), (GAIN or BEYOND, entry, arm), (CONTROL or MATCHED, entry, arm, other)


@dataclass(frozen=True)
class Questions:
    """The questions of a report: the contrast of each, the controls of each gain, and which ones are exploratory."""

    contrasts: dict[Question, Contrast]
    controls: dict[Question, list[Question]]
    exploratory: set[Question]


def losses_of(study: Study, column: str) -> PairedLosses[Run]:
    """Return ``column`` of the study's cells by run and seed; NaN for a cell that did not complete."""
    cells = study.cells
    losses = cells[column].where(cells["status"] == COMPLETED).to_numpy(dtype="float64")
    runs = zip(cells["format"], cells["optimizer"], cells["lr_scale"], strict=True)
    return PairedLosses.of(zip(runs, cells["seed"], losses, strict=True), study.seeds)


def ask(study: Study, best: Mapping[tuple[str, str], Run], references: Mapping[str, str]) -> Questions:
    """Return the questions of ``study``.

    Args:
        study: the runs.
        best: the run at the chosen learning rate, by (entry, optimizer).
        references: the baseline optimizer of each optimizer that has one.
    """
    contrasts: dict[Question, Contrast] = {}
    controls: dict[Question, list[Question]] = {}
    exploratory: set[Question] = set()
    plain = roles.main_plain(study)
    for entry in study.formats:
        if plain and study.baseline and entry != study.baseline and roles.is_quantized(study, entry):
            contrasts[COST, entry] = {best[entry, plain]: 1, best[study.baseline, plain]: -1}
    for arm, reference in references.items():
        others, (matched, form_of) = roles.controls(study, arm), roles.rms_forms(study, arm)
        is_secondary = roles.role_of(study.arm(arm)).control or form_of
        for entry in study.formats:
            method, base = best[entry, arm], best[entry, reference]
            gain: Question = (GAIN, entry, arm)
            contrasts[gain] = {method: 1, base: -1}
            if is_secondary or not roles.entry_role(study, entry).has_format:
                exploratory.add(gain)
                continue
            asked: dict[Question, Contrast] = {
                **{(CONTROL, entry, arm, other): {method: 1, best[entry, other]: -1} for other in others},
                **{(MATCHED, entry, arm, other): {best[entry, other]: 1, base: -1} for other in matched},
            }
            if twin := roles.unquantized_control(study, entry, arm):
                there = {best[twin, arm]: -1, best[twin, reference]: 1}
                asked[BEYOND, entry, arm] = {**contrasts[gain], **there}
            contrasts |= asked
            controls[gain] = list(asked)
    return Questions(contrasts, controls, exploratory)


def answer(
    questions: Questions, runs: PairedLosses[Run], least: Mapping[str, float], *, tuned_here: bool,
    smallest_effect: float = SMALLEST_EFFECT,
) -> dict[Question, Result]:  # fmt: skip
    """Return the result of every question; one without a seed that has all of its runs is left out.

    Args:
        questions: from `ask`.
        runs: the losses.
        least: by optimizer, the difference that its tuning alone makes; a gain is tested against this difference.
        tuned_here: whether the learning rates were chosen on the seeds that are compared. Then nothing is tested.
        smallest_effect: the smallest effect of interest, in the unit of the losses.
    """
    exploratory = questions.exploratory
    differences = {
        q: difference for q, contrast in questions.contrasts.items()
        if (difference := runs.difference(contrast)) is not None
    }  # fmt: skip
    p_values: dict[Question, float] = {}
    seen: dict[tuple[str, bytes], Question] = {}
    asked_as: dict[Question, Question] = {}  # runs of E0M7 and E1M6 are identical: one question
    for q, difference in differences.items():
        if difference.sd > 0:
            asked_as[q] = seen.setdefault((q[0], runs.row(questions.contrasts[q]).tobytes()), q)
            p_values.setdefault(asked_as[q], difference.p_value(least.get(q[2], 0.0) if q[0] == GAIN else 0.0))
    controls = {gain: [q for q in own if q in p_values] for gain, own in questions.controls.items() if gain in p_values}
    primary = {q for q in p_values if q[0] in (COST, GAIN) and q not in exploratory}.union(*controls.values())
    levels = adjusted({q: p for q, p in p_values.items() if q in primary}, controls)
    for arm in {q[2] for q in exploratory}:
        levels |= adjusted({q: p for q, p in p_values.items() if q in exploratory and q[2] == arm})
    claims = {}
    for q, difference in differences.items():
        result = judge(difference, levels.get(asked_as.get(q, q), math.nan), SEEDS, smallest_effect)
        if tuned_here and result.outcome != IDENTICAL:
            result = replace(result, outcome=TUNED_HERE)
        claims[q] = replace(result, exploratory=q in exploratory)
    return claims


@dataclass(frozen=True)
class Comparison:
    """Every number of the comparison.

    Attributes:
        best: a row per format and optimizer at its best learning rate: counts of cells, means over seeds, and the
            paired ``difference`` to the baseline at its best learning rate.
        gains: a row per format and optimizer that has a reference, see `_gains`.
        claims: the result of every question, see `answer`.
        runs: the primary metric by run and seed.
        best_runs: the run of each row of ``best``, by format and optimizer.
        references: the baseline optimizer that each other optimizer is compared with.
        reference: the baseline optimizer under which formats are compared; ``None`` if the grid has none.
        least: by optimizer, the difference that its tuning alone makes, see `_tuning_error`.
    """

    best: pd.DataFrame
    gains: pd.DataFrame
    claims: dict[Question, Result]
    runs: PairedLosses[Run]
    best_runs: dict[tuple[str, str], Run]
    references: dict[str, str]
    reference: str | None
    least: dict[str, float]

    @property
    def noise_floor(self) -> float:
        """The median over grid entries of half the 95 % interval of their cost; NaN if no cost has an interval."""
        costs = [claim.difference for (kind, *_), claim in self.claims.items() if kind == COST]
        known = [cost.half_width for cost in costs if cost.sd > 0]
        return float(np.median(known)) if known else math.nan

    @property
    def paired_seeds(self) -> tuple[int, int] | None:
        """The fewest and the most seeds of a comparison; ``None`` where nothing is compared."""
        counts = [claim.difference.n for claim in self.claims.values()]
        return (min(counts), max(counts)) if counts else None


def compare(study: Study) -> Comparison:
    """Return the comparison of the completed cells of ``study``."""
    metric = study.primary
    # Test documents may not choose the learning rate: the chosen one would be too good on them.
    runs, chosen_by = losses_of(study, metric.final), losses_of(study, metric.on_validation)
    rates = sorted(study.lr_scales)
    best = {
        (entry, arm): chosen_by.best([(entry, arm, rate) for rate in rates], higher_is_better=metric.higher_is_better)
        for entry, arm in itertools.product(study.formats, study.optimizers)
    }
    references = roles.references(study)
    least = _tuning_error(study, runs, best, references)
    claims = answer(
        ask(study, best, references), runs, least, tuned_here=len(rates) > 1, smallest_effect=metric.smallest_effect
    )
    return Comparison(
        _best(study, runs, best), _gains(study, references, claims), claims, runs, best, references,
        roles.main_plain(study), least,
    )  # fmt: skip


def _tuning_error(
    study: Study, runs: PairedLosses[Run], best: Mapping[tuple[str, str], Run], references: Mapping[str, str]
) -> dict[str, float]:
    """Return for each optimizer the largest mean difference (magnitude) that tuning alone makes; 0 if it is not known.

    It is measured with optimizers that need a format, in entries without one, where they train as their baseline
    optimizer. A difference there is chance, or one learning rate is closer to the best by luck: rates are a factor of
    two apart. Other optimizers differ there by more than their rates. Optimizers of one base share the result.
    """
    sizes: dict[str, float] = {}
    bases = {arm: study.arm(arm)["base"] for arm in study.optimizers}
    unquantized = [entry for entry in study.formats if not roles.entry_role(study, entry).has_format]
    for (arm, reference), entry in itertools.product(references.items(), unquantized):
        gain = runs.difference({best[entry, arm]: 1, best[entry, reference]: -1})
        if gain and bases[arm] == bases[reference] and roles.role_of(study.arm(arm)).needs_format:
            sizes[bases[arm]] = max(sizes.get(bases[arm], 0.0), abs(gain.mean))
    return {arm: sizes.get(bases[arm], 0.0) for arm in references}


def _best(study: Study, runs: PairedLosses[Run], best: Mapping[tuple[str, str], Run]) -> pd.DataFrame:
    """Return ``Comparison.best``, a row per format and optimizer at its best learning rate.

    ``difference`` is None for the baseline, and for an optimizer that trains as its baseline optimizer there.
    """
    cells = study.cells.assign(**{status: study.cells["status"] == status for status in (COMPLETED, DIVERGED, MISSING)})
    primary = study.primary.final
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
    table["perplexity"] = np.exp(table["val_loss"]) if study.primary.in_nats else math.nan
    return table


def _gains(study: Study, references: Mapping[str, str], claims: dict[Question, Result]) -> pd.DataFrame:
    """Return ``Comparison.gains``, a row per format and optimizer that has a baseline optimizer (``reference``).

    A format in which the optimizer trains as its baseline optimizer has no row. ``claim`` is the result for the
    optimizer's loss minus the reference's, None if no seed completed both. ``controls`` has by name the results against
    its controls and the result of its RMS-matched form. ``beyond`` is the format-specific effect: the gain minus the
    gain in the unquantized control ``twin``; None without a control.
    """
    columns = ["format", "optimizer", "reference", "claim", "controls", "twin", "beyond"]
    rows = []
    for entry, arm in itertools.product(study.formats, references):
        if roles.is_plain_in(study, entry, arm):
            continue
        of_arm = {q: claim for q, claim in claims.items() if q[1:3] == (entry, arm)}
        named = {q: {CONTROL: f"`{q[-1]}`", MATCHED: "RMS-matched"}.get(q[0]) for q in of_arm}
        controls = {name: of_arm[q] for q, name in named.items() if name}
        rows.append((
            entry, arm, references[arm], of_arm.get((GAIN, entry, arm)), controls,
            roles.unquantized_control(study, entry, arm), of_arm.get((BEYOND, entry, arm)),
        ))  # fmt: skip
    return pd.DataFrame(rows, columns=columns)


def among(frame: pd.DataFrame, runs: pd.DataFrame, keys: Sequence[str] = IDENTITY) -> pd.Series:
    """Return a mask of the rows of ``frame`` that equal a row of ``runs`` in the columns ``keys``."""
    known = pd.MultiIndex.from_frame(runs[list(keys)])
    return pd.Series(pd.MultiIndex.from_frame(frame[list(keys)]).isin(known), frame.index)


def at_best(frame: pd.DataFrame, comparison: Comparison) -> pd.DataFrame:
    """Return the rows of ``frame`` whose learning rate is the best of their (format, optimizer)."""
    return frame[among(frame, comparison.best, RUN)]


def of_completed(frame: pd.DataFrame, study: Study) -> pd.DataFrame:
    """Return the rows of ``frame`` that belong to completed runs."""
    return frame[among(frame, study.of_status(COMPLETED))]


def shown_optimizer(study: Study, comparison: Comparison) -> str:
    """Return the optimizer that per-layer figures show: the baseline optimizer, or else the grid's first."""
    return comparison.reference or study.optimizers[0]


def per_layer(frame: pd.DataFrame, study: Study, comparison: Comparison) -> pd.DataFrame:
    """Return the rows of ``frame`` of completed runs, with `shown_optimizer` at its best learning rate per format.

    If no run of a format completed, the rows of its diverged runs are returned.
    """
    frame = at_best(frame[frame["optimizer"] == shown_optimizer(study, comparison)], comparison)
    rows = among(frame, study.of_status(COMPLETED))
    return frame[rows | ~frame["format"].isin(frame.loc[rows, "format"].unique())]


def late(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the second half of each run, when weights have settled."""
    return frame[frame["step"] >= frame.groupby(IDENTITY)["step"].transform("max") / 2]


def in_order(names: Iterable[str], present: Iterable[str]) -> list[str]:
    """Return the ``names`` that are in ``present``, in the order of ``names`` (such as the grid's formats)."""
    members = set(present)
    return [name for name in names if name in members]


def memory(study: Study, comparison: Comparison) -> pd.DataFrame:
    """Return bytes per parameter (weights, master weights, gradients, optimizer state) and milliseconds of a step.

    There is a row per format and optimizer at its best learning rate, with the median over completed runs. The frame is
    empty if all of them have the same bytes per parameter.
    """
    completed = at_best(study.of_status(COMPLETED), comparison)
    costs = completed.groupby(["format", "optimizer"], sort=False)[[BYTES, "step_ms_median"]].median().dropna()
    return costs if costs[BYTES].round(2).nunique() > 1 else costs.iloc[:0]
