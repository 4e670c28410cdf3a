"""The licences corpus. Oracles: hand-written package folders, and the counts of version 32.1.0 of
the installed package, which were obtained by a separate script before this module was written."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from altgrad.config import UserError
from altgrad.config.schema import LicencesCorpus
from altgrad.data import documents, licences
from altgrad.data.corpora import SPLITS

PROSE = "permission is granted to anyone to use this software for any purpose including commercial ones"


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
    return [document.name for document in licences._selected(folder, min_characters, max_repeated)]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("---\nkey: a\n---\n\nThe text.\n", "The text."),
        ("---\r\nkey: a\r\n---\r\n\r\nOne.\r\nTwo.", "One.\nTwo."),
        ("---\nkey: a\n---", ""),
        ("---\nkey: a\n---\n", ""),
        ("---\n---\nNo header lines.", "No header lines."),
        ("No header at all.", "No header at all."),
        ("---\nkey: a\n---\nA rule\n---\nbelow a line", "A rule\n---\nbelow a line"),
    ],
)
def test_the_text_is_what_follows_the_header(content: str, text: str) -> None:
    assert licences.parse(content)[1] == text


def test_labels_are_the_categories_of_the_licences_and_what_headers_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = package(
        tmp_path,
        a_LICENSE=f"---\nkey: a\ncategory: Permissive\nignorable_urls:\n  - x\n---\n{PROSE}",
        b_LICENSE="---\nkey: b-2.0\ncategory: Copyleft Limited\nis_exception: yes\n---\nthe second licence",
        both_RULE="---\nlicense_expression: (a AND b-2.0) or a\nis_license_notice: yes\n---\na notice of two",
        none_RULE="---\nlicense_expression: a\nis_license_tag: no\n---\nnothing else is said of it",
    )
    monkeypatch.setattr(licences, "package_folder", lambda: folder)
    found = {}
    for kind in ("categories", "flags"):
        corpus = LicencesCorpus(source="licences", min_characters=1, labels=kind)
        licences._selected.cache_clear(), licences._categories.cache_clear()
        rows = [row for split in SPLITS for row in licences.labelled(corpus, split)]
        assert [row.text for row in rows] == [text for split in SPLITS for text in documents(corpus, split)]
        found[kind] = {row.text: row.labels for row in rows}
        assert all(row.text in (next(folder.rglob(row.document))).read_text() for row in rows)
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
        tmp_path,
        notice_RULE=f"---\na: b\n---\n{PROSE} and then some more words than the licence has",
        longer_RULE=f"---\na: b\n---\nthis rule speaks of something else entirely as its words {'show ' * 9}",
        shorter_RULE=f"---\na: b\n---\nThis rule speaks of SOMETHING else, entirely; as its words {'show ' * 3}",
        whole_LICENSE=f"---\na: b\n---\n{PROSE}",
    )
    assert selected(folder) == ["whole.LICENSE", "notice.RULE", "longer.RULE"]  # notice: 8 of 17 grams are seen
    assert selected(folder, max_repeated=0.4) == ["whole.LICENSE", "longer.RULE"]
    assert len(selected(folder, max_repeated=1.0)) == 4


def test_the_share_at_the_limit_is_kept(tmp_path: Path) -> None:
    """8 words are one gram, 12 words five of which four repeat: exactly 80%."""
    words = [f"word{i}" for i in range(11)]
    folder = package(
        tmp_path,
        first_LICENSE="---\na: b\n---\n" + " ".join(words),
        second_RULE="---\na: b\n---\n" + " ".join([*words, "twelve"]),
    )
    assert selected(folder) == ["first.LICENSE", "second.RULE"]
    assert selected(folder, max_repeated=0.79) == ["first.LICENSE"]


def test_marks_of_required_phrases_are_not_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {f"f{i}_RULE": f"---\na: b\n---\nrule {i} under the {{{{GNU GPL}}}}" for i in range(20)}
    folder = package(tmp_path, **files)
    monkeypatch.setattr(licences, "package_folder", lambda: folder)
    corpus = LicencesCorpus(source="licences", min_characters=1, max_repeated=1.0)
    texts = [text for split in SPLITS for text in documents(corpus, split)]
    assert sorted(texts) == sorted(f"rule {i} under the GNU GPL" for i in range(20))


def test_a_missing_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install licensedcode-data==32.1.0"):
        list(documents(LicencesCorpus(source="licences"), "train"))


def test_a_damaged_package_names_the_command(tmp_path: Path) -> None:
    folder = package(tmp_path)
    (folder / "rules" / "bad.RULE").write_bytes(b"---\n---\n\xff\xfe")
    with pytest.raises(UserError, match="force-reinstall"):
        selected(folder)


def test_the_installed_corpus_has_the_stated_documents() -> None:
    corpus = LicencesCorpus(source="licences")
    splits = {split: list(documents(corpus, split)) for split in SPLITS}
    assert {split: len(texts) for split, texts in splits.items()} == {"train": 3331, "val": 470, "test": 416}
    texts = [text for split in splits.values() for text in split]
    assert len(texts) == len(set(texts)) == 4217
    assert round(sum(map(len, texts)) / 1e6, 2) == 12.25
    assert not any("\r" in text or "{{" in text or text != text.strip() for text in texts)
    assert list(documents(corpus, "val")) == splits["val"]
