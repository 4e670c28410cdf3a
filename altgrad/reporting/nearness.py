"""Is a format's geometry anything like the loss's? What the diagnoses of a study say of it, format by format.

A geometry-aware arm descends along S·g, S the spacing of the format's values at each weight. If that geometry were the
loss's, S·g would lie nearer to the natural gradient F⁻¹g than with the same spacings shuffled among the weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from altgrad.metrics import Metric
from altgrad.reporting import roles
from altgrad.reporting.compare import Comparison
from altgrad.reporting.figures.select import per_layer
from altgrad.reporting.load import Study
from altgrad.reporting.multiplicity import holm
from altgrad.reporting.paired import two_sided
from altgrad.reporting.statistics import CONFIDENCE

ALONG, SHUFFLED, PLAIN = "natural_kfac_s", "natural_kfac_shuffled", "natural_kfac_plain"
SHOWN = {"stiffness_spread": "spread", "gradient_stiffness_rho": "gradient_rho", "fisher_stiffness_rho": "fisher_rho",
         PLAIN: "plain", ALONG: "along", SHUFFLED: "shuffled"}  # fmt: skip
GEOMETRIC = ("natural_", "stiffness_", "descent_share", "gradient_stiffness", "fisher_")


def is_geometry(metric: Metric) -> bool:
    """Whether a metric of the diagnosis is about geometry, and so belongs to the report's section on it."""
    return metric.name.startswith(GEOMETRIC)


@dataclass(frozen=True)
class Nearness:
    """A format's geometry beside the loss's: means over layers and seeds, NaN where not diagnosed.

    ``spread`` of log2 S; ``gradient_rho`` and ``fisher_rho``, rank correlations of S with the size of the gradient and
    with the Fisher information's diagonal; cosines of the natural gradient with g (``plain``), S·g (``along``) and S·g
    with S ``shuffled``. ``differences`` are those of the last two, by seed. ``told`` is 1 where S·g is nearer, -1 where
    it is farther, 0 where seeds do not tell: Student's t, Holm's step-down over the formats.
    """

    entry: str
    spread: float
    gradient_rho: float
    fisher_rho: float
    plain: float
    along: float
    shuffled: float
    differences: np.ndarray
    told: int


def nearness(study: Study, comparison: Comparison) -> list[Nearness]:
    """Return a row per quantized entry whose values are no uniform grid, in grid order, of what was diagnosed."""
    rows = per_layer(study.summary, study, comparison)
    rows = rows[rows["metric"].isin(SHOWN)].dropna(subset="value")
    table = rows.pivot_table(index=["format", "seed"], columns="metric", values="value").reindex(columns=list(SHOWN))
    table = table.dropna(subset=[ALONG, SHUFFLED])
    present = set(table.index.get_level_values("format"))
    entries = [
        entry
        for entry in study.formats
        if entry in present and roles.is_quantized(study, entry) and not roles.has_even_grid(study, entry)
    ]
    by_entry = {entry: (table.loc[entry, ALONG] - table.loc[entry, SHUFFLED]).to_numpy() for entry in entries}
    levels = holm({entry: two_sided(differences) for entry, differences in by_entry.items()})
    told = {e: int(np.sign(by_entry[e].mean())) if levels[e] <= 1 - CONFIDENCE else 0 for e in entries}
    means: pd.DataFrame = table.rename(columns=SHOWN).groupby(level="format").mean()
    return [Nearness(e, **means.loc[e].to_dict(), differences=by_entry[e], told=told[e]) for e in entries]
