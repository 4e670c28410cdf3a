"""The user's own text. Oracle: the files that each test writes."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from altgrad.config import UserError
from altgrad.config.schema import LocalCorpus
from altgrad.data import documents
from altgrad.data.splits import SPLITS, hashed_split

ROWS = [f'row {i}: naïve text,\nwith "quotes"' for i in range(60)]


def write_table(path: Path, values: list[object], column: str = "text") -> None:
    """Write one column of ``values`` in the format that the suffix names."""
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table({"id": range(len(values)), column: values}), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps({column: value}) + "\n" for value in values), encoding="utf-8")
    else:
        with open(path, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([["id", column], *([str(i), v] for i, v in enumerate(values))])


def everything(corpus: LocalCorpus) -> list[str]:
    """Return the documents of all three splits."""
    return [text for split in SPLITS for text in documents(corpus, split)]


def corpus_at(path: Path, **settings: object) -> LocalCorpus:
    return LocalCorpus(source="local", path=str(path), **settings)


def test_hashed_splits_are_about_80_10_10() -> None:
    found = [hashed_split(f"document {i}") for i in range(10_000)]
    for split, share in (("train", 0.8), ("val", 0.1), ("test", 0.1)):
        assert abs(found.count(split) / 10_000 - share) < 0.015  # 5 sigma


# --- folders -------------------------------------------------------------------------------------


def test_every_text_file_of_a_folder_is_one_document_of_one_split(folder_of: Callable[..., LocalCorpus]) -> None:
    files = {f"deep/{i % 3}/{i}.{'txt' if i % 2 else 'MD'}": f"text {i}\r\n\r\nsecond paragraph" for i in range(60)}
    corpus = folder_of({**files, "a.pdf": "no", ".git/b.txt": "hidden", "c.txt": "  \n"})
    found = everything(corpus)
    assert sorted(found) == sorted(text.replace("\r\n", "\n") for text in files.values())
    assert found == everything(corpus)
    assert all(list(documents(corpus, split)) for split in SPLITS)


def test_adding_a_file_moves_no_other_to_another_split(folder_of: Callable[..., LocalCorpus]) -> None:
    def splits(numbers: range) -> dict[str, set[str]]:
        corpus = folder_of({f"{i}.txt": f"text {i}" for i in numbers})
        return {split: set(documents(corpus, split)) for split in SPLITS}

    before, after = splits(range(0, 60, 2)), splits(range(60))
    assert all(before[split] < after[split] for split in SPLITS)


def test_short_documents_are_dropped(folder_of: Callable[..., LocalCorpus]) -> None:
    corpus = folder_of({f"{i}.txt": "x" * i + "\n" for i in range(1, 20)}, min_characters=15)
    assert sorted(map(len, everything(corpus))) == [15, 16, 17, 18, 19]


# --- one text file -------------------------------------------------------------------------------


def test_a_text_file_is_cut_by_position(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("".join(f"paragraph {i:03d}\n\n" for i in range(100)), encoding="utf-8")
    corpus = corpus_at(path)
    splits = {split: list(documents(corpus, split)) for split in SPLITS}
    assert {split: len(texts) for split, texts in splits.items()} == {"train": 80, "val": 10, "test": 10}
    assert everything(corpus) == [f"paragraph {i:03d}" for i in range(100)]


def test_a_text_without_blank_lines_is_one_document_in_each_split(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_text("0123456789" * 10, encoding="utf-8")
    assert [[len(t) for t in documents(corpus_at(path), split)] for split in SPLITS] == [[80], [10], [10]]


@given(text=st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\ufeff"), min_size=1))
@settings(max_examples=150, deadline=None)
def test_cutting_never_breaks_a_character_or_loses_one(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.mktemp("text") / "any.txt"
    path.write_bytes(text.encode("utf-8"))
    assert "".join("".join(everything(corpus_at(path))).split()) == "".join(text.split())


def test_a_byte_order_mark_and_windows_newlines_are_not_text(tmp_path: Path) -> None:
    path = tmp_path / "windows.txt"
    path.write_bytes("\ufeffone\r\ntwo\r\n \r\nthree".encode())
    joined = "|".join(everything(corpus_at(path)))
    assert joined.startswith("one\ntwo|") and "\ufeff" not in joined and "\r" not in joined


# --- tables --------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".csv"])
def test_every_row_of_a_table_is_a_document(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"table{suffix}"
    write_table(path, [*ROWS, ""])
    found = everything(corpus_at(path))
    assert sorted(found) == sorted(ROWS)
    assert [len(list(documents(corpus_at(path), split))) for split in SPLITS] == [
        sum(hashed_split(f"row {i}") == split for i in range(60)) for split in SPLITS
    ]


def test_a_long_csv_field_is_read(tmp_path: Path) -> None:
    write_table(tmp_path / "t.csv", ["x" * 300_000])
    assert [len(text) for text in everything(corpus_at(tmp_path / "t.csv"))] == [300_000]


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_a_null_is_no_document_and_a_number_is_an_error(tmp_path: Path, suffix: str) -> None:
    write_table(tmp_path / f"null{suffix}", ["a", None, "b"])
    assert sorted(everything(corpus_at(tmp_path / f"null{suffix}"))) == ["a", "b"]
    write_table(tmp_path / f"number{suffix}", [1, 2])
    with pytest.raises(UserError, match="holds int, not text"):
        everything(corpus_at(tmp_path / f"number{suffix}"))


# --- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".csv"])
def test_a_misspelt_column_gets_a_suggestion(tmp_path: Path, suffix: str) -> None:
    write_table(tmp_path / f"t{suffix}", ROWS, column="content")
    with pytest.raises(UserError, match="no column 'contnt'; did you mean content"):
        everything(corpus_at(tmp_path / f"t{suffix}", text="contnt"))


def test_a_misspelt_path_gets_a_suggestion(tmp_path: Path) -> None:
    (tmp_path / "licences.txt").write_text("text")
    with pytest.raises(UserError, match="does not exist; did you mean licences.txt"):
        everything(corpus_at(tmp_path / "licenses.txt"))
    with pytest.raises(UserError, match="does not exist$"):
        everything(corpus_at(tmp_path / "no" / "such" / "folder"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("latin.txt", "naïve".encode("latin-1"), "latin.txt is not UTF-8"),
        ("latin.csv", "text\nnaïve".encode("latin-1"), "latin.csv is not UTF-8"),
        ("latin.jsonl", '{"text": "naïve"}'.encode("latin-1"), "latin.jsonl is not UTF-8"),
        ("broken.jsonl", b'{"text": "a"}\n{"text": ', "line 2 is not a JSON object"),
        ("list.jsonl", b"[1]", "line 1 is not a JSON object"),
        ("broken.parquet", b"no parquet", "is not a parquet file"),
        ("empty.csv", b"", "has no column 'text'"),
        ("scan.pdf", b"%PDF", "neither a folder nor one of .txt"),
    ],
)
def test_an_unreadable_file_is_one_sentence(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as raised:
        everything(corpus_at(tmp_path / name))
    assert "\n" not in str(raised.value)


def test_a_folder_without_text_or_with_other_encodings_is_an_error(folder_of: Callable[..., LocalCorpus]) -> None:
    corpus = folder_of({"train.parquet": b"PAR1"})
    with pytest.raises(UserError, match="no .txt or .md file"):
        everything(corpus)
    with pytest.raises(UserError, match="latin.txt is not UTF-8"):
        everything(folder_of({"latin.txt": "naïve".encode("latin-1")}))
