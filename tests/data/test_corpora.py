"""The licences corpus, the corpus of docstrings, and near copies.

Oracles: package folders and packages written by hand; the counts of version 32.1.0 of the installed licences, which a
separate script found before the module was written; word 8-grams counted anew in what the token files decode to.
"""

from __future__ import annotations

import importlib.util
import itertools
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from altgrad.config import UserError
from altgrad.config.schema import LicencesCorpus, LocalCorpus, Tokenizer
from altgrad.data import SPLITS, NearCopies, documents, hashed_split, licences
from altgrad.data.docstrings import docstrings, main, write_docstrings
from altgrad.data.tokens import load_tokenizer, write_tokens

TOKENIZER = Tokenizer(vocab_size=512)
WORDS = itertools.count()
PROSE = "permission is granted to anyone to use this software for any purpose including commercial ones"
LONG = "This sentence stands in a docstring and is no code. " * 12
Folder = Callable[..., LocalCorpus]


# --- near copies ---------------------------------------------------------------------------------


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
    """Return the largest share of a text's 8-grams that occur in the other texts."""
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


def test_no_text_of_validation_or_test_stands_in_train(families, folder_of: Folder, tmp_path: Path) -> None:
    kept = written(folder_of(families, max_repeated=1), tmp_path / "kept")
    assert sum(map(len, kept.values())) == 100
    assert overlap(kept["val"], kept["train"]) == overlap(kept["test"], kept["train"]) == 1
    found = written(folder_of(families), tmp_path / "tokens")
    assert overlap(found["val"], found["train"]) <= 0.8
    assert overlap(found["test"], found["train"] + found["val"]) <= 0.8
    for split, texts in found.items():
        assert set(texts) <= set(kept[split]), "no document moves to another split"
        assert all(overlap([text], texts[:i]) <= 0.8 for i, text in enumerate(texts) if i)


def test_every_copy_is_counted_and_of_its_texts_one_is_left(folder_of: Folder, tmp_path: Path) -> None:
    names = [(f"{i}.txt", f"copy/{i}.txt") for i in range(150)]
    texts = {pair: " ".join(prose(12)) for pair in names}
    files = {name: text.upper() + "!" if name in pair[1:] else text for pair, text in texts.items() for name in pair}
    meta = write_tokens("mine", folder_of(files), TOKENIZER, tmp_path / "tokens")
    assert meta["near_copies"] == 150
    splits = [{hashed_split(name) for name in pair} for pair in names]
    left = [next(split for split in SPLITS if split in found) for found in splits]  # train before val before test
    assert {split: meta["splits"][split]["documents"] for split in SPLITS} == {s: left.count(s) for s in SPLITS}


def test_texts_that_share_less_than_the_limit_are_kept(folder_of: Folder, tmp_path: Path) -> None:
    shared = prose(30)  # 23 grams of the 43 that a text has: its licence header, say
    files = {f"{i}.txt": " ".join([*shared, *prose(20)]) for i in range(40)} | {"sign.txt": "?!", "other.txt": "!?"}
    meta = write_tokens("mine", folder_of(files), TOKENIZER, tmp_path / "tokens")
    assert meta["near_copies"] == 0 and sum(split["documents"] for split in meta["splits"].values()) == 42


def test_the_same_tokens_whatever_the_order_of_the_files(families, folder_of: Folder, tmp_path: Path, monkeypatch):
    corpus = folder_of(families)
    listed = sorted(Path(corpus.path).rglob("*"))
    contents = []
    for name, order in (("a", listed), ("b", random.Random(7).sample(listed, len(listed)))):
        monkeypatch.setattr(Path, "rglob", lambda _, __, order=order: iter(order))
        write_tokens("mine", corpus, TOKENIZER, tmp_path / name)
        contents.append([(tmp_path / name / f"{split}.bin").read_bytes() for split in SPLITS])
    assert contents[0] == contents[1]


def test_beyond_the_limit_of_memory_copies_are_still_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("altgrad.data.MOST_GRAMS", 1000)
    monkeypatch.setattr(f"{__name__}.WORDS", itertools.count())  # so that what is left to chance is the same each time
    near, texts = NearCopies(0.8), [prose(5 if i % 2 else 400) for i in range(200)]
    assert not any(near.drops(" ".join(words)) for words in texts)  # 40,000 grams
    assert len(near._grams) <= 1000
    assert all(near.drops(" ".join(words)) for words in texts)
    assert sum(near.drops(" ".join([*prose(2), *words[2:]])) for words in texts[::2]) >= 95
    assert not any(near.drops(" ".join([*words[:40], *prose(360)])) for words in texts[::2])


# --- licences ------------------------------------------------------------------------------------


def package(folder: Path, **files: str) -> Path:
    """Write a package folder; a name such as ``a_LICENSE`` becomes licenses/a.LICENSE."""
    for subfolder in ("licenses", "rules"):
        (folder / subfolder).mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        stem, suffix = name.rsplit("_", 1)
        subfolder = "licenses" if suffix == "LICENSE" else "rules"
        (folder / subfolder / f"{stem}.{suffix}").write_bytes(content.encode("utf-8"))
    return folder


def selected(folder: Path, min_characters: int = 1, max_repeated: float = 0.8) -> list[str]:
    licences._selected.cache_clear()
    return [file.name for file in licences._selected(folder, min_characters, max_repeated)]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("---\r\nkey: a\r\n---\r\n\r\nOne.\r\nTwo.", "One.\nTwo."),
        ("---\nkey: a\n---", ""),
        ("---\n---\nNo header lines.", "No header lines."),
        ("No header at all.", "No header at all."),
        ("---\nkey: a\n---\nA rule\n---\nbelow a line", "A rule\n---\nbelow a line"),
    ],
)
def test_the_text_is_what_follows_the_header(content: str, text: str) -> None:
    assert licences.parse(content)[1] == text


def test_labels_are_the_categories_of_the_licences_and_what_headers_say(tmp_path: Path, monkeypatch) -> None:
    folder = package(
        tmp_path,
        a_LICENSE=f"---\nkey: a\ncategory: Permissive\nignorable_urls:\n  - x\n---\n{PROSE}",
        b_LICENSE="---\nkey: b-2.0\ncategory: Copyleft Limited\nis_exception: yes\n---\nthe second licence",
        both_RULE="---\nlicense_expression: (a AND b-2.0) or a\nis_license_notice: yes\n---\na {{notice}} of two",
        none_RULE="---\nlicense_expression: a\nis_license_tag: no\n---\nnothing else is said of it",
    )
    monkeypatch.setattr(licences, "package_folder", lambda: folder)
    found = {}
    for kind in ("categories", "flags"):
        corpus = LicencesCorpus(source="licences", min_characters=1, labels=kind)
        licences._selected.cache_clear(), licences._categories.cache_clear()
        rows = [row for split in SPLITS for row in licences.rows(corpus, split, labels=True)]
        assert [row.text for row in rows] == [text for split in SPLITS for text in documents(corpus, split)]
        found[kind] = {row.text: row.labels for row in rows}
        files = {row.text: next(folder.rglob(row.document)).read_text() for row in rows}
        assert all(text in file.replace("{{", "").replace("}}", "") for text, file in files.items())
    assert found["categories"] == {
        PROSE: ("Permissive",), "the second licence": ("Copyleft Limited",),
        "a notice of two": ("Permissive", "Copyleft Limited"), "nothing else is said of it": ("Permissive",),
    }  # fmt: skip
    assert found["flags"] == {
        PROSE: ("Permissive", "text", "names urls"), "the second licence": ("Copyleft Limited", "text", "exception"),
        "a notice of two": ("Permissive", "Copyleft Limited", "notice"), "nothing else is said of it": ("Permissive",),
    }  # fmt: skip


def test_documents_that_are_foreign_or_false_positives_or_short_are_dropped(tmp_path: Path) -> None:
    folder = package(
        tmp_path,
        french_LICENSE="---\nlanguage: fr\n---\nLicence publique",
        english_LICENSE="---\nlanguage: en\n---\nPublic licence",
        nested_LICENSE="---\nother:\n    language: fr\n---\nAnother public text",
        false_RULE="---\nis_false_positive: yes\n---\nNot a licence in any way",
        short_RULE="---\nkey: a\n---\nMIT",
        empty_RULE="---\nkey: a\n---",
    )
    assert selected(folder, min_characters=10) == ["nested.LICENSE", "english.LICENSE"]


def test_a_near_copy_is_dropped_and_the_licence_or_else_the_longer_text_is_kept(tmp_path: Path) -> None:
    folder = package(
        tmp_path / "copies",
        notice_RULE=f"---\na: b\n---\n{PROSE} and then some more words than the licence has",
        longer_RULE=f"---\na: b\n---\nthis rule speaks of something else entirely as its words {'show ' * 9}",
        shorter_RULE=f"---\na: b\n---\nThis rule speaks of SOMETHING else, entirely; as its words {'show ' * 3}",
        whole_LICENSE=f"---\na: b\n---\n{PROSE}",
    )
    assert selected(folder) == ["whole.LICENSE", "notice.RULE", "longer.RULE"]  # notice: 8 of 17 grams are seen
    assert selected(folder, max_repeated=0.4) == ["whole.LICENSE", "longer.RULE"]
    assert len(selected(folder, max_repeated=1.0)) == 4
    # 8 words are one gram, 12 words five of which four repeat: exactly 80%, which is kept
    words = " ".join(f"word{i}" for i in range(11))
    folder = package(tmp_path / "limit", first_LICENSE=f"---\n---\n{words}", second_RULE=f"---\n---\n{words} twelve")
    assert selected(folder) == ["first.LICENSE", "second.RULE"]
    assert selected(folder, max_repeated=0.79) == ["first.LICENSE"]


def test_a_missing_or_damaged_package_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (package(tmp_path) / "rules" / "bad.RULE").write_bytes(b"---\n---\n\xff\xfe")
    with pytest.raises(UserError, match="force-reinstall"):
        selected(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install licensedcode-data==32.1.0"):
        list(documents(LicencesCorpus(source="licences"), "train"))


def test_the_installed_corpus_has_the_stated_documents() -> None:
    corpus = LicencesCorpus(source="licences")
    splits = {split: list(documents(corpus, split)) for split in SPLITS}
    assert {split: len(texts) for split, texts in splits.items()} == {"train": 3331, "val": 470, "test": 416}
    texts = [text for split in splits.values() for text in split]
    assert len(texts) == len(set(texts)) == 4217
    assert round(sum(map(len, texts)) / 1e6, 2) == 12.25
    assert not any("\r" in text or "{{" in text or text != text.strip() for text in texts)


# --- docstrings ----------------------------------------------------------------------------------


def test_docstrings_come_from_top_to_bottom_without_their_indentation() -> None:
    source = '''"""Module."""
class A:
    """Class.

    Level.
        Further in.
    """
    async def f(self):
        r"""Method \\d."""
def g(): "One line."
def silent(): return """no docstring"""
'''
    assert list(docstrings(source)) == ["Module.", "Class.\n\nLevel.\n    Further in.", "Method \\d.", "One line."]


def test_a_module_is_a_text_and_what_was_shown_is_not_shown_again(tmp_path: Path, monkeypatch, capsys) -> None:
    root, folder = tmp_path / "lib" / "documented", tmp_path / "texts"
    (root / "inner" / "tests").mkdir(parents=True)
    for name, text in {
        "__init__.py": f'"""{LONG}"""\nraise RuntimeError("nobody imports this")\n',
        "inner/again.py": f'"""{LONG}"""\n',
        "inner/own.py": f'def f():\n    """Own. {LONG}"""\n', "inner/short.py": '"""Too little."""\n',
        "inner/broken.py": f'"""{LONG} broken"""\ndef (:\n', "inner/tests/test_own.py": f'"""Test. {LONG}"""\n',
    }.items():  # fmt: skip
        (root / name).write_text(text)
    monkeypatch.syspath_prepend(root.parent)
    with pytest.raises(UserError, match="no_such_package is no package that is installed here"):
        write_docstrings(folder, ["documented", "no_such_package"])
    assert not folder.exists()
    main([str(folder), "documented"])
    assert capsys.readouterr().out == f"{folder}: 2 texts\n"
    texts = {path.name: path.read_text().strip() for path in folder.iterdir()}
    assert texts == {"documented.__init__.txt": LONG.strip(), "documented.inner.own.txt": f"Own. {LONG}".strip()}
    with pytest.raises(UserError, match="is not empty"):
        write_docstrings(folder, ["documented"])
