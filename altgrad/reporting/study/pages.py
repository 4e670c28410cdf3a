"""The pages of the study: RESULTS.md with a row per hypothesis; by question a row per comparison, and a forest plot."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from altgrad.reporting.decision_rule import SMALLEST_EFFECT
from altgrad.reporting.figures.style import drawing, panels, save
from altgrad.reporting.markdown import NONE, Column, Table, escaped, listed, number, significant, words
from altgrad.reporting.primary_metric import PrimaryMetric
from altgrad.reporting.study.answers import NATS, Answer, Comparison
from altgrad.reporting.study.questions import Question
from altgrad.reporting.study.runs import Runs
from altgrad.reporting.tables import cells, heads

LOW, HIGH, OPEN = "#0072B2", "#D55E00", "#777777"  # colours of the forest plot
NOTHING = "no seed has all of its runs"
DOUBTS = ("exploratory", "not checked")
RESULT = -4  # its place among `heads`, whose first may be followed by a unit
PLACE = "<!-- table -->"  # in what a person writes around the results
RULE = (
    "Δ loss is that of the method minus that of the reference, in nats per token of final validation loss, paired by "
    "seed: negative is better. Intervals are of 95 % and unadjusted; p is adjusted by Holm's step-down over the "
    f"comparisons of a hypothesis. *No effect*: the interval lies within ±{SMALLEST_EFFECT:g}. *Inconclusive* shows "
    "the smallest effect that the same seeds would have found nine times in ten."
)
UNITS = (
    " The unit *nats* is that of a loss, per label of a classifier. *F1* is that of test documents, where positive is "
    "better. A *ratio* is a cost in F1 minus a cost in loss, each divided by the unit that the hypothesis states."
)
KEY = (
    "Of a hypothesis with several comparisons, the row shows the one of the smallest p, and the result says how many "
    "of them are significant. *Registered* names the commit that first stated the hypothesis, as git's history has it."
)


def page(question: Question, answers: Sequence[Answer], runs: Runs, figure: str | None) -> str:
    """Return the page of a question; ``figure`` is the path of its figure from there."""
    shown = "Δ loss by the tokens of a batch, above what is predicted" if question.curve else (
        "Δ loss of each comparison below, with its 95 % interval"
    )  # fmt: skip
    drawn = f"![{shown}]({figure})" if figure else None
    parts = [
        f"# {question.question}", " ".join(question.answer.split()), drawn,
        *(" ".join(paragraph.split()) for paragraph in question.why),
        escaped(_hypotheses(answers)), _rule(answers), str(_comparisons(answers, runs)),
        _source(question, runs),
    ]  # fmt: skip
    return "\n\n".join(filter(None, parts)) + "\n"


def results(answers: Sequence[Answer], about: Path) -> str:
    """Return RESULTS.md: by question a row per hypothesis, within what a person wrote in the file ``about``."""
    above, _, below = about.read_text().partition(PLACE)
    registered = [answer for answer in answers if answer.hypothesis.registered]
    kinds = {kind: [answer.name for answer in registered if answer.registration.kind == kind] for kind in DOUBTS}
    counted = {kind: listed(names) if len(names) < 10 else f"{len(names)}" for kind, names in kinds.items() if names}
    doubted = [f"{said} {'is' if len(kinds[kind]) == 1 else 'are'} {kind}" for kind, said in counted.items()]
    held = f"Git's history confirms {sum(map(_holds, registered))} of {len(registered)} registrations"
    parts = [above.strip(), f"{'; '.join([held, *doubted])}.", KEY, _rule(answers)]
    for name, group in itertools.groupby(registered, key=lambda answer: answer.question.name):
        own = list(group)
        numbers = _heads(own)
        columns = [words(""), words("hypothesis"), *numbers, words("as expected"), words("registered")]
        table = Table(columns, [_hypothesis(answer, len(numbers)) for answer in own])
        parts += [f"## [{own[0].question.question}](study/{name}.md)", str(table)]
    return "\n\n".join(filter(None, [*parts, below.strip()])) + "\n"


def _rule(answers: Sequence[Answer]) -> str:
    return RULE + UNITS * bool(_units(answers) - {NATS})


def _units(answers: Sequence[Answer]) -> set[str]:
    return {found.unit for answer in answers for found in answer.comparisons}


def _heads(answers: Sequence[Answer]) -> list[Column]:
    """Return the columns of numbers, with one of units where not all are of losses."""
    delta, *others = heads(PrimaryMetric().delta)
    return [Column("Δ"), words("unit"), *others] if _units(answers) - {NATS} else [delta, *others]


def _numbers(found: Comparison, columns: int) -> list[str]:
    """Return the cells of as many columns, with the unit where it has one."""
    delta, *others = cells(found.result) if found.result else [NONE, NOTHING, NONE, NONE, "0"]
    return [delta, found.unit, *others] if columns > len(others) + 1 else [delta, *others]


def _holds(answer: Answer) -> bool:
    return answer.registration.kind == "registered"


def _hypothesis(answer: Answer, columns: int) -> list[str]:
    hypothesis, found = answer.hypothesis, answer.first
    registered = f"`{answer.registration.commit}`" if _holds(answer) else answer.registration.kind
    numbers = _numbers(found[0], columns) if found else [NONE] * columns
    if found is None:
        numbers[RESULT] = hypothesis.status if hypothesis.status != "tested" else hypothesis.result or NOTHING
    elif (count := len(answer.comparisons)) > 1:
        significant_of = sum(one.result is not None and one.result.significant for one in answer.comparisons)
        numbers[RESULT] = f"{significant_of} of {count} significant"
    expected = {True: "yes", False: "no", None: NONE}[answer.as_expected]
    return [answer.name, hypothesis.says, *numbers, expected, registered]


def _comparisons(answers: Sequence[Answer], runs: Runs) -> Table:
    numbers = _heads(answers)
    columns = [words(""), words("comparison"), words("size, tokens"), *numbers, words("expected")]
    rows = []
    for answer in answers:
        exploratory = answer.registration.kind == "exploratory"
        for i, found in enumerate(answer.comparisons):
            written = " + ".join(f"`{text}`" for text in found.written)
            written = written if len(found.written) <= 2 else f"a sum of {len(found.written)} contrasts"
            expected = "exploratory" if exploratory else found.expected or NONE
            expected += ": no" if not exploratory and found.as_expected is False else ""
            name = "" if i else f"**{answer.name}**"
            rows.append([name, written, _size(found, runs), *_numbers(found, len(numbers)), expected])
    return Table(columns, rows)


def _size(found: Comparison, runs: Runs) -> str:
    """Say parameters and tokens of a comparison's runs, such as "0.17 M, 0.2 M"."""
    rows = runs.of_experiment(*{run.experiment for run in found.runs})
    sizes = [sorted(set(rows[name].dropna())) for name in ("parameters", "tokens")]

    def millions(value: float) -> str:
        return f"{significant(value / 1e6, 2) if value < 1e8 else number(value / 1e6, 0)} M"

    return ", ".join("/".join(map(millions, values)) for values in sizes)


def _hypotheses(answers: Sequence[Answer]) -> str:
    """Say what each hypothesis is, where it was registered, how it was answered in words, and what deviates."""
    lines = []
    for answer in answers:
        asked, found = answer.hypothesis, answer.registration
        place = f"{' in' if _holds(answer) else ', stated in'} `{found.commit}`" * bool(found.commit)
        held = f"{found.kind}{place}" + f", {found.why}" * bool(found.why)
        said = [
            f"**{answer.name}** ({held}): {asked.says}", f"{asked.status}: {asked.why}" if asked.why else None,
            asked.result, f"deviation: {asked.deviation}" if asked.deviation else None,
        ]  # fmt: skip
        lines.append("- " + " ".join(filter(None, said)))
    return "\n".join(lines)


def _source(question: Question, runs: Runs) -> str:
    """Say how many runs there are, of which machines, and how to train and to read them again."""
    rows = runs.of_experiment(*question.runs)
    machines = ", ".join(sorted(set(rows["machine"].dropna())))
    ended = int((rows["status"] == "ok").sum())
    return (
        f"{ended} of {len(rows)} runs ended, on {machines}. Settings: [{question.path.name}]({question.path.name}); "
        f"losses: [runs.csv](results/runs.csv); again: `make study NAME={question.name}`."
    )


def draw(answers: Sequence[Answer], folder: Path) -> str | None:
    """Draw the comparisons of losses that have an interval as ``folder/<question>.png``; ``None`` without one."""
    rows = [
        (f"{answer.name}  {found.label}" if i == 0 else found.label, found.result)
        for answer in answers
        for i, found in enumerate(answer.comparisons)
        if found.result is not None and found.unit == NATS and found.result.half_width == found.result.half_width
    ]
    if not rows:
        return None
    name = answers[0].question.name
    with drawing():
        figure, ((axes,),) = panels(1, 1, 0.9 + 0.2 * len(rows), width=7.5)
        axes.axvspan(-SMALLEST_EFFECT, SMALLEST_EFFECT, color="#dddddd", linewidth=0)
        axes.axvline(0, color="black", linewidth=0.8)
        for y, (_, result) in enumerate(rows):
            mean, look = result.difference.mean, {"marker": "o", "markersize": 4}
            color = (LOW if mean < 0 else HIGH) if result.significant else OPEN
            axes.errorbar(mean, y, xerr=result.half_width, color=color, linewidth=1.1, **look)
            axes.plot(mean, y, color=color, markerfacecolor=color if result.significant else "white", **look)
        axes.set_yticks(range(len(rows)), [label for label, _ in rows], fontsize=7)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set(xlabel="Δ loss: method − reference (nats per token); below zero is better, grey is no effect")
        save(figure, folder, name)
    return f"{name}.png"
