"""The labels of a tokenized corpus: chosen by training documents, checked, and written beside the tokens.

``<split>.labels.parquet`` has a row per document, in the order of the token file: the numbers of its labels, and what
its corpus calls the document. ``meta.json`` has the labels' names and in how many documents each is.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from altgrad.common.errors import UserError
from altgrad.common.files import replacing
from altgrad.config.tasks import Classify
from altgrad.data.corpora import SPLITS, Labelled, Split

Found = Mapping[Split, Sequence[Labelled]]  # by split, the documents; their texts do not matter
NAMED = 5  # labels in a message


def write_labels(corpus_name: str, found: Found, task: Classify, out_dir: Path) -> dict[str, Any]:
    """Write the labels of each split's documents to ``out_dir``; return what ``meta.json`` says of them.

    A label of fewer training documents than ``task.min_documents`` is left out. Raises :class:`UserError` for labels
    that nothing can be learned from, or no threshold be chosen for.
    """
    counts: dict[str, Counter[str]] = {
        split: Counter(chain.from_iterable(row.labels for row in found.get(split, ()))) for split in SPLITS
    }
    labels = sorted(name for name, count in counts["train"].items() if count >= task.min_documents)
    _require_learnable(f"corpus {corpus_name}", labels, counts, found, task)
    numbers = {name: i for i, name in enumerate(labels)}
    digest, unlabelled = hashlib.sha256(), {}
    for split, documents in found.items():
        rows = [[numbers[name] for name in row.labels if name in numbers] for row in documents]
        called = [row.document for row in documents]
        unlabelled[split] = sum(not row for row in rows)
        digest.update(repr((rows, called)).encode())
        table = pyarrow.table({"labels": pyarrow.array(rows, pyarrow.list_(pyarrow.uint16())), "document": called})
        with replacing(out_dir / f"{split}.labels.parquet") as temporary:
            pyarrow.parquet.write_table(table, temporary)
    return {
        "labels": [{"name": name, **{split: counts[split][name] for split in SPLITS}} for name in labels],
        "labels_left_out": len({name for split in SPLITS for name in counts[split]} - numbers.keys()),
        "labels_sha256": digest.hexdigest(),  # by which a run is another one where a label or a row moved
        "unlabelled": unlabelled,
    }


def _require_learnable(
    where: str, labels: Sequence[str], counts: Mapping[str, Counter[str]], found: Found, task: Classify
) -> None:
    absent = [split for split in SPLITS if not found.get(split)]
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
    constant = [name for name in labels if counts["train"][name] == len(found["train"])]
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


def read_labels(directory: Path, split: Split, count: int) -> np.ndarray:
    """Return which of ``count`` labels each document of ``split`` has: bool (documents, count).

    Raises :class:`UserError` where the file is not there.
    """
    lists = _table(directory, split)["labels"].combine_chunks()
    sizes = np.diff(lists.offsets.to_numpy())
    truth = np.zeros((len(lists), count), dtype=bool)
    truth[np.repeat(np.arange(len(lists)), sizes), lists.values.to_numpy()] = True
    return truth


def read_documents(directory: Path, split: Split) -> list[str]:
    """Return what the corpus calls each document of ``split``; raises as `read_labels`."""
    return _table(directory, split)["document"].to_pylist()


def _table(directory: Path, split: Split) -> pyarrow.Table:
    path = directory / f"{split}.labels.parquet"
    if not path.is_file():
        raise UserError(f"{path} does not exist; run `dvc repro` to make it")
    return pyarrow.parquet.read_table(path)
