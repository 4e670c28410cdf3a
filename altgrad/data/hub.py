"""Data sets of the Hugging Face hub, and local folders in the hub's layout (data files and README.md).

Every failure (no network, a misspelt name, a data set that is a script, a missing column) raises a `UserError`, which
names a corpus to use instead.
"""

import ssl
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from altgrad.common.errors import UserError, did_you_mean
from altgrad.common.files import csv_rows
from altgrad.config.schema import HubCorpus
from altgrad.data import Labelled, Split, label_names

DEFAULT_FALLBACK = "licences"
CONNECT_SECONDS = 5
BATCH_ROWS = 256


def rows(corpus: HubCorpus, split: Split, *, labels: bool) -> Iterator[Labelled]:
    """Yield the texts of ``split`` without blank rows, with the names of their ``labels`` if asked.

    A missing test split yields nothing, unless the setting ``splits`` names it. Raises :class:`UserError` where the
    data set, the split or a column cannot be read.
    """
    columns = {"text": corpus.text} | ({"labels": corpus.labels} if labels else {})
    dataset = _load(corpus)
    name = corpus.splits.get(split)
    if name not in dataset:
        if split == "test" and (name is None or "splits" not in corpus.model_fields_set):
            return
        hint = did_you_mean(name or split, dataset)
        raise _refusal(corpus, f"{corpus.path} has no split {name!r} (for {split}){hint}")
    table = dataset[name]
    if any("." in column for column in columns.values()):
        table = table.flatten()
    for setting, column in columns.items():
        if column not in table.column_names:
            hint = did_you_mean(column, table.column_names)
            raise _refusal(corpus, f"{corpus.path} has no column {column!r} (setting: {setting}){hint}")
    kind = table.features[columns["labels"]] if "labels" in columns else None
    kind = getattr(kind, "feature", kind)  # of a list's elements
    numbers = count()
    for batch in table.select_columns(list(columns.values())).iter(batch_size=BATCH_ROWS):
        values = batch[columns["labels"]] if "labels" in columns else [None] * len(batch[corpus.text])
        for text, value, number in zip(batch[corpus.text], values, numbers, strict=False):
            if not isinstance(text, str | None):
                others = ", ".join(column for column in table.column_names if column != corpus.text)
                raise _refusal(
                    corpus,
                    f"column {corpus.text!r} of {corpus.path} holds {type(text).__name__}, not text; "
                    f"its other columns (setting: text): {others}",
                )
            if text and not text.isspace():
                try:
                    yield Labelled(text, label_names(value, kind), str(number))
                except ValueError as error:
                    raise _refusal(corpus, f"column {columns['labels']!r} of {corpus.path}: {error}") from None


def _refusal(corpus: HubCorpus, problem: str) -> UserError:
    """Return the error that states ``problem`` and names the corpus to use instead."""
    stop = "" if problem.endswith("?") else "."
    return UserError(f"{problem}{stop} To go on without it, set corpus: {corpus.fallback or DEFAULT_FALLBACK}")


def _load(corpus: HubCorpus) -> dict:
    """Return the data set's splits by name. What is not in the cache yet is downloaded."""
    import datasets  # slow to import, and only this source needs it
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError

    local = Path(corpus.path).is_dir()
    if not local and not datasets.config.HF_HUB_OFFLINE and not _reachable(constants.ENDPOINT):
        # Otherwise the library would retry for 23 seconds before it reads its cache.
        datasets.config.HF_HUB_OFFLINE = True
    try:
        found = datasets.load_dataset(corpus.path, corpus.name, revision=corpus.revision)
        if local:
            _require_strict_csv(datasets.load_dataset_builder(corpus.path, corpus.name).config)
        return found
    except datasets.exceptions.DatasetNotFoundError as error:
        problem = f"{corpus.path} is neither a folder here nor a data set of the hub that you may read ({_line(error)})"
    except FileNotFoundError as error:
        problem = f"{corpus.path} holds no data files ({_line(error)})"
    except HfHubHTTPError as error:
        problem = f"the hub refused {corpus.path} ({_line(error)})"
    except ConnectionError:
        problem = f"{corpus.path} is not on this machine yet and the hub cannot be reached"
    except RuntimeError as error:
        problem = f"{corpus.path} cannot be loaded without running its own code ({_line(error)})"
    except ValueError as error:
        problem = f"{corpus.path} cannot be loaded as configured, name: {corpus.name} ({_line(error)})"
    except datasets.exceptions.DatasetGenerationError as error:
        problem = f"{corpus.path} cannot be read ({_line(error.__cause__ or error)})"
    raise _refusal(corpus, problem)


def _require_strict_csv(config: Any) -> None:
    """Raise `UserError` for a CSV file in which the library, which reads with pandas, would cut or fill a row."""
    if getattr(config, "sep", None) == ",":  # others are not CSV, or no table
        for path in (Path(path) for paths in config.data_files.values() for path in paths):
            if path.suffix.lower() == ".csv":
                with open(path, encoding="utf-8-sig", errors="replace", newline="") as file:
                    deque(csv_rows(file, path), maxlen=0)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()).rstrip(".")


def _reachable(endpoint: str) -> bool:
    """Return whether a server answers at ``endpoint``, asked through the environment's proxies."""
    try:
        with urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=CONNECT_SECONDS):
            return True
    except urllib.error.HTTPError:
        return True  # it answered
    except urllib.error.URLError as error:
        return isinstance(error.reason, ssl.SSLError)  # its certificates are the library's to judge
    except TimeoutError:
        return False
