"""What memory buys: the loss of each format and optimizer against the bytes that its training keeps."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from altgrad.reporting.compare import Comparison
from altgrad.reporting.figures.spec import in_report
from altgrad.reporting.figures.style import legend, looks, panels
from altgrad.reporting.load import Study
from altgrad.reporting.select import BYTES, memory


@in_report(
    section="costs", order=20,
    alt="Final {noun} of each {entry} and optimizer against the bytes that a parameter takes in training",
    caption="Final {noun}, mean over seeds, against the bytes of a parameter in training: weights, master "
    "weights, gradients and optimizer state as they are allocated, scales included. The line joins those that nothing "
    "of as few bytes is as good as (Pareto front), by their means; whether two differ, the tables say.",
)  # fmt: skip
def loss_against_bytes(study: Study, comparison: Comparison) -> Figure | None:
    """Draw what a format, optimizer state and master weights cost in bytes, and what they leave in loss."""
    rows = comparison.best.dropna(subset="primary").set_index(["format", "optimizer"])
    rows = rows.join(memory(study, comparison)[BYTES], how="inner").reset_index()
    if rows.empty:
        return None
    figure, axes = panels(1, 1, 4.2)
    axis, styles = axes[0, 0], looks(study.formats)
    best = front(rows[BYTES], rows["primary"], higher_is_better=study.measure.higher_is_better)
    for i, row in rows.iterrows():
        look = styles[row["format"]].line(linestyle="none", markerfacecolor=None if i in best else "white")
        axis.plot(row[BYTES], row["primary"], **look)
    axis.step(rows[BYTES][best], rows["primary"][best], where="post", color="black", linewidth=0.9, zorder=0)
    for i in best:
        axis.annotate(rows["optimizer"][i], (rows[BYTES][i], rows["primary"][i]), (5, 5), textcoords="offset points")
    axis.set(xlabel="bytes per parameter", ylabel=study.measure.labelled(study.measure.full))
    legend(figure, styles, list(dict.fromkeys(rows["format"])), linestyle="none")
    return figure


def front(bytes_kept: pd.Series, values: pd.Series, *, higher_is_better: bool = False) -> list[int]:
    """Return the labels of the Pareto front by ascending bytes: no other run of as few bytes is as good or better."""
    rows = pd.DataFrame({"bytes": bytes_kept, "value": -values if higher_is_better else values})
    rows = rows.sort_values(["bytes", "value"], kind="stable")
    return rows.index[rows["value"] < rows["value"].cummin().shift(fill_value=float("inf"))].tolist()
