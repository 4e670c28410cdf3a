"""Which runs fail, at which rates, and whether a format without significand bits fares as was foretold.

The bench began with a prediction about E7M0, whose values are powers of two: more than 90 % of its runs fail, since
gradients vanish and losses stop falling within ten steps. A run **fails** if it diverges, or ends above the middle
between the loss of an untrained model, ln V for a vocabulary of V, and the baseline's mean loss at its best rate in the
same arm; in any arm, where it has none in that one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from altgrad.formats import Format
from altgrad.reporting.compare import Comparison
from altgrad.reporting.document import Block, Bullets, Column, Table, Text, of_numbers
from altgrad.reporting.early_warning import sentences, verdicts
from altgrad.reporting.figures.select import at_best
from altgrad.reporting.load import COMPLETED, IDENTITY, MISSING, Study
from altgrad.reporting.roles import is_virtual, regime
from altgrad.reporting.statistics import wilson
from altgrad.reporting.wording import NONE, joined, number, percent_of

FORETOLD = 0.9  # the share of runs of a format without significand bits that was to fail
STEPS, FALL = 10, 0.1  # a loss that falls less than FALL nats per token after so many steps has stopped
REGIMES = {"master": "with master weights", "quantized": "with weights on the quantization grid"}


def limit_of(vocabulary: int, best: float) -> float:
    """Return the validation loss above which a run fails, where the baseline's best mean is ``best``."""
    return (math.log(vocabulary) + best) / 2


def failed(study: Study) -> pd.Series:
    """Return whether each run failed, by the cell's key; nothing where the baseline has no run that completed."""
    cells = study.cells[study.cells["status"] != MISSING]
    done = cells[(cells["status"] == COMPLETED) & (cells["format"] == study.baseline)]
    best = done.groupby(["optimizer", "lr_scale"])["val_loss"].mean().groupby("optimizer").min()
    if best.empty:
        return pd.Series(dtype=bool)
    limits = {
        arm: limit_of(study.corpus["vocab_size"], best.get(arm, best.min())) for arm in cells["optimizer"].unique()
    }
    above = cells["val_loss"] > cells["optimizer"].map(limits).astype("float64")
    return (cells["status"] != COMPLETED) | above


def foretold(low: float, high: float) -> str:
    """Return what an interval of the share that fails says of the prediction."""
    return "holds" if low > FORETOLD else "fails" if high < FORETOLD else "is left open"


def failures(study: Study, comparison: Comparison) -> list[Block]:
    """Say which runs fail and whether that could be seen early; nothing where none fails and none was foretold to."""
    if "vocab_size" not in study.corpus:
        return []
    fails = failed(study)
    cells = study.cells.loc[fails.index].assign(fails=fails)
    bare = [name for name in study.formats if _lacks_significand(study, name) and name in set(cells["format"])]
    if fails.empty or not (fails.any() or bare):
        return []
    told = [Text(_as_foretold(study, cells, name)) for name in bare]
    found = verdicts(study)
    early = [Text("Could the first fifth of a run tell?"), *(Bullets(sentences(verdict)) for verdict in found)]
    return [*told, _table(study, comparison, cells), *(early if found else [])]


def _lacks_significand(study: Study, entry: str) -> bool:
    cell = study.entry(entry)
    weights = {rule["weight"]["format"] for rule in cell["rules"] if rule["weight"]}
    formats = {name: Format(**fields) for name, fields in cell.get("formats", {}).items()}
    return not is_virtual(study, entry) and any(
        name in formats and formats[name].mantissa_bits == 0 and formats[name].exponent_bits > 0 for name in weights
    )


def _as_foretold(study: Study, cells: pd.DataFrame, entry: str) -> str:
    own = cells[cells["format"] == entry]
    count, total = int(own["fails"].sum()), len(own)
    first = (
        f"**{entry}** has no significand bits. It was foretold that more than {100 * FORETOLD:.0f} % of its runs fail, "
        f"and that losses stop falling within {STEPS} steps. {percent_of(count, total)} fail: the first "
        f"{foretold(*wilson(count, total))}."
    )
    said, fall = [first], _falls(study, own)
    if len(fall):
        stopped = int((fall < FALL).sum())
        said.append(f"The training loss of {stopped} of {len(fall)} falls less than {FALL:g} nats after step {STEPS}.")
    for name, words in REGIMES.items():
        arms = [arm for arm in study.optimizers if regime(study.arm(arm)) == name]
        mine = own[own["optimizer"].isin(arms)]
        if len(mine) and len(arms) < len(study.optimizers):
            said.append(f"{words.capitalize()}: {percent_of(int(mine['fails'].sum()), len(mine))}.")
    return " ".join(said)


def _falls(study: Study, cells: pd.DataFrame) -> np.ndarray:
    """Return by how much each run's training loss falls after its first steps, to the last that is recorded.

    A run without a record of the first steps, or one that recorded nothing after them, is left out.
    """
    wanted = pd.MultiIndex.from_frame(cells[IDENTITY])
    rows = study.history.dropna(subset="train_loss")
    rows = rows[(rows["step"] > 0) & pd.MultiIndex.from_frame(rows[IDENTITY]).isin(wanted)]
    found = []
    for _, run in rows.groupby(IDENTITY, sort=False):
        first, after = run[run["step"] <= STEPS], run[run["step"] > STEPS]
        if len(first) and len(after):
            found.append(first["train_loss"].iloc[-1] - after["train_loss"].iloc[-1])
    return np.array(found)


def _table(study: Study, comparison: Comparison, cells: pd.DataFrame) -> Table:
    """Format x arm: how many fail, from which rate on most do, what becomes of gradients and updates at the best."""
    at = at_best(study.monitors, comparison)
    means = at.groupby(["format", "optimizer", "role", "metric"])["value"].mean()

    def share(name: str, arm: str, role: str, metric: str) -> str:
        value = means.get((name, arm, role, metric))
        return NONE if value is None else number(100 * value, 2 if value < 0.1 else 0)

    groups = list(cells.groupby(["format", "optimizer"], sort=False))
    rows = [
        [f"**{name}**", f"`{arm}`", percent_of(int(own["fails"].sum()), len(own)), _lowest(own),
         share(name, arm, "grad", "underflow_frac"), share(name, arm, "update", "stall_ratio")]
        for (name, arm), own in groups
    ]  # fmt: skip
    columns = [
        Column("format", numeric=False), Column("arm", numeric=False), Column("runs that fail"),
        Column("most fail from"), Column("gradients to zero, %"), Column("updates that change no code, %"),
    ]  # fmt: skip
    arms = joined([f"`{arm}`" for arm in dict.fromkeys(cells["optimizer"])])
    note = (
        f"A run fails if it diverges, or ends above the middle between ln {study.corpus['vocab_size']}, the loss of an "
        f"untrained model, and {study.baseline}'s best in the same arm ({arms}), in any if it has none there. Shares "
        "with 95 % intervals (Wilson 1927) as if runs were independent, which those of one rate are not; the lowest "
        "rate, as a multiple of the arm's, at which more than half of the seeds fail; elements of incoming gradients "
        "that the format rounds to zero, and updates that leave the weight's code: means over layers, watched steps "
        "and seeds at the best rate."
    )
    behind = [of_numbers(columns, {"format": name, "optimizer": arm}) for (name, arm), _ in groups]
    return Table(columns, rows, note, behind)


def _lowest(cells: pd.DataFrame) -> str:
    by_rate = cells.groupby("lr_scale")["fails"].mean()
    beyond: Sequence[float] = sorted(by_rate.index[by_rate > 0.5])
    return f"{beyond[0]:g} times" if beyond else "none"
