"""Files arrive whole or not at all, and nowhere else. Oracle: the files that were sent."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from altgrad.config import UserError
from altgrad.execution.node import Parcel, digest, pack, unpack

SENT = {"data/runs/a/metrics.json": b"{}", "data/runs/a/deep/model.bin": bytes(range(256)), "data/diag/a.json": b"1"}
BELOW = ["data/runs/a", "data/diag/a.json"]


@pytest.fixture
def sender(tmp_path: Path) -> Path:
    for name, content in SENT.items():
        path = tmp_path / "sender" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path / "sender"


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_is_sent_arrives_in_place_of_what_was_there(sender, tmp_path):
    home = tmp_path / "home"
    (home / "data/runs/a").mkdir(parents=True)
    (home / "data/runs/a/old.csv").touch()
    (home / "data/runs/b.csv").touch()
    unpack(pack(sender, [*BELOW, "data/not/there"]), home, BELOW)
    assert files(home) == SENT | {"data/runs/b.csv": b""}


@pytest.mark.parametrize("damage", ["content", "name", "missing", "more"])
def test_a_parcel_that_was_damaged_changes_nothing(sender, tmp_path, damage):
    sent = pack(sender, BELOW)
    name = "data/runs/a/metrics.json"
    damaged = {
        "content": {**sent.files, name: b"{ }"}, "missing": {k: v for k, v in sent.files.items() if k != name},
        "name": {k.replace("metrics", "metric5"): v for k, v in sent.files.items()}, "more": {**sent.files, "x": b""},
    }[damage]  # fmt: skip
    with pytest.raises(UserError, match="not what it sent"):
        unpack(Parcel(damaged, sent.digest), tmp_path / "home", BELOW)
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("name", ["data/runs/b/x", "/etc/passwd", "data/runs/a/../../../x", "data/runs/ab", "../x"])
def test_nothing_is_put_where_it_was_not_asked_for(tmp_path, name):
    content = {"data/runs/a/good": b"1", name: b"2"}
    with pytest.raises(UserError, match="none of what it was asked for"):
        unpack(Parcel(content, digest(content)), tmp_path / "home", BELOW)
    assert not (tmp_path / "home").exists()


def test_the_digest_tells_where_one_file_ends_and_the_next_begins():
    assert digest({"a": b"bc", "d": b""}) != digest({"a": b"b", "cd": b""}) != digest({"a": b"", "bcd": b""})
    assert digest({}) == hashlib.sha256().hexdigest()
