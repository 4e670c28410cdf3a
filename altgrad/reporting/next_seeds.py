"""What to run next: the seeds that would halve the widest interval that matters, as a command, and what they take."""

from __future__ import annotations

import math

from altgrad.reporting.claims import BEYOND, COST, GAIN, Claim, Question, Questions, ask
from altgrad.reporting.compare import Comparison
from altgrad.reporting.load import COMPLETED, Study
from altgrad.reporting.wording import plural

# What a report is about comes first: a gain beyond the same geometry's without the format, then gains, then costs.
KINDS = (BEYOND, GAIN, COST)
NARROWER = 2.0  # times as narrow


def widest(comparison: Comparison, questions: Questions) -> tuple[Question, Claim] | None:
    """Return the question that is not told apart whose interval is the widest, of the first of `KINDS` with any.

    Exploratory ones are left out: no number of seeds makes a finding of them.
    """
    for kind in KINDS:
        found = [
            (question, claim) for question, claim in comparison.answers.claims.items()
            if question[0] == kind and question not in questions.exploratory
            and claim is not None and not claim.told_apart and claim.half_width > 0
        ]  # fmt: skip
        if found:
            return max(found, key=lambda pair: pair[1].half_width)
    return None


def next_seeds(study: Study, comparison: Comparison) -> str:
    """Say which seeds would halve the widest interval that matters; "" where nothing is left to tell apart."""
    questions = ask(study, comparison.best_runs, comparison.references)
    found = widest(comparison, questions)
    if found is None:
        return ""
    question, claim = found
    contrast = questions.contrasts[question]
    entries, arms, rates = (
        [value for value in known if value in {run[i] for run in contrast}]
        for i, known in enumerate((study.formats, study.optimizers, study.lr_scales))
    )
    count = math.ceil(NARROWER**2 * len(study.seeds))
    paired = claim.difference.n
    provided = f", if again {paired} of {len(study.seeds)} complete all runs" if paired < len(study.seeds) else ""
    seeds = [*study.seeds, *(seed for seed in range(10_000) if seed not in study.seeds)][:count]
    cells = len(entries) * len(arms) * len(rates) * (count - len(study.seeds))
    settings = {"formats": entries, "optimizers": arms, "lr_scales": rates, "seeds": seeds}
    options = [f"-S 'grid.{name}=[{','.join(map(str, values))}]'" for name, values in settings.items()]
    if study.params["grid"]["baseline"] not in entries:
        options.append(f"-S grid.baseline={entries[0]}")
    return (
        f"The widest interval that matters is that of {_named(question)}, ±{claim.half_width:.4f}. One about half as "
        f"wide takes {plural(count, 'seed')}{provided}: `dvc exp run {' '.join(options)}`, {plural(cells, 'new cell')}"
        f"{_time(study, entries, arms, cells)}."
    )


def _named(question: Question) -> str:
    kind, entry, *arm = question
    if kind == COST:
        return f"what **{entry}** costs"
    part = "what is **{}**'s own in the gain of `{}`" if kind == BEYOND else "the gain in **{}** of `{}`"
    return part.format(entry, arm[0])


def _time(study: Study, entries: list[str], arms: list[str], cells: int) -> str:
    """Say what so many cells take, by those of the same entries and arms that completed: others stopped early."""
    seconds = [
        timing["total_s"] - (timing.get("compile_s") or 0.0) for key, timing in study.timing.items()
        if study.cells.at[key, "format"] in entries and study.cells.at[key, "optimizer"] in arms
        and study.cells.at[key, "status"] == COMPLETED
    ]  # fmt: skip
    if not seconds:
        return ""
    mean = sum(seconds) / len(seconds)
    return f" of about {mean:.0f} s each, {cells * mean / 60:.0f} min if one runs at a time"
