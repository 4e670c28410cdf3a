"""Shared by the data tests: small corpora on disk, and the full GPT-2 encoding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import tiktoken

from altgrad.config.schema import LocalCorpus, Tokenizer
from altgrad.data import load_tokenizer


@pytest.fixture(scope="session")
def gpt2() -> tiktoken.Encoding:
    """The whole GPT-2 vocabulary."""
    return load_tokenizer(Tokenizer(vocab_size=50_257))


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
