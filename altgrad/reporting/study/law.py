"""The cost of formats by size and tokens, from a question's experiments of several models and lengths."""

import itertools
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from altgrad.common.errors import UserError
from altgrad.reporting.cost_law import Sizes
from altgrad.reporting.cost_law_section import described
from altgrad.reporting.load import PrimaryMetric
from altgrad.reporting.markdown import significant, to_markdown
from altgrad.reporting.study.runs import RunTable, Untrained

BASELINE = "bf16"


def law_of(experiments: Mapping[str, list[str]], runs: RunTable, folder: Path, name: str) -> str:
    """Draw ``folder/<name>.png`` and return the section of a page on the law, as Markdown.

    Args:
        experiments: the grid entries, `BASELINE` among them, by experiment. Each experiment is of one model and one
            number of tokens, with one optimizer at one learning rate.
        runs: all runs.
        folder: of the figure.
        name: of the figure.
    """
    sizes = sizes_of(experiments, runs)
    return to_markdown(described(sizes, PrimaryMetric(), BASELINE, folder, name))


def sizes_of(experiments: Mapping[str, list[str]], runs: RunTable) -> Sizes:
    """Return the measured sizes, named by their parameters, such as "0.17 M"; arguments as of `law_of`.

    A format has no cost in an experiment whose grid lacks it. Raises :class:`UserError` without the baseline and where
    a format has several runs with a seed, and `Untrained` where an experiment has no run in a format of its grid.
    """
    rows = runs.of_experiment(*experiments)
    for experiment, formats in experiments.items():
        if BASELINE not in formats:
            raise UserError(f"law: {experiment}: costs are measured against {BASELINE}, which its formats lack")
        for entry in formats:
            seeds = rows[(rows["experiment"] == experiment) & (rows["format"] == entry)]["seed"]
            if seeds.empty:
                raise Untrained(f"law: {experiment}: no run in {entry}; `make study` trains it")
            if seeds.duplicated().any():
                raise UserError(
                    f"law: {experiment}: {entry} has several runs with a seed; name one optimizer and one rate"
                )
    order = rows.groupby("experiment")[["parameters", "tokens"]].max().astype(float)
    order = order.sort_values(["parameters", "tokens"])
    losses = rows.pivot(index="experiment", columns=["format", "seed"], values="val_loss").loc[order.index]
    seeds = sorted(rows["seed"].unique())
    entries = dict.fromkeys(itertools.chain.from_iterable(experiments.values()))
    by_format = {entry: losses[entry].reindex(columns=seeds).to_numpy() for entry in entries}
    base = by_format.pop(BASELINE)
    return Sizes(
        [f"{significant(n / 1e6, 2)} M" for n in order["parameters"]], np.array(order["parameters"]),
        np.array(order["tokens"]), base, {entry: of_format - base for entry, of_format in by_format.items()},
    )  # fmt: skip
