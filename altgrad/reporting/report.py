"""Write reports/ from the pipeline's files: the pages, the figures, and what DVC shows.

The report has these sections: the result, its conditions, failed runs, what happened inside the runs, the settings.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from altgrad.common.files import write_text
from altgrad.config.cell import HEAD, Cell, clamped_heads
from altgrad.config.params import validated
from altgrad.reporting import diagnosis_tables, model_sizes, tables
from altgrad.reporting import optimizer_roles as roles
from altgrad.reporting.anomalies import Case, cases
from altgrad.reporting.compare import Comparison, compare
from altgrad.reporting.dvc_outputs import write_outputs
from altgrad.reporting.fairness import Tuning, conditions, load_tuning
from altgrad.reporting.figures import SECTIONS, draw, report_figures
from altgrad.reporting.html import links_of, to_cells_page, to_html
from altgrad.reporting.load import COMPLETED, DIVERGED, MISSING, Study, every_rule, joined, load_studies, prune
from altgrad.reporting.markdown import Block, Picture, integer, listed, plural, significant, to_markdown
from altgrad.reporting.simulate import worst_rate
from altgrad.reporting.statistics import SEEDS
from altgrad.reporting.summary import headline, summary, title

FIRST = "gains"  # the figure of the first screen


def write_report(data: Path, out: Path, revision: str | None, experiments: Sequence[str] = ()) -> tuple[str, str]:
    """Write the report of the study in ``data`` into ``out``; return its result in a sentence, and what to run next.

    The same files give the same bytes. Outputs of cells that left the grid are removed from ``data`` first.

    Args:
        data: the pipeline's folder, with grid, tokens, runs and diag.
        out: the folder to write; ``simulation.csv`` and ``study`` in it are read if they exist.
        revision: the git revision to name, ``None`` outside a checkout.
        experiments: see `proposal`.

    Raises:
        UserError: if the grid or the tokens are missing.
    """
    prune(data)
    studies = load_studies(data)
    comparisons = {name: compare(study) for name, study in studies.items()}
    (name, study), *_ = studies.items()
    comparison, whole = comparisons[name], joined(studies)
    flags = diagnosis_tables.raised(whole)
    pictures = draw(report_figures(), study, comparison, out / "figures")
    sizes = model_sizes.sections(studies, comparisons, out / "figures")
    chance, tuning = worst_rate(out / "simulation.csv", study), load_tuning(out / "study", study)
    ended_badly = [case for one in studies.values() for case in cases(one)]
    text = to_markdown(report(study, comparison, ended_badly, pictures, revision, chance, tuning, whole, sizes)) + "\n"
    write_text(out / "REPORT.md", text)
    write_text(out / "index.html", to_html(text, out / "figures", links_of(whole)))
    write_text(out / "cells.html", to_cells_page(whole, flags, ended_badly))
    further = {model: (one, comparisons[model]) for model, one in studies.items() if model != name}
    write_outputs(study, comparison, len(diagnosis_tables.raised(study)), out, further)
    return headline(study, comparison).replace("**", "").replace("`", ""), proposal(study, experiments)


def report(
    study: Study, comparison: Comparison, ended_badly: Sequence[Case], pictures: Mapping[str, Picture],
    revision: str | None, chance: float | None, tuning: Tuning | None, whole: Study, sizes: model_sizes.Sections,
) -> list[Block | None]:  # fmt: skip
    """Return the blocks of the report; ``chance`` is for `altgrad.reporting.summary.summary`.

    ``whole`` has the runs of all models, and ``study`` those of the grid's ``model``. ``sizes`` are the sections on the
    others.
    """
    figures: dict[str, list[Block | None]] = {section: [] for section in SECTIONS}
    for spec in report_figures():
        if spec.name in pictures and spec.name != FIRST:
            figures[spec.section].append(pictures[spec.name])
    name, question = title(study, comparison)
    page: list[Block | None] = [
        f"# {name}", f"**{question}**", headline(study, comparison), _several(study), _no_baseline(study),
        _clamped(study),
        study.primary.direction if study.primary.higher_is_better else None,
        pictures.get(FIRST), *summary(study, comparison, chance), tables.against_words(study, comparison),
    ]  # fmt: skip
    sections: dict[str, list[Block | None]] = {
        "Result in detail": [
            *figures["gains"], *figures["costs"], tables.results_table(study, comparison),
            tables.metrics_table(study, comparison),
        ],
        **sizes,
        "What makes it fair": [tables.fairness_table(conditions(study, comparison, tuning))],
        "Which runs fail": [diagnosis_tables.failures_table(whole, ended_badly)],
        "Precision and range": figures["layers"],
        "Weights": [*figures["weights"], diagnosis_tables.diagnosis_table(study, comparison)],
        "The format's geometry and the loss's": [diagnosis_tables.geometry_table(study, comparison)],
        "Updates": [*figures["updates"], diagnosis_tables.updates_table(study, comparison)],
        "Loss curves": figures["curves"],
        "Formats and recipe": [tables.formats_table(study), tables.recipe_table(study), tables.changes_table(study)],
        "What it was": [
            _scope(study), tables.machine_table(whole, revision), tables.corpus_table(study),
            *tables.labels_table(study),
        ],
    }  # fmt: skip
    for section, blocks in sections.items():
        page += [f"## {section}", *blocks] if any(blocks) else []
    return page


def _several(study: Study) -> str | None:
    """Return a paragraph on a grid of several models; ``None`` if it has one."""
    first, *further = study.models
    others = listed(f"`{name}`" for name in further)
    text = f"**Several models.** Sections that name no model are about `{first}`. One section each is about {others}. "
    return f"{text}No comparison crosses models, and p is adjusted in each model by itself." if further else None


def _no_baseline(study: Study) -> str | None:
    """Return a paragraph saying that the grid lacks its baseline; ``None`` if the grid has it."""
    if study.baseline:
        return None
    name = study.params["grid"]["baseline"]
    return (
        f"**No baseline.** `grid.baseline` is `{name}`, which is not in `grid.formats`: no format's cost is shown. Add "
        f"`{name}` to the grid, or hold experiments against each other with `dvc plots diff`."
    )


def _clamped(study: Study) -> str | None:
    """Return a paragraph on entries whose scales clamp the head's gradient at this number of tokens per step."""
    resolved = [cell for cell in study.resolved.values() if "grad_accumulation" in cell["train"]]  # by this program
    rows = study.monitors
    rows = rows[(rows["layer"] == HEAD) & (rows["role"] == "grad") & (rows["metric"] == "block_clamped_frac")]
    texts = []
    for clamped, entries in clamped_heads([validated(Cell, cell, cell["key"]) for cell in resolved]).items():
        share = rows[rows["format"].isin(entries)]["value"].mean()
        blocks = "" if math.isnan(share) else f" That was {100 * share:.2g} % of all its blocks' largest elements."
        texts.append(f"{listed(f'`{entry}`' for entry in entries)}: {clamped}.{blocks}")
    return f"**Scales clamp a gradient.** {' '.join(texts)}" if texts else None


def _scope(study: Study) -> str:
    """Return a paragraph on the size of the grid, the outcomes of its runs, and the model and training of a run."""
    by_status = {status: len(study.of_status(status)) for status in (COMPLETED, DIVERGED, MISSING)}
    counts = [f"{count} {status}" for status, count in by_status.items() if count]
    nouns = ("format", "optimizer", "seed", "learning rate")
    values = (study.formats, study.optimizers, study.seeds, study.lr_scales)
    shape = [plural(len(members), noun) for noun, members in zip(nouns, values, strict=True)]
    text = f"The grid: {' × '.join(shape)} = {plural(len(study.cells), 'run')}, {listed(counts)}."
    completed = study.of_status(COMPLETED)
    if len(completed):
        cell = next(iter(study.resolved.values()))
        start, lora = cell["model"].get("start"), cell.get("lora")
        begin = f", from the weights in `{start['folder']}`" if start else ""
        begin += f" with adapters of rank {lora['rank']}" if lora else ""
        text += (
            f" Each trains a GPT of {significant(completed['parameters'].max() / 1e6)} M parameters for "
            f"{integer(study.cells['planned_steps'].max())} steps ({significant(completed['tokens'].max() / 1e6)} M "
            f"tokens) on `{study.corpus['corpus']}`{begin}. Settings: params.yaml; every run: cells.html; definitions: "
            "`python -m altgrad.metrics`."
        )
    if by_status[MISSING]:
        text += " `dvc repro` runs what is missing or stale, and writes this report again."
    return text


def proposal(study: Study, experiments: Sequence[str] = ()) -> str:
    """Return a ``dvc exp run`` command that extends the grid, followed by its purpose.

    It adds the first of these that the grid lacks: the baseline, enough seeds for a test, an unquantized control, four
    times the steps. ``experiments`` are the names of DVC's experiments, newest first. If there are two or more, a
    command that compares the newest two follows.
    """
    new = (seed for seed in itertools.count() if seed not in study.seeds)
    missing = next((f"virtual.{entry}" for entry in study.formats if _lacks_control(study, entry)), None)
    baseline = study.params["grid"]["baseline"]
    if baseline not in study.formats:
        setting, purpose = _setting("formats", [baseline, *study.formats]), "compares with the baseline"
    elif len(study.seeds) < SEEDS:
        setting = _setting("seeds", [*study.seeds, *itertools.islice(new, SEEDS - len(study.seeds))])
        purpose = "has the seeds that a test takes"
    elif missing:
        setting, purpose = _setting("formats", [*study.formats, missing]), "tells what is format-specific"
    else:
        setting, purpose = f"train.steps={4 * study.params['train']['steps']}", "is the longer run"
    plots = f"; dvc plots diff {experiments[1]} {experiments[0]} compares the two" if len(experiments) > 1 else ""
    return f"dvc exp run -S '{setting}' {purpose}{plots}"


def _setting(name: str, values: Iterable[object]) -> str:
    return f"grid.{name}=[{','.join(map(str, values))}]"


def _lacks_control(study: Study, entry: str) -> bool:
    """Return whether ``entry`` lacks an unquantized control and may have one, as a format with a scale per tensor."""
    weights = [rule["weight"] for rule in every_rule(study.entry(entry)) if rule["weight"]]
    return (
        bool(roles.spacing_methods(study))
        and roles.is_quantized(study, entry) and not roles.has_even_grid(study, entry)
        and {(weight["format"], weight["granularity"]) for weight in weights} == {(entry, "tensor")}
        and entry not in roles.unquantized_controls(study) and f"virtual.{entry}" not in study.formats
    )  # fmt: skip
