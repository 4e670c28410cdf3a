"""The labels of a tokenized corpus, and how well a classifier finds them. Every metric here is scikit-learn's.

``<split>.labels.parquet`` has a row per document, in the order of the token file: the numbers of its labels, and the
corpus's name for the document. ``meta.json`` has each label's name, and how many documents of each split have it.

Metrics compare truth with scores, both (documents, labels). For F1 a document gets a label if its score is at least the
label's threshold. Thresholds are chosen on other documents than those measured. `macro_f1` is the mean F1 of all
labels. `f1_rare` and `f1_common` are the means of two halves of the labels: `f1_rare` has the labels with the fewest
documents, and one label less than `f1_common` if the number of labels is odd.

The other metrics depend on the order of scores alone. `map` is the mean over labels of the average precision.
`ndcg_at_5` and `r_precision` are means over documents that have a label. If a document has R labels, its R-precision is
the precision of the R labels with its highest scores.

A model is compared with a well-known classifier: TF-IDF of words with a logistic regression per label, on whole
documents. Its thresholds are chosen on validation documents, and the highest micro F1 there chooses its regularisation.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import tiktoken
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score, f1_score, ndcg_score, precision_recall_curve, precision_score
from sklearn.multiclass import OneVsRestClassifier

from altgrad.common.errors import UserError
from altgrad.common.files import replacing
from altgrad.config.tasks import Classify
from altgrad.data import SPLITS, Labelled, Split
from altgrad.data.batches import DTYPE, read_labels

Rows = Mapping[Split, Sequence[Labelled]]  # by split, the documents; their texts are not used
NAMED = 5  # labels in a message
NAME = "TF-IDF + logistic regression"
STRENGTHS = (1.0, 10.0, 100.0)  # C: the inverse of the penalty
DIGITS = 6


def write_labels(corpus_name: str, rows: Rows, task: Classify, out_dir: Path) -> dict[str, Any]:
    """Write ``<split>.labels.parquet`` of each split to ``out_dir``; return the entries for ``meta.json``.

    A label with fewer training documents than ``task.min_documents`` is left out. Raises :class:`UserError` for labels
    from which nothing can be learned, and for a label that no validation or no test document has.
    """
    counts: dict[str, Counter[str]] = {
        split: Counter(chain.from_iterable(row.labels for row in rows.get(split, ()))) for split in SPLITS
    }
    labels = sorted(name for name, count in counts["train"].items() if count >= task.min_documents)
    _require_learnable(f"corpus {corpus_name}", labels, counts, rows, task)
    numbers = {name: i for i, name in enumerate(labels)}
    digest, unlabelled = hashlib.sha256(), {}
    for split, documents in rows.items():
        given = [[numbers[name] for name in row.labels if name in numbers] for row in documents]
        called = [row.document for row in documents]
        unlabelled[split] = sum(not labels for labels in given)
        digest.update(repr((given, called)).encode())
        table = pyarrow.table({"labels": pyarrow.array(given, pyarrow.list_(pyarrow.uint16())), "document": called})
        with replacing(out_dir / f"{split}.labels.parquet") as temporary:
            pyarrow.parquet.write_table(table, temporary)
    return {
        "labels": [{"name": name, **{split: counts[split][name] for split in SPLITS}} for name in labels],
        "labels_left_out": len({name for split in SPLITS for name in counts[split]} - numbers.keys()),
        "labels_sha256": digest.hexdigest(),  # so that a moved label or row makes another run
        "unlabelled": unlabelled,
    }


def _require_learnable(
    where: str, labels: Sequence[str], counts: Mapping[str, Counter[str]], rows: Rows, task: Classify
) -> None:
    absent = [split for split in SPLITS if not rows.get(split)]
    if absent:
        raise UserError(f"{where} has no {absent[0]} documents, and classifying needs train, val and test")
    if not any(counts[split] for split in SPLITS):
        raise UserError(f"{where}: no document has a label; check the corpus' setting labels")
    least = f"tasks.classify.min_documents {task.min_documents}"
    if len(labels) < 2:
        most = ", ".join(f"{name!r} in {count}" for name, count in counts["train"].most_common(2)) or "none"
        raise UserError(
            f"{where}: fewer than two labels are in as many training documents as {least} asks (the most are {most}); "
            "lower it, or check the corpus' setting labels"
        )
    constant = [name for name in labels if counts["train"][name] == len(rows["train"])]
    if constant:
        raise UserError(
            f"{where}: every training document has the label {constant[0]!r}, so there is one class only and nothing "
            "to learn; take it out of the labels"
        )
    for split, why in (("val", "choose a threshold by"), ("test", "measure")):
        without = [name for name in labels if not counts[split][name]]
        if without:
            shown = ", ".join(map(repr, without[:NAMED])) + (", ..." if len(without) > NAMED else "")
            raise UserError(
                f"{where}: no {split} document has the label {shown}, so there is nothing to {why}; set "
                f"tasks.classify.min_documents above {max(counts['train'][name] for name in without)}, or take "
                f"{'them' if len(without) > 1 else 'it'} out of the labels"
            )


def choose_thresholds(truth: np.ndarray, scores: np.ndarray, thresholds: str) -> np.ndarray:
    """Return a threshold per label, (labels,), chosen on these documents.

    ``thresholds`` is ``"one"``, the same threshold for all labels, with the highest micro F1; or ``"label"``, the
    threshold with the highest F1 for each label.
    """
    if thresholds == "one":
        return np.full(truth.shape[1], _best(truth.ravel(), scores.ravel()))
    return np.array([_best(t, s) for t, s in zip(truth.T, scores.T, strict=True)])


def _best(truth: np.ndarray, scores: np.ndarray) -> float:
    precision, recall, thresholds = precision_recall_curve(truth, scores)
    f1 = 2 * precision * recall / np.maximum(precision + recall, np.finfo(float).tiny)
    return thresholds[f1[:-1].argmax()]  # behind the last threshold there is nothing


def classification_metrics(truth: np.ndarray, scores: np.ndarray, thresholds: np.ndarray) -> dict[str, float]:
    """Return the metrics in `altgrad.config.tasks.TITLES` by name, for two labels or more, each in some document."""
    given = scores >= thresholds
    each = f1_score(truth, given, average=None, zero_division=0.0)
    rarest = truth.sum(axis=0).argsort(kind="stable")
    half = len(rarest) // 2
    some = truth.any(axis=1)
    order = np.argsort(-scores[some], axis=1, kind="stable").argsort(axis=1)
    first = order < truth[some].sum(axis=1, keepdims=True)
    metrics = {
        "micro_f1": f1_score(truth, given, average="micro", zero_division=0.0),
        "macro_f1": each.mean(),
        "f1_rare": each[rarest[:half]].mean(),
        "f1_common": each[rarest[half:]].mean(),
        "map": average_precision_score(truth, scores, average="macro"),
        "ndcg_at_5": ndcg_score(truth[some], scores[some], k=5),
        "r_precision": precision_score(truth[some], first, average="samples", zero_division=0.0),
    }
    return {name: float(value) for name, value in metrics.items()}


def linear_baseline(folder: Path, meta: dict[str, Any], encoding: tiktoken.Encoding, task: Classify) -> dict[str, Any]:
    """Train the linear classifier on the token files in ``folder``; return its settings and its test metrics.

    ``meta`` is the content of ``meta.json`` so far, with the labels.
    """
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
            on_test = classification_metrics(truth["test"], scores["test"], thresholds)
            best = {"val": on_val, "C": strength, "metrics": {n: round(value, DIGITS) for n, value in on_test.items()}}
    return {"name": NAME, "words": len(words.vocabulary_), "C": best["C"], "test": best["metrics"]}


def _texts(folder: Path, split: Split, encoding: tiktoken.Encoding) -> Iterator[str]:
    tokens = np.fromfile(folder / f"{split}.bin", dtype=DTYPE)
    for document in np.split(tokens, np.flatnonzero(tokens == encoding.eot_token) + 1)[:-1]:
        yield encoding.decode(document[:-1].tolist())
