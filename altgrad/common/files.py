"""Reading and writing small files; a reader never sees half of one.

params.yaml is read with ruamel.yaml, whose YAML 1.2 reads ``1e-5`` as a number. PyYAML's YAML 1.1 reads a string, and
``dvc exp run -S`` writes floats in that form.
"""

from __future__ import annotations

import copy
import csv
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from altgrad.common.errors import UserError

if TYPE_CHECKING:
    import pyarrow

LONGEST_CSV_FIELD = 2**31 - 1  # the csv module's default, 131,072, is shorter than many documents


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in the YAML 1.2 file ``path``.

    Raises :class:`UserError` naming file, line and column when it is missing, is not YAML, or does not hold a mapping.
    """
    try:
        content = copy.deepcopy(_parsed(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        where = "; run from the project's top folder" if path.name == "params.yaml" else ""
        raise UserError(f"{path} does not exist{where}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UserError(f"{path}{place} is not valid YAML: {error.problem or error.context}") from None
    except (YAMLError, ValueError) as error:  # ValueError: a date that does not exist, such as 2026-02-30
        raise UserError(f"{path} is not valid YAML: {str(error).splitlines()[0]}") from None
    except (LookupError, TypeError, AttributeError):  # ruamel.yaml raises these, as for !!float without a number
        raise UserError(f"{path} is not valid YAML: a value does not fit the tag in front of it") from None
    except RecursionError:
        raise UserError(f"{path} is not valid YAML: its brackets or anchors are nested without an end") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold a mapping of settings, not {type(content).__name__}")
    return content


@lru_cache(maxsize=8)  # parsing params.yaml takes a tenth of a second, and a command reads it several times
def _parsed(text: str) -> Any:
    return YAML(typ="safe", pure=True).load(text)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; on success flush that file to disk and rename it to ``path``.

    A process killed inside the block leaves the old file, or none, never half a new one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        os.replace(temporary, path)
    except OSError as error:
        error.filename = error.filename or str(path)  # for the sentence about a full disk
        raise
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write ``text`` (UTF-8) to ``path`` atomically."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of the file ``path`` as hex digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def canonical_json(content: Any) -> str:
    """Return ``content`` as JSON that depends only on its values: sorted keys, finite numbers, a final newline.

    Raises ``ValueError`` on NaN or infinity, which are not JSON; callers write ``None`` and a status.
    """
    return json.dumps(content, indent=2, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n"


def write_json(path: Path, content: Any) -> None:
    """Write ``content`` as :func:`canonical_json` to ``path`` atomically."""
    write_text(path, canonical_json(content))


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write ``record`` to ``path`` as JSON, atomically. The keys keep their order."""
    write_text(path, json.dumps(record, indent=1) + "\n")


def write_rows(path: Path, rows: Sequence[Sequence[Any]], schema: pyarrow.Schema) -> None:
    """Write ``rows``, each with a value for every column of ``schema``, to the parquet file ``path`` atomically."""
    import pyarrow  # slow to import, and reading settings does not need it
    import pyarrow.parquet

    columns = zip(*rows, strict=True) if rows else [()] * len(schema)
    arrays = [pyarrow.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
    with replacing(path) as temporary:
        pyarrow.parquet.write_table(pyarrow.Table.from_arrays(arrays, schema=schema), temporary)


def csv_rows(lines: Iterable[str], path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield (number of its first line, values) for each row of a CSV file. Blank lines are skipped.

    ``lines`` are the file's lines with their line ends; messages call the file ``path``. A row that the strict reader
    of ``csv`` refuses, or that is longer or shorter than the first row, raises :class:`UserError`. pandas is laxer: it
    reads a quoted text on to the next quote in any line, fills short rows, and makes an index of an extra value.
    """
    csv.field_size_limit(LONGEST_CSV_FIELD)
    reader, columns, line = csv.reader(lines, strict=True), 0, 1
    try:
        for values in reader:
            columns = columns or len(values)
            if len(values) > columns:
                raise UserError(
                    f"{path}, line {line}: more values than the columns, {columns}; put a text with commas in double "
                    "quotes"
                )
            if values and len(values) < columns:
                raise UserError(
                    f"{path}, line {line}: {len(values)} values for {columns} columns; put a text of several lines in "
                    "double quotes"
                )
            if values:
                yield line, values
            line = reader.line_num + 1
    except csv.Error as error:
        raise UserError(
            f"{path}, line {line}: the row that begins here is not valid CSV ({error}); put a text with quotes in "
            'double quotes, and write each quote in it as "", not as \\"'
        ) from None


def read_json(path: Path) -> Any:
    """Return the content of the JSON file ``path``; raise :class:`UserError` if it is missing or is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; run `dvc repro` to make it") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not valid JSON (line {error.lineno}); delete it and run `dvc repro`") from None
