"""Near copies in local texts. Oracles: word 8-grams counted anew in what the token files decode to; made copies."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from altgrad.config import UserError
from altgrad.config.schema import LocalCorpus, Tokenizer
from altgrad.data import copies, load_tokenizer, write_tokens
from altgrad.data.copies import NearCopies
from altgrad.data.corpora import SPLITS, hashed_split

TOKENIZER = Tokenizer(vocab_size=512)
WORDS = itertools.count()


def prose(words: int) -> list[str]:
    """Return words that no other call returns."""
    return [f"w{next(WORDS)}" for _ in range(words)]


def grams(text: str) -> set[tuple[str, ...]]:
    words = text.split()
    return {tuple(words[i : i + 8]) for i in range(max(1, len(words) - 7))}


def written(corpus: LocalCorpus, folder: Path) -> dict[str, list[str]]:
    """Return the documents in the token files, by split."""
    meta = write_tokens("mine", corpus, TOKENIZER, folder)
    encoding = load_tokenizer(TOKENIZER)
    found = {}
    for split in meta["splits"]:
        text = encoding.decode(np.fromfile(folder / f"{split}.bin", dtype="<u2").tolist())
        found[split] = text.split("<|endoftext|>")[:-1]
    return found


def overlap(texts: list[str], with_texts: list[str]) -> float:
    """Return the largest share of a text's 8-grams that stand in the other texts."""
    others = set().union(*map(grams, with_texts))
    return max(len(grams(text) & others) / len(grams(text)) for text in texts)


@pytest.fixture
def families() -> dict[str, str]:
    """Files, 20 times: a text, a copy, one with two words changed, a half of it, and one that goes on elsewhere."""
    files = {}
    for i in range(20):
        text = prose(60)
        changed = [*text[:3], *prose(1), *text[4:57], *prose(1), *text[58:]]
        variants = (text, text, changed, text[:30], [*text[:30], *prose(40)])
        files |= {f"{i}-{j}.txt": " ".join(words) for j, words in enumerate(variants)}
    return files


def test_no_text_of_validation_or_test_stands_in_train(
    families: dict[str, str], folder_of: Callable[..., LocalCorpus], tmp_path: Path
) -> None:
    kept = written(folder_of(families, max_repeated=1), tmp_path / "kept")
    assert sum(map(len, kept.values())) == 100
    assert overlap(kept["val"], kept["train"]) == overlap(kept["test"], kept["train"]) == 1
    found = written(folder_of(families), tmp_path / "tokens")
    assert overlap(found["val"], found["train"]) <= 0.8
    assert overlap(found["test"], found["train"] + found["val"]) <= 0.8
    for split, texts in found.items():
        assert set(texts) <= set(kept[split]), "no document moves to another split"
        assert all(overlap([text], texts[:i]) <= 0.8 for i, text in enumerate(texts) if i)


def test_every_copy_is_counted_and_of_its_texts_one_is_left(
    folder_of: Callable[..., LocalCorpus], tmp_path: Path
) -> None:
    names = [(f"{i}.txt", f"copy/{i}.txt") for i in range(150)]
    texts = {pair: " ".join(prose(12)) for pair in names}
    files = {name: text.upper() + "!" if name in pair[1:] else text for pair, text in texts.items() for name in pair}
    meta = write_tokens("mine", folder_of(files), TOKENIZER, tmp_path / "tokens")
    assert meta["near_copies"] == 150
    splits = [{hashed_split(name) for name in pair} for pair in names]
    left = [next(split for split in SPLITS if split in found) for found in splits]  # train before val before test
    assert {split: meta["splits"][split]["documents"] for split in SPLITS} == {s: left.count(s) for s in SPLITS}


def test_texts_that_share_less_than_the_limit_are_kept(folder_of: Callable[..., LocalCorpus], tmp_path: Path) -> None:
    shared = prose(30)  # 23 grams of the 43 that a text has: its licence header, say
    files = {f"{i}.txt": " ".join([*shared, *prose(20)]) for i in range(40)} | {"sign.txt": "?!", "other.txt": "!?"}
    meta = write_tokens("mine", folder_of(files), TOKENIZER, tmp_path / "tokens")
    assert meta["near_copies"] == 0 and sum(split["documents"] for split in meta["splits"].values()) == 42


def test_40_files_of_which_39_are_copies_are_no_corpus(folder_of: Callable[..., LocalCorpus], tmp_path: Path) -> None:
    text = " ".join(prose(200))
    corpus = folder_of({f"{i}.txt": text for i in range(40)})
    with pytest.raises(UserError, match="and 0 to validate on .39 near copies were dropped., and each needs"):
        write_tokens("mine", corpus, TOKENIZER, tmp_path / "tokens")
    assert not (tmp_path / "tokens/meta.json").exists()


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_a_text_file_has_no_near_copies_either(tmp_path: Path, suffix: str) -> None:
    import pyarrow

    texts = [" ".join(prose(30)) for _ in range(40)]
    content = "\n\n".join([*texts, *texts[:10], *(" ".join(prose(30)) for _ in range(10))]).encode()
    path = tmp_path / f"book.txt{suffix}"
    with pyarrow.output_stream(path) as file:
        file.write(content)
    found = written(LocalCorpus(source="local", path=str(path)), tmp_path / "tokens")
    assert 50 <= sum(map(len, found.values())) <= 52  # each cut may go through a text
    assert overlap(found["val"] + found["test"], found["train"]) <= 0.8


def test_the_same_tokens_whatever_the_order_of_the_files(
    families: dict[str, str],
    folder_of: Callable[..., LocalCorpus],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    corpus = folder_of(families)
    listed = sorted(Path(corpus.path).rglob("*"))
    contents = []
    for name, order in (("a", listed), ("b", listed[::-1]), ("c", random.Random(7).sample(listed, len(listed)))):
        monkeypatch.setattr(Path, "rglob", lambda _, __, order=order: iter(order))
        write_tokens("mine", corpus, TOKENIZER, tmp_path / name)
        contents.append([(tmp_path / name / f"{split}.bin").read_bytes() for split in SPLITS])
    assert contents[0] == contents[1] == contents[2]


def test_beyond_the_limit_of_memory_copies_are_still_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "MOST_GRAMS", 1000)
    monkeypatch.setattr(f"{__name__}.WORDS", itertools.count())  # so that what is left to chance is the same each time
    near, texts = NearCopies(0.8), [prose(5 if i % 2 else 400) for i in range(200)]
    assert not any(near.drops(" ".join(words)) for words in texts)  # 40,000 grams
    assert len(near._grams) <= 1000
    assert all(near.drops(" ".join(words)) for words in texts)
    assert sum(near.drops(" ".join([*prose(2), *words[2:]])) for words in texts[::2]) >= 95
    assert not any(near.drops(" ".join([*words[:40], *prose(360)])) for words in texts[::2])
