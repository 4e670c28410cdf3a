"""The report's tables. Each takes the study or the comparison and returns rows of text."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pandas as pd

from altgrad.config.recipe import SCALE_FORMATS
from altgrad.metrics import METRICS
from altgrad.reporting import roles
from altgrad.reporting.claims import BEYOND, COST, Claim
from altgrad.reporting.compare import Comparison
from altgrad.reporting.document import Column, Table, of_numbers
from altgrad.reporting.fairness import Condition
from altgrad.reporting.load import COMPLETED, DIVERGED, MISSING, Study
from altgrad.reporting.runs import RUN
from altgrad.reporting.wording import (
    NONE,
    absent,
    duration,
    interval,
    joined,
    number,
    p_value,
    plural,
    signed,
    significant,
    whole,
)

FLAG = "⚑"
BEYOND_TWIN = "beyond the virtual twin"


def words(head: str) -> Column:
    """A column of text."""
    return Column(head, numeric=False)


def results_table(study: Study, comparison: Comparison) -> Table:
    """Format x optimizer x learning rate: loss, paired difference, gap, perplexity, speed.

    The arm and the learning rate have a column where there are several, and stand in the note otherwise.
    """
    several_arms, several_rates = len(study.optimizers) > 1, len(study.lr_scales) > 1
    best, noise = comparison.best_runs, comparison.noise
    columns = [words("format")]
    columns += [words("arm")] * several_arms + [Column("peak lr")] * several_rates
    columns += [
        words("seeds"), Column("val loss ± sd"), Column("minus baseline"), Column("95 % interval"), words("reading"),
        Column("val gap"), Column("train gap"), Column("perplexity"), Column("tokens/s"),
    ]  # fmt: skip
    rows, behind = [], []
    for row in comparison.results.itertuples():
        run = (row.format, row.optimizer, row.lr_scale)
        behind.append(of_numbers(columns, dict(zip(RUN, run, strict=True))))
        chosen = " ◂" if best[row.format, row.optimizer] == run else ""
        mean = None if row.difference is None else row.difference.mean
        half = noise.half_width(row.difference) if noise and row.difference else None
        claim = comparison.answers.of(COST, row.format) if run == best.get((row.format, comparison.reference)) else None
        rows.append([
            f"**{row.format}**", *[row.optimizer] * several_arms, *[f"{row.peak_lr:.3g}{chosen}"] * several_rates,
            _seeds(row), _mean_sd(row.val_loss, row.val_loss_sd), signed(mean, 4), interval(row.difference, half),
            "baseline" if row.format == study.baseline else claim.verdict if claim else NONE,
            _gap(row, "val_gap"), _gap(row, "train_gap"),
            number(row.perplexity, 2), whole(row.tokens_per_s),
        ])  # fmt: skip
    note = [
        (
            "Means over completed seeds; differences and gaps over the seeds that both the row and the baseline "
            f"completed. {_asked(comparison.reference)} "
            f"{FLAG} marks a gap above {METRICS['val_gap'].level} (validation) or "
            f"{METRICS['train_gap'].level} (training)."
        )
    ]
    if not several_arms:
        note.append(f"Every row is arm `{study.optimizers[0]}`.")
    if several_rates:
        note.append("◂ marks the best learning rate of each format and arm, which the figures and the answer use.")
    else:
        rates = joined([f"{rate:.3g}" for rate in dict.fromkeys(comparison.results["peak_lr"])])
        note.append(f"Peak learning rate {rates}.")
    return Table(columns, rows, " ".join(note), behind)


def _asked(reference: str | None) -> str:
    if reference is None:
        return "No cost of a format is read: the grid has no plain arm."
    return (
        f"The cost of a format is read under `{reference}` alone: what the other rows show "
        "is no question that was asked beforehand."
    )


def _seeds(row: Any) -> str:
    lost = [f"{getattr(row, status)} {status}" for status in (DIVERGED, MISSING) if getattr(row, status)]
    return f"{row.completed} of {row.planned}" + (f" ({', '.join(lost)})" if lost else "")


def _mean_sd(mean: float, sd: float) -> str:
    return number(mean, 4) + ("" if absent(sd) else f" ± {number(sd, 4)}")


def _gap(row: Any, metric: str) -> str:
    percent = getattr(row, metric)
    text = signed(percent, 2) + ("" if absent(percent) else " %")
    return f"{FLAG} {text}" if METRICS[metric].limit.crossed("", percent) else text


def gains_table(study: Study, comparison: Comparison) -> Table:
    """Format x arm that is not plain: how much lower its loss is than its plain arm's, and against which controls."""
    gains = comparison.gains
    beyond, matched = (any(claim is not None for claim in gains[name]) for name in ("beyond", "matched"))
    nulls, foreign, several_rates = any(gains["nulls"]), any(gains["foreign"]), len(study.lr_scales) > 1
    columns = [
        words("format"), words("arm"), words("kind"), Column("seeds"), Column("gain"), Column("95 % interval"),
        Column("p, adjusted"), words("reading of the arm"),
    ]  # fmt: skip
    columns += [words(BEYOND_TWIN)] * beyond + [words("against null arms")] * nulls
    columns += [words("against a foreign geometry")] * foreign + [words("at AdamW's update size")] * matched
    columns += [words("learning rate")] * several_rates
    rows, behind = [], []
    for row in gains.itertuples():
        claim = row.claim
        compared = {"format": row.format, "optimizer": [row.optimizer, row.reference]}
        measured = claim is not None
        cells = [
            f"**{row.format}**", row.optimizer, row.kind, str(claim.difference.n if measured else 0),
            signed(-claim.difference.mean, 4) if measured else NONE,
            interval(-claim.difference, claim.half_width) if measured else NONE,
            p_value(claim.adjusted) if measured else NONE, claim.verdict if measured else "not judged",
        ]  # fmt: skip
        cells += [_sized(row.beyond)] * beyond + [_against(row.nulls)] * nulls + [_against(row.foreign)] * foreign
        cells += [_sized(row.matched)] * matched
        bracket = "bracketed" if row.bracketed else f"{FLAG} unbracketed"
        cells += [bracket if measured else NONE] * several_rates
        rows.append(cells)
        behind.append([
            compared | {"format": [row.format, row.twin]} if column.head == BEYOND_TWIN else of
            for column, of in zip(columns, of_numbers(columns, compared), strict=True)
        ])  # fmt: skip
    return Table(columns, rows, _gains_note(comparison), behind)


def _sized(claim: Claim | None) -> str:
    if claim is None:
        return NONE
    gain = -claim.difference
    return f"{signed(gain.mean, 4)} {interval(gain, claim.half_width)} {claim.verdict}"


def _against(claims: dict[str, Claim]) -> str:
    return ", ".join(f"{other}: {claim.verdict}" for other, claim in claims.items()) or NONE


def _gains_note(comparison: Comparison) -> str:
    held = {reference: [] for reference in comparison.references.values()}
    for arm, reference in comparison.references.items():
        held[reference].append(arm)
    pairs = joined([f"`{reference}` (for {joined(arms)})" for reference, arms in held.items()])
    parts = [
        (
            f"Gain: final validation loss of {pairs} minus the arm's, each at its best learning rate, in nats per "
            "token. Intervals are of each gain by itself; readings and p-values count all questions of the report."
        )
    ]
    for spread, what in ((comparison.gain_noise, "gains"), (comparison.answers.spreads[BEYOND], "differences of two")):
        if spread is not None:
            prior = "infinite" if math.isinf(spread.prior) else number(spread.prior, 1)
            parts.append(
                f"Spread of {what} from seed to seed: s0 {significant(math.sqrt(spread.variance))}, d0 {prior}, known "
                f"with {number(spread.dof, 0)} degrees of freedom."
            )
    tuned: dict[float, list[str]] = {}  # arms of one base have one
    for arm in comparison.references:
        tuned.setdefault(comparison.least.get(arm, 0.0), []).append(arm)
    if any(tuned):
        each = len(tuned) > 1
        sizes = [f"{significant(size)}{f' (of {joined(arms)})' * each}" for size, arms in tuned.items() if size]
        parts.append(
            f"Differences up to {joined(sizes)} count as none: that is what the choice among an arm's learning "
            "rates makes where nothing is quantized."
        )
    return " ".join(parts)


def outcomes_table(cells: pd.DataFrame) -> Table:
    """Every cell: how it ended, when, and with which signature."""
    columns = [
        words("cell"), words("outcome"), words("signature or reason"), Column("at step"), words("first non-finite"),
        Column("final val loss"), Column("best val loss"), Column("at step"), Column("steps clipped"),
    ]  # fmt: skip
    rows = []
    for key, cell in cells.iterrows():
        why = cell["reason"] if cell["status"] == MISSING else cell["signature"]
        emphasis = "" if cell["status"] == COMPLETED else "**"
        clipped = NONE if absent(cell["clipped_frac"]) else f"{100 * cell['clipped_frac']:.0f} %"
        rows.append([
            f"`{key}`", f"{emphasis}{cell['status']}{emphasis}", why, whole(cell["outcome_step"]),
            cell["first_nonfinite"] or NONE, number(cell["val_loss"], 4), number(cell["val_loss_best"], 4),
            whole(cell["val_loss_best_step"]), f"{FLAG} {clipped}" if cell["clipped_frac"] > 0.5 else clipped,
        ])  # fmt: skip
    return Table(columns, rows, f"{FLAG} marks gradient clipping on more than half of the steps.")


def fairness_table(conditions: Iterable[Condition]) -> Table:
    """The conditions of a fair comparison."""
    rows = [[condition.name, f"**{condition.met}**", condition.reason] for condition in conditions]
    return Table([words("condition"), words("met"), words("because")], rows)


def recipe_table(study: Study) -> Table | None:
    """The quantization rules of the grid's first quantized cell, and of its first one with virtual geometry."""
    first: dict[bool, dict[str, Any]] = {}
    for cell in study.resolved.values():
        if cell["rules"]:
            first.setdefault(roles.is_virtual(study, cell["format"]), cell)
    cells = list(first.values())
    if not cells:
        return None

    def spec(value: dict[str, Any] | None) -> str:
        if value is None:
            return "not quantized"
        per = f"block of {value['block']}" if value["granularity"] == "block" else value["granularity"]
        if value["granularity"] == "block" and value["scale"] not in SCALE_FORMATS:
            per += " under a float32 one per tensor"
        seen = " (the arm sees it, no product does)" if value.get("virtual") else ""
        return f"{value['format']}, {value['scaling']} scaling, {value['scale']} scale per {per}{seen}"

    heads = ("layers", "weight", "input", "incoming gradient", "through rounding", "output", "product by")
    columns = [words(head) for head in heads]
    rows = []
    for rule in (rule for cell in cells for rule in cell["rules"]):
        quantized = [spec(rule[role]) for role in ("weight", "input", "grad")]
        by = f"torchao, {rule['torchao']}" if rule.get("torchao") else rule.get("backend", "emulated")
        rows.append([f"`{rule['layers']}`", *quantized, rule["gradient"], rule["accumulate"], by])
    resolved = joined([f"`{cell['key']}`" for cell in cells])
    note = f"As resolved for {resolved}; the last matching rule wins. Everything else stays in the compute dtype."
    return Table(columns, rows, note)


def cost_table(study: Study) -> Table:
    """Time, speed and memory of every cell that ran, and their sum."""
    columns = [
        words("cell"), Column("train"), Column("compile"), Column("total"), Column("tokens/s"), Column("step, median"),
        Column("step, p90"), Column("peak memory"), Column("checkpoint"),
    ]  # fmt: skip
    ran = study.cells[study.cells["status"] != MISSING]
    rows = [
        [f"`{key}`", duration(cell["train_s"]), duration(cell["compile_s"]), duration(cell["total_s"]),
         whole(cell["tokens_per_s"]), f"{number(cell['step_ms_median'], 0)} ms", f"{number(cell['step_ms_p90'], 0)} ms",
         f"{whole(cell['peak_memory_mb'])} MB", f"{whole(cell['checkpoint_mb'])} MB"]
        for key, cell in ran.iterrows()
    ]  # fmt: skip
    total = [duration(ran[name].sum()) for name in ("train_s", "compile_s", "total_s")]
    rows.append([f"**all {plural(len(ran), 'cell')}**", *total, *[NONE] * 5])
    note = "Measured while the cell trained; a cell restored from the cache keeps the time that it took when it ran."
    return Table(columns, rows, note)


def machine_table(study: Study, revision: str | None) -> Table:
    """Where the numbers come from: machine, versions, revision."""
    rows = []
    for field in ("device", "machine", "devices", "threads", "compiled") if study.timing else ():
        seen = dict.fromkeys(str(timing[field]) for timing in study.timing.values())
        rows.append([field, joined(list(seen))])
    packages = dict.fromkeys(name for timing in study.timing.values() for name in timing["versions"])
    for package in packages:
        seen = dict.fromkeys(
            timing["versions"][package] for timing in study.timing.values() if package in timing["versions"]
        )
        rows.append([package, joined(list(seen))])
    rows.append(["git revision", f"`{revision}`" if revision else "not a git checkout"])
    return Table([words("what"), words("value")], rows)


def corpus_table(study: Study) -> Table:
    """The sizes of the splits."""
    units = ("documents", "characters", "tokens")
    splits = study.corpus["splits"]
    rows = [
        [name, *(whole(splits[name][unit]) for unit in units)] for name in ("train", "val", "test") if name in splits
    ]
    note = f"Corpus `{study.corpus['corpus']}`, vocabulary {whole(study.corpus['vocab_size'])}."
    return Table([words("split"), *(Column(unit) for unit in units)], rows, note)
