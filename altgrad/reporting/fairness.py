"""Which of the conditions of a fair comparison this grid satisfies, with the reason for each."""

from __future__ import annotations

from dataclasses import dataclass

from altgrad.reporting.compare import CLAIM_SEEDS, Comparison, is_null, is_plain, regime
from altgrad.reporting.control import TWINS, Control
from altgrad.reporting.load import COMPLETED, DIVERGED, Study
from altgrad.reporting.wording import joined, plural

YES, NO, PARTLY, OPEN = "yes", "no", "partly", "does not apply"


@dataclass(frozen=True)
class Condition:
    """One condition, whether it is met (yes, partly, no, does not apply), and why."""

    name: str
    met: str
    reason: str


def conditions(study: Study, comparison: Comparison, control: Control | None) -> list[Condition]:
    """Return the conditions in a fixed order."""
    return [
        _tuned(study, comparison),
        _full_schedule(study),
        _matched_update(study),
        _null_arms(study),
        _twins(control),
        _seeds(study),
        _metric(),
        _regime(study),
        _divergence(study),
    ]


def _tuned(study: Study, comparison: Comparison) -> Condition:
    name = "Learning rate tuned per arm, optimum bracketed"
    if len(study.lr_scales) == 1:
        return Condition(name, NO, f"one learning rate for all (scale {study.lr_scales[0]:g})")
    edge = comparison.best[comparison.best["bracket"] != "bracketed"]
    arms = [f"{row.format} {row.optimizer} at {row.lr_scale:g}" for row in edge.itertuples()]
    tried = f"{len(study.lr_scales)} learning rates for every arm"
    if not arms:
        return Condition(name, YES, tried)
    return Condition(
        name, PARTLY if len(arms) < len(comparison.best) else NO, f"{tried}; optimum at an edge: {joined(arms)}"
    )


def _full_schedule(study: Study) -> Condition:
    name = "Compared at the end of the full schedule"
    completed = study.cells[study.cells["status"] == COMPLETED]
    if completed.empty:
        return Condition(name, OPEN, "no cell completed")
    short = completed[completed["steps"] < completed["planned_steps"]]
    lengths = sorted(set(study.cells["planned_steps"].astype(int)))
    if len(short):
        return Condition(name, NO, f"stopped early: {joined(list(short.index))}")
    if len(lengths) > 1:
        return Condition(
            name, PARTLY, f"cells have schedules of different length: {joined([str(n) for n in lengths])} steps"
        )
    return Condition(name, YES, f"{lengths[0]} steps in every completed cell")


def _matched_update(study: Study) -> Condition:
    name = "Second control with matched update size"
    if all(is_plain(study.arm(optimizer)) for optimizer in study.optimizers):
        return Condition(name, OPEN, "no geometry-aware arm in this grid")
    matched = [optimizer for optimizer in study.optimizers if study.arm(optimizer).get("match_rms")]
    if matched:
        return Condition(name, YES, f"{joined(matched)}: updates of AdamW's root mean square, per tensor")
    return Condition(name, NO, "no arm is rescaled to AdamW's update size in this grid")


def _null_arms(study: Study) -> Condition:
    name = "Null arms that carry no geometry"
    if all(is_plain(study.arm(optimizer)) for optimizer in study.optimizers):
        return Condition(name, OPEN, "no geometry-aware arm in this grid")
    null = [optimizer for optimizer in study.optimizers if is_null(study.arm(optimizer))]
    return Condition(name, YES if null else NO, joined(null) if null else "none in this grid")


def _twins(control: Control | None) -> Condition:
    name = f"{TWINS[0]} and {TWINS[1]} agree to the bit"
    if control is None:
        return Condition(name, OPEN, f"{TWINS[0]} and {TWINS[1]} did not both run")
    pairs = plural(control.pairs, "pair")
    reason = f"largest difference {control.max_difference:g} over {control.values} logged values of {pairs} of cells"
    return Condition(name, YES if control.agrees else NO, reason)


def _seeds(study: Study) -> Condition:
    n = len(study.seeds)
    met = YES if n >= CLAIM_SEEDS else PARTLY if n > 1 else NO
    reason = f"{plural(n, 'seed')} of the {CLAIM_SEEDS} that a claim takes; a seed fixes initial weights and data order"
    return Condition("Paired seeds, enough for a claim", met, reason)


def _metric() -> Condition:
    return Condition("Primary metric named before the run", YES, "final validation loss, fixed in the report's code")


def _regime(study: Study) -> Condition:
    name = "Master and on-grid weights never mixed"
    regimes = {regime(study.arm(optimizer)) for optimizer in study.optimizers}
    if len(regimes) > 1:
        return Condition(
            name, YES, f"this grid has {joined(sorted(regimes))} weights, and gains are within each"
        )
    return Condition(name, YES, f"every arm keeps {regimes.pop()} weights")


def _divergence(study: Study) -> Condition:
    count = study.count(DIVERGED)
    return Condition(
        "Divergence counted as an outcome", YES, f"{plural(count, 'cell')} diverged; listed, never averaged"
    )
