"""Files on their way between machines: bytes by name, with a digest, put in place whole or not at all.

Nothing in a parcel is run or unpickled, and none of its names leads out of the folder that it is unpacked into.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from altgrad.config import UserError
from altgrad.config.files import replacing


class Parcel(NamedTuple):
    """Files by their names below a project's top folder, and the SHA-256 of them all."""

    files: Mapping[str, bytes]
    digest: str


def pack(root: Path, names: Iterable[str]) -> Parcel:
    """Return the files ``names``, and those in folders of ``names``, below ``root``; what is not there is left out."""
    files: dict[str, bytes] = {}
    for name in names:
        path = root / name
        found = sorted(path.rglob("*")) if path.is_dir() else [path]
        files |= {file.relative_to(root).as_posix(): file.read_bytes() for file in found if file.is_file()}
    return Parcel(files, digest(files))


def digest(files: Mapping[str, bytes]) -> str:
    """Return the SHA-256 of names, lengths and contents."""
    found = hashlib.sha256()
    for name, content in sorted(files.items()):
        found.update(f"{len(name)} {name} {len(content)} ".encode())
        found.update(content)
    return found.hexdigest()


def unpack(parcel: Parcel, root: Path, below: Iterable[str]) -> None:
    """Put a parcel's files in place below ``root``: a folder of ``below`` at once, what is in none of them one by one.

    ``below``: names of the only folders and files that a parcel may hold. Such a folder is replaced, with all that
    is in it. Raises :class:`UserError`, and changes nothing, for a parcel that was damaged on its way or holds others.
    """
    if digest(parcel.files) != parcel.digest:
        raise UserError("what came from another machine is not what it sent; run the same command again")
    places = list(below)
    by_place: dict[str, dict[str, bytes]] = {}
    for name, content in parcel.files.items():
        place = next((place for place in places if _is_in(name, place)), None)
        if place is None:
            raise UserError(f"another machine sent {name}, which is none of what it was asked for")
        by_place.setdefault(place, {})[name] = content
    for place, files in by_place.items():
        target = root / place
        if set(files) == {place}:
            with replacing(target) as temporary:
                temporary.write_bytes(files[place])
            continue
        coming = target.with_name(f".{target.name}.coming")
        shutil.rmtree(coming, ignore_errors=True)
        for name, content in files.items():
            path = coming / PurePosixPath(name).relative_to(place)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        shutil.rmtree(target, ignore_errors=True)
        coming.rename(target)


def _is_in(name: str, place: str) -> bool:
    path = PurePosixPath(name)
    return ".." not in path.parts and not path.is_absolute() and path.is_relative_to(place)
