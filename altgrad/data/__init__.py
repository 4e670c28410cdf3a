"""Text in, batches of tokens out. This file has what all corpus sources share.

    documents -> tokens.load_tokenizer -> tokens.write_tokens -> batches.training_batch

Each corpus source is a module of its own: ``licences`` (installed with the package, works offline), ``hub`` (a Hugging
Face data set) and ``local`` (the user's own files). A corpus is a stream of documents per split. At most a batch of
documents is in memory at once.

The split depends on a hash of the document's identity alone. It stays the same when other documents are added, removed
or reordered, so no document moves from training to validation between two versions of a corpus.
"""

import ast
import hashlib
import importlib
import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, Literal, NamedTuple

from altgrad.config.schema import Corpus

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = ("train", "val", "test")
GRAM = 8  # words
WORD = re.compile(r"\w+")
MOST_GRAMS = 2**24  # remembered at once: the grams of some 100 MB of text, in at most 1.7 GB of memory


class Labelled(NamedTuple):
    """A text, its labels' names, and the corpus's name for it: the number of its row from 0 on, or a file's name."""

    text: str
    labels: tuple[str, ...] = ()
    document: str = ""


def label_names(value: Any, kind: Any = None) -> tuple[str, ...]:
    """Return the names of a document's labels, each once.

    ``value`` is a list, a text with ; between labels, or one label. A list may be a text, ``"['a', 'b']"`` as Python or
    JSON writes it: pandas puts lists into CSV files so. ``kind`` is the type of a data set's column, which may name
    numbers. Raises ``ValueError`` for a number without a name, a blank name, a record, and any other form of list.
    """
    if isinstance(value, str):
        value = _listed(value.strip())
    elif not isinstance(value, list | tuple):
        value = [] if value is None else [value]
    return tuple(dict.fromkeys(_label_name(label, kind) for label in value))


def label_text(names: Sequence[str]) -> str:
    """Return a text that `label_names` reads as ``names``: with ; between them, or as JSON where that is ambiguous."""
    text = ";".join(names)
    try:
        return text if label_names(text) == tuple(names) else json.dumps(names, ensure_ascii=False)
    except ValueError:  # of a name in brackets
        return json.dumps(names, ensure_ascii=False)


def _listed(text: str) -> Sequence[Any]:
    """Return the labels in ``text``; raise ``ValueError`` for NumPy's ``['a' 'b']``: Python would read ``['ab']``."""
    if text[:1] + text[-1:] in ("[]", "()", "{}"):
        as_json, as_python = _read(json.loads, text), _read(ast.literal_eval, text)
        if isinstance(as_json, list):
            return as_json
        if isinstance(as_python, list | tuple) and repr(as_python) == text:
            return as_python
        if text[0] == "[" or isinstance(as_python, tuple | set | dict):
            raise ValueError(f"{text!r} is no list as JSON or Python writes it; write the labels with ; between them")
    return [part for part in text.split(";") if part.strip()]


def _read(reader: Callable[[str], Any], text: str) -> Any:
    try:
        return reader(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None


def _label_name(label: Any, kind: Any) -> str:
    if not isinstance(label, str | int) or isinstance(label, bool) or not str(label).strip():
        raise ValueError(f"{label!r} is no label; a label is a name or a whole number")
    if isinstance(label, str) or not hasattr(kind, "int2str"):
        return str(label).strip()
    if not 0 <= label < kind.num_classes:
        raise ValueError(f"label {label} is unknown; the column has names for 0 to {kind.num_classes - 1}")
    return kind.int2str(label)


def hashed_split(identity: str) -> Split:
    """Return the split of a document: 8 in 10 train, 1 val, 1 test, by the SHA-256 of ``identity``."""
    tenth = int(hashlib.sha256(identity.encode("utf-8")).hexdigest(), 16) % 10
    return "train" if tenth < 8 else "val" if tenth == 8 else "test"


def documents(corpus: Corpus, split: Split) -> Iterator[str]:
    """Yield the texts of ``split`` of ``corpus``, the same ones in the same order in every call.

    Documents are streamed, and none is blank. A split that the corpus does not have (a data set without a test split)
    yields nothing. An unreadable corpus raises :class:`altgrad.config.UserError`, which says what to change.
    """
    return (row.text for row in _module_of(corpus).rows(corpus, split, labels=False))


def labelled(corpus: Corpus, split: Split) -> Iterator[Labelled]:
    """Yield the texts of ``split`` as `documents` does, each with the names of its labels. No name is repeated.

    Raises :class:`altgrad.config.UserError` also where the corpus has no labels.
    """
    return _module_of(corpus).rows(corpus, split, labels=True)


def _module_of(corpus: Corpus) -> ModuleType:
    """Return the module ``altgrad.data.<source>``, which reads the corpus."""
    return importlib.import_module(f"altgrad.data.{corpus.source}")


class NearCopies:
    """Finds documents that are near copies of earlier ones, which would make validation a test of memory.

    A document is a near copy if more than the share ``max_repeated`` of its word 8-grams, without case and punctuation,
    occurred in earlier documents that were kept. Eight words or fewer are one gram. With ``max_repeated`` 1 nothing is
    a near copy. ``dropped`` counts the near copies.

    Only hashes are kept, and the time is linear in the text. Beyond ``MOST_GRAMS`` different grams only one in 2, 4, 8,
    ... is used, chosen by its hash. A document that has none of these grams is compared by one hash of its words.
    """

    def __init__(self, max_repeated: float) -> None:
        self.dropped = 0
        self._max_repeated = max_repeated
        self._grams: set[int] = set()
        self._wholes: set[int] = set()
        self._one_in = 1

    def drops(self, text: str) -> bool:
        """Return whether ``text`` is a near copy. A text that is not is remembered; a near copy is counted."""
        if self._max_repeated >= 1:
            return False
        # Hashes of tuples of int, unlike those of str, are the same in every process.
        words = tuple(zlib.crc32(word.encode(errors="replace")) for word in WORD.findall(text.lower()) or [text])
        hashes = (hash(words[i : i + GRAM]) for i in range(max(1, len(words) - GRAM + 1)))
        grams = {gram for gram in hashes if gram % self._one_in == 0}
        compared, seen = (grams, self._grams) if grams else ({hash(words)}, self._wholes)
        if len(compared & seen) > self._max_repeated * len(compared):
            self.dropped += 1
            return True
        self._grams |= grams
        self._wholes.add(hash(words))
        while len(self._grams) > MOST_GRAMS:
            self._one_in *= 2
            self._grams = {gram for gram in self._grams if gram % self._one_in == 0}
        return False
