"""Which split a document belongs to, decided by its identity alone.

A hash of the identity stays the same when documents are added, removed or reordered, so a document
never wanders from training into validation between two versions of a corpus.
"""

from __future__ import annotations

import hashlib
from typing import Literal

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = ("train", "val", "test")


def hashed_split(identity: str) -> Split:
    """Return the split of a document: 8 in 10 train, 1 val, 1 test, by the SHA-256 of ``identity``."""
    tenth = int(hashlib.sha256(identity.encode("utf-8")).hexdigest(), 16) % 10
    return "train" if tenth < 8 else "val" if tenth == 8 else "test"
