"""Which of the conditions of a fair comparison this grid satisfies, with the number or the reason for each.

A condition stands here only if a grid can fail it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from altgrad.config.schedule import kept_by_decay
from altgrad.reporting import roles
from altgrad.reporting.compare import Comparison
from altgrad.reporting.load import COMPLETED, Study
from altgrad.reporting.results import SEEDS
from altgrad.reporting.tuning import Tuning
from altgrad.reporting.wording import joined, plural

YES, NO, PARTLY, OPEN = "yes", "no", "partly", "does not apply"


@dataclass(frozen=True)
class Condition:
    """One condition, whether it is met (yes, partly, no, does not apply), and why."""

    name: str
    met: str
    reason: str


def conditions(study: Study, comparison: Comparison, tuning: Tuning | None = None) -> list[Condition]:
    """Return the conditions in a fixed order; ``tuning`` is an earlier run that fixed the learning rates."""
    return [
        _tuned(study, comparison, tuning),
        _other_seeds(study),
        _seeds(study, comparison),
        _one_machine(study),
        _lost(study),
        _full_schedule(study),
        _referred(study, comparison),
        _settings(study, comparison),
        _decay(study),
        _matched_update(study),
        _null_arms(study),
        _virtual(study, comparison),
    ]


def _tuned(study: Study, comparison: Comparison, tuning: Tuning | None) -> Condition:
    name = "Learning rate tuned per optimizer, optimum bracketed"
    if len(study.lr_scales) == 1:
        return _tuned_before(name, study, tuning)
    best = comparison.best
    edge, lost = best[best["bracket"] == "unbracketed"], best[best["bracket"] == "none completed"]
    reasons = [f"{len(study.lr_scales)} learning rates for every optimizer"]
    if len(edge):
        arms = [f"{row.format} {row.optimizer} at {row.lr_scale:g}" for row in edge.itertuples()]
        reasons.append(f"optimum at an edge: {joined(arms)}")
    if len(lost):  # their best rate is one that was put down for want of a loss
        arms = [f"{row.format} {row.optimizer}" for row in lost.itertuples()]
        reasons.append(f"completed at no rate: {joined(arms)}")
    untuned = len(edge) + len(lost)
    return Condition(name, YES if not untuned else PARTLY if untuned < len(best) else NO, "; ".join(reasons))


def _tuned_before(name: str, study: Study, tuning: Tuning | None) -> Condition:
    """Whether the one rate of each arm is the best that an earlier run found, between others that it tried."""
    if tuning is None:
        return Condition(name, NO, f"one learning rate for each optimizer in this grid (scale {study.lr_scales[0]:g})")
    good, bad = [], []
    for arm in study.optimizers:
        rate, tuned = study.arm(arm)["lr"] * study.lr_scales[0], tuning.arms.get(arm)
        if tuned is None:
            bad.append(f"{arm}: not among the optimizers tuned")
        elif tuned.against is not None:
            bad.append(f"{arm}: tuned {tuned.against}")
        elif not math.isclose(rate, tuned.best):
            bad.append(f"{arm}: {rate:g}, and {tuned.best:g} was better")
        elif not tuned.bracketed:
            bad.append(f"{arm}: {rate:g}, at the edge of the rates tried")
        else:
            good.append(f"{arm} {rate:g} of {tuned.rates[0]:g} to {tuned.rates[-1]:g}")
    seeds = f"seeds {joined([str(seed) for seed in tuning.seeds])}"
    reason = "; ".join([*bad, *([f"on {seeds} and {joined(list(tuning.entries))}: {joined(good)}"] if good else [])])
    return Condition(name, YES if not bad else PARTLY if good else NO, reason)


def _other_seeds(study: Study) -> Condition:
    name = "Learning rates not chosen on the seeds that are compared"
    if len(study.lr_scales) > 1:
        return Condition(name, NO, "each optimizer's best of several rates on these seeds, so nothing is tested")
    return Condition(name, YES, "one rate per optimizer, set in params.yaml before these runs")


def _full_schedule(study: Study) -> Condition:
    name = "Compared at the end of the full schedule"
    completed = study.cells[study.cells["status"] == COMPLETED]
    if completed.empty:
        return Condition(name, OPEN, "no run completed")
    short = completed[completed["steps"] < completed["planned_steps"]]
    lengths = sorted(set(study.cells["planned_steps"].astype(int)))
    if len(short):
        return Condition(name, NO, f"stopped early: {joined(list(short.index))}")
    if len(lengths) > 1:
        return Condition(
            name, PARTLY, f"runs have schedules of different length: {joined([str(n) for n in lengths])} steps"
        )
    return Condition(name, YES, f"{lengths[0]} steps in every completed run")


def _referred(study: Study, comparison: Comparison) -> Condition:
    name = "Every optimizer held against the baseline optimizer of its base and weight storage"
    aware = [optimizer for optimizer in study.optimizers if not roles.is_plain(study.arm(optimizer))]
    if not aware:
        return Condition(name, OPEN, "no geometry-aware optimizer in this grid")
    pairs = [f"{arm} against {comparison.references[arm]}" for arm in aware if arm in comparison.references]
    alone = [arm for arm in aware if arm not in comparison.references]
    if not alone:
        return Condition(name, YES, "; ".join(pairs))
    met = PARTLY if pairs else NO
    return Condition(name, met, "; ".join([*pairs, f"none in this grid for {joined(alone)}"]))


def _settings(study: Study, comparison: Comparison) -> Condition:
    """Whether arms differ from their references in anything that is not the question."""
    name = "Optimizers differ from their reference in nothing but the spacing"
    if not comparison.references:
        return Condition(name, OPEN, "no optimizer has a reference")
    found = []
    for arm, reference in comparison.references.items():
        own, base = study.arm(arm), study.arm(reference)
        changed = [key for key in roles.SHARED if own.get(key) != base.get(key)]
        if changed:
            found.append(f"{arm}: {joined([f'{key} {own.get(key)} for {base.get(key)}' for key in changed])}")
    if not found:
        return Condition(name, YES, f"the same {joined(list(roles.SHARED))} in each")
    return Condition(name, PARTLY if len(found) < len(comparison.references) else NO, "; ".join(found))


def _decay(study: Study) -> Condition:
    """Whether decay alone leaves the same share of a weight in every arm."""
    name = "Decay leaves the same share of the weights under every optimizer, over the run"
    if any("warmup" not in cell["train"] for cell in study.resolved.values()):
        return Condition(name, PARTLY, "not known: other programs trained the runs, by schedules of their own")
    kept: dict[str, set[str]] = {}
    left = cache(kept_by_decay)  # hundreds of cells have a few schedules
    for cell in study.resolved.values():
        arm, train = cell["arm"], cell["train"]
        schedule = {"steps": train["steps"], "warmup": train["warmup"], "final": train["final_lr"]}
        shares = [100 * left(arm[name], **schedule) for name in ("decay", "plain_decay")]
        kept.setdefault(f"{shares[0]:.3g} % of a linear layer, {shares[1]:.3g} % of an embedding", set()).add(
            cell["optimizer"]
        )
    ordered = {text: sorted(arms, key=study.optimizers.index) for text, arms in kept.items()}
    if len(ordered) == 1:
        return Condition(name, YES, next(iter(ordered)))
    return Condition(name, NO, "; ".join(f"{joined(arms)}: {text}" for text, arms in ordered.items()))


def _matched_update(study: Study) -> Condition:
    name = "RMS-matched update"
    if all(roles.is_plain(study.arm(optimizer)) for optimizer in study.optimizers):
        return Condition(name, OPEN, "no geometry-aware optimizer in this grid")
    matched = [optimizer for optimizer in study.optimizers if study.arm(optimizer).get("match_rms")]
    if matched:
        return Condition(name, YES, f"{joined(matched)}: updates of AdamW's root mean square, per tensor")
    return Condition(name, NO, "no update is rescaled to AdamW's root mean square in this grid")


def _null_arms(study: Study) -> Condition:
    name = "Shuffled or mean control, which knows nothing of the weight"
    if all(roles.is_plain(study.arm(optimizer)) for optimizer in study.optimizers):
        return Condition(name, OPEN, "no geometry-aware optimizer in this grid")
    null = [optimizer for optimizer in study.optimizers if roles.is_null(study.arm(optimizer))]
    return Condition(name, YES if null else NO, joined(null) if null else "none in this grid")


def _virtual(study: Study, comparison: Comparison) -> Condition:
    name = "Unquantized control (`virtual.`), the same spacing without the format"
    if not comparison.references:
        return Condition(name, OPEN, "no optimizer has a reference")
    twins = roles.unquantized_controls(study)
    quantized = [entry for entry in study.formats if roles.is_quantized(study, entry)]
    even = [entry for entry in quantized if entry not in twins and roles.has_even_grid(study, entry)]
    uneven = [entry for entry in quantized if entry not in even]
    without = [entry for entry in uneven if entry not in twins]
    if not uneven:
        return Condition(name, OPEN, "nothing is quantized to a format of unequal spacing in this grid")
    if not without:
        spared = f"; the values of {joined(even)} are a uniform grid, which needs none" if even else ""
        return Condition(name, YES, f"one for {joined(uneven)}{spared}")
    return Condition(name, PARTLY if twins else NO, f"none for {joined(without)}")


def _seeds(study: Study, comparison: Comparison) -> Condition:
    """Whether every comparison is over enough seeds: a seed counts where all of its runs completed."""
    name = "Paired seeds, enough for a test"
    if comparison.answers.paired_seeds is None:
        return Condition(name, OPEN, "no two runs are compared on a seed that both completed")
    fewest, most = comparison.answers.paired_seeds
    met = YES if fewest >= SEEDS else PARTLY if most > 1 else NO
    seeds = plural(most, "seed") if fewest == most else f"{fewest} to {most} seeds, by comparison,"
    reason = f"{seeds} of the {SEEDS} that a test takes; a seed fixes initial weights and data order"
    return Condition(name, met, reason)


def _one_machine(study: Study) -> Condition:
    """Whether what is compared was trained where the same cell gives the same bits."""
    name = "Runs of a seed trained on one class of machine"
    of_seed: dict[int, set[str]] = {}
    for key, timing in study.timing.items():
        versions = timing.get("versions", {})
        before = f"{timing.get('machine')}, torch {versions.get('torch')}"  # of records without a class
        of_seed.setdefault(study.cells.at[key, "seed"], set()).add(timing.get("machine_class", before))
    if not of_seed:
        return Condition(name, OPEN, "no run has trained")
    mixed = {seed: classes for seed, classes in sorted(of_seed.items()) if len(classes) > 1}
    if mixed:
        reason = "; ".join(f"seed {seed}: {joined(sorted(classes))}" for seed, classes in mixed.items())
        return Condition(name, PARTLY if len(mixed) < len(of_seed) else NO, f"{reason}; others may give other bits")
    return Condition(name, YES, joined(sorted(set().union(*of_seed.values()))))


def _lost(study: Study) -> Condition:
    name = "Every run has a final loss"
    lost = study.cells[study.cells["status"] != COMPLETED]
    if lost.empty:
        return Condition(name, YES, f"all {plural(len(study.cells), 'run')} completed")
    counts = [f"{count} {status}" for status, count in lost["status"].value_counts().items()]
    reason = f"{joined(counts)} of {plural(len(study.cells), 'run')}: counted as outcomes, left out of the means"
    return Condition(name, PARTLY if len(lost) < len(study.cells) else NO, reason)
