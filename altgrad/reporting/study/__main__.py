"""Write the study's pages from its questions and its table of runs: all of them, or those of the questions named."""

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path

from altgrad.common.console import STOPS, called
from altgrad.common.errors import UserError, did_you_mean, run_stage
from altgrad.common.files import write_text
from altgrad.reporting.load import PrimaryMetric
from altgrad.reporting.markdown import NONE, Column, Table, escaped, listed, number, significant, words
from altgrad.reporting.statistics import SMALLEST_EFFECT, UNTESTED
from altgrad.reporting.study.figures import costs, draw_costs, draw_curve, draw_forest
from altgrad.reporting.study.law import law_of
from altgrad.reporting.study.questions import NATS, Answer, ContrastResult, Question, answered, read_questions
from altgrad.reporting.study.registered import History, checked
from altgrad.reporting.study.runs import RunTable, Untrained
from altgrad.reporting.study.train import train_missing
from altgrad.reporting.tables import cells, heads

STUDY = Path("reports/study")
RESULTS = "RESULTS.md"
ABOUT = "ABOUT.md"  # the text around the table of results, which a person writes
PLACE = "<!-- table -->"  # where the table stands in `ABOUT`
NOTHING = "no seed has all of its runs"
DOUBTS = ("exploratory", "not checked")
RESULT = -4  # the index of the result in `_heads`, from the end: a column of units may follow the first
RULE = (
    "Δ loss is the final validation loss of the method minus that of the reference, in nats per token, paired by seed; "
    "negative is better. The 95 % intervals are unadjusted; p is adjusted by Holm's step-down over the comparisons of "
    f"a hypothesis. *No effect*: the interval lies within ±{SMALLEST_EFFECT:g}. *Inconclusive* comes with the smallest "
    "effect that the same seeds would have found nine times in ten."
)
UNITS = (
    " *Nats* are the unit of a loss, per label for a classifier. The unit *F1* is that of test documents, and positive "
    "is better. A *ratio* is a cost in F1 minus a cost in loss, each divided by the unit that the hypothesis states."
)
KEY = (
    "For a hypothesis with several comparisons, the row shows the one with the smallest p, and how many of them are "
    "significant; without a test, the largest difference, and how many are as predicted. *Registered* names the first "
    "commit in git's history that states the hypothesis."
)


def write_pages(
    study: Path, names: list[str], *, train: bool = False, jobs: int | None = None, history: History | None = None
) -> list[Path]:
    """Write the pages of questions, their figures, and RESULTS.md above ``study``; return the pages written.

    Args:
        study: the folder of questions and results.
        names: the questions to write; all if the list is empty.
        train: first train the runs that their experiments lack.
        jobs: the number of runs trained at a time; ``None`` for the fastest number.
        history: the commits that confirm registrations; by default read from ``study``, if git has them.
    """
    questions = {question.name: question for question in read_questions(study)}
    for name in names:
        if name not in questions:
            raise UserError(f"{study}: no question {name!r}{did_you_mean(name, questions)}")
    names = names or list(questions)
    runs = RunTable.read(study / "results")
    try:
        history = history or History.read(study)
    except UserError as error:
        print(f"registrations are not checked, as the pages say: {error}")
    for name in names if train else ():
        for late in history.unstated(questions[name]) if history else ():
            print(f"{name}: {late} will be exploratory, as no commit states it: first commit {study / name}.yaml")
        runs = train_missing(questions[name], runs, study, jobs)
    answers: dict[str, list[Answer]] = {}
    for name, question in questions.items():
        try:
            answers[name] = [checked(answer, runs, history) for answer in answered(question, runs)]
        except Untrained as error:
            if name in names:
                raise
            print(f"left out of {RESULTS}: {error}")
    written = []
    for name in names:
        curve = questions[name].curve
        figure = draw_curve(answers[name], curve, study) if curve else draw_forest(answers[name], study / "figures")
        written.append(study / f"{name}.md")
        write_text(written[-1], page(questions[name], answers[name], runs, figure and f"figures/{figure}", study))
    written.append(study.parent / RESULTS)
    every = [answer for of_question in answers.values() for answer in of_question]
    write_text(written[-1], results(every, study / ABOUT))
    if shown := costs(every, runs):
        draw_costs(shown, study / "figures")
    return written


def page(question: Question, answers: Sequence[Answer], runs: RunTable, figure: str | None, study: Path) -> str:
    """Return the page of a question as Markdown; ``figure`` is the figure's path relative to the page in ``study``."""
    alt = "Δ loss by the tokens of a batch, above what is predicted" if question.curve else (
        "Δ loss of each comparison below, with its 95 % interval"
    )  # fmt: skip
    law = None
    if question.law:
        formats = {name: question.settings(name)["grid"]["formats"] for name in question.law}
        law = law_of(formats, runs, study / "figures", f"{question.name}-law")
    parts = [
        f"# {question.question}", " ".join(question.answer.split()), f"![{alt}]({figure})" if figure else None,
        *(" ".join(paragraph.split()) for paragraph in question.why), law,
        escaped(_hypotheses(answers)), _rule(answers), str(_comparisons(answers, runs)),
        _source(question, runs),
    ]  # fmt: skip
    return "\n\n".join(filter(None, parts)) + "\n"


def results(answers: Sequence[Answer], about: Path) -> str:
    """Return RESULTS.md: the text of ``about`` around a table per question, with a row per registered hypothesis."""
    above, _, below = about.read_text().partition(PLACE)
    registered = [answer for answer in answers if answer.hypothesis.registered]
    doubted = []
    for kind in DOUBTS:
        if names := [answer.name for answer in registered if answer.registration.kind == kind]:
            said = listed(names) if len(names) < 10 else str(len(names))
            doubted.append(f"{said} {'is' if len(names) == 1 else 'are'} {kind}")
    confirmed = f"Git's history confirms {sum(map(_holds, registered))} of {len(registered)} registrations"
    parts = [above.strip(), f"{'; '.join([confirmed, *doubted])}.", KEY, _rule(answers)]
    for name, group in itertools.groupby(registered, key=lambda answer: answer.question.name):
        of_question = list(group)
        numbers = _heads(of_question)
        columns = [words(""), words("hypothesis"), *numbers, words("as expected"), words("registered")]
        table = Table(columns, [_hypothesis_row(answer, len(numbers)) for answer in of_question])
        parts += [f"## [{of_question[0].question.question}](study/{name}.md)", str(table)]
    return "\n\n".join(filter(None, [*parts, below.strip()])) + "\n"


def _rule(answers: Sequence[Answer]) -> str:
    return RULE + UNITS * _has_units(answers)


def _has_units(answers: Sequence[Answer]) -> bool:
    """Return whether any comparison has a unit other than nats, so that the tables need a column of units."""
    return any(one.unit != NATS for answer in answers for one in answer.comparisons)


def _heads(answers: Sequence[Answer]) -> list[Column]:
    """Return the table's columns for a result, with a column of units if `_has_units`."""
    delta, *others = heads(PrimaryMetric().delta)
    return [Column("Δ"), words("unit"), *others] if _has_units(answers) else [delta, *others]


def _numbers(one: ContrastResult, columns: int) -> list[str]:
    """Return the cells of a result for the columns of `_heads`; ``columns`` is their number."""
    delta, *others = cells(one.result) if one.result else [NONE, NOTHING, NONE, NONE, "0"]
    return [delta, one.unit, *others] if columns > len(others) + 1 else [delta, *others]


def _holds(answer: Answer) -> bool:
    return answer.registration.kind == "registered"


def _hypothesis_row(answer: Answer, columns: int) -> list[str]:
    hypothesis, first = answer.hypothesis, answer.first
    registered = f"`{answer.registration.commit}`" if _holds(answer) else answer.registration.kind
    numbers = _numbers(first[0], columns) if first else [NONE] * columns
    if first is None:
        numbers[RESULT] = hypothesis.status if hypothesis.status != "tested" else hypothesis.result or NOTHING
    elif (count := len(answer.comparisons)) > 1:
        if first[1].outcome not in UNTESTED:
            significant_of = sum(one.result is not None and one.result.significant for one in answer.comparisons)
            numbers[RESULT] = f"{significant_of} of {count} significant"
        elif answer.as_expected is not None:
            numbers[RESULT] = f"{sum(one.as_expected is True for one in answer.comparisons)} of {count} as predicted"
    expected = {True: "yes", False: "no", None: NONE}[answer.as_expected]
    return [answer.name, hypothesis.says, *numbers, expected, registered]


def _comparisons(answers: Sequence[Answer], runs: RunTable) -> Table:
    numbers = _heads(answers)
    columns = [words(""), words("comparison"), words("size, tokens"), *numbers, words("expected")]
    rows = []
    for answer in answers:
        exploratory = answer.registration.kind == "exploratory"
        for i, one in enumerate(answer.comparisons):
            written = " + ".join(f"`{text}`" for text in one.written)
            written = written if len(one.written) <= 2 else f"a sum of {len(one.written)} contrasts"
            expected = "exploratory" if exploratory else one.expected or NONE
            expected += ": no" if not exploratory and one.as_expected is False else ""
            name = "" if i else f"**{answer.name}**"
            rows.append([name, written, _size(one, runs), *_numbers(one, len(numbers)), expected])
    return Table(columns, rows)


def _size(one: ContrastResult, runs: RunTable) -> str:
    """Return the parameters and tokens of a comparison's runs that ended, such as "0.17 M, 0.2 M"."""
    rows = runs.of_experiment(*{run.experiment for run in one.runs})
    rows = rows[rows.status == "ok"]
    sizes = [sorted(set(rows[name].dropna())) for name in ("parameters", "tokens")]

    def millions(value: float) -> str:
        return f"{significant(value / 1e6, 2) if value < 1e8 else number(value / 1e6, 0)} M"

    return ", ".join("/".join(map(millions, values)) for values in sizes)


def _hypotheses(answers: Sequence[Answer]) -> str:
    """Return the hypotheses as a Markdown list, each with its registration, result in words and deviation."""
    lines = []
    for answer in answers:
        asked, registration = answer.hypothesis, answer.registration
        place = f"{' in' if _holds(answer) else ', stated in'} `{registration.commit}`" * bool(registration.commit)
        kind = f"{registration.kind}{place}" + f", {registration.why}" * bool(registration.why)
        parts = [
            f"**{answer.name}** ({kind}): {asked.says}", f"{asked.status}: {asked.why}" if asked.why else None,
            asked.result, f"deviation: {asked.deviation}" if asked.deviation else None,
        ]  # fmt: skip
        lines.append("- " + " ".join(filter(None, parts)))
    return "\n".join(lines)


def _source(question: Question, runs: RunTable) -> str:
    """Return a line on the question's runs: how many ended, on which machines, their files, and how to repeat them."""
    rows = runs.of_experiment(*question.runs)
    machines = ", ".join(sorted(set(rows["machine"].dropna())))
    ended = int((rows["status"] == "ok").sum())
    return (
        f"{ended} of {len(rows)} runs ended, on {machines}. Settings: [{question.path.name}]({question.path.name}); "
        f"losses: [runs.csv](results/runs.csv); again: `make study NAME={question.name}`."
    )


def main(arguments: list[str]) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog=called("reporting.study"), description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a question: a file reports/study/NAME.yaml")
    parser.add_argument("--train", action="store_true", help="first train the runs that the table lacks")
    parser.add_argument("--jobs", type=int, metavar="N", help="training runs at a time; default: what is fastest here")
    options = parser.parse_args(arguments)
    for path in write_pages(STUDY, options.names, train=options.train, jobs=options.jobs):
        print(f"written: {path}")


if __name__ == "__main__":
    run_stage(main, stops=STOPS)
