"""dvc.lock is whole at any moment, damage is mended, a copy is apart. Oracles: DVC's own bytes and its commands."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import dvc.dvcfile
import pytest
from dvc.config import Config
from dvc.repo import Repo
from ruamel.yaml import YAML

from altgrad.common.files import write_text
from altgrad.config import UserError
from altgrad.execution import dvc_api, dvc_files
from altgrad.execution.dvc_api import locked_project
from altgrad.execution.pending import copied_project, first_tasks, pending
from tests.execution.conftest import begin
from tests.pipeline.conftest import PROJECT, environment

DVC = [sys.executable, "-m", "dvc"]


def leave_dvc(patch: pytest.MonkeyPatch) -> None:
    """Leave DVC to the other tests as they found it."""
    patch.setattr(dvc.dvcfile, "modify_yaml", dvc.dvcfile.modify_yaml)


@pytest.fixture(autouse=True)
def dvc_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_dvc(monkeypatch)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a project of two cells that have run, with a whole dvc.lock."""
    place = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        leave_dvc(patch)
        patch.chdir(place)
        begin()
        with Repo() as repo:
            repo.reproduce()
        with locked_project():
            pass
    return place


@pytest.fixture
def trained(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of it, which is the working directory."""
    monkeypatch.chdir(shutil.copytree(made, tmp_path / "trained", symlinks=True))
    return tmp_path / "trained"


def test_dvc_lock_has_the_bytes_of_dvc_and_is_never_written_in_place(folder: Path, monkeypatch):
    subprocess.run([*DVC, "repro", "--quiet"], cwd=folder, env=environment(), check=True)
    theirs = dvc_files.LOCK.read_bytes()
    dvc_files.LOCK.unlink()
    in_place, opened = [], open

    def watched(path, mode="r", *arguments, **options):
        if "w" in mode and Path(str(path)).name == "dvc.lock":
            in_place.append(path)
        return opened(path, mode, *arguments, **options)

    monkeypatch.setattr("builtins.open", watched)
    dvc_api.reproduce(["train"])
    assert dvc_files.LOCK.read_bytes() == theirs and not in_place


def test_the_lock_of_this_project_is_read_and_written_to_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (PROJECT / "dvc.lock").read_text()
    Path("dvc.lock").write_text(text)
    names = set(YAML(typ="safe").load(text)["stages"])
    assert dvc_files.prune(names | {"another"}) == 0 and Path("dvc.lock").read_text() == text
    gone = sorted(names)[3]
    assert dvc_files.prune(names - {gone}) == 1
    left = YAML(typ="safe").load(Path("dvc.lock"))["stages"]
    assert list(left) == [name for name in YAML(typ="safe").load(text)["stages"] if name != gone]


def test_a_write_that_fails_leaves_the_file_as_it_was(trained: Path, monkeypatch):
    before = dvc_files.LOCK.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(dvc_files, "write_text", full)
    with locked_project() as project, pytest.raises(OSError, match="No space left"):
        project.write_lock_file(project.cells_of("train"))
    assert dvc_files.LOCK.read_bytes() == before


CONFLICT = "<<<<<<< HEAD\n{0}=======\n{0}>>>>>>> theirs\n"


def test_a_damaged_lock_is_put_back_and_said_and_nothing_is_run_again(trained: Path, capsys):
    """Empty, in conflict, no text, something else, or cut anywhere, as a kill of a plain `dvc repro` leaves it."""
    whole, chance = dvc_files.LOCK.read_bytes(), random.Random(0)
    cuts = {*chance.sample(range(1, len(whole)), 8), whole.index(b"  train@b"), len(whole) - 1}
    conflict = CONFLICT.format(whole.decode()).encode()
    for damaged in (b"", conflict, b"\xff\x00\xfe", b"[1, 2]\n", *(whole[:cut] for cut in cuts)):
        dvc_files.LOCK.write_bytes(damaged)
        assert first_tasks() == ([], []), damaged[:20]
        assert "begun anew" in capsys.readouterr().err or whole.startswith(damaged + b"  train")
        assert dvc_files.LOCK.read_bytes() == whole
    with Repo() as repo:
        assert repo.status() == {}


def test_a_damaged_lock_is_that_of_the_last_commit_if_there_is_one(trained: Path):
    whole = dvc_files.LOCK.read_bytes()
    subprocess.run(["git", "init", "--quiet"], check=True)
    subprocess.run(["git", "add", "dvc.lock"], check=True)
    subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "lock"], check=True)
    dvc_files.LOCK.write_bytes(b"")
    assert any("as it was in the last commit" in sentence for sentence in dvc_files.mend())
    assert dvc_files.LOCK.read_bytes() == whole


def test_a_half_written_rwlock_is_removed_and_said(trained: Path, capsys):
    for content in (b"", b'{"write": {"/a', b"\xff", b"[]"):
        dvc_files.RWLOCK.write_bytes(content)
        assert first_tasks() == ([], []) and "rwlock was half-written" in capsys.readouterr().err, content
        assert not dvc_files.RWLOCK.exists() or json.loads(dvc_files.RWLOCK.read_text()) is not None


def test_what_is_whole_is_left_alone_and_nothing_is_said(trained: Path, capsys):
    before = dvc_files.LOCK.stat().st_mtime_ns
    assert first_tasks() == ([], [])
    assert dvc_files.LOCK.stat().st_mtime_ns == before and not capsys.readouterr().err


def test_what_a_killed_process_left_is_removed(trained: Path):
    gone, here = 1 << 30, os.getppid()
    left = [Path(".dvc.lock.{}.tmp"), Path(".dvc/tmp/.rwlock.{}.tmp"), Path("data/diag/.a.json.{}.tmp")]
    Path("data/diag").mkdir()
    for path in left:
        Path(str(path).format(gone)).touch()
        Path(str(path).format(here)).touch()
    assert first_tasks() == ([], [])
    assert not any(Path(str(path).format(gone)).exists() for path in left)
    assert all(Path(str(path).format(here)).exists() for path in left), "somebody is writing it"


@pytest.mark.parametrize(("leave", "left"), [
    (lambda entry: entry.with_name(".half.tmp").write_text("cmd: python -m stages.tokenize\n"), "*/*/.*"),
    (Path.unlink, "*/*"),
], ids=["half of an entry", "a folder without one"])  # fmt: skip
def test_what_a_kill_left_in_the_run_cache_is_removed_and_dvc_goes_on(trained: Path, leave, left):
    """DVC takes the newest file of a folder for the entry, whatever it is called, and makes the folder first."""
    for entry in list(dvc_files.RUN_CACHE.glob("*/*/*")):
        leave(entry)
    dvc_files.LOCK.unlink()
    done = subprocess.run([*DVC, "repro"], cwd=trained, env=environment(), check=False, capture_output=True, text=True)
    assert "failed to reproduce" in done.stderr or "TypeError" in done.stderr
    with locked_project():
        pass
    assert not list(dvc_files.RUN_CACHE.glob(left))
    dvc_api.reproduce(["train"])


def test_stages_that_are_gone_leave_the_lock_and_come_back_from_the_run_cache(trained: Path):
    whole = dvc_files.LOCK.read_text()
    pipeline = Path("dvc.yaml").read_text()
    write_text(Path("dvc.yaml"), pipeline.replace("[a, b]", "[a]"))
    assert first_tasks() == ([], [])
    assert set(YAML(typ="safe").load(dvc_files.LOCK)["stages"]) == {"train@a"}
    write_text(Path("dvc.yaml"), pipeline)
    assert first_tasks() == ([], []) and dvc_files.LOCK.read_text() == whole


def flip(path: Path) -> None:
    """Flip a bit in a read-only file, without a trace of when."""
    before, content = path.stat(), bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    path.chmod(0o444)


@pytest.mark.parametrize("what", ["a file", "a folder's list"])
def test_a_flipped_bit_in_the_cache_is_found_and_the_run_made_again(trained: Path, capsys, what):
    pipeline, copies = (trained / "dvc.yaml").read_text(), "cp data/grid/${key}.json data/runs/${key}"
    into_a_folder = "mkdir -p data/runs/${key} && " + copies + "/out"
    (trained / "dvc.yaml").write_text(pipeline.replace(copies, into_a_folder))
    dvc_api.reproduce(["train"])
    with locked_project() as project:
        oid = next(cell for cell in project.cells_of("train") if cell.key == "a")._stage.outs[0].hash_info.value
    cache = trained / ".dvc/cache/files/md5"
    listed = cache / oid[:2] / oid[2:]
    (entry,) = json.loads(listed.read_text())
    flip(listed if what != "a file" else cache / entry["md5"][:2] / entry["md5"][2:])
    subprocess.run(["rm", "-r", "data/runs"], check=True)
    tasks, _ = first_tasks()
    assert "train@a" in {task.name for task in tasks}
    assert "copy of what train@a made was damaged" in capsys.readouterr().err
    assert dvc_files.damaged(cache, oid) == []


def test_a_folder_that_may_not_be_written_is_one_sentence(trained: Path, monkeypatch):
    monkeypatch.setattr("altgrad.execution.dvc_api.os.access", lambda *_: False)
    with pytest.raises(UserError, match="may not be written; allow it, or copy the project"):
        first_tasks()


def state(folder: Path) -> dict[Path, tuple[bytes, int]]:
    """Return what is in every file of a project, and when it was written."""
    files = [path for path in folder.rglob("*") if path.is_file() and "scratch" not in path.parts]
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


@pytest.mark.parametrize(("elsewhere", "stopped"), [(False, False), (True, True)])
def test_settings_outputs_and_the_lock_file_are_as_they_were_after_work_in_a_copy(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, elsewhere: bool, stopped: bool
) -> None:
    """What the cache has is found there too, wherever the cache lies."""
    if elsewhere:
        with Config(str(folder / ".dvc")).edit("local") as settings:
            settings["cache"] = {"dir": os.path.relpath(tmp_path_factory.mktemp("cache"), folder)}
    (folder / "texts").mkdir()
    (folder / "texts/mine.txt").write_text("text")
    dvc_api.reproduce(["train"])
    before = state(folder)
    with suppress(KeyboardInterrupt), copied_project():
        assert Path.cwd() != folder and Path("texts/mine.txt").read_text() == "text"
        Path("data/runs/a").unlink()
        with locked_project() as project:
            assert pending(project) == [] and Path("data/runs/a").exists()
        Path("params.yaml").write_text("setting: 2\n")
        with locked_project() as project:
            assert [task.key for task in pending(project)] == ["a", "b"]
        dvc_api.reproduce(["train"])
        assert "setting: 2" in Path("dvc.lock").read_text()
        if stopped:
            raise KeyboardInterrupt
    assert Path.cwd() == folder and state(folder) == before and not list(folder.glob("scratch/*"))
