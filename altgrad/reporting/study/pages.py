"""The pages of the study: RESULTS.md with a row per hypothesis; by question a row per comparison, and a forest plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from altgrad.reporting.document import Column, Table, Text, words
from altgrad.reporting.figures.style import drawing, panels, save
from altgrad.reporting.markdown import blocks_to_markdown
from altgrad.reporting.measure import Measure
from altgrad.reporting.results import SMALLEST_EFFECT
from altgrad.reporting.study.answers import Answer, Comparison
from altgrad.reporting.study.questions import Question
from altgrad.reporting.study.runs import Runs
from altgrad.reporting.summary import cells, heads
from altgrad.reporting.wording import NONE, number, significant

LOW, HIGH, OPEN = "#0072B2", "#D55E00", "#777777"  # colours of the forest plot
NOTHING = "no seed has all of its runs"
NUMBERS = heads(Measure().delta)
RULE = (
    "Δ loss is that of the method minus that of the reference, in nats per token of final validation loss, paired by "
    "seed: negative is better. Intervals are of 95 % and unadjusted; p is adjusted by Holm's step-down over the "
    f"comparisons of a hypothesis. *No effect*: the interval lies within ±{SMALLEST_EFFECT:g}. *Inconclusive* shows "
    "the smallest effect that the same seeds would have found nine times in ten."
)
OF_F1 = " A comparison `at` an F1 is of the F1 of test documents, where positive is better."


def page(question: Question, answers: Sequence[Answer], runs: Runs, figure: str | None) -> str:
    """Return the page of a question; ``figure`` is the path of its figure from there."""
    drawn = f"![Δ loss of each comparison below, with its 95 % interval]({figure})" if figure else None
    parts = [
        f"# {question.question}", " ".join(question.answer.split()), drawn,
        blocks_to_markdown([_comparisons(answers, runs), *_untested(answers)]), _rule(answers), _source(question, runs),
    ]  # fmt: skip
    return "\n\n".join(filter(None, parts)) + "\n"


def results(answers: Sequence[Answer], about: Path) -> str:
    """Return RESULTS.md: a row per hypothesis, after what a person wrote in the file ``about``."""
    columns = [words(""), words("hypothesis"), Column("comparisons"), *NUMBERS, words("as expected"), words("page")]
    rows = [_hypothesis(answer) for answer in answers if answer.hypothesis.registered]
    note = (
        "Of a hypothesis with several comparisons the one of the smallest p is shown, and of how many the result is "
        "significant."
    )
    table = blocks_to_markdown([Table(columns, rows, note)])
    return "\n\n".join([about.read_text().strip(), _rule(answers), table]) + "\n"


def _rule(answers: Sequence[Answer]) -> str:
    return RULE + OF_F1 * any(found.of_f1 for answer in answers for found in answer.comparisons)


def _hypothesis(answer: Answer) -> list[str]:
    hypothesis, found = answer.hypothesis, answer.first
    link = f"[{answer.question.name}](study/{answer.question.name}.md)"
    if found is None:
        said = hypothesis.status if hypothesis.status != "tested" else hypothesis.result or NOTHING
        return [answer.name, hypothesis.says, NONE, NONE, said, *[NONE] * (len(NUMBERS) - 1), link]
    delta, said, *numbers = cells(found[1])
    if (count := len(answer.comparisons)) > 1:
        significant_of = sum(one.result is not None and one.result.significant for one in answer.comparisons)
        said = f"{significant_of} of {count} significant"
    expected = {True: "yes", False: "no", None: NONE}[answer.as_expected]
    return [answer.name, hypothesis.says, str(count), delta, said, *numbers, expected, link]


def _comparisons(answers: Sequence[Answer], runs: Runs) -> Table:
    columns = [words(""), words("comparison"), words("size, tokens"), *NUMBERS, words("expected")]
    rows = []
    for answer in answers:
        for i, found in enumerate(answer.comparisons):
            written = " + ".join(f"`{text}`" for text in found.written)
            written = written if len(found.written) <= 2 else f"a sum of {len(found.written)} contrasts"
            expected = "exploratory" if not answer.hypothesis.registered else found.expected or NONE
            expected += ": no" if answer.hypothesis.registered and found.as_expected is False else ""
            numbers = cells(found.result) if found.result else [NONE, NOTHING, NONE, NONE, "0"]
            rows.append(["" if i else f"**{answer.name}**", written, _size(found, runs), *numbers, expected])
    return Table(columns, rows)


def _size(found: Comparison, runs: Runs) -> str:
    """Say parameters and tokens of a comparison's runs, such as "0.17 M, 0.2 M"."""
    rows = runs.of_experiment(*{run.experiment for run in found.runs})
    sizes = [sorted(set(rows[name].dropna())) for name in ("parameters", "tokens")]

    def millions(value: float) -> str:
        return f"{significant(value / 1e6, 2) if value < 1e8 else number(value / 1e6, 0)} M"

    return ", ".join("/".join(map(millions, values)) for values in sizes)


def _untested(answers: Sequence[Answer]) -> list[Text]:
    """Say what was registered and not tested, what was decided otherwise, and what deviates from the registration."""
    found = []
    for asked, name in ((answer.hypothesis, answer.name) for answer in answers):
        said = [
            f"{asked.status}: {asked.why}" if asked.why else None, asked.result,
            f"deviation: {asked.deviation}" if asked.deviation else None,
        ]  # fmt: skip
        if any(said):
            found.append(Text(f"**{name}.** {asked.says} " + " ".join(filter(None, said))))
    return found


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
        if found.result is not None and not found.of_f1 and found.result.half_width == found.result.half_width
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
