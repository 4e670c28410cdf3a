"""Early warning: does the first fifth of a run tell whether it will fail?

A run fails if it diverges, or ends `MARGIN` nats per token above the mean of its format and arm at their best learning
rate. Runs that diverge within the first fifth are left out: nothing is left to warn of. Two rules are judged: a score,
the logistic regression of failing on `FEATURES`; and the trivial rule, that the training loss is above a threshold by
then. Each is judged on the runs of one format after it was made from all others, and on those of one format and rate
after it was made from other formats at other rates, so that it cannot know the rate instead of the fault.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd

from altgrad.reporting.load import COMPLETED, DIVERGED, IDENTITY, Study
from altgrad.reporting.wording import joined, percent_of

UNSEEN = ("format", "lr_scale")  # of the runs that are judged, what those that teach must not share
UNSEEN_IN_WORDS = dict(zip(UNSEEN, ("formats", "rates"), strict=True))
SEEN = 0.2  # of the steps
MARGIN = 0.1  # nats per token, some forty times what two equal arms of the default run differ by
RIDGE = 1.0  # of the coefficients' squares, against the sum of the runs' log losses
TRIVIAL = "loss"
#: Of the part that is seen: the last training loss, how much it fell since half of it, the log of the last gradient
#: norm, how much that grew since half of it, and the share of steps that were clipped.
FEATURES = (TRIVIAL, "fall", "gradient", "growth", "clipped")


class Score(NamedTuple):
    """How often a rule was right about runs that it was not made from."""

    warned_failed: int
    warned_fine: int
    silent_failed: int
    silent_fine: int

    @property
    def precision(self) -> tuple[int, int]:
        """Runs that failed among those warned of."""
        return self.warned_failed, self.warned_failed + self.warned_fine

    @property
    def recall(self) -> tuple[int, int]:
        """Runs warned of among those that failed."""
        return self.warned_failed, self.warned_failed + self.silent_failed


class Verdict(NamedTuple):
    """Both rules on the same runs; ``p`` is McNemar's exact test of which is right more often, by runs.

    ``unseen`` are those of `UNSEEN` in which the runs that taught a rule differ from those that it judged.
    """

    score: Score
    trivial: Score
    p: float
    runs: int
    unseen: tuple[str, ...]


def examples(study: Study) -> pd.DataFrame:
    """Return a row per run that outlived the first fifth: `UNSEEN`, whether it ``fails``, and `FEATURES`."""
    best = study.cells[study.cells["status"] == COMPLETED].groupby(["format", "optimizer", "lr_scale"])["val_loss"]
    floor = best.mean().groupby(["format", "optimizer"]).min()
    histories = {tuple(key): rows for key, rows in study.history.groupby(list(IDENTITY))}
    found = []
    for cell in study.cells.to_dict("records"):
        if cell["status"] not in (COMPLETED, DIVERGED):
            continue
        rows = histories.get(tuple(cell[name] for name in IDENTITY))
        last = SEEN * cell["planned_steps"]
        if rows is None or cell["steps"] <= last:
            continue
        seen = rows[(rows["step"] > 0) & (rows["step"] <= last)].dropna(subset=["train_loss", "grad_norm"])
        half = seen[seen["step"] <= last / 2]
        if half.empty:
            continue
        now, then = seen.iloc[-1], half.iloc[-1]
        level = floor.get((cell["format"], cell["optimizer"]), np.inf)
        found.append({
            "format": cell["format"], "lr_scale": cell["lr_scale"],
            "fails": cell["status"] == DIVERGED or cell["val_loss"] > level + MARGIN,
            TRIVIAL: now["train_loss"], "fall": then["train_loss"] - now["train_loss"],
            "gradient": np.log(now["grad_norm"]), "growth": np.log(now["grad_norm"] / then["grad_norm"]),
            "clipped": seen["clipped_frac"].mean(),
        })  # fmt: skip
    table = pd.DataFrame(found, columns=[*UNSEEN, "fails", *FEATURES]).replace([np.inf, -np.inf], np.nan)
    return table.dropna().reset_index(drop=True)


def judge(table: pd.DataFrame, unseen: tuple[str, ...] = ("format",)) -> Verdict | None:
    """Judge both rules on ``table``, `examples`: each set of runs that are alike in what is ``unseen`` in turn.

    Those runs teach that share nothing of it with the set. None without both kinds of runs among those.
    """
    from scipy.stats import binomtest  # few reports come here, and loading it takes longer than this

    truth = table["fails"].to_numpy(dtype=bool)
    said = {"score": np.zeros(len(table), dtype=bool), TRIVIAL: np.zeros(len(table), dtype=bool)}
    for values in dict.fromkeys(table[list(unseen)].itertuples(index=False, name=None)):
        same = table[list(unseen)].to_numpy(dtype=object) == np.array(values, dtype=object)
        left_out, others = same.all(axis=1), ~same.any(axis=1)
        taught, y = table[others], truth[others]
        if not 0 < y.sum() < len(y):
            return None
        for rule, names in (("score", list(FEATURES)), (TRIVIAL, [TRIVIAL])):
            warn = warning(taught[names].to_numpy(dtype=float), y)
            said[rule][left_out] = warn(table.loc[left_out, names].to_numpy(dtype=float))
    right = {rule: warned == truth for rule, warned in said.items()}
    only = [int((right[a] & ~right[b]).sum()) for a, b in (("score", TRIVIAL), (TRIVIAL, "score"))]
    p = binomtest(only[0], sum(only)).pvalue if sum(only) else 1.0
    return Verdict(_score(said["score"], truth), _score(said[TRIVIAL], truth), float(p), len(table), unseen)


def verdicts(study: Study) -> list[Verdict]:
    """Return what `judge` says with formats unseen, and with formats and rates, as far as runs of both kinds teach."""
    table = examples(study)
    found = [judge(table, UNSEEN[:count]) for count in range(1, len(UNSEEN) + 1)] if len(table) else []
    return [verdict for verdict in found if verdict is not None]


def warning(x: np.ndarray, fails: np.ndarray):  # noqa: ANN201 - a function of features (n, f) to bool (n,)
    """Return the rule that ``x`` (n, f) and whether each run ``fails`` teach, a function of features like ``x``.

    A logistic regression on standardized features with a ridge; it warns above the probability that has the highest F1
    score on the runs that taught it.
    """
    mean, spread = x.mean(0), x.std(0)
    spread[spread == 0] = 1.0
    sign = np.where(fails, 1.0, -1.0)

    from scipy.optimize import minimize  # few reports come here, and loading it takes longer than this

    def standardized(features: np.ndarray) -> np.ndarray:
        return np.column_stack([np.ones(len(features)), (features - mean) / spread])

    def loss(w: np.ndarray) -> float:
        return float(np.logaddexp(0, -sign * (standardized(x) @ w)).sum() + RIDGE * (w[1:] ** 2).sum())

    w = minimize(loss, np.zeros(x.shape[1] + 1), method="BFGS").x
    scores = standardized(x) @ w
    candidates = np.unique(scores)
    f1 = [2 * (fails & (scores >= c)).sum() / (fails.sum() + (scores >= c).sum()) for c in candidates]
    at = int(np.argmax(f1))
    below = candidates[at - 1] if at else candidates[at] - 1.0
    limit = (candidates[at] + below) / 2
    return lambda features: standardized(features) @ w >= limit


def _score(warned: np.ndarray, failed: np.ndarray) -> Score:
    return Score(*(int((a & b).sum()) for a in (warned, ~warned) for b in (failed, ~failed)))


def sentences(verdict: Verdict) -> list[str]:
    """Say how good the score is on what it has not seen, and whether it is better than the trivial rule."""
    of = joined([UNSEEN_IN_WORDS[name] for name in verdict.unseen])
    if verdict.p >= 0.05:
        better = "the score does not beat the trivial rule"
    elif sum((verdict.score.warned_failed, verdict.score.silent_fine)) > sum(
        (verdict.trivial.warned_failed, verdict.trivial.silent_fine)
    ):
        better = "the score beats the trivial rule"
    else:
        better = "the score is worse than the trivial rule"
    judged = (
        f"Judged on {of} that taught it nothing: {better} (McNemar's exact p {verdict.p:.3f}, as if its "
        f"{verdict.runs} runs were independent)."
    )
    return [
        judged,
        *(f"{name}: precision {percent_of(*score.precision)}, recall {percent_of(*score.recall)}."
          for name, score in (("Score", verdict.score), ("Loss alone", verdict.trivial))),
    ]  # fmt: skip

