"""Write the study's pages from its questions and its table of runs: all of them, or those of the questions named."""

from __future__ import annotations

import argparse
from pathlib import Path

from altgrad.common.console import STOPS, called
from altgrad.common.errors import UserError, did_you_mean, run_stage
from altgrad.common.files import write_text
from altgrad.reporting.study.answers import answered
from altgrad.reporting.study.curve import draw_curve
from altgrad.reporting.study.front import costs, draw_costs
from altgrad.reporting.study.pages import draw, page, results
from altgrad.reporting.study.questions import read_questions
from altgrad.reporting.study.registered import History, checked
from altgrad.reporting.study.runs import Runs, Untrained
from altgrad.reporting.study.train import train_missing

STUDY = Path("reports/study")
RESULTS = "RESULTS.md"
ABOUT = "ABOUT.md"  # what stands above the table of results, which a person writes


def write_pages(
    study: Path, names: list[str], *, train: bool = False, jobs: int | None = None, history: History | None = None
) -> list[Path]:
    """Write the pages of the named questions, or of all, and RESULTS.md above ``study``; return what was written.

    ``train`` trains before what their experiments lack, ``jobs`` runs at a time. ``history`` is that of ``study``, if
    git has it, unless another one is given.
    """
    questions = {question.name: question for question in read_questions(study)}
    for name in names:
        if name not in questions:
            raise UserError(f"{study}: no question {name!r}{did_you_mean(name, questions)}")
    runs = Runs.read(study / "results")
    try:
        history = history or History.read(study)
    except UserError as error:
        print(f"registrations are not checked, as the pages say: {error}")
    for name in (names or questions) if train else ():
        for late in history.unstated(questions[name]) if history else ():
            print(f"{name}: {late} will be exploratory, as no commit states it: first commit {study / name}.yaml")
        runs = train_missing(questions[name], runs, study, jobs)
    answers, named = {}, names or list(questions)
    for name, question in questions.items():
        try:
            answers[name] = [checked(answer, runs, history) for answer in answered(question, runs)]
        except Untrained as error:
            if name in named:
                raise
            print(f"left out of {RESULTS}: {error}")
    written = []
    for name in named:
        curve = questions[name].curve
        figure = draw_curve(answers[name], curve, study) if curve else draw(answers[name], study / "figures")
        written.append(study / f"{name}.md")
        write_text(written[-1], page(questions[name], answers[name], runs, figure and f"figures/{figure}"))
    written.append(study.parent / RESULTS)
    every = [answer for found in answers.values() for answer in found]
    write_text(written[-1], results(every, study / ABOUT))
    if shown := costs(every, runs):
        draw_costs(shown, study / "figures")
    return written


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
