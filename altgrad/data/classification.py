"""How well labels are found: every number here is scikit-learn's, of documents' truth and scores, (documents, labels).

F1 needs a decision: a label is given where its score is at least its threshold, and thresholds are chosen on documents
that are not measured. `f1_rare` and `f1_common` are the means over two halves of the labels, of which the first are in
fewer of these documents (and one fewer, where the number is odd); `macro_f1` is that over all of them.

The rest needs the order of scores alone: `map`, the mean over labels of the average precision; `ndcg_at_5`; and
`r_precision`, the precision of a document's first R labels, where R is how many it has. These two are means over
documents that have a label.

Beside a model stands the classifier that a reader trusts: TF-IDF of words with logistic regression, on whole documents.
A label has a regression of its own. How strongly these are regularised is chosen by the micro F1 of validation
documents, and so are thresholds; what is reported is of test documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score, f1_score, ndcg_score, precision_recall_curve, precision_score
from sklearn.multiclass import OneVsRestClassifier

from altgrad.config.tasks import Classify
from altgrad.data.batches import DTYPE
from altgrad.data.corpora import SPLITS, Split
from altgrad.data.labels import read_labels

NAME = "TF-IDF + logistic regression"
STRENGTHS = (1.0, 10.0, 100.0)  # C: the inverse of the penalty
DIGITS = 6


def choose_thresholds(truth: np.ndarray, scores: np.ndarray, thresholds: str) -> np.ndarray:
    """Return a threshold per label, (labels,): ``one`` of the highest micro F1, or per ``label`` of its highest F1."""
    if thresholds == "one":
        return np.full(truth.shape[1], _best(truth.ravel(), scores.ravel()))
    return np.array([_best(t, s) for t, s in zip(truth.T, scores.T, strict=True)])


def _best(truth: np.ndarray, scores: np.ndarray) -> float:
    precision, recall, thresholds = precision_recall_curve(truth, scores)
    f1 = 2 * precision * recall / np.maximum(precision + recall, np.finfo(float).tiny)
    return thresholds[f1[:-1].argmax()]  # behind the last threshold there is nothing


def classification_metrics(truth: np.ndarray, scores: np.ndarray, thresholds: np.ndarray) -> dict[str, float]:
    """Return each of `altgrad.config.tasks.TITLES`; of two labels or more; each needs a document."""
    given = scores >= thresholds
    each = f1_score(truth, given, average=None, zero_division=0.0)
    rarest = truth.sum(axis=0).argsort(kind="stable")
    half = len(rarest) // 2
    some = truth.any(axis=1)
    order = np.argsort(-scores[some], axis=1, kind="stable").argsort(axis=1)
    first = order < truth[some].sum(axis=1, keepdims=True)
    found = {
        "micro_f1": f1_score(truth, given, average="micro", zero_division=0.0),
        "macro_f1": each.mean(),
        "f1_rare": each[rarest[:half]].mean(),
        "f1_common": each[rarest[half:]].mean(),
        "map": average_precision_score(truth, scores, average="macro"),
        "ndcg_at_5": ndcg_score(truth[some], scores[some], k=5),
        "r_precision": precision_score(truth[some], first, average="samples", zero_division=0.0),
    }
    return {name: float(value) for name, value in found.items()}


def linear_baseline(folder: Path, meta: dict[str, Any], encoding: tiktoken.Encoding, task: Classify) -> dict[str, Any]:
    """Return its metrics on the test documents of ``folder``, whose ``meta`` is given, and how it was made."""
    words = TfidfVectorizer(sublinear_tf=True, min_df=2, dtype=np.float32)
    truth = {split: read_labels(folder, split, len(meta["labels"])) for split in SPLITS}
    texts = {split: words.fit_transform(_texts(folder, split, encoding)) if split == "train"
             else words.transform(_texts(folder, split, encoding)) for split in SPLITS}  # fmt: skip
    best: dict[str, Any] = {}
    for strength in STRENGTHS:
        model = OneVsRestClassifier(LogisticRegression(C=strength, solver="liblinear", random_state=0))
        model.fit(texts["train"], truth["train"])
        scores = {split: model.decision_function(texts[split]) for split in ("val", "test")}
        thresholds = choose_thresholds(truth["val"], scores["val"], task.thresholds)
        on_val = classification_metrics(truth["val"], scores["val"], thresholds)["micro_f1"]
        if not best or on_val > best["val"]:
            found = classification_metrics(truth["test"], scores["test"], thresholds)
            best = {"val": on_val, "C": strength, "metrics": {n: round(value, DIGITS) for n, value in found.items()}}
    return {"name": NAME, "words": len(words.vocabulary_), "C": best["C"], "test": best["metrics"]}


def _texts(folder: Path, split: Split, encoding: tiktoken.Encoding) -> Iterator[str]:
    tokens = np.fromfile(folder / f"{split}.bin", dtype=DTYPE)
    for document in np.split(tokens, np.flatnonzero(tokens == encoding.eot_token) + 1)[:-1]:
        yield encoding.decode(document[:-1].tolist())
