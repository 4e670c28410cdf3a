"""Shared by the data tests: small corpora on disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from altgrad.config.schema import LocalCorpus, Tokenizer
from altgrad.config.tasks import Classify
from altgrad.data.tokens import write_tokens

TOKENIZER = Tokenizer(vocab_size=300)
TASK = Classify(min_documents=2)
KINDS = {"red": "crimson scarlet", "green": "olive moss", "blue": "navy azure"}


@pytest.fixture
def folder_of(tmp_path: Path) -> Callable[..., LocalCorpus]:
    """Return a function that writes files (name -> content) below a folder and returns its corpus."""

    def write(files: dict[str, str | bytes], **settings: object) -> LocalCorpus:
        folder = tmp_path / "corpus"
        for name, content in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
        return LocalCorpus(source="local", path=str(folder), **settings)

    return write


def rows_of(count: int = 120) -> list[dict[str, object]]:
    """Return documents whose words tell their labels: each of three by a bit of the row's number, none in some."""
    own = [[name for i, name in enumerate(KINDS) if number >> i & 1] for number in range(count)]
    return [
        {"text": f"{' '.join(KINDS[name] for name in names)} number {number} "
         + " ".join(f"w{number}{i}" for i in range(number % 30)), "labels": names}
        for number, names in enumerate(own)
    ]


ALL = rows_of()


@pytest.fixture
def table(tmp_path: Path) -> Callable[..., LocalCorpus]:
    """Return a function that writes rows as JSON lines and returns their corpus; near copies are kept."""

    def write(rows: list[dict[str, object]], **settings: object) -> LocalCorpus:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return LocalCorpus(source="local", path=str(path), **{"max_repeated": 1, **settings})

    return write


def tokenize(corpus: LocalCorpus, folder: Path, task: Classify = TASK) -> dict:
    return write_tokens("mine", corpus, TOKENIZER, folder, task=task)
