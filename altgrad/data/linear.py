"""The classifier that a reader trusts: TF-IDF of words with logistic regression, by scikit-learn, on whole documents.

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
from sklearn.multiclass import OneVsRestClassifier

from altgrad.config.tasks import Classify
from altgrad.data.batches import DTYPE
from altgrad.data.classification import choose_thresholds, classification_metrics
from altgrad.data.labels import read_labels
from altgrad.data.splits import SPLITS, Split

NAME = "TF-IDF + logistic regression"
STRENGTHS = (1.0, 10.0, 100.0)  # C: the inverse of the penalty
DIGITS = 6


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
