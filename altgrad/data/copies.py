"""Near copies, which would make validation a test of memory: documents whose words stood in others before them."""

from __future__ import annotations

import re
import zlib

GRAM = 8  # words
WORD = re.compile(r"\w+")
MOST_GRAMS = 2**24  # remembered at once: those of some 100 MB of text, in at most 1.7 GB of memory


class NearCopies:
    """Tells which documents are near copies of documents before them, and counts those in ``dropped``.

    One is when more than ``max_repeated`` of its word 8-grams have been seen, case and punctuation apart, in
    documents that were none; eight words or fewer are one gram. With ``max_repeated`` 1 no document is.

    Hashes alone are kept, and the time is linear in the text. From ``MOST_GRAMS`` different grams on only one in
    2, 4, 8, ... is looked at, chosen by its hash. Then one number a document tells copies that have none of these.
    """

    def __init__(self, max_repeated: float) -> None:
        self.dropped = 0
        self._max_repeated = max_repeated
        self._grams: set[int] = set()
        self._wholes: set[int] = set()
        self._one_in = 1

    def drops(self, text: str) -> bool:
        """Return whether ``text`` is a near copy, and remember it if it is none."""
        if self._max_repeated >= 1:
            return False
        # Hashes of tuples of int, unlike those of str, are the same in every process.
        words = tuple(zlib.crc32(word.encode(errors="replace")) for word in WORD.findall(text.lower()) or [text])
        hashes = (hash(words[i : i + GRAM]) for i in range(max(1, len(words) - GRAM + 1)))
        grams = {gram for gram in hashes if gram % self._one_in == 0}
        found, seen = (grams, self._grams) if grams else ({hash(words)}, self._wholes)
        if len(found & seen) > self._max_repeated * len(found):
            self.dropped += 1
            return True
        self._grams |= grams
        self._wholes.add(hash(words))
        while len(self._grams) > MOST_GRAMS:
            self._one_in *= 2
            self._grams = {gram for gram in self._grams if gram % self._one_in == 0}
        return False
