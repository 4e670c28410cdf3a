"""Where weights lie on a format's number line: below the largest one, which a scale puts on its largest value."""

from __future__ import annotations

import numpy as np
import pandas as pd

BINS_PER_BINADE = 4  # of the histogram that the diagnosis writes
LOWEST = -16  # binades below the largest weight


def relative_histogram(rows: pd.DataFrame, amax: pd.Series) -> np.ndarray:
    """Return the share of weights per quarter binade below the layer's largest, every layer counting alike.

    Entry i covers [LOWEST + i/4, LOWEST + (i+1)/4). A layer's bins are moved by its own log2(amax),
    which is no multiple of a quarter, so each is split between the two that it then overlaps. A layer
    whose amax was not finite, as after a divergence, is left out.
    """
    total = np.zeros(-LOWEST * BINS_PER_BINADE + 2)
    groups = {key: group for key, group in rows.groupby(["format", "seed", "layer"], sort=False) if key in amax.index}
    for key, group in groups.items():
        position = BINS_PER_BINADE * (group["x"].to_numpy() - np.log2(amax[key]) - LOWEST)
        floor = np.floor(position)
        part, share = position - floor, group["value"].to_numpy()
        index = np.clip(floor.astype(int), 0, len(total) - 2)
        np.add.at(total, index, (1 - part) * share)
        np.add.at(total, index + 1, part * share)
    return total[: -LOWEST * BINS_PER_BINADE] / max(len(groups), 1)
