"""dvc.lock and DVC's rwlock, whole at any moment, and put back where something else has left half of one.

DVC writes both in place: stopped in there, or on a full disk, it leaves a file with which no command of DVC goes on
(github.com/iterative/dvc, issues 7615 and 814). Processes of this project have it write to a temporary name instead,
which then takes the place of the file. That is done where DVC opens files for writing text; of a DVC that has no such
place nothing is changed, and what it leaves is mended by the next command of ours as what a plain `dvc` leaves is.

dvc.lock is also read and written by the parser in C, to the same bytes as DVC's own in Python, in a tenth of the time.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from altgrad.common.files import write_text

LOCK = Path("dvc.lock")
TMP = Path(".dvc/tmp")
PLACES = (Path(), TMP, Path("data/diag"), Path("reports"))  # with files of their own, and not folders of one stage
COPY, RWLOCK = TMP / "dvc.lock.whole", TMP / "rwlock"
RUN_CACHE = Path(".dvc/cache/runs")


def keep_whole() -> None:
    """Have this process's DVC write text files by way of a temporary name, and dvc.lock by the parser in C."""
    import dvc.dvcfile
    from dvc_objects.fs import local

    if not hasattr(getattr(local, "FsspecLocalFileSystem", None), "open"):
        return
    if not hasattr(local.FsspecLocalFileSystem.open, "whole"):
        whole = _whole(local.FsspecLocalFileSystem.open)
        local.FsspecLocalFileSystem.open = whole  # type: ignore[method-assign]
        if hasattr(dvc.dvcfile, "modify_yaml"):
            dvc.dvcfile.modify_yaml = _quick(dvc.dvcfile.modify_yaml)


def mend() -> list[str]:
    """Put back what is damaged in the working directory's project; return a sentence for each file that was.

    Whoever calls it holds DVC's lock on the project, so that nobody is writing.
    """
    said = []
    for left in (found for place in PLACES for found in place.glob(".*.*.tmp")):
        number = left.name.split(".")[-2]  # of the process that was writing it, as `altgrad.common.files` has it
        if number.isdigit() and not psutil.pid_exists(int(number)):
            left.unlink(missing_ok=True)
    for left in RUN_CACHE.glob("*/*/.*.tmp"):  # the newest of a folder is what DVC takes for the entry
        left.unlink(missing_ok=True)
    for folder in RUN_CACHE.glob("*/*"):  # and where it has made the folder and no entry yet, it ends in a traceback
        with suppress(OSError):
            folder.rmdir()  # which only an empty one lets happen
    if RWLOCK.exists() and not _is_json(RWLOCK):
        RWLOCK.unlink()
        said.append(f"{RWLOCK} was half-written, as a stop or a full disk leaves it: removed, nothing is lost by it")
    if not LOCK.exists():
        return said
    text = LOCK.read_bytes()
    if _copy() == text or _is_whole(text):
        return said
    whole = next((found for found in (_copy(), _committed()) if found is not None and _is_whole(found)), None)
    if whole is None:
        LOCK.unlink()
    else:
        write_text(LOCK, whole.decode())
    said.append(
        f"{LOCK} was damaged, as a stop while DVC writes it or a merge leaves it: it is "
        f"{'as it was when last whole' if whole else 'begun anew'}, and what it lacks is taken from the cache"
    )
    return said


def prune(names: set[str]) -> int:
    """Remove the entries of stages that are not among ``names`` from dvc.lock; return how many there were."""
    if not LOCK.exists():
        return 0
    content = _parsed(LOCK.read_text(encoding="utf-8"))
    gone = [name for name in content["stages"] if name not in names]
    if gone:
        content["stages"] = {name: entry for name, entry in content["stages"].items() if name in names}
        stream = io.StringIO()
        _dump(content, stream)
        write_text(LOCK, stream.getvalue())
    return len(gone)


def damaged(cache: Path, oid: str) -> list[Path]:
    """Return the objects behind ``oid`` in ``cache`` that are not what they are called after, their own MD5.

    DVC looks at no object that it has made read-only, and checks out a flipped bit without a word.
    """
    path = cache / oid[:2] / oid[2:]
    if not path.exists():
        return []
    content = path.read_bytes()
    if hashlib.md5(content, usedforsecurity=False).hexdigest() != oid.removesuffix(".dir"):
        return [path]
    entries = json.loads(content) if oid.endswith(".dir") else []
    return [found for entry in entries for found in damaged(cache, entry["md5"])]


def keep_copy() -> None:
    """Keep a copy of dvc.lock, which is whole now, for `mend`."""
    if LOCK.exists() and not (COPY.exists() and COPY.read_bytes() == LOCK.read_bytes()):
        write_text(COPY, LOCK.read_text(encoding="utf-8"))


class _Replacing(io.StringIO):
    """A text file that takes its place, whole, when it is closed without an error."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:
            super().close()
        self.close()

    def close(self) -> None:
        if not self.closed:
            text = self.getvalue()
            super().close()
            write_text(self._path, text)


def _whole(opened: Callable[..., Any]) -> Callable[..., Any]:
    def open_(self: Any, path: Any, mode: str = "r", encoding: str | None = None, **kwargs: Any) -> Any:
        if mode in ("w", "w+", "wt"):
            return _Replacing(Path(path))
        return opened(self, path, mode, encoding=encoding, **kwargs)

    open_.whole = True  # type: ignore[attr-defined]
    return open_


def _quick(modified: Callable[..., Any]) -> Callable[..., Any]:
    @contextmanager
    def modify_yaml(path: Any, fs: Any = None) -> Iterator[dict[str, Any]]:
        if Path(path).name != LOCK.name or fs is None:
            with modified(path, fs=fs) as content:
                yield content
            return
        content = {}
        if fs.exists(os.fspath(path)):
            with fs.open(path, encoding="utf-8") as file:
                content = _parsed(file.read())
        yield content
        with fs.open(path, "w+", encoding="utf-8") as file:
            _dump(content, file)

    return modify_yaml


def _parsed(text: str) -> dict[str, Any]:
    return YAML(typ="safe").load(text) or {}


def _dump(content: dict[str, Any], stream: Any) -> None:
    yaml = YAML(typ="safe")
    yaml.default_flow_style = False
    yaml.representer.sort_base_mapping_type_on_output = False
    yaml.dump(_plain(content), stream)


def _plain(value: Any) -> Any:
    """Return what DVC gives as mappings and lists of kinds of its own in Python's."""
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else value


def _is_whole(text: bytes) -> bool:
    """Return whether this is all of a dvc.lock: every stage of this project has a command and outputs."""
    try:
        content = _parsed(text.decode())
    except (YAMLError, ValueError):  # ValueError: not UTF-8, or a number that is none
        return False
    stages = content.get("stages") if isinstance(content, dict) else None
    entries = stages.values() if isinstance(stages, dict) else [None]
    return text.endswith(b"\n") and all(isinstance(entry, dict) and {"cmd", "outs"} <= set(entry) for entry in entries)


def _is_json(path: Path) -> bool:
    try:
        return isinstance(json.loads(path.read_text(encoding="utf-8")), dict)
    except ValueError:
        return False


def _copy() -> bytes | None:
    return COPY.read_bytes() if COPY.exists() else None


def _committed() -> bytes | None:
    """Return the dvc.lock of the last commit, None where there is none or no git."""
    try:
        done = subprocess.run(["git", "show", f"HEAD:./{LOCK}"], capture_output=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None
