"""One entry to every corpus source; the split that a document belongs to, and its labels' names.

The split is decided by the document's identity alone. A hash of that stays the same when documents are added, removed
or reordered, so a document never wanders from training into validation between two versions of a corpus.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import json
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, Literal, NamedTuple

from altgrad.config.schema import Corpus

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = ("train", "val", "test")


class Labelled(NamedTuple):
    """A text, the names of its labels, and what its corpus calls it: the number of its row from 0 on, or a file."""

    text: str
    labels: tuple[str, ...] = ()
    document: str = ""


def named(value: Any, kind: Any = None) -> tuple[str, ...]:
    """Return the names of a document's labels, each once: of a list, of a text with ; between them, or of one.

    A list may be written out as text, as JSON or as Python shows it (pandas does so in CSV files). ``kind`` is the type
    of a data set's column, which may have names for numbers. Raises ``ValueError`` for what is no label: a number that
    it has no name for, a blank name, a record, a list that is written otherwise.
    """
    if isinstance(value, str):
        value = _written(value.strip())
    elif not isinstance(value, list | tuple):
        value = [] if value is None else [value]
    return tuple(dict.fromkeys(_name(label, kind) for label in value))


def joined(names: Sequence[str]) -> str:
    """Return the text in which `named` reads these names: with ; between them, as JSON where that would be misread."""
    text = ";".join(names)
    try:
        return text if named(text) == tuple(names) else json.dumps(names, ensure_ascii=False)
    except ValueError:  # of a name in brackets
        return json.dumps(names, ensure_ascii=False)


def _written(text: str) -> Sequence[Any]:
    """Return the labels in a text; ``ValueError`` for a list such as NumPy's ``['a' 'b']``, which Python would join."""
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


def _name(label: Any, kind: Any) -> str:
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
    """Yield the texts of ``split`` of ``corpus``, always the same ones in the same order.

    Documents are streamed and none is blank. A split that the corpus does not have (a data set
    without a test split) yields nothing. Raises :class:`altgrad.config.UserError` when the corpus
    cannot be read; the message says what to change.
    """
    return _module_of(corpus).documents(corpus, split)


def labelled(corpus: Corpus, split: Split) -> Iterator[Labelled]:
    """Yield the texts of ``split`` as `documents` does, each with its labels; a name is there once.

    Raises :class:`altgrad.config.UserError` where there are none to be had too.
    """
    return _module_of(corpus).labelled(corpus, split)


def _module_of(corpus: Corpus) -> ModuleType:
    """Return the module of this package that is called like the source, and has ``documents`` for it."""
    return importlib.import_module(f"altgrad.data.{corpus.source}")
