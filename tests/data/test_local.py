"""The user's own text. Oracles: the files that each test writes; of CSV files, strict `csv` and pandas."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pandas as pd
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from altgrad.config import UserError
from altgrad.config.schema import LocalCorpus
from altgrad.data import SPLITS, documents, hashed_split

ROWS = [f'row {i}: naïve text,\nwith "quotes"' for i in range(60)]
Folder = Callable[..., LocalCorpus]
packed = partial(gzip.compress, mtime=0)  # the same bytes, and so the same names of cases, in every process


def write_table(path: Path, values: list[object], column: str = "text") -> None:
    """Write one column of ``values`` in the format that the suffix names."""
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table({"id": range(len(values)), column: values}), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps([{"id": i, column: value} for i, value in enumerate(values)]), encoding="utf-8")
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


def test_every_text_file_of_a_folder_is_one_document_of_one_split(folder_of: Folder) -> None:
    files = {f"deep/{i % 3}/{i}.{'txt' if i % 2 else 'MD'}": f"text {i}\r\n\r\nsecond paragraph" for i in range(60)}
    corpus = folder_of({**files, "a.pdf": "no", ".git/b.txt": "hidden", "c.txt": "  \n"})
    found = everything(corpus)
    assert sorted(found) == sorted(text.replace("\r\n", "\n") for text in files.values())
    assert found == everything(corpus)
    assert all(list(documents(corpus, split)) for split in SPLITS)
    short = folder_of({f"short/{i}.txt": "x" * i + "\n" for i in range(1, 20)}, min_characters=18)
    assert sorted(text for text in everything(short) if text.startswith("x")) == ["x" * 18, "x" * 19]


def test_adding_a_file_moves_no_other_to_another_split(folder_of: Folder) -> None:
    def splits(numbers: range) -> dict[str, set[str]]:
        corpus = folder_of({f"{i}.txt": f"text {i}" for i in numbers})
        return {split: set(documents(corpus, split)) for split in SPLITS}

    before, after = splits(range(0, 60, 2)), splits(range(60))
    assert all(before[split] < after[split] for split in SPLITS)


@pytest.mark.parametrize("name", ["deep/rows.csv", "rows.json.gz", "rows.PARQUET"])
def test_a_table_among_texts_is_named_and_refused(folder_of: Folder, name: str) -> None:
    with pytest.raises(UserError, match=f"{re.escape(name)} is a table in a folder of texts.*; name it by its own"):
        everything(folder_of({"a.txt": "text", name: "{}"}))


def test_other_files_and_links_to_folders_are_left_out_with_a_word(folder_of: Folder, tmp_path: Path) -> None:
    files = {"deep/a.html": "text", "LICENSE": "text", "a.txt.xz": "text", ".hidden.rst": "text"}
    corpus, elsewhere = folder_of({"a.txt": "text"} | files), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "b.txt").write_text("more")
    (Path(corpus.path) / "link").symlink_to(elsewhere)
    with pytest.warns(UserWarning, match="left out: 4, such as .*LICENSE$"):
        assert everything(corpus) == ["text"]


# --- one text file -------------------------------------------------------------------------------


def test_a_text_file_is_cut_by_position(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("".join(f"paragraph {i:03d}\n\n" for i in range(100)), encoding="utf-8")
    corpus = corpus_at(path)
    splits = {split: list(documents(corpus, split)) for split in SPLITS}
    assert {split: len(texts) for split, texts in splits.items()} == {"train": 80, "val": 10, "test": 10}
    assert everything(corpus) == [f"paragraph {i:03d}" for i in range(100)]
    path.write_text("0123456789" * 10, encoding="utf-8")  # no blank line
    assert [[len(t) for t in documents(corpus, split)] for split in SPLITS] == [[80], [10], [10]]


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


@pytest.mark.parametrize("suffix", [".parquet", ".json", ".jsonl", ".csv"])
def test_every_row_of_a_table_is_a_document(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"table{suffix}"
    long = "x" * 300_000  # more than `csv` reads into a field by itself
    write_table(path, [*ROWS, "", long])
    found = everything(corpus_at(path))
    assert sorted(found) == sorted([*ROWS, long])
    assert [len(list(documents(corpus_at(path), split))) for split in SPLITS] == [
        sum(hashed_split(f"row {i}") == split for i in range(62) if i != 60) for split in SPLITS
    ]


@given(
    rows=st.lists(st.text('ab", \\\n', min_size=1), min_size=1, max_size=5),
    place=st.integers(8, 60),
    mistake=st.sampled_from(["", '"', '\\"', ",", "\n", '"\n', ',"']),
)
@settings(max_examples=400, deadline=None)
def test_a_csv_file_with_a_mistake_is_refused_by_line_or_read_as_strict_readers_read_it(
    tmp_path_factory: pytest.TempPathFactory, rows: list[str], place: int, mistake: str
) -> None:
    """Something stands at a wrong place; the one answer is that of `csv`'s strict reader, and no row is cut or filled.

    pandas is no second oracle of what is refused: it reads some of these files as something else.
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([["id", "text"], *([i, row] for i, row in enumerate(rows))])
    content = text.getvalue()[:place] + mistake + text.getvalue()[place:]
    path = tmp_path_factory.mktemp("csv") / "t.csv"
    path.write_text(content, newline="")
    try:
        strict = [row for row in csv.reader(io.StringIO(content, newline=""), strict=True) if row]
        fits = all(len(row) == 2 for row in strict)
    except csv.Error:
        fits = False
    if not fits:
        with pytest.raises(UserError, match=r"t\.csv, line \d+: "):
            everything(corpus_at(path))
        return
    expected = sorted(text.strip() for _, text in strict[1:] if text.strip())
    assert sorted(everything(corpus_at(path))) == expected
    theirs = pd.read_csv(path, dtype=str, keep_default_na=False)["text"]
    assert sorted(text.strip() for text in theirs if text.strip()) == expected


@pytest.mark.parametrize("suffix", [".parquet", ".json", ".jsonl"])
def test_a_null_is_no_document_and_a_number_is_an_error(tmp_path: Path, suffix: str) -> None:
    write_table(tmp_path / f"null{suffix}", ["a", None, "b"])
    assert sorted(everything(corpus_at(tmp_path / f"null{suffix}"))) == ["a", "b"]
    write_table(tmp_path / f"number{suffix}", [1, 2])
    with pytest.raises(UserError, match="holds int, not text"):
        everything(corpus_at(tmp_path / f"number{suffix}"))


def test_texts_that_the_library_reads_as_something_else_stay_texts(tmp_path: Path) -> None:
    """Oracle of the claim in the module: the library itself."""
    texts = ["2026-01-01 00:00:00", "2026-01-02 00:00:00"]
    write_table(tmp_path / "dates.jsonl", texts)
    write_table(tmp_path / "missing.csv", ["NA", "null"])
    assert sorted(everything(corpus_at(tmp_path / "dates.jsonl"))) == texts
    assert sorted(everything(corpus_at(tmp_path / "missing.csv"))) == ["NA", "null"]
    assert not any(isinstance(text, str) for text in of_library("json", tmp_path / "dates.jsonl"))
    assert of_library("csv", tmp_path / "missing.csv") == [None, None]


# --- compressed ----------------------------------------------------------------------------------


def compress(path: Path, suffix: str) -> Path:
    """Replace a file by its compressed form."""
    content, packed = path.read_bytes(), path.with_name(path.name + suffix)
    path.unlink()
    if suffix == ".zst":
        packed.write_bytes(pyarrow.compress(content, codec="zstd", asbytes=True))
    else:
        packed.write_bytes({".gz": gzip, ".bz2": bz2}[suffix].compress(content))
    return packed


def of_library(kind: str, path: Path) -> list[object]:
    """Return the column text as the library reads it: a second reader of the same files."""
    datasets = pytest.importorskip("datasets")
    rows = datasets.load_dataset(kind, data_files=str(path), split="train", streaming=True, cache_dir=str(path.parent))
    return [row["text"] for row in rows]


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".zst"])
@pytest.mark.parametrize("name", ["t.txt", "t.parquet", "t.csv", "t.json", "t.jsonl"])
def test_compression_changes_no_document_and_no_split(tmp_path: Path, name: str, suffix: str) -> None:
    path = tmp_path / name
    if path.suffix == ".txt":
        path.write_text("\n\n".join(ROWS), encoding="utf-8")
    else:
        write_table(path, ROWS)
    plain = [list(documents(corpus_at(path), split)) for split in SPLITS]
    packed = compress(path, suffix)
    assert [list(documents(corpus_at(packed), split)) for split in SPLITS] == plain
    assert sum(map(len, plain)) >= 60


def test_the_files_of_a_folder_stay_in_their_split_when_they_are_compressed(folder_of: Folder) -> None:
    corpus = folder_of({f"deep/{i}.txt": f"text {i}\r\n" for i in range(60)})
    plain = [list(documents(corpus, split)) for split in SPLITS]
    for i in range(0, 60, 2):
        compress(Path(corpus.path) / f"deep/{i}.txt", (".gz", ".bz2", ".zst")[i % 3])
    assert [list(documents(corpus, split)) for split in SPLITS] == plain


@pytest.mark.parametrize("name", ["objects.json", "texts.json", "lines.json", "lines.jsonl"])
def test_json_is_read_as_the_library_reads_it(tmp_path: Path, name: str) -> None:
    path, texts = tmp_path / name, [*ROWS, "\u2028line separator"]
    rows = texts if name == "texts.json" else [{"id": i, "text": text} for i, text in enumerate(texts)]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text(lines if name.startswith("lines") else json.dumps(rows), encoding="utf-8")
    for suffix in ("", ".gz"):
        file = compress(path, suffix) if suffix else path
        assert of_library("json", file) == texts
        assert sorted(everything(corpus_at(file))) == sorted(text.strip() for text in texts)


# --- mistakes ------------------------------------------------------------------------------------


def damaged_parquet() -> bytes:
    """Return a table whose first page has a header of ones."""
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table({"text": ROWS}), sink)
    content = sink.getvalue().to_pybytes()
    return content[:4] + b"\xff" * 40 + content[44:]


def test_a_misspelt_path_or_column_gets_a_suggestion(tmp_path: Path) -> None:
    for suffix in (".parquet", ".json", ".jsonl", ".csv"):
        write_table(tmp_path / f"t{suffix}", ROWS, column="content")
        with pytest.raises(UserError, match="no column 'contnt'; did you mean content"):
            everything(corpus_at(tmp_path / f"t{suffix}", text="contnt"))
    (tmp_path / "licences.txt").write_text("text")
    with pytest.raises(UserError, match="does not exist; did you mean licences.txt"):
        everything(corpus_at(tmp_path / "licenses.txt"))
    with pytest.raises(UserError, match="does not exist$"):
        everything(corpus_at(tmp_path / "no" / "such" / "folder"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("latin.csv", "text\nnaïve".encode("latin-1"), "latin.csv is not UTF-8"),
        ("latin.jsonl", '{"text": "naïve"}'.encode("latin-1"), "latin.jsonl is not UTF-8"),
        ("broken.jsonl", b'{"text": "a"}\n{"text": ', "line 2 is not a JSON object"),
        ("list.jsonl", b"[1]", "item 1 is not a JSON object"),
        ("number.json", b'["a", 1]', "number.json, item 2 is not a JSON object"),
        ("broken.json", b'[{"text": "a"}, ', "broken.json is not a JSON object"),
        ("column.json", b'[{"text": "a"}, {"txt": "b"}]', "column.json, item 2 has no column 'text'; did you mean txt"),
        ("broken.txt.gz", packed(b"text" * 99)[:-9], "broken.txt.gz cannot be read .Truncated.*unpack it first"),
        ("broken.jsonl.zst", b"{}", "broken.jsonl.zst cannot be read"),
        ("latin.txt.gz", packed("naïve".encode("latin-1")), "latin.txt.gz is not UTF-8"),
        ("broken.jsonl.gz", packed(b'{"text": "a"}\n3'), "broken.jsonl.gz, line 2 is not a JSON object"),
        ("book.epub.gz", packed(b""), "neither a folder nor one of .txt.* compressed .\\.gz"),
        ("broken.parquet", b"no parquet", "is not a parquet file"),
        ("damaged.parquet", damaged_parquet(), "damaged.parquet cannot be read .*; write it anew"),
        ("empty.csv", b"", "has no column 'text'"),
        ("commas.csv", b"text\nno comma\none, two\n", "commas.csv, line 3: more values than the columns, 1; put"),
        ("stray.csv", b'text\na\n\n"Big\nb\nc\n', "stray.csv, line 4: the row that begins here is not valid CSV"),
        ("two.csv", b'text\na\n"Big\nb\n"News" c\n', "two.csv, line 3: the row that begins here is not valid CSV"),
        ("spark.csv", b'text,labels\nb,c\n"say \\"hi\\"",a\n', 'spark.csv, line 3: .* write each quote in it as ""'),
        ("short.csv", b"id,text,labels\n1,first line\nsecond line,a\n", "short.csv, line 2: 2 values for 3 columns"),
        ("twice.csv", b"text,text\na,b\n", "twice.csv has more than one column 'text'"),
        ("number.jsonl", b'{"text": "a"}\n{"text": 1}', "number.jsonl, line 2: column 'text' holds int, not text"),
        ("scan.pdf", b"%PDF", "neither a folder nor one of .txt"),
    ],
)
def test_an_unreadable_file_is_one_sentence(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as raised:
        everything(corpus_at(tmp_path / name))
    assert "\n" not in str(raised.value)


def test_a_folder_without_text_is_an_error(folder_of: Folder) -> None:
    with pytest.raises(UserError, match="no .txt or .md file"):
        everything(folder_of({"train.parquet": b"PAR1"}))
