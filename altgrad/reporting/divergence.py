"""How far each format's weights are from the baseline's, as distributions of magnitudes."""

from __future__ import annotations

import numpy as np
import pandas as pd
from scipy.special import rel_entr

from altgrad.reporting.compare import Comparison
from altgrad.reporting.figures.select import in_order, per_layer
from altgrad.reporting.load import Study

KL_MIXTURE = 1e-6  # share of p that is mixed into q before KL(p || q), so that one empty bin is no infinite divergence


def divergences(study: Study, comparison: Comparison) -> pd.Series:
    """Return by format KL(its run || the baseline's) in bits, mean over layers and seeds; empty without a baseline.

    Of the magnitudes of weights at the end of training, over quarter binades. The baseline's own, where there are two
    seeds, is that to its run with the next seed: how far two runs come apart that differ in nothing else.
    """
    rows = per_layer(study.diagnosis, study, comparison)
    rows = rows[rows["metric"] == "log2_magnitude"]
    counts = rows.pivot_table(index=["format", "seed", "layer"], columns="x", values="value", fill_value=0.0)
    if study.baseline not in in_order(study, rows):
        return pd.Series(dtype="float64")
    shares = counts.div(counts.sum(axis=1), axis=0)
    baseline, seeds = shares.loc[study.baseline], list(rows["seed"].unique())

    def bits(own: pd.DataFrame) -> float:
        p, q = own.to_numpy(), baseline.reindex(own.index).to_numpy()
        found = rel_entr(p, q + KL_MIXTURE * (p - q)).sum(axis=1) / np.log(2)
        return float(pd.Series(found, own.index).groupby("layer").mean().mean())

    found = {name: bits(shares.loc[name]) for name in in_order(study, rows) if name != study.baseline}
    if len(seeds) > 1:
        following = dict(zip(seeds, seeds[1:] + seeds[:1], strict=True))
        found[study.baseline] = bits(baseline.rename(index=following, level="seed"))
    return pd.Series(found)
