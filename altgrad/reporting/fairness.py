"""The conditions of a fair comparison: which ones a grid meets, with the number or the reason for each.

Every condition is one that a grid can fail.

The study's experiment ``tuning`` fixed the learning rates of the default grid. It counts for an optimizer if it trained
a model of the same size on the same text for as many steps. All settings apart from the learning rate must be the same,
and the seeds must not be those of this grid. The best rate has the lowest mean loss over all formats and seeds tried; a
rate at which a run diverged is not the best.
"""

import math
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from altgrad.common.errors import UserError
from altgrad.config.arms import Arm
from altgrad.config.schema import kept_by_decay, schedule_of
from altgrad.config.tasks import FEWEST, ComparedOn
from altgrad.reporting import optimizer_roles as roles
from altgrad.reporting.compare import Comparison
from altgrad.reporting.load import COMPLETED, Study
from altgrad.reporting.markdown import listed, plural, significant
from altgrad.reporting.statistics import SEEDS
from altgrad.reporting.study.questions import Question
from altgrad.reporting.study.runs import RunTable

YES, NO, PARTLY, OPEN = "yes", "no", "partly", "does not apply"
Met = tuple[str, str]  # whether a condition is met (one of these texts), and the reason
UNAWARE = OPEN, "no geometry-aware optimizer in this grid"
EXPERIMENT, QUESTION = "tuning", "default-rates.yaml"  # the file of the experiment's question
EQUAL = {"parameters": "model", "steps": "number of steps", "tokens": "number of tokens"}


class Tuned(NamedTuple):
    """The learning rates tried for an optimizer, ascending, and the best; ``against``: why they do not count, if so."""

    rates: tuple[float, ...]
    best: float
    against: str | None


class Tuning(NamedTuple):
    """The seeds and entries of the experiment, and by optimizer what it found."""

    seeds: tuple[int, ...]
    entries: tuple[str, ...]
    arms: dict[str, Tuned]


def load_tuning(folder: Path, study: Study) -> Tuning | None:
    """Return the tuning in ``folder`` of the optimizers that ``study`` has; ``None`` if the folder cannot be read."""
    if not (folder / QUESTION).is_file():
        return None
    try:
        rows = RunTable.read(folder / "results").of_experiment(EXPERIMENT)
        params = Question.read(folder / QUESTION).params(EXPERIMENT, folder.parents[1] / "params.yaml")
    except UserError:
        return None
    elsewhere, arms = _elsewhere(params, rows, study), {}
    for arm, runs in rows.groupby("optimizer"):
        if arm in study.optimizers:
            losses = runs.groupby("lr_scale")["val_loss"].agg(lambda values: values.mean(skipna=False)).sort_index()
            rates = tuple(params["optimizers"][arm]["lr"] * float(scale) for scale in losses.index)
            best = rates[int(losses.argmin())] if losses.notna().any() else float("nan")
            arms[arm] = Tuned(rates, best, elsewhere or _changed(arm, params, study))
    return Tuning(tuple(sorted(set(rows["seed"]))), tuple(dict.fromkeys(rows["format"])), arms)


def _elsewhere(params: dict[str, Any], rows: pd.DataFrame, study: Study) -> str | None:
    """Return how the experiment differs from this grid, such as "with another text"; ``None`` if it does not."""
    if "task" in study.params:
        return "for another task"
    for column, what in EQUAL.items():
        if set(rows[column]) != set(study.cells[column].dropna()):
            return f"with another {what}"
    here = study.corpus.get("corpus"), study.corpus.get("vocab_size")
    if (params["corpus"], params["tokenizer"]["vocab_size"]) != here:
        return "with another text"
    return "on seeds of this grid" if set(rows["seed"]) & set(study.seeds) else None


def _changed(arm: str, params: dict[str, Any], study: Study) -> str | None:
    tried, here = Arm.model_validate(params["optimizers"][arm]).model_dump(mode="json"), study.params["optimizers"][arm]
    changed = [name for name in tried if name != "lr" and tried[name] != here.get(name)]
    return f"with another {changed[0]}" if changed else None


def conditions(study: Study, comparison: Comparison, tuning: Tuning | None = None) -> dict[str, Met]:
    """Return whether each condition is met, by name; ``tuning`` is an earlier study that fixed the learning rates."""
    arms = {name: study.arm(name) for name in study.optimizers}
    others, aware = roles.aware(study), any(roles.role_of(arm).follows_spacing for arm in arms.values())
    matched = listed([name for name, arm in arms.items() if arm.get("match_rms")])
    null = listed([name for name, arm in arms.items() if arm.get("stiffness") in roles.NULL_STIFFNESS])
    one_rate = len(study.lr_scales) == 1
    return {
        "Learning rate tuned per optimizer, optimum bracketed":
            _tuned_before(study, tuning) if one_rate else _tuned(study, comparison),
        "Learning rates not chosen on the seeds that are compared":
            (YES, "one rate per optimizer, set in params.yaml before these runs") if one_rate
            else (NO, "each optimizer's best of several rates on these seeds, so nothing is tested"),
        "Paired seeds, enough for a test": _seeds(comparison),
        "Enough text compared on to stand for other text": _text(study, comparison),
        "Runs of a seed trained on one class of machine": _one_machine(study),
        "Every run has a final loss": _lost(study),
        "Compared at the end of the full schedule": _full_schedule(study),
        "Every optimizer held against the baseline optimizer of its base and weight storage":
            _referred(others, comparison) if others else (OPEN, "no other optimizer in this grid"),
        "Every optimizer has the settings of its reference, but for its update rule": _settings(study, comparison),
        "Decay leaves the same share of the weights under every optimizer, over the run": _decay(study),
        "RMS-matched update":
            UNAWARE if not aware else (YES, f"{matched}: updates of AdamW's root mean square, per tensor") if matched
            else (NO, "no update is rescaled to AdamW's root mean square in this grid"),
        "Shuffled or mean control, which knows nothing of the weight":
            UNAWARE if not aware else (YES, null) if null else (NO, "none in this grid"),
        "Unquantized control (`virtual.`), the same spacing without the format": _virtual(study, comparison),
    }  # fmt: skip


def _some(good: int, of: int) -> str:
    """Return "yes", "partly" or "no" for a condition that ``good`` members out of ``of`` meet."""
    return YES if good == of else PARTLY if good else NO


def _tuned(study: Study, comparison: Comparison) -> Met:
    """Return whether, for each optimizer and format, the best learning rate lies between smaller and larger ones."""
    best = comparison.best
    edge, lost = best[best["bracket"] == "unbracketed"], best[best["bracket"] == "none completed"]
    reasons = [f"{len(study.lr_scales)} learning rates for every optimizer"]
    if len(edge):
        arms = [f"{row.format} {row.optimizer} at {row.lr_scale:g}" for row in edge.itertuples()]
        reasons.append(f"optimum at an edge: {listed(arms)}")
    if len(lost):  # without a loss, their best rate means nothing
        arms = [f"{row.format} {row.optimizer}" for row in lost.itertuples()]
        reasons.append(f"completed at no rate: {listed(arms)}")
    return _some(len(best) - len(edge) - len(lost), len(best)), "; ".join(reasons)


def _tuned_before(study: Study, tuning: Tuning | None) -> Met:
    """Return whether each optimizer has the best of the learning rates that an earlier study (``tuning``) tried."""
    if tuning is None:
        return NO, f"one learning rate for each optimizer in this grid (scale {study.lr_scales[0]:g})"
    good, bad = [], []
    for arm in study.optimizers:
        rate, tuned = study.arm(arm)["lr"] * study.lr_scales[0], tuning.arms.get(arm)
        if tuned is None:
            bad.append(f"{arm}: not among the optimizers tuned")
        elif tuned.against is not None:
            bad.append(f"{arm}: tuned {tuned.against}")
        elif not math.isclose(rate, tuned.best):
            bad.append(f"{arm}: {rate:g}, and {tuned.best:g} was better")
        elif not tuned.rates[0] < tuned.best < tuned.rates[-1]:
            bad.append(f"{arm}: {rate:g}, at the edge of the rates tried")
        else:
            good.append(f"{arm} {rate:g} of {tuned.rates[0]:g} to {tuned.rates[-1]:g}")
    seeds = f"seeds {listed(map(str, tuning.seeds))}"
    reason = "; ".join([*bad, *([f"on {seeds} and {listed(tuning.entries)}: {listed(good)}"] if good else [])])
    return _some(len(good), len(study.optimizers)), reason


def _seeds(comparison: Comparison) -> Met:
    """Return whether every comparison has enough seeds; a seed counts if all runs of the comparison completed it."""
    if comparison.paired_seeds is None:
        return OPEN, "no two runs are compared on a seed that both completed"
    fewest, most = comparison.paired_seeds
    seeds = plural(most, "seed") if fewest == most else f"{fewest} to {most} seeds, by comparison,"
    met = YES if fewest >= SEEDS else PARTLY if most > 1 else NO
    return met, f"{seeds} of the {SEEDS} that a test takes; a seed fixes initial weights and data order"


def _text(study: Study, comparison: Comparison) -> Met:
    """Return whether runs are compared on enough documents, and how large a difference the seeds would show there."""
    splits = study.corpus.get("splits")
    if splits is None or any("eval_sequences" not in cell["train"] for cell in study.resolved.values()):
        return OPEN, "not known: other programs trained the runs"
    read = {
        (cell["train"]["eval_sequences"], cell["model"]["context"], cell.get("task", {}).get("chunks"))
        for cell in study.resolved.values()
    }
    texts = [ComparedOn.of_splits(splits, *settings) for settings in sorted(read)]
    good = sum(text.enough for text in texts)
    few = "" if good == len(texts) else f", fewer than {FEWEST}"
    visible = [result.visible for result in comparison.claims.values() if math.isfinite(result.visible)]
    ends = list(dict.fromkeys(significant(end(visible)) for end in (min, max))) if visible else []
    seen = "how large a difference must be to be seen is not known" if not ends else (
        f"there a difference is seen nine times in ten if it is {' to '.join(ends)} {study.primary.unit} or more"
        f"{', by comparison' * (len(ends) > 1)}".replace("  ", " ")
    )  # fmt: skip
    return _some(good, len(texts)), f"{listed(map(str, texts))}{few}; {seen}"


def _one_machine(study: Study) -> Met:
    """Return whether all runs of a seed were trained on one class of machine: within one, results have equal bits."""
    of_seed: dict[int, set[str]] = {}
    for key, timing in study.timing.items():
        versions = timing.get("versions", {})
        before = f"{timing.get('machine')}, torch {versions.get('torch')}"  # for records without a machine class
        of_seed.setdefault(study.cells.at[key, "seed"], set()).add(timing.get("machine_class", before))
    if not of_seed:
        return OPEN, "no run has trained"
    mixed = {seed: classes for seed, classes in sorted(of_seed.items()) if len(classes) > 1}
    if not mixed:
        return YES, listed(sorted(set().union(*of_seed.values())))
    reason = "; ".join(f"seed {seed}: {listed(sorted(classes))}" for seed, classes in mixed.items())
    return _some(len(of_seed) - len(mixed), len(of_seed)), f"{reason}; others may give other bits"


def _lost(study: Study) -> Met:
    lost, every = study.cells[study.cells["status"] != COMPLETED], plural(len(study.cells), "run")
    if lost.empty:
        return YES, f"all {every} completed"
    counts = listed([f"{count} {status}" for status, count in lost["status"].value_counts().items()])
    good = len(study.cells) - len(lost)
    return _some(good, len(study.cells)), f"{counts} of {every}: counted as outcomes, left out of the means"


def _full_schedule(study: Study) -> Met:
    completed = study.of_status(COMPLETED)
    if completed.empty:
        return OPEN, "no run completed"
    short = completed[completed["steps"] < completed["planned_steps"]]
    lengths = sorted(set(study.cells["planned_steps"].astype(int)))
    if len(short):
        return NO, f"stopped early: {listed(short.index)}"
    if len(lengths) > 1:
        return PARTLY, f"runs have schedules of different length: {listed(map(str, lengths))} steps"
    return YES, f"{lengths[0]} steps in every completed run"


def _referred(others: list[str], comparison: Comparison) -> Met:
    pairs = [f"{arm} against {reference}" for arm, reference in comparison.references.items()]
    alone = [arm for arm in others if arm not in comparison.references]
    without = [f"none in this grid for {listed(alone)}"] if alone else []
    return _some(len(pairs), len(others)), "; ".join([*pairs, *without])


def _settings(study: Study, comparison: Comparison) -> Met:
    """Return whether optimizers have the settings of their references, apart from the update rule."""
    if not comparison.references:
        return OPEN, "no optimizer has a reference"
    different = []
    for arm, reference in comparison.references.items():
        method, base = study.arm(arm), study.arm(reference)
        values = {key: (method.get(key), base.get(key)) for key in roles.SHARED}
        changed = [f"{key} {a} for {b}" for key, (a, b) in values.items() if a != b]
        different += [f"{arm}: {listed(changed)}"] if changed else []
    pairs = len(comparison.references)
    return _some(pairs - len(different), pairs), "; ".join(different) or f"the same {listed(roles.SHARED)} in each"


def _decay(study: Study) -> Met:
    """Return whether weight decay alone leaves the same share of a weight at the end under every optimizer."""
    if any("warmup" not in cell["train"] for cell in study.resolved.values()):
        return PARTLY, "not known: other programs trained the runs, by schedules of their own"
    kept: dict[str, set[str]] = {}
    left = cache(kept_by_decay)  # hundreds of cells have a few schedules
    for cell in study.resolved.values():
        shares = [100 * left(share, **schedule_of(cell["train"])) for share in _shares(cell)]
        text = f"{shares[0]:.3g} % of a linear layer, {shares[1]:.3g} % of an embedding"
        kept.setdefault(text, set()).add(cell["optimizer"])
    if len(kept) == 1:
        return YES, next(iter(kept))
    ordered = {text: sorted(arms, key=study.optimizers.index) for text, arms in kept.items()}
    return NO, "; ".join(f"{listed(arms)}: {text}" for text, arms in ordered.items())


def _shares(cell: dict[str, Any]) -> tuple[float, float]:
    """Return the shares that a step's decay takes from a linear layer's weight and an embedding, at the peak rate."""
    arm = cell["arm"]
    if arm.get("decay") is not None:
        return arm["decay"], arm["plain_decay"]
    return Arm.model_validate(arm | {"lr": arm["lr"] * cell["lr_scale"]}).shares


def _virtual(study: Study, comparison: Comparison) -> Met:
    if not comparison.references:
        return OPEN, "no optimizer has a reference"
    if not any(roles.role_of(study.arm(arm)).follows_spacing for arm in comparison.references):
        return UNAWARE
    twins = roles.unquantized_controls(study)
    quantized = [entry for entry in study.formats if roles.is_quantized(study, entry)]
    even = [entry for entry in quantized if entry not in twins and roles.has_even_grid(study, entry)]
    uneven = [entry for entry in quantized if entry not in even]
    without = [entry for entry in uneven if entry not in twins]
    if not uneven:
        return OPEN, "nothing is quantized to a format of unequal spacing in this grid"
    if not without:
        spared = f"; the values of {listed(even)} are a uniform grid, which needs none" if even else ""
        return YES, f"one for {listed(uneven)}{spared}"
    return PARTLY if twins else NO, f"none for {listed(without)}"
