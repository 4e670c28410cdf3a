"""What torch's compiler leaves in its cache on disk, checked: a library with a bit flipped loads, and computes wrongly.

Torch checks none of its files. So whoever has compiled a graph writes down the digests of the files that came with it,
and the next process removes what differs from them, so that it is compiled again.
"""

from __future__ import annotations

import fcntl
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from altgrad.common.files import sha256_of, write_text

RECORDS = "made"  # the folder of the digests: a file for each graph
OWN = {RECORDS, "altgrad"}  # folders that are not the compiler's: the loops in C++ have digests of their own


@contextmanager
def recorded(folder: Path, record: Path) -> Iterator[None]:
    """Write to ``record`` the digests of all files of the cache ``folder`` that came meanwhile, or that no record has.

    Where two processes compile at once, the later record of a file counts: the earlier may be of half of it.
    """
    before = set(_files(folder))
    with _lock(folder, fcntl.LOCK_SH):
        yield
        known = before & {folder / name for digests in _records(folder).values() for name in digests}
        digests = {str(path.relative_to(folder)): sha256_of(path) for path in _files(folder) if path not in known}
        write_text(record, json.dumps(digests, indent=0))


def remove_damaged(folder: Path) -> None:
    """Remove the files of the cache ``folder`` that are not as recorded, and say so; nothing while others compile."""
    with _lock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB) as free:
        if not free:
            return
        records = _records(folder)
        expected = {name: digest for digests in records.values() for name, digest in digests.items()}
        damaged = {
            name
            for name, digest in expected.items()
            if not (folder / name).exists() or sha256_of(folder / name) != digest
        }
        for record, digests in records.items():
            if damaged & digests.keys():
                record.unlink()
        for name in damaged:
            (folder / name).unlink(missing_ok=True)
    if damaged:
        print(f"note: {len(damaged)} compiled files in {folder} were damaged; they are compiled again", file=sys.stderr)


@contextmanager
def _lock(folder: Path, how: int) -> Iterator[bool]:
    (folder / RECORDS).mkdir(parents=True, exist_ok=True)
    with open(folder / RECORDS / "lock", "w") as file:
        try:
            fcntl.flock(file, how)
        except BlockingIOError:
            yield False
        else:
            yield True


def _files(folder: Path) -> Iterator[Path]:
    for path in folder.glob("*/**/*"):
        if path.relative_to(folder).parts[0] not in OWN and path.suffix != ".lock" and path.is_file():
            yield path


def _records(folder: Path) -> dict[Path, dict[str, str]]:
    dated = [(path.stat().st_mtime_ns, path) for path in (folder / RECORDS).glob("*.json")]
    return {path: _read(path) for _, path in sorted(dated)}


def _read(record: Path) -> dict[str, str]:
    try:
        return dict(json.loads(record.read_text()))
    except ValueError:
        return {}
