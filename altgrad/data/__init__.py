"""Text in, batches of tokens out.

    corpora.documents -> tokens.load_tokenizer -> tokens.write_tokens -> batches.training_batch

Each corpus source is a module of its own: ``licences`` (installed with the package, works offline), ``hub`` (a Hugging
Face data set) and ``local`` (the user's own files). A corpus is a stream of documents per split. At most a batch of
documents is in memory at once.
"""

from altgrad.data.batches import TokenFile, training_batch, validation_sample
from altgrad.data.corpora import documents
from altgrad.data.tokens import load_tokenizer, write_tokens

__all__ = ["TokenFile", "documents", "load_tokenizer", "training_batch", "validation_sample", "write_tokens"]
