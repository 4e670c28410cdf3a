"""Which format suits which layer, by the noise that rounding adds to the layer's tensors."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd

from altgrad.reporting import roles
from altgrad.reporting.compare import Comparison
from altgrad.reporting.document import Block, Bullets, Column, Fold, Table, Text
from altgrad.reporting.figures.select import of_completed
from altgrad.reporting.load import Study
from altgrad.reporting.paired import interval
from altgrad.reporting.pairwise import from_the_lowest
from altgrad.reporting.plots import LAYER_ROLES, layers_table
from altgrad.reporting.tables import words
from altgrad.reporting.wording import joined, number, plural, signed

WORDS = {"weight": "Weights", "input": "Inputs", "grad": "Incoming gradients"}
OPEN_ROWS = 12  # of a table that is not folded


class Fit(NamedTuple):
    """The format in which a tensor has the highest SQNR, and by how much, in dB, it leads the next: one per seed."""

    layer: str
    role: str
    best: str
    sqnr_db: float
    following: str
    lead_db: np.ndarray

    @property
    def told_apart(self) -> bool:
        """Whether the lead is more than the seeds' spread."""
        return bool(interval(self.lead_db)[1] > 0)


def layer_fit(study: Study, comparison: Comparison) -> list[Block]:
    """Return a sentence per role and a table; nothing without two formats to choose from."""
    fits = fits_of(study, comparison)
    if not fits:
        return []
    lead = Text(
        f"Signal-to-quantization-noise ratio (SQNR) of each layer's tensors under `{comparison.reference}`, each "
        "format's from its own cells, the mean over the second half of the run:"
    )
    rows, behind = [], []
    for fit in fits:
        best, both = comparison.behind(fit.best, comparison.reference), [fit.best, fit.following]
        behind.append([None, None, None, best, None, {"format": both, "optimizer": comparison.reference}])
        tensor = [f"`{fit.layer}`", WORDS[fit.role].lower()]
        rows.append([*tensor, f"**{fit.best}**", number(fit.sqnr_db, 1), fit.following, _lead(fit)])
    columns = [words("layer"), words("tensor"), words("highest in"), Column("dB"), words("next"), Column("lead, dB")]
    fewest, most = (pick(len(fit.lead_db) for fit in fits) for pick in (min, max))
    over = plural(most, "seed") if fewest == most else f"{fewest} to {plural(most, 'seed')}"
    note = f"Leads with 95 % intervals over {over}, each by itself."
    table: Block = Table(columns, rows, note, behind)
    if len(rows) > OPEN_ROWS:
        table = Fold(f"All {len(rows)} tensors", [table])
    said = [_said(role, [fit for fit in fits if fit.role == role]) for role in dict.fromkeys(fit.role for fit in fits)]
    limits = Text(
        "This is what rounding takes from tensors, not from the loss: in the committed study (part `what-if`) recipes "
        "of the highest SQNR in every layer did not end below the best single format. `python -m altgrad.diagnostics "
        "what-if CELL` shows a cell's tensors in every other format and writes such a recipe, to be tried."
    )
    return [lead, Bullets(said), table, limits]


def fits_of(study: Study, comparison: Comparison) -> list[Fit]:
    """Return the best format of every tensor that the grid quantizes to more than one, layers in their order.

    Of completed runs: a diverged one has no second half.
    """
    entries = [name for name in study.formats if roles.is_quantized(study, name) and not roles.is_virtual(study, name)]
    table = layers_table(study)
    rate = {entry: run[2] for (entry, arm), run in comparison.best_runs.items() if arm == comparison.reference and run}
    table = table[(table["optimizer"] == comparison.reference) & table["format"].isin(entries)]
    table = table[table["lr_scale"] == table["format"].map(rate)].dropna(subset="sqnr_db")
    table = of_completed(table, study)
    wide = table.pivot_table(index=["layer", "role", "seed"], columns="format", values="sqnr_db", sort=False)
    found = []
    for role in LAYER_ROLES:
        if role not in wide.index.get_level_values("role") or len(_formats_of(study, entries, role)) < 2:
            continue
        of_role = wide.xs(role, level="role")
        for layer in dict.fromkeys(of_role.index.get_level_values("layer")):
            fit = _fit(layer, role, of_role.xs(layer, level="layer"))
            found += [fit] if fit else []
    return found


def _fit(layer: str, role: str, by_seed: pd.DataFrame) -> Fit | None:
    by_seed = by_seed.dropna(axis=1, how="all")
    if by_seed.shape[1] < 2:
        return None
    best, following, *_ = from_the_lowest({name: -values.to_numpy() for name, values in by_seed.items()})
    lead = (by_seed[best] - by_seed[following]).dropna().to_numpy()
    return Fit(layer, role, best, by_seed[best].mean(), following, lead) if len(lead) else None


def _formats_of(study: Study, entries: list[str], role: str) -> set[str]:
    rules = [rule for entry in entries for rule in study.entry(entry)["rules"]]
    return {rule[role]["format"] for rule in rules if rule.get(role)}


def _said(role: str, fits: list[Fit]) -> str:
    layers = {best: [fit.layer for fit in fits if fit.best == best] for best in dict.fromkeys(fit.best for fit in fits)}
    most = max(layers, key=lambda best: len(layers[best]))
    apart = sum(fit.told_apart for fit in fits)
    if len(layers) == 1:
        text = f"**{WORDS[role]}**: highest in {most} in all {plural(len(fits), 'layer')}; no layer calls for another."
    else:
        count = f"{len(layers.pop(most))} of {plural(len(fits), 'layer')}"
        others = [f"{best} in {joined([f'`{name}`' for name in names])}" for best, names in layers.items()]
        text = f"**{WORDS[role]}**: highest in {most} in {count}; in {joined(others)}."
    return text if apart == len(fits) else f"{text} In {apart} of {len(fits)} the next is told apart by the seeds."


def _lead(fit: Fit) -> str:
    mean, low, high = interval(fit.lead_db)
    if not np.isfinite(mean):
        return signed(float(fit.lead_db.mean()), 1)
    return f"{signed(mean, 1)} [{signed(low, 1)}, {signed(high, 1)}]"
