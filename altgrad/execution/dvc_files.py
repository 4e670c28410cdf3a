"""Write dvc.lock atomically, and repair DVC's files that a stop or a full disk left half-written.

DVC writes dvc.lock and its rwlock in place. A stop or a full disk meanwhile leaves a file with which every DVC command
fails (github.com/iterative/dvc, issues 7615 and 814). `mend` repairs both before each command of this package.
`write_lock_quickly` makes DVC write dvc.lock through this module: atomically, and with the YAML library in C. It writes
the same bytes as DVC's in Python in a tenth of the time.
"""

import hashlib
import io
import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import dvc.dvcfile
import psutil
from dvc.utils.serialize import modify_yaml
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from altgrad.common.files import write_text

LOCK = Path("dvc.lock")
TMP = Path(".dvc/tmp")
PLACES = (Path(), TMP, Path("data/diag"), Path("reports"))  # folders that several stages or commands write to
RWLOCK = TMP / "rwlock"
RUN_CACHE = Path(".dvc/cache/runs")


def write_lock_quickly() -> None:
    """Make DVC use `_modify_lock` in this process."""
    dvc.dvcfile.modify_yaml = _modify_lock


@contextmanager
def _modify_lock(path: Any, fs: Any = None) -> Iterator[dict[str, Any]]:
    """Yield the content of dvc.lock, then write it, without comments; leave other files to DVC's ``modify_yaml``."""
    if Path(path).name != LOCK.name:
        with modify_yaml(path, fs=fs) as content:
            yield content
        return
    lock = Path(path)
    content = _parsed(lock.read_text(encoding="utf-8")) if lock.exists() else {}
    yield content
    _write(lock, content)


def mend() -> list[str]:
    """Repair the damaged DVC files of the working directory's project; return a sentence about each repair.

    The caller must hold DVC's lock on the project, so that no other command writes.
    """
    for left in (path for place in PLACES for path in place.glob(".*.*.tmp")):
        number = left.name.split(".")[-2]  # the process that was writing it: see `altgrad.common.files.replacing`
        if number.isdigit() and not psutil.pid_exists(int(number)):
            left.unlink(missing_ok=True)
    # The newest file of a folder in the run cache is the entry for DVC, which fails with a traceback if there is none.
    for left in RUN_CACHE.glob("*/*/.*.tmp"):
        left.unlink(missing_ok=True)
    for folder in RUN_CACHE.glob("*/*"):
        with suppress(OSError):  # the folder is not empty
            folder.rmdir()
    said = []
    if RWLOCK.exists() and not _is_json(RWLOCK):
        RWLOCK.unlink()
        said.append(f"{RWLOCK} was half-written, as a stop or a full disk leaves it: removed, nothing is lost by it")
    if not LOCK.exists() or _is_whole(LOCK.read_bytes()):
        return said
    committed = _committed()
    if committed is not None and _is_whole(committed):
        state = "as it was in the last commit"
        write_text(LOCK, committed.decode())
    else:
        state = "begun anew"
        LOCK.unlink()
    said.append(
        f"{LOCK} was damaged, as a stop while DVC writes it or a merge leaves it: it is {state}, and what it lacks is "
        "taken from the cache"
    )
    return said


def prune(names: set[str]) -> int:
    """Remove from dvc.lock the entries of stages that are not in ``names``; return how many were removed."""
    if not LOCK.exists():
        return 0
    content = _parsed(LOCK.read_text(encoding="utf-8"))
    gone = content["stages"].keys() - names
    if gone:
        content["stages"] = {name: entry for name, entry in content["stages"].items() if name in names}
        _write(LOCK, content)
    return len(gone)


def damaged(cache: Path, oid: str) -> list[Path]:
    """Return the files in ``cache`` of object ``oid`` whose MD5 is not that of their name; none if it is missing.

    ``oid`` is an MD5, with ``.dir`` at its end for a folder. DVC itself does not check objects that it made read-only.
    """
    path = cache / oid[:2] / oid[2:]
    if not path.exists():
        return []
    content = path.read_bytes()
    if hashlib.md5(content, usedforsecurity=False).hexdigest() != oid.removesuffix(".dir"):
        return [path]
    entries = json.loads(content) if oid.endswith(".dir") else []
    return [bad for entry in entries for bad in damaged(cache, entry["md5"])]


def _parsed(text: str) -> dict[str, Any]:
    return YAML(typ="safe").load(text) or {}


def _write(path: Path, content: dict[str, Any]) -> None:
    yaml, stream = YAML(typ="safe"), io.StringIO()
    yaml.default_flow_style = False
    yaml.representer.sort_base_mapping_type_on_output = False
    yaml.dump(_plain(content), stream)
    write_text(path, stream.getvalue())


def _plain(value: Any) -> Any:
    """Return ``value`` with Python's own dicts and lists in place of DVC's subclasses, which the C parser refuses."""
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else value


def _is_whole(text: bytes) -> bool:
    """Return whether ``text`` is a complete dvc.lock: every stage of this project has a command and outputs."""
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


def _committed() -> bytes | None:
    """Return the content of dvc.lock in the last commit; None if the commit has none or git is missing."""
    try:
        done = subprocess.run(["git", "show", f"HEAD:./{LOCK}"], capture_output=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None
