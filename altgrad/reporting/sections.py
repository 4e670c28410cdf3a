"""The report's sections in reading order: result, its conditions, what failed, what happened inside, what it was."""

from __future__ import annotations

from collections.abc import Sequence

from altgrad.reporting import tables, tables_inside
from altgrad.reporting.anomalies import Case
from altgrad.reporting.compare import Comparison
from altgrad.reporting.document import Block, Document, Picture, Section, Text
from altgrad.reporting.fairness import conditions
from altgrad.reporting.figures import at
from altgrad.reporting.figures.updates import updates_table
from altgrad.reporting.labels import against_words, labels_table, metrics_table
from altgrad.reporting.load import COMPLETED, DIVERGED, MISSING, Study
from altgrad.reporting.summary import QUESTION, headline, summary
from altgrad.reporting.tuning import Tuning
from altgrad.reporting.wording import joined, plural, significant, whole

Pictures = dict[str, Picture]
FIRST = "gains"  # the figure of the first screen


def document(
    study: Study,
    comparison: Comparison,
    ended_badly: Sequence[Case],
    pictures: Pictures,
    revision: str | None,
    chance: float | None = None,
    tuning: Tuning | None = None,
) -> Document:
    """Return the whole report.

    ``ended_badly`` are those of `altgrad.reporting.anomalies.cases`, ``chance`` how often simulated studies like
    this one find what is not there, ``tuning`` is that of the run that fixed its learning rates.
    """
    first = [picture for picture in _shown(pictures, "gains") if picture.name == FIRST]
    sections = [
        Section("Result in detail", "result", _result(study, comparison, pictures)),
        Section("What makes it fair", "fairness", [
            tables.fairness_table(conditions(study, comparison, tuning))
        ]),
        Section("Which runs fail", "failures", _with_table(
            [], tables_inside.failures_table(study, ended_badly)
        )),
        Section("Precision and range", "precision", _shown(pictures, "layers")),
        Section("Weights", "weights", _with_table(
            _shown(pictures, "weights"), tables_inside.diagnosis_table(study, comparison)
        )),
        Section("The format's geometry and the loss's", "geometry", _with_table(
            [], tables_inside.geometry_table(study, comparison)
        )),
        Section("Updates", "updates", _with_table(_shown(pictures, "updates"), updates_table(study, comparison))),
        Section("Loss curves", "curves", _shown(pictures, "curves")),
        Section("Formats and recipe", "formats", [
            made for table in (tables.formats_table, tables.recipe_table, tables.changes_table)
            if (made := table(study)) is not None
        ]),
        Section("What it was", "settings", [
            Text(_scope(study)), tables.machine_table(study, revision), tables.corpus_table(study),
            *labels_table(study),
        ]),
    ]  # fmt: skip
    return Document(
        "AltGrad report",
        QUESTION,
        [
            Text(headline(study, comparison)), *[Text(study.measure.direction)] * study.measure.higher_is_better,
            *first, *summary(study, comparison, chance),
            *(Text(said) for said in [against_words(study, comparison)] if said),
        ],
        [section for section in sections if section.blocks],
    )  # fmt: skip


def _shown(pictures: Pictures, *sections: str) -> list[Picture]:
    return [picture for section in sections for picture in at(section, pictures)]


def _with_table(blocks: Sequence[Block], table: Block | None) -> list[Block]:
    return [*blocks, *([table] if table else [])]


def _result(study: Study, comparison: Comparison, pictures: Pictures) -> list[Block]:
    """The course of what each optimizer changes, and every format and optimizer in one table."""
    gains = [picture for picture in _shown(pictures, "gains") if picture.name != FIRST]
    costs = _shown(pictures, "costs")
    return [*gains, *costs, tables.results_table(study, comparison), *metrics_table(study, comparison)]


def _scope(study: Study) -> str:
    """Say what the grid is and what a run of it."""
    by_status = {status: len(study.of_status(status)) for status in (COMPLETED, DIVERGED, MISSING)}
    counts = [f"{count} {status}" for status, count in by_status.items() if count]
    shape = [
        plural(len(study.formats), "format"), plural(len(study.optimizers), "optimizer"),
        plural(len(study.seeds), "seed"), plural(len(study.lr_scales), "learning rate"),
    ]  # fmt: skip
    text = f"The grid: {' × '.join(shape)} = {plural(len(study.cells), 'run')}, {joined(counts)}."
    completed = study.of_status(COMPLETED)
    if len(completed):
        text += (
            f" Each trains a GPT of {significant(completed['parameters'].max() / 1e6)} M parameters for "
            f"{whole(study.cells['planned_steps'].max())} steps ({significant(completed['tokens'].max() / 1e6)} M "
            f"tokens) on `{study.corpus['corpus']}`. Settings: params.yaml; every run: cells.html; definitions: "
            "`python -m altgrad.metrics`."
        )
    if by_status[MISSING]:
        text += " `dvc repro` runs what is missing or stale, and writes this report again."
    return text
