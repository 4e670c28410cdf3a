"""The user's own text. The kind of the path decides how it becomes documents and splits:

- a **folder**: every .txt and .md file below it is a document, except hidden files. A hash of the file's path within
  the folder decides its split. A table among the files is refused, and a warning counts other files;
- a **text file** (.txt, .md): its first 80 % of bytes are train, the next 10 % val, the last 10 % test, so no test text
  lies between two training paragraphs. Within its split, blank lines separate documents;
- a **table** (.parquet, .csv, .json, .jsonl): every row is a document, with a column of labels where documents are
  classified. A hash of the row's number decides its split.

Any of these files may be compressed (.gz, .bz2, .zst), which changes no document and no split. Text is UTF-8. Documents
shorter than ``min_characters`` are dropped here, near copies by `altgrad.data.tokens.write_tokens`.

The ``datasets`` library cannot replace these readers. It makes a date of a JSON text that looks like one, and a null of
the CSV field ``NA`` and of a column that a row lacks; its errors name no column.
"""

import io
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, groupby
from pathlib import Path
from typing import IO, Any

import pyarrow
import pyarrow.parquet

from altgrad.common.errors import UserError, did_you_mean
from altgrad.common.files import csv_rows
from altgrad.config.schema import LocalCorpus
from altgrad.data import Labelled, Split, hashed_split, label_names

Columns = dict[str, str]  # names of columns by setting: text, and perhaps labels
Row = dict[str, Any]  # values of a row by setting

COMPRESSED = (".gz", ".bz2", ".zst")
TEXT_SUFFIXES = (".txt", ".md")
CUTS = {"train": (0, 8), "val": (8, 9), "test": (9, 10)}  # tenths of a text file's bytes
BATCH_ROWS = 256
NO_OBJECT = "is not a JSON object; a file has one on each line, or is an array of them"


def rows(corpus: LocalCorpus, split: Split, *, labels: bool) -> Iterator[Labelled]:
    """Yield the texts of ``split`` (see the module's docstring), with the names of a table's ``labels`` if asked.

    Near copies are not dropped yet. Raises :class:`UserError` when the path, its files or a column cannot be read.
    """
    path = Path(corpus.path).expanduser()
    if labels and (path.is_dir() or (path.is_file() and _unpacked(path).suffix.lower() not in TABLES)):
        raise UserError(f"corpus path {path} has no labels; to classify, name a table ({', '.join(TABLES)}) with them")
    columns = {"text": corpus.text} | ({"labels": corpus.labels} if labels else {})
    for row in _rows(path, split, columns):
        text = row.text.replace("\r\n", "\n").strip()
        if text and len(text) >= corpus.min_characters:
            yield row._replace(text=text)


def _unpacked(path: Path) -> Path:
    """Return ``path`` without a suffix of `COMPRESSED`: ``a.csv`` for ``a.csv.gz``."""
    return path.with_suffix("") if path.suffix.lower() in COMPRESSED else path


def _rows(path: Path, split: Split, columns: Columns) -> Iterator[Labelled]:
    if path.is_dir():
        return map(Labelled, _from_folder(path, split))
    if not path.is_file():
        siblings = [sibling.name for sibling in path.parent.iterdir()] if path.parent.is_dir() else []
        raise UserError(f"corpus path {path} does not exist{did_you_mean(path.name, siblings) if siblings else ''}")
    suffix = _unpacked(path).suffix.lower()
    if suffix in TEXT_SUFFIXES:
        return map(Labelled, _from_text_file(path, split))
    if suffix not in TABLES:
        raise UserError(
            f"corpus path {path} is neither a folder nor one of {', '.join([*TEXT_SUFFIXES, *TABLES])}, as it is or "
            f"compressed ({', '.join(COMPRESSED)}); convert it to one of these"
        )
    return _from_table(path, split, columns)


def _from_folder(folder: Path, split: Split) -> Iterator[str]:
    files, others = [], []
    for file in sorted(folder.rglob("*")):
        identity = _unpacked(file.relative_to(folder))
        searched = file.is_dir() and not file.is_symlink() and os.access(file, os.R_OK | os.X_OK)
        if searched or any(part.startswith(".") for part in identity.parts):
            continue
        if identity.suffix.lower() in TEXT_SUFFIXES and file.is_file():
            files.append((identity.as_posix(), file))
        else:
            others.append(file)
    if not files:
        raise UserError(
            f"{folder} holds no {' or '.join(TEXT_SUFFIXES)} file; name a table by its own path, "
            "or use source: hub for a folder in the hub's layout"
        )
    for file in others:
        if _unpacked(file).suffix.lower() in TABLES:
            raise UserError(
                f"{file} is a table in a folder of texts, and would not be read; name it by its own path, as another "
                "corpus, or move it out of the folder"
            )
    if others:
        said = f"neither {' nor '.join(TEXT_SUFFIXES)} and left out: {len(others)}, such as {others[0]}"
        warnings.warn(f"{folder}: files that are {said}", stacklevel=2)
    for name, path in sorted(files):
        if hashed_split(name) == split:
            with _opened(path) as opened:
                yield io.TextIOWrapper(opened, encoding="utf-8-sig").read()


def _from_text_file(path: Path, split: Split) -> Iterator[str]:
    with _opened(path) as file:
        size = file.seek(0, os.SEEK_END)
        start, end = (_character_start(file, size * tenth // 10) for tenth in CUTS[split])
        file.seek(start)
        lines = iter(lambda: file.readline(max(0, end - file.tell())), b"")
        for blank, paragraph in groupby(lines, key=lambda line: not line.strip()):
            if not blank:
                yield b"".join(paragraph).decode("utf-8-sig")


def _character_start(file: IO[bytes], position: int) -> int:
    """Return the first position at or behind ``position`` that is not inside a UTF-8 character."""
    file.seek(position)
    ahead = file.read(3)  # a character has at most three continuation bytes, 0b10xxxxxx
    return position + next((i for i, byte in enumerate(ahead) if byte & 0xC0 != 0x80), len(ahead))


def _from_table(path: Path, split: Split, columns: Columns) -> Iterator[Labelled]:
    with _opened(path) as file:
        rows = TABLES[_unpacked(path).suffix.lower()](file, path, columns)
        for number, (where, row) in enumerate(rows):
            value, labels = row["text"], row.get("labels")
            if not isinstance(value, str | None):
                raise UserError(
                    f"{where}: column {columns['text']!r} holds {type(value).__name__}, not text; name another"
                )
            if value and hashed_split(f"row {number}") == split:
                try:
                    yield Labelled(value, label_names(labels), str(number))
                except ValueError as error:
                    raise UserError(f"{where}: column {columns['labels']!r}: {error}") from None


def _parquet_rows(file: IO[bytes], path: Path, columns: Columns) -> Iterator[tuple[str, Row]]:
    try:
        table = pyarrow.parquet.ParquetFile(file)
    except pyarrow.ArrowInvalid:
        raise UserError(f"{path} is not a parquet file") from None
    _require_columns(path, columns, table.schema_arrow.names)
    batches = table.iter_batches(batch_size=BATCH_ROWS, columns=list(columns.values()))
    for number, row in enumerate(chain.from_iterable(batch.to_pylist() for batch in batches), start=1):
        yield f"{path}, row {number}", _chosen(row, columns)


def _json_rows(file: IO[bytes], path: Path, columns: Columns) -> Iterator[tuple[str, Row]]:
    """Yield (place for messages, chosen columns) of each JSON object: one per line, or items of an array.

    An item of an array may also be a text.
    """
    text = io.TextIOWrapper(file, encoding="utf-8-sig")
    array = text.read(1) == "["
    text.seek(0)
    for number, item in enumerate(_parsed(text.read(), path) if array else text, start=1):
        if not array and not item.strip():
            continue
        where = f"{path}, {'item' if array else 'line'} {number}"
        row = item if array else _parsed(item, where)
        if array and isinstance(row, str):
            row = {"text": row}
        if not isinstance(row, dict):
            raise UserError(f"{where} {NO_OBJECT}")
        _require_columns(where, columns, row)
        yield where, _chosen(row, columns)


def _parsed(text: str, where: object) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise UserError(f"{where} {NO_OBJECT}") from None


def _csv_rows(file: IO[bytes], path: Path, columns: Columns) -> Iterator[tuple[str, Row]]:
    rows = csv_rows(io.TextIOWrapper(file, encoding="utf-8-sig", newline=""), path)
    _, names = next(rows, (1, []))
    _require_columns(path, columns, names)
    for line, values in rows:
        yield f"{path}, line {line}", _chosen(dict(zip(names, values, strict=True)), columns)


TABLES = {".parquet": _parquet_rows, ".csv": _csv_rows, ".json": _json_rows, ".jsonl": _json_rows}


def _chosen(row: dict[str, Any], columns: Columns) -> Row:
    return {setting: row[column] for setting, column in columns.items()}


def _require_columns(where: object, columns: Columns, names: Any) -> None:
    for setting, column in columns.items():
        if column not in names:
            raise UserError(f"{where} has no column {column!r}{did_you_mean(column, names)} (setting: {setting})")
        if not isinstance(names, dict) and list(names).count(column) > 1:
            raise UserError(f"{where} has more than one column {column!r} (setting: {setting}); rename all but one")


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """Yield the file, unpacked if it is compressed, for reading at any position; damaged files raise `UserError`."""
    packed = path != _unpacked(path)
    try:
        with tempfile.TemporaryFile() if packed else open(path, "rb") as file:
            if packed:
                with pyarrow.input_stream(path) as stream:  # its suffix says how
                    shutil.copyfileobj(stream, file)
                file.seek(0)
            yield file
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text; convert it, for example: iconv -f latin1 -t utf-8") from None
    except (OSError, NotImplementedError) as error:  # a damaged file, or a codec that pyarrow was built without
        if getattr(error, "errno", None):  # an error of the disk
            raise
        said = " ".join(str(error).split())
        raise UserError(f"{path} cannot be read ({said}); write it anew, or unpack it first") from None
