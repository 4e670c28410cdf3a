"""What a study that classifies documents says besides its comparison: every metric, and a linear model of words."""

from __future__ import annotations

from altgrad.config.tasks import ON_TEST, TITLES
from altgrad.reporting.compare import Comparison
from altgrad.reporting.document import Block, Column, Row, Table, Text, words
from altgrad.reporting.load import COMPLETED, Study
from altgrad.reporting.select import at_best
from altgrad.reporting.tables import SPLITS
from altgrad.reporting.wording import NONE, joined, number, plural, whole


def against_words(study: Study, comparison: Comparison) -> Text | None:
    """Return whether the baseline under the baseline optimizer is better than the linear model; None for other tasks.
    """
    linear = study.corpus.get("baseline")
    run = comparison.best_runs.get((study.baseline or "", comparison.reference or ""))
    if linear is None or run is None or not comparison.runs.completed(run):
        return None
    name = study.params["primary"]
    own, other = comparison.runs.of_run(run).mean(), linear["test"][name]
    does = "beats" if own > other else "**does not beat**"
    return Text(
        f"`{run[0]}` under `{run[1]}` {does} {linear['name']} on whole documents: {TITLES[name]} {number(own, 4)} "
        f"against {number(other, 4)}."
    )


def metrics_table(study: Study, comparison: Comparison) -> Table | None:
    """Return every metric of every format and optimizer at its best rate, and the linear model's; None for text."""
    linear = study.corpus.get("baseline")
    if linear is None:
        return None
    columns = [words("format"), words("optimizer"), *(Column(title) for title in TITLES.values())]
    done = at_best(study.of_status(COMPLETED), comparison)
    means = done.groupby(["format", "optimizer"], sort=False)[list(ON_TEST.values())].mean()
    rows: list[Row] = [
        ([f"**{entry}**", arm, *(number(value, 4) for value in found)], {"format": entry, "optimizer": arm})
        for (entry, arm), found in means.iterrows()
    ]
    words_alone = [f"**{linear['name']}**", NONE, *(number(linear["test"][name], 4) for name in TITLES)]
    rows.append((words_alone, [None] * len(columns)))
    primary = TITLES[study.params["primary"]]
    note = (
        "Means over completed seeds, of test documents at thresholds chosen on validation documents; all but "
        f"{primary} are exploratory. The last row reads whole documents: {whole(linear['words'])} words, "
        f"C = {linear['C']:g} chosen on validation documents."
    )
    return Table.of(columns, rows, note)


def labels_table(study: Study) -> list[Block]:
    """Return what the labels are and how much of a document is read; nothing for text."""
    if "labels" not in study.corpus:
        return []
    labels, cell = study.corpus["labels"], next(iter(study.resolved.values()))
    rows = [[f"`{label['name']}`", *(whole(label[split]) for split in SPLITS)] for label in labels]
    pieces, context = cell["task"]["chunks"], cell["model"]["context"]
    left_out, without = study.corpus["labels_left_out"], study.corpus["unlabelled"]
    read = study.cells["read_frac"].max()
    said = (
        f"A document is read in up to {plural(pieces, 'piece')} of {context} tokens from its start, "
        f"{number(100 * read, 0)} % of all tokens of test documents; what is behind them is cut off. Its score is the "
        f"mean over pieces. {plural(left_out, 'rarer label')} left out; documents without a label: "
        f"{joined([f'{without[split]} in {split}' for split in SPLITS])}."
    )
    return [Text(said), Table([words("label"), *(Column(f"in {split}") for split in SPLITS)], rows, "Documents.")]
