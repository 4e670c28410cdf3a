"""What the models learn: the next token (``language``), or the labels of a document (``classify``).

A report compares the primary metric of the task. The file of a language model's cell has no section ``task``.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Self

from pydantic import Field

from altgrad.config.base import Settings

TaskName = Literal["language", "classify"]
Found = Literal["micro_f1", "macro_f1", "f1_rare", "f1_common", "map", "ndcg_at_5", "r_precision"]
#: The metrics of a classifier (`altgrad.data.labels`) and their names in tables; higher is better.
TITLES: dict[Found, str] = {
    "micro_f1": "micro F1", "macro_f1": "macro F1", "f1_rare": "F1 of rare labels", "f1_common": "F1 of common labels",
    "map": "mAP", "ndcg_at_5": "nDCG@5", "r_precision": "R-precision",
}  # fmt: skip
#: The columns of every run's history.csv; a classifier's has its metrics on validation documents behind them.
HISTORY = ("step", "tokens", "lr", "train_loss", "val_loss", "grad_norm", "clipped_frac")
#: The columns of a classifier's metrics in its run's files, on validation and on test documents.
ON_VALIDATION, ON_TEST = ({name: f"{split}_{name}" for name in TITLES} for split in ("val", "test"))


class Language(Settings):
    """The next token."""

    primary: Literal["val_loss"] = Field("val_loss", description="the validation loss, in nats per token")


class Classifier(Settings):
    """How a resolved cell classifies documents."""

    pooling: Literal["mean", "last"] = Field(
        "mean", description="what of a piece's tokens the head sees: their mean, or the last one"
    )
    chunks: int = Field(
        4, ge=1, le=1024, description="pieces of context tokens, read from a document's start; 1: truncated there"
    )
    thresholds: Literal["one", "label"] = Field(
        "one", description="one for all labels, of the highest micro F1; or one per label, of the highest F1 of each"
    )
    class_weights: bool = Field(
        False, description="weigh a label's positives by its negatives over its positives in training"
    )


class Classify(Classifier):
    """Which labels a document has, several or none: binary cross-entropy for each label.

    A document is read in pieces of `context` tokens, each with all of its labels. The score of a document is the mean
    of its pieces' logits. Thresholds are chosen on validation documents; final metrics are those of test documents.
    """

    primary: Found = Field(
        "micro_f1", description="the metric that is compared, higher is better; the others are exploratory"
    )
    min_documents: int = Field(
        10, ge=1, le=2**31 - 1, description="training documents that a label needs; one with fewer is left out"
    )


class Tasks(Settings):
    """The settings of each task."""

    language: Language = Field(Language(), description="the next token")
    classify: Classify = Field(Classify(), description="the labels of a document")


#: The usual least sample for a reliable standard error of a mean. A difference on fewer documents or sequences may not
#: hold on others. More seeds do not help: all seeds share the documents, which differ more than seeds do.
FEWEST = 30


class ComparedOn(NamedTuple):
    """The text that runs are compared on, counted before any of them trains.

    Language models are compared on ``sequences`` validation sequences of ``context`` tokens; the split has ``room`` for
    so many. Classifiers are compared on all test documents. ``documents`` is the number of documents in ``split``.
    """

    split: str
    documents: int
    sequences: int
    context: int
    room: int

    @classmethod
    def of_splits(
        cls, splits: Mapping[str, Mapping[str, int]], sequences: int, context: int, chunks: int | None = None
    ) -> Self:
        """Return the text. ``sequences`` is ``train.eval_sequences``; ``chunks`` is ``None`` for a language model.

        ``splits`` has the numbers of documents and tokens by split, as data/tokens/meta.json does.
        """
        if chunks is None:
            room = (splits["val"]["tokens"] - 1) // context
            return cls("validation", splits["val"]["documents"], min(sequences, room), context, room)
        room = splits["val"]["documents"] * chunks
        return cls("test", splits["test"]["documents"], min(sequences, room), context, room)

    @property
    def enough(self) -> bool:
        """Whether the text has at least `FEWEST` documents and sequences, so that a difference may hold elsewhere."""
        return self.documents >= FEWEST and (self.split == "test" or self.sequences >= FEWEST)

    def notes(self, asked: int) -> list[str]:
        """Return warnings to show before training: fewer sequences than ``asked`` for, and too small a sample."""
        notes = []
        if asked > self.room:
            notes.append(f"train.eval_sequences is {asked}, and the validation split has {self.room}: all are taken")
        if not self.enough:
            notes.append(f"runs are compared on {self}, fewer than {FEWEST}: a difference there may be none elsewhere")
        return notes

    def __str__(self) -> str:
        sequences = "" if self.split == "test" else f"{self.sequences} sequences of {self.context} tokens, of "
        return f"{sequences}{self.documents} {self.split} document{'s' * (self.documents != 1)}"


class Compared(NamedTuple):
    """The metric that a grid compares: its name in metrics.json, its column in history.csv, and its title."""

    final: str = "val_loss"
    on_validation: str = "val_loss"
    title: str = "validation loss"
    unit: str = "nats per token"
    higher_is_better: bool = False

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> Self:
        """Return the metric that ``params["primary"]`` of a grid's index names; without it, the validation loss."""
        name = params.get("primary")
        return cls() if name is None else cls(ON_TEST[name], ON_VALIDATION[name], TITLES[name], "", True)
