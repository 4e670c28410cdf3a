"""The cost of formats by size and tokens, from a question's experiments of several models and lengths."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from altgrad.reporting.cost_law import Sizes, described
from altgrad.reporting.load import PrimaryMetric
from altgrad.reporting.markdown import significant, to_markdown
from altgrad.reporting.study.runs import RunTable

BASELINE = "bf16"


def law_of(experiments: Sequence[str], formats: list[str], runs: RunTable, folder: Path, name: str) -> str:
    """Draw ``folder/<name>.png`` and return the section of a page on the law, as Markdown.

    Args:
        experiments: each of one model and one number of tokens, with one optimizer at one learning rate.
        formats: the grid entries, `BASELINE` among them.
        runs: all runs.
        folder: of the figure.
        name: of the figure.
    """
    sizes = sizes_of(experiments, formats, runs)
    return to_markdown(described(sizes, PrimaryMetric(), BASELINE, formats, folder, name))


def sizes_of(experiments: Sequence[str], formats: list[str], runs: RunTable) -> Sizes:
    """Return the measured sizes, named by their parameters, such as "0.17 M"; arguments as of `law_of`."""
    rows = runs.of_experiment(*experiments)
    order = rows.groupby("experiment")[["parameters", "tokens"]].max().astype(float)
    order = order.sort_values(["parameters", "tokens"])
    losses = rows.pivot(index="experiment", columns=["format", "seed"], values="val_loss").loc[order.index]
    seeds = sorted(rows["seed"].unique())
    by_format = {entry: losses[entry].reindex(columns=seeds).to_numpy() for entry in formats}
    base = by_format.pop(BASELINE)
    return Sizes(
        [f"{significant(n / 1e6, 2)} M" for n in order["parameters"]], np.array(order["parameters"]),
        np.array(order["tokens"]), base, {entry: of_format - base for entry, of_format in by_format.items()},
    )  # fmt: skip
