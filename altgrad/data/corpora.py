"""One entry to every corpus source."""

from __future__ import annotations

from collections.abc import Iterator

from altgrad.config.schema import Corpus, HubCorpus, LicencesCorpus
from altgrad.data import hub, licences, local
from altgrad.data.splits import Split


def documents(corpus: Corpus, split: Split) -> Iterator[str]:
    """Yield the texts of ``split`` of ``corpus``, always the same ones in the same order.

    Documents are streamed and none is blank. A split that the corpus does not have (a data set
    without a test split) yields nothing. Raises :class:`altgrad.config.UserError` when the corpus
    cannot be read; the message says what to change.
    """
    if isinstance(corpus, LicencesCorpus):
        return licences.documents(corpus, split)
    if isinstance(corpus, HubCorpus):
        return hub.documents(corpus, split)
    return local.documents(corpus, split)
