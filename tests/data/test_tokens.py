"""Token files. Oracle: decoding what was written gives the documents back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from altgrad.config import UserError
from altgrad.config.schema import LocalCorpus, Tokenizer
from altgrad.data import batches, documents, load_tokenizer, tokens, write_tokens
from altgrad.data.corpora import SPLITS

TOKENIZER = Tokenizer(vocab_size=512)
FILES = {f"{i}.txt": f"Licence {i}: naïve text with <|endoftext|> in it. " * (i + 1) for i in range(60)}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_the_files_decode_to_the_documents(folder_of: Callable[..., LocalCorpus], tmp_path: Path) -> None:
    corpus = folder_of(FILES)
    meta = write_tokens("mine", corpus, TOKENIZER, tmp_path / "tokens")
    encoding = load_tokenizer(TOKENIZER)
    for split in SPLITS:
        ids = np.fromfile(tmp_path / "tokens" / f"{split}.bin", dtype="<u2")
        ends = np.flatnonzero(ids == encoding.eot_token)
        found = [encoding.decode(part[:-1].tolist()) for part in np.split(ids, ends + 1)[:-1]]
        assert found == list(documents(corpus, split))
        assert ends[-1] == len(ids) - 1
        assert meta["splits"][split] == {
            "documents": len(found), "characters": sum(map(len, found)), "tokens": len(ids),
        }  # fmt: skip


def test_meta_holds_what_a_reader_needs_and_nothing_that_changes(
    folder_of: Callable[..., LocalCorpus], tmp_path: Path
) -> None:
    meta = write_tokens("mine", folder_of(FILES), TOKENIZER, tmp_path / "tokens")
    assert json.loads((tmp_path / "tokens" / "meta.json").read_text(encoding="utf-8")) == meta
    assert {name: meta[name] for name in ("corpus", "tokenizer", "vocab_size", "endoftext", "dtype")} == {
        "corpus": "mine", "tokenizer": "gpt2", "vocab_size": 512, "endoftext": 511, "dtype": "uint16",
    }  # fmt: skip
    totals = {unit: sum(counts[unit] for counts in meta["splits"].values()) for unit in ("characters", "tokens")}
    assert meta["characters_per_token"] == totals["characters"] / totals["tokens"]
    assert str(tmp_path) not in json.dumps(meta)


def test_the_bytes_are_the_same_every_time_and_for_every_batch_size(
    folder_of: Callable[..., LocalCorpus], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tokens("mine", folder_of(FILES), TOKENIZER, tmp_path / "a")
    monkeypatch.setattr(tokens, "BATCH_CHARACTERS", 100)
    write_tokens("mine", folder_of(FILES), TOKENIZER, tmp_path / "b")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert set(contents(tmp_path / "a")) == {"train.bin", "val.bin", "test.bin", "meta.json"}


def test_batches_hold_little_more_than_their_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "BATCH_CHARACTERS", 100)
    batches = list(tokens._batches("x" * 30 for _ in range(11)))
    assert [len(batch) for batch in batches] == [4, 4, 3]
    assert list(tokens._batches([])) == []


def test_a_corpus_without_a_test_split_has_no_test_file(folder_of: Callable[..., LocalCorpus], tmp_path: Path) -> None:
    corpus = folder_of(FILES)
    write_tokens("mine", corpus, TOKENIZER, tmp_path / "tokens")
    for path in Path(corpus.path).iterdir():
        if path.read_text(encoding="utf-8").strip() in set(documents(corpus, "test")):
            path.write_text("", encoding="utf-8")
    meta = write_tokens("mine", corpus, TOKENIZER, tmp_path / "tokens")
    assert set(meta["splits"]) == {"train", "val"}
    assert set(contents(tmp_path / "tokens")) == {"train.bin", "val.bin", "meta.json"}


def test_a_corpus_is_refused_exactly_when_it_cannot_be_trained_or_validated_on(
    folder_of: Callable[..., LocalCorpus], tmp_path: Path
) -> None:
    """Oracle: the batches themselves."""
    corpus, folder = folder_of(FILES), tmp_path / "tokens"
    meta = write_tokens("mine", corpus, TOKENIZER, folder)
    before = contents(folder)
    train, val = (meta["splits"][split]["tokens"] for split in ("train", "val"))
    assert write_tokens("mine", corpus, TOKENIZER, folder, context=val - 1) == meta and contents(folder) == before
    batches.validation_sample(batches.TokenFile(folder, "val"), 9, val - 1)
    for context in (val, train - 1):
        with pytest.raises(UserError, match=r"val split has"):
            batches.validation_sample(batches.TokenFile(folder, "val"), 9, context)
        with pytest.raises(UserError, match=rf"{train} tokens .* and {val} to .*context \+ 1 = {context + 1};"):
            batches.require_sequences(meta, context)
    swapped = meta | {"splits": {"train": meta["splits"]["val"], "val": meta["splits"]["train"]}}
    with pytest.raises(UserError, match=rf"{val} tokens to train on and {train} to"):
        batches.require_sequences(swapped, val)
    with pytest.raises(UserError, match="too small"):
        write_tokens("mine", corpus, TOKENIZER, folder, context=val)
    assert "meta.json" not in contents(folder)


def test_eleven_characters_are_no_corpus(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("hello world", encoding="utf-8")
    corpus = LocalCorpus(source="local", path=str(tmp_path / "short.txt"))
    with pytest.raises(UserError, match=r"and 2 to validate on, and each needs context \+ 1 = 9; use a larger"):
        write_tokens("short", corpus, TOKENIZER, tmp_path / "tokens")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a.txt": "  \n"}, "corpus mine: the train split has no text; check its path"),
        ({"a.txt": "one document"}, r"corpus mine is too small: it has \d+ tokens to train on and 0 to validate on"),
        ({"a.txt": "  \n", "b.md": ""}, "the train split has no text"),
    ],
)
def test_an_empty_split_is_an_error_and_leaves_no_meta(
    folder_of: Callable[..., LocalCorpus], tmp_path: Path, files: dict[str, str], message: str
) -> None:
    write_tokens("mine", folder_of(FILES), TOKENIZER, tmp_path / "tokens")
    for path in (tmp_path / "corpus").iterdir():
        path.unlink()
    with pytest.raises(UserError, match=message):
        write_tokens("mine", folder_of(files), TOKENIZER, tmp_path / "tokens")
    assert "meta.json" not in contents(tmp_path / "tokens")
