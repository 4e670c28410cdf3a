"""One entry to every corpus source."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType

from altgrad.config.schema import Corpus
from altgrad.data.splits import Labelled, Split


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
