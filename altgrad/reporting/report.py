"""From the pipeline's files to reports/: the page, the figures, the metrics and the plot data.

The report's sections in reading order: result, its conditions, what failed, what happened inside, what it was.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from altgrad.common.files import replacing, write_json, write_text
from altgrad.config.cell import HEAD, Cell, clamped_heads
from altgrad.config.params import validated
from altgrad.reporting import tables, tables_inside
from altgrad.reporting.anomalies import Case, cases
from altgrad.reporting.cells import to_cells_page
from altgrad.reporting.compare import Comparison, compare, compared
from altgrad.reporting.document import Document, Picture, Section, Text, there
from altgrad.reporting.fairness import conditions
from altgrad.reporting.figures import FIGURES, at, draw
from altgrad.reporting.figures.updates import updates_table
from altgrad.reporting.flags import raised
from altgrad.reporting.html import CELLS, links_of, to_html
from altgrad.reporting.labels import against_words, labels_table, metrics_table
from altgrad.reporting.load import COMPLETED, DIVERGED, MISSING, Study, load_study, prune
from altgrad.reporting.markdown import to_markdown
from altgrad.reporting.metrics import metrics, numbers
from altgrad.reporting.plots import write_plots
from altgrad.reporting.proposal import proposal
from altgrad.reporting.simulate import worst_rate
from altgrad.reporting.summary import headline, summary, title
from altgrad.reporting.tuning import Tuning, load_tuning
from altgrad.reporting.wording import joined, plural, significant, whole

FIRST = "gains"  # the figure of the first screen


def write_report(data: Path, out: Path, revision: str | None, experiments: Sequence[str] = ()) -> tuple[str, str]:
    """Write the report into ``out``; return its result in a sentence, and what may be run next.

    It is of ``data/{grid,tokens,runs,diag}``, and of ``simulation.csv`` and ``study`` in ``out``, each if it is there.
    ``revision`` is the git revision to name, ``None`` outside a checkout; ``experiments`` are for `proposal`. Outputs
    of cells that left the grid are removed from ``data`` first. The same files give the same bytes: ``REPORT.md``,
    ``index.html``, ``cells.html``, ``results.csv``, ``metrics.json``, ``summary.json``, ``figures/`` and ``plots/``.
    Raises :class:`altgrad.config.UserError` when the grid or the tokens are missing.
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
    write_json(out / "metrics.json", metrics(study, comparison))
    write_json(out / "summary.json", numbers(study, comparison, len(flags)))
    with replacing(out / "results.csv") as path:
        compared(study, comparison).to_csv(path, index=False, lineterminator="\n", float_format="%.7g")
    write_plots(study, out / "plots")
    return headline(study, comparison).replace("**", "").replace("`", ""), proposal(study, experiments)


def document(
    study: Study,
    comparison: Comparison,
    ended_badly: Sequence[Case],
    pictures: dict[str, Picture],
    revision: str | None,
    chance: float | None = None,
    tuning: Tuning | None = None,
) -> Document:
    """Return the whole report.

    ``ended_badly`` are those of `altgrad.reporting.anomalies.cases`, ``chance`` how often simulated studies like
    this one find what is not there, ``tuning`` is that of the run that fixed its learning rates.
    """
    gains, labels = at("gains", pictures), labels_table(study)
    sections = [
        Section("Result in detail", "result", there(
            *(picture for picture in gains if picture.name != FIRST), *at("costs", pictures),
            tables.results_table(study, comparison), metrics_table(study, comparison),
        )),
        Section("What makes it fair", "fairness", [tables.fairness_table(conditions(study, comparison, tuning))]),
        Section("Which runs fail", "failures", there(tables_inside.failures_table(study, ended_badly))),
        Section("Precision and range", "precision", at("layers", pictures)),
        Section("Weights", "weights", there(
            *at("weights", pictures), tables_inside.diagnosis_table(study, comparison)
        )),
        Section("The format's geometry and the loss's", "geometry", there(
            tables_inside.geometry_table(study, comparison)
        )),
        Section("Updates", "updates", there(*at("updates", pictures), updates_table(study, comparison))),
        Section("Loss curves", "curves", at("curves", pictures)),
        Section("Formats and recipe", "formats", there(
            tables.formats_table(study), tables.recipe_table(study), tables.changes_table(study)
        )),
        Section("What it was", "settings", [
            Text(_scope(study)), tables.machine_table(study, revision), tables.corpus_table(study), *labels,
        ]),
    ]  # fmt: skip
    return Document(
        *title(study, comparison),
        there(
            Text(headline(study, comparison)),
            _no_baseline(study), _clamped(study),
            Text(study.measure.direction) if study.measure.higher_is_better else None,
            *(picture for picture in gains if picture.name == FIRST), *summary(study, comparison, chance),
            against_words(study, comparison),
        ),
        [section for section in sections if section.blocks],
    )  # fmt: skip


def _no_baseline(study: Study) -> Text | None:
    """Say that nothing is compared with a baseline where the grid has none: experiments of one format do."""
    if study.baseline:
        return None
    name = study.params["grid"]["baseline"]
    return Text(
        f"**No baseline.** `grid.baseline` is `{name}`, which is not in `grid.formats`: no format's cost is shown. Add "
        f"`{name}` to the grid, or hold experiments against each other with `dvc plots diff`."
    )


def _clamped(study: Study) -> Text | None:
    """Say where scales clamp the head's gradient because of the tokens of a step, and how many of its blocks."""
    ours = [cell for cell in study.resolved.values() if "grad_accumulation" in cell["train"]]  # not another program's
    own = [validated(Cell, cell, cell["key"]) for cell in ours]
    seen = study.monitors
    seen = seen[(seen["layer"] == HEAD) & (seen["role"] == "grad") & (seen["metric"] == "block_clamped_frac")]
    said = []
    for clamped, entries in clamped_heads(own).items():
        share = seen[seen["format"].isin(entries)]["value"].mean()
        blocks = "" if math.isnan(share) else f" That was {100 * share:.2g} % of all its blocks' largest elements."
        said.append(f"{joined([f'`{entry}`' for entry in entries])}: {clamped}.{blocks}")
    return Text(f"**Scales clamp a gradient.** {' '.join(said)}") if said else None


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
        cell = next(iter(study.resolved.values()))
        start, lora = cell["model"].get("start"), cell.get("lora")
        begun = f", from the weights in `{start['folder']}`" if start else ""
        begun += f" with adapters of rank {lora['rank']}" if lora else ""
        text += (
            f" Each trains a GPT of {significant(completed['parameters'].max() / 1e6)} M parameters for "
            f"{whole(study.cells['planned_steps'].max())} steps ({significant(completed['tokens'].max() / 1e6)} M "
            f"tokens) on `{study.corpus['corpus']}`{begun}. Settings: params.yaml; every run: cells.html; definitions: "
            "`python -m altgrad.metrics`."
        )
    if by_status[MISSING]:
        text += " `dvc repro` runs what is missing or stale, and writes this report again."
    return text
