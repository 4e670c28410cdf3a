"""The documents of a corpus under the name that callers outside of this package import: see `altgrad.data`."""

from altgrad.data import SPLITS, documents, labelled

__all__ = ["SPLITS", "documents", "labelled"]
