"""The report's sections in reading order: result, its conditions, what failed, why, what it cost, how to repeat it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from altgrad.config.files import canonical_json
from altgrad.reporting import tables, tables_inside
from altgrad.reporting.after_training import Spreads, sentence
from altgrad.reporting.answer import QUESTION, answer
from altgrad.reporting.causes import Case
from altgrad.reporting.compare import Comparison
from altgrad.reporting.control import Control
from altgrad.reporting.document import Block, Bullets, Code, Document, Fold, Picture, Section, Text
from altgrad.reporting.early_stopping import early_stopping
from altgrad.reporting.explain import MEASURES, correlations, explanation
from altgrad.reporting.failures import failures
from altgrad.reporting.fairness import conditions
from altgrad.reporting.figures import at
from altgrad.reporting.figures.plate import Plate
from altgrad.reporting.gain_course import gain_course_table, gain_courses
from altgrad.reporting.glossary import glossary
from altgrad.reporting.layer_fit import layer_fit
from altgrad.reporting.load import COMPLETED, MISSING, Study
from altgrad.reporting.nearness import SHOWN, is_geometry
from altgrad.reporting.simulated import Rates
from altgrad.reporting.speed import speed_blocks
from altgrad.reporting.tables_formats import formats_table
from altgrad.reporting.tuning import Tuning
from altgrad.reporting.updates import updates_table
from altgrad.reporting.wording import joined, number, plural

# Above this many cells the full table of outcomes is folded away and only the others are shown.
OPEN_OUTCOMES = 24
PUBLISHED = "Kuzmin et al. 2022 (arXiv:2208.09225) find that formats differ less when trained so."
DRAW = "python -m altgrad.reporting.figures"

Pictures = dict[str, Picture]


def document(
    study: Study,
    comparison: Comparison,
    control: Control | None,
    flags: pd.DataFrame,
    ended_badly: Sequence[Case],
    pictures: Pictures,
    silent: Sequence[Plate],
    revision: str | None,
    benches: list[dict[str, Any]],
    rates: Rates | None = None,
    tuning: Tuning | None = None,
    spreads: Spreads | None = None,
) -> Document:
    """Return the whole report.

    ``flags`` are those of :func:`altgrad.reporting.flags.raised`, ``ended_badly`` those of
    :func:`altgrad.reporting.causes.cases`, ``silent`` the figures without news, ``rates`` of
    simulated studies like this one, ``tuning`` of the run that fixed its learning rates, ``spreads`` of formats
    after training and when trained so.
    """
    sections = [
        result_section(study, comparison, pictures),
        fairness_section(study, comparison, control, tuning),
        Section("Which runs fail", "failures", failures(study, comparison)),
        Section("Outcome of every cell", "outcomes", _outcomes(study, ended_badly)),
        Section("Which format suits which layer", "layers", layer_fit(study, comparison)),
        Section("Why: precision and range", "precision", _precision(study, comparison, pictures, spreads)),
        Section("Why: weights on the quantization grid", "weights", _weights(study, comparison, pictures)),
        Section("Why: the format's geometry and the loss's", "geometry", _geometry(study, comparison)),
        Section("What the updates did", "updates", _updates(study, comparison, pictures)),
        Section("Gradients and activations", "signals", _shown(pictures, "signals")),
        Section("Loss curves", "curves", _shown(pictures, "curves")),
        Section("Flags", "flags", [*_flags(study, flags), *_left_out(study, silent)]),
        Section("Time and cost", "cost", [*early_stopping(study), tables.cost_table(study)] if study.timing else []),
        Section("Step times beside bf16", "speed", speed_blocks(benches, pictures)),
        Section("Formats and recipe", "formats", _formats(study)),
        Section("How to repeat it", "settings", _settings(study, revision)),
        definitions_section(study),
    ]
    return Document(
        "AltGrad report",
        QUESTION,
        answer(study, comparison, control, rates),
        [section for section in sections if section.blocks],
    )


def _shown(pictures: Pictures, *spots: str) -> list[Block]:
    return [picture for spot in spots for picture in at(spot, pictures)]


def result_section(study: Study, comparison: Comparison, pictures: Pictures) -> Section:
    """What each arm gains and each format costs: figures and tables."""
    blocks: list[Block] = _shown(pictures, "gains")
    if len(comparison.gains):
        blocks.append(tables.gains_table(study, comparison))
        course = gain_course_table(gain_courses(study, comparison))
        blocks += [Fold("Gains over the run", [course])] if course else []
    blocks += [*_shown(pictures, "costs"), tables.results_table(study, comparison)]
    return Section("Result", "result", blocks)


def fairness_section(
    study: Study, comparison: Comparison, control: Control | None, tuning: Tuning | None = None
) -> Section:
    """Which conditions of a fair comparison the grid meets."""
    found = conditions(study, comparison, control, tuning)
    return Section("What makes it fair", "fairness", [tables.fairness_table(found)])


def definitions_section(study: Study) -> Section:
    """What every number means."""
    measured = set(study.summary["metric"].unique())
    diagnosed = [m for m in study.metrics.values() if m.name in measured and (m.name in SHOWN or not is_geometry(m))]
    terms = [f"**{term}**: {text}" for term, text in glossary(diagnosed).items()]
    return Section("Definitions", "definitions", [Bullets(terms)])


def _updates(study: Study, comparison: Comparison, pictures: Pictures) -> list[Block]:
    table = updates_table(study, comparison)
    return _shown(pictures, "updates") + ([table] if table else [])


def _outcomes(study: Study, ended_badly: Sequence[Case]) -> list[Block]:
    cells = study.cells
    full = tables.outcomes_table(cells)
    causes = tables_inside.causes_table(ended_badly)
    found: list[Block] = [causes] if causes else []
    if len(cells) <= OPEN_OUTCOMES:
        return [full, *found]
    others = cells[cells["status"] != COMPLETED]
    blocks: list[Block] = [tables.outcomes_table(others)] if len(others) else [Text("Every cell completed.")]
    return [*blocks, *found, Fold(f"All {len(cells)} cells", [full])]


def _precision(study: Study, comparison: Comparison, pictures: Pictures, spreads: Spreads | None) -> list[Block]:
    blocks = _shown(pictures, "precision")
    if "cost_against_precision" in pictures:
        found = correlations(explanation(study, comparison))
        parts = [
            f"{MEASURES[measure].title} {number(rho, 2)} ({plural(n, 'format')})"
            for measure, (rho, n) in found.items()
            if rho == rho
        ]
        if parts:
            blocks.append(Text(
                f"Spearman's rank correlation between a format's cost and its mean SQNR: {joined(parts)}. "
                "Near −1 means that the cost falls as precision grows; over so few formats it is a hint, not a test."
            ))  # fmt: skip
    if spreads:
        blocks.append(Text(f"{sentence(spreads)} {PUBLISHED}"))
    blocks += _shown(pictures, "layers")
    if "overflow" not in pictures and (study.monitors["metric"] == "overflow_frac").any():
        blocks.append(Text("In no layer were more than 0.005 % of the elements beyond their format's maximum."))
    return blocks + _shown(pictures, "over time")


def _weights(study: Study, comparison: Comparison, pictures: Pictures) -> list[Block]:
    table = tables_inside.diagnosis_table(study, comparison)
    blocks = _shown(pictures, "weights")
    return blocks + ([table] if table else [])


def _geometry(study: Study, comparison: Comparison) -> list[Block]:
    table = tables_inside.geometry_table(study, comparison)
    return [table] if table else []


def _flags(study: Study, flags: pd.DataFrame) -> list[Block]:
    if flags.empty:
        return [Text("No quantity crossed its limit.")]
    lead = Text(
        "Values beyond the level at which they deserve a look. A flag is a hint, not a failure. "
        f"`{tables_inside.EXPLAIN}` tells and draws which tensor of a cell left the band of healthy runs first."
    )
    return [
        lead,
        tables_inside.flags_table(flags),
        Fold(f"All {plural(len(flags), 'flag')}", [tables_inside.all_flags_table(study, flags)]),
    ]


def _left_out(study: Study, silent: Sequence[Plate]) -> list[Block]:
    """Say which figures have no news, and why, so that nobody takes what is not shown for what was not looked at."""
    found = [f"`{plate.name}` ({plate.news.otherwise})" for plate in silent if plate.news]
    if not found or study.monitors.empty:
        return []
    return [Text(f"Figures without news here: {joined(found)}. `{DRAW}` draws them.")]


def _formats(study: Study) -> list[Block]:
    return [table for table in (formats_table(study), tables.recipe_table(study)) if table is not None]


def _settings(study: Study, revision: str | None) -> list[Block]:
    missing = study.count(MISSING)
    blocks: list[Block] = []
    if missing:
        lack = f"{plural(missing, 'cell')} missing"
        blocks.append(Text(f"{lack}: `dvc repro` runs what is absent or stale and rewrites this report."))
    blocks += [tables.machine_table(study, revision), tables.corpus_table(study)]
    return [*blocks, Fold("Exact parameters", [Code(canonical_json(study.params))])]
