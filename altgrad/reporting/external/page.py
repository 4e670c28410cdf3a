"""The page of runs that something else has trained: the report's tables and figures, of a table of losses."""

from __future__ import annotations

from pathlib import Path

from altgrad.common.errors import UserError
from altgrad.common.files import write_text
from altgrad.reporting.compare import compare
from altgrad.reporting.document import Document, Section, Table, Text, there, words
from altgrad.reporting.external.family import Family, study_of
from altgrad.reporting.external.rows import read_curves, read_rows
from altgrad.reporting.figures import FIGURES, draw
from altgrad.reporting.html import to_html
from altgrad.reporting.markdown import to_markdown
from altgrad.reporting.results import SEEDS
from altgrad.reporting.summary import outcomes, summary
from altgrad.reporting.tables import results_table
from altgrad.reporting.wording import NONE, joined

QUESTION = "What does each configuration change, and what each optimizer?"
SECTIONS = ("gains", "costs", "curves")  # whose figures need nothing but losses


def write_comparison(results: Path, family: Family, curves: Path | None, out: Path) -> str:
    """Write ``REPORT.md``, ``index.html`` and ``figures/`` of the runs in ``results`` into ``out``.

    Args:
        results: final losses, a row per run.
        family: what is asked of them.
        curves: losses by step, a row per run and step.
        out: a folder, which is made once everything has been read and compared.

    Returns:
        The result in a sentence.

    Raises:
        UserError: for a mistake in a file, a name that no run has, or runs of which none share two seeds.
    """
    rows = read_rows(results, family.metric)
    family = family.checked(rows, str(results))
    study = study_of(rows, read_curves(curves, family.metric, rows) if curves else None, family)
    comparison = compare(study)
    if max((claim.difference.n for claim in comparison.answers.claims.values()), default=0) < 2:
        raise UserError(f"{results}: no comparison has two seeds in common; an interval takes two, a test {SEEDS}")
    pictures = draw([spec for spec in FIGURES if spec.section in SECTIONS], study, comparison, out / "figures")
    said, curve = outcomes(study, comparison), ("loss_curves", "loss_differences")
    page = Document(
        f"Comparison of {results.name}", QUESTION,
        there(
            Text(said), Text(study.measure.direction), pictures.get("gains"),
            *summary(study, comparison, costs="What each configuration changes",
                     why="`altgrad/reporting/STATISTICS.md`"),
        ),
        [section for section in (
            Section("Result in detail", "result", there(
                pictures.get("gains_over_run"), results_table(study, comparison)
            )),
            Section("Curves", "curves", there(*map(pictures.get, curve))),
            Section("What was asked", "family", [_family_table(results, family, rows.attrs["unread"])]),
        ) if section.blocks],
    )  # fmt: skip
    write_text(out / "REPORT.md", to_markdown(page))
    write_text(out / "index.html", to_html(page, out / "figures", cells=False))
    return said.replace("**", "").replace("`", "")


def _family_table(results: Path, family: Family, unread: list[str]) -> Table:
    """Everything that was declared, with the defaults, and the columns of the results that nothing reads."""

    def said(value: object) -> str:
        if isinstance(value, dict):
            value = [f"{control} ({of})" for control, of in value.items()]
        if isinstance(value, bool):
            return "yes" if value else "no"
        return (joined(value) if isinstance(value, list) else str(value)) or NONE

    rows = [[name.replace("_", " "), said(value)] for name, value in family.model_dump().items()]
    return Table(
        [words("what"), words("value")],
        [["results", results.name], ["columns not read", said([name for name in unread if name])], *rows],
        "Controls stand with what they are controls of.",
    )  # fmt: skip
