"""From a corpus to token files: ``train.bin``, ``val.bin``, ``test.bin`` and ``meta.json``.

The .bin files are nanoGPT's: little-endian uint16, every document followed by ``<|endoftext|>``.
Documents pass through in batches, so memory stays bounded whatever the size of the corpus.
``meta.json`` holds counts only, no times and no paths: the same corpus gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import filterfalse
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken
from tqdm import tqdm

from altgrad.common.errors import UserError
from altgrad.common.files import replacing, write_json
from altgrad.config.models import LEAST_CONTEXT
from altgrad.config.schema import Corpus, Tokenizer
from altgrad.config.tasks import Classify
from altgrad.data.batches import DTYPE, require_sequences
from altgrad.data.copies import NearCopies
from altgrad.data.corpora import SPLITS, Labelled, Split, documents, labelled
from altgrad.data.labels import write_labels
from altgrad.data.tokenizer import load_tokenizer

THREADS = 2
BATCH_CHARACTERS = 4_000_000  # some 1.4 million tokens, 60 MB as Python numbers


def write_tokens(
    corpus_name: str,
    corpus: Corpus,
    tokenizer: Tokenizer,
    out_dir: Path,
    context: int = LEAST_CONTEXT,
    task: Classify | None = None,
) -> dict[str, Any]:
    """Tokenize ``corpus`` into ``out_dir`` and return the content of its ``meta.json``.

    A corpus without a test split gives no ``test.bin``. Of local texts near copies are dropped, and counted as
    ``near_copies``: train comes first and its texts stay, so that none of the others repeats them. Raises
    :class:`UserError` when the corpus cannot be read, or train or val has no sequence of ``context`` tokens.

    With a ``task`` the documents' labels are written too (`altgrad.data.labels`), and what a linear model of words
    makes of them is in ``meta.json`` as ``baseline`` (`altgrad.data.classification`).
    """
    encoding = load_tokenizer(tokenizer)
    (out_dir / "meta.json").unlink(missing_ok=True)  # written last: its presence says that all is complete
    copies = NearCopies(corpus.max_repeated if corpus.source == "local" else 1)
    splits: dict[Split, dict[str, int]] = {}
    rows: dict[Split, list[Labelled]] = {split: [] for split in SPLITS}
    for split in SPLITS:
        if task:
            texts = _of_labelled(labelled(corpus, split), copies, rows[split])
        else:
            texts = filterfalse(copies.drops, documents(corpus, split))
        counts = _write_split(texts, encoding, split, out_dir)
        if counts["documents"]:
            splits[split] = counts
        else:
            (out_dir / f"{split}.bin").unlink()
            _require_no_documents(corpus_name, corpus, split, splits)
    characters, tokens = (sum(counts[unit] for counts in splits.values()) for unit in ("characters", "tokens"))
    meta = {
        "corpus": corpus_name,
        "tokenizer": tokenizer.name,
        "vocab_size": encoding.n_vocab,
        "endoftext": encoding.eot_token,
        "dtype": "uint16",
        "splits": splits,
        "characters_per_token": characters / tokens,
    }
    if corpus.source == "local":
        meta["near_copies"] = copies.dropped
    if task:
        from altgrad.data.classification import linear_baseline  # which loads scikit-learn, and text needs none of it

        meta |= write_labels(corpus_name, rows, task, out_dir)
        meta["baseline"] = linear_baseline(out_dir, meta, encoding, task)
    else:
        require_sequences(meta, context)
    write_json(out_dir / "meta.json", meta)
    return meta


def _of_labelled(rows: Iterable[Labelled], copies: NearCopies, kept: list[Labelled]) -> Iterator[str]:
    """Yield the texts that are no near copies, and append each row without its text to ``kept``."""
    for row in rows:
        if not copies.drops(row.text):
            kept.append(row._replace(text=""))
            yield row.text


def _require_no_documents(corpus_name: str, corpus: Corpus, split: Split, found: Mapping[Split, Any]) -> None:
    """Raise unless ``split`` may be empty, as test may, or is refused for its size, as validation in local texts."""
    if split == "test" or (corpus.source == "local" and found):
        return
    where = f"corpus {corpus_name}: the {split} split has no text"
    if corpus.source == "hub":
        raise UserError(f"{where} in column {corpus.text!r}; name another column or another corpus")
    least = getattr(corpus, "min_characters", None)
    check = "its settings" if least is None else f"its path and min_characters ({least})"
    raise UserError(f"{where}; check {check}, or name another corpus")


def _write_split(texts: Iterable[str], encoding: tiktoken.Encoding, split: Split, out_dir: Path) -> dict[str, int]:
    counts = {"documents": 0, "characters": 0, "tokens": 0}
    progress = tqdm(desc=f"tokenize {split}", unit=" tokens", unit_scale=True)
    with replacing(out_dir / f"{split}.bin") as temporary, open(temporary, "wb") as file, progress:
        for batch in _batches(texts):
            for ids in encoding.encode_ordinary_batch(batch, num_threads=THREADS):
                ids.append(encoding.eot_token)
                file.write(np.array(ids, dtype=DTYPE).tobytes())
                counts["tokens"] += len(ids)
            counts["documents"] += len(batch)
            counts["characters"] += sum(map(len, batch))
            progress.update(counts["tokens"] - progress.n)
    return counts


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Group ``texts`` into lists of at least ``BATCH_CHARACTERS`` characters in all; the last may be smaller."""
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
