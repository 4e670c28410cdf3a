"""The user's own text, by path. What the path is decides how it becomes documents and splits:

- a **folder**: every .txt and .md file below it is a document (hidden ones are left out); the split
  is a hash of the file's path within the folder;
- a **text file** (.txt, .md): cut by position, the first 80% of its bytes train, the next 10% val,
  the last 10% test, so that what is tested was not seen between two training paragraphs; within its
  part, blank lines separate documents;
- a **table** (.parquet, .jsonl, .csv): every row is a document; the split is a hash of its number.

Text is UTF-8. Documents shorter than ``min_characters`` are dropped.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from altgrad.config.errors import UserError, did_you_mean
from altgrad.config.schema import LocalCorpus
from altgrad.data.splits import Split, hashed_split

TEXT_SUFFIXES = (".txt", ".md")
TABLE_SUFFIXES = (".parquet", ".jsonl", ".csv")
CUTS = {"train": (0, 8), "val": (8, 9), "test": (9, 10)}  # tenths of a text file's bytes
BATCH_ROWS = 256
LONGEST_CSV_FIELD = 2**31 - 1  # the csv module's default, 131,072, is shorter than many documents


def documents(corpus: LocalCorpus, split: Split) -> Iterator[str]:
    """Yield the texts of ``split`` (see the module's docstring).

    Raises :class:`UserError` when the path, its files or the column cannot be read.
    """
    for raw in _texts(Path(corpus.path).expanduser(), corpus.text, split):
        text = raw.replace("\r\n", "\n").strip()
        if text and len(text) >= corpus.min_characters:
            yield text


def _texts(path: Path, column: str, split: Split) -> Iterator[str]:
    if path.is_dir():
        return _from_folder(path, split)
    if not path.is_file():
        siblings = [sibling.name for sibling in path.parent.iterdir()] if path.parent.is_dir() else []
        raise UserError(f"corpus path {path} does not exist{did_you_mean(path.name, siblings) if siblings else ''}")
    suffix = path.suffix.lower()
    if suffix in TEXT_SUFFIXES:
        return _from_text_file(path, split)
    rows = {".parquet": _parquet_rows, ".jsonl": _jsonl_rows, ".csv": _csv_rows}.get(suffix)
    if rows is None:
        raise UserError(
            f"corpus path {path} is neither a folder nor one of {', '.join(TEXT_SUFFIXES + TABLE_SUFFIXES)}; "
            "convert it to one of these"
        )
    return _from_rows(path, column, rows(path, column), split)


def _from_folder(folder: Path, split: Split) -> Iterator[str]:
    files = {}
    for file in folder.rglob("*"):
        relative = file.relative_to(folder)
        hidden = any(part.startswith(".") for part in relative.parts)
        if file.suffix.lower() in TEXT_SUFFIXES and not hidden and file.is_file():
            files[relative.as_posix()] = file
    if not files:
        raise UserError(
            f"{folder} holds no {' or '.join(TEXT_SUFFIXES)} file; name a table by its own path, "
            "or use source: hub for a folder in the hub's layout"
        )
    for relative in sorted(files):
        if hashed_split(relative) == split:
            with _utf8(files[relative]):
                yield files[relative].read_text(encoding="utf-8-sig")


def _from_text_file(path: Path, split: Split) -> Iterator[str]:
    size = path.stat().st_size
    with _utf8(path), open(path, "rb") as file:
        start, end = (_character_start(file, size * tenth // 10) for tenth in CUTS[split])
        file.seek(start)
        paragraph: list[bytes] = []
        while (left := end - file.tell()) > 0:
            line = file.readline(left)
            if line.strip():
                paragraph.append(line)
            elif paragraph:
                yield b"".join(paragraph).decode("utf-8-sig")
                paragraph = []
        if paragraph:
            yield b"".join(paragraph).decode("utf-8-sig")


def _character_start(file: Any, position: int) -> int:
    """Return the first position from ``position`` on that is not inside a UTF-8 character."""
    file.seek(position)
    ahead = file.read(3)  # a character has at most three continuation bytes, 0b10xxxxxx
    return position + next((i for i, byte in enumerate(ahead) if byte & 0xC0 != 0x80), len(ahead))


def _from_rows(path: Path, column: str, rows: Iterator[Any], split: Split) -> Iterator[str]:
    for number, value in enumerate(rows):
        if not isinstance(value, str | None):
            raise UserError(f"{path}: column {column!r} holds {type(value).__name__}, not text; name another column")
        if value and hashed_split(f"row {number}") == split:
            yield value


def _parquet_rows(path: Path, column: str) -> Iterator[Any]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid:
        raise UserError(f"{path} is not a parquet file") from None
    with file:
        _require_column(path, column, file.schema_arrow.names)
        for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=[column]):
            yield from batch.column(0).to_pylist()


def _jsonl_rows(path: Path, column: str) -> Iterator[Any]:
    with _utf8(path), open(path, encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                row = None
            if not isinstance(row, dict):
                raise UserError(f"{path}, line {number} is not a JSON object; a .jsonl file has one on each line")
            _require_column(f"{path}, line {number}", column, row)
            yield row[column]


def _csv_rows(path: Path, column: str) -> Iterator[Any]:
    csv.field_size_limit(LONGEST_CSV_FIELD)
    with _utf8(path), open(path, encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file)
        try:
            _require_column(path, column, reader.fieldnames or ())
            for row in reader:
                yield row[column]
        except csv.Error as error:
            raise UserError(f"{path}, line {reader.line_num} is not valid CSV: {error}") from None


def _require_column(where: object, column: str, names: Any) -> None:
    if column not in names:
        raise UserError(f"{where} has no column {column!r}{did_you_mean(column, names)} (setting: text)")


@contextmanager
def _utf8(path: Path) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text; convert it, for example: iconv -f latin1 -t utf-8") from None
