"""From the pipeline's files to reports/: the page, the figures, the metrics and the plot data."""

from __future__ import annotations

from pathlib import Path

from altgrad.config.files import write_json, write_text
from altgrad.reporting.anomalies import cases
from altgrad.reporting.cells import to_cells_page
from altgrad.reporting.compare import compare
from altgrad.reporting.figures import FIGURES, draw
from altgrad.reporting.flags import raised
from altgrad.reporting.html import CELLS, links_of, to_html
from altgrad.reporting.load import load_study, prune
from altgrad.reporting.markdown import to_markdown
from altgrad.reporting.metrics import metrics
from altgrad.reporting.plots import write_plots
from altgrad.reporting.sections import document
from altgrad.reporting.simulate import worst_rate
from altgrad.reporting.summary import headline
from altgrad.reporting.tuning import load_tuning


def write_report(data: Path, out: Path, revision: str | None) -> str:
    """Write the report into ``out`` and return its result in a sentence.

    It is of ``data/{grid,tokens,runs,diag}``, and of ``simulation.csv`` and ``study`` in ``out``, each if it is there.
    ``revision`` is the git revision to name, ``None`` outside a checkout. Outputs of cells that left
    the grid are removed from ``data`` first. The same files give the same bytes: ``REPORT.md``,
    ``index.html``, ``cells.html``, ``metrics.json``, ``figures/`` and ``plots/``. Raises
    :class:`altgrad.config.UserError` when the grid or the tokens are missing.
    """
    prune(data)
    study = load_study(data)
    comparison = compare(study)
    flags = raised(study)
    pictures = draw(FIGURES, study, comparison, out / "figures")
    chance = worst_rate(out / "simulation.csv", study)
    tuning = load_tuning(out / "study", study)
    ended_badly = list(cases(study))
    page = document(study, comparison, ended_badly, pictures, revision, chance, tuning)
    write_text(out / "REPORT.md", to_markdown(page))
    write_text(out / "index.html", to_html(page, out / "figures", links_of(study)))
    write_text(out / CELLS, to_cells_page(study, flags, ended_badly))
    write_json(out / "metrics.json", metrics(study, comparison, len(flags)))
    write_plots(study, out / "plots")
    return headline(study, comparison).replace("**", "").replace("`", "")
