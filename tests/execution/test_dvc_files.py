"""dvc.lock and rwlock are whole at any moment. Oracles: the bytes of DVC's own writer, and its commands."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import dvc.dvcfile
import pytest
from dvc.repo import Repo
from dvc_objects.fs.local import FsspecLocalFileSystem
from ruamel.yaml import YAML

from altgrad.common.files import write_text
from altgrad.config import UserError
from altgrad.execution import dvc_files
from altgrad.execution.dvc_api import locked_project
from altgrad.execution.plan import first_tasks
from tests.execution.conftest import begin
from tests.pipeline.conftest import PROJECT, environment

DVC = [sys.executable, "-m", "dvc"]


def leave_dvc(patch: pytest.MonkeyPatch) -> None:
    """Leave DVC to the other tests as they found it."""
    patch.setattr(FsspecLocalFileSystem, "open", FsspecLocalFileSystem.open)
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
        assert dvc_files.COPY.read_bytes() == dvc_files.LOCK.read_bytes()
    return place


@pytest.fixture
def trained(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of it, which is the working directory."""
    monkeypatch.chdir(shutil.copytree(made, tmp_path / "trained", symlinks=True))
    return tmp_path / "trained"


def test_it_is_written_as_dvc_writes_it(folder: Path):
    subprocess.run([*DVC, "repro", "--quiet"], cwd=folder, env=environment(), check=True)
    theirs = dvc_files.LOCK.read_bytes()
    dvc_files.LOCK.unlink()
    dvc_files.keep_whole()
    assert dvc.dvcfile.modify_yaml.__module__ == dvc_files.__name__
    with Repo() as repo:
        repo.reproduce()
    assert dvc_files.LOCK.read_bytes() == theirs


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


@pytest.mark.parametrize("name", ["dvc.lock", ".dvc/tmp/rwlock"])
def test_no_moment_of_a_command_finds_half_of_a_file(folder: Path, monkeypatch, name):
    """Every state that the file ever had on disk is one that a reader understands."""
    states, replace = [], os.replace

    def replaced(source: object, target: object) -> None:
        if Path(str(target)).name == Path(name).name:
            states.append(Path(str(source)).read_text())
            if Path(str(target)).exists():
                states.append(Path(str(target)).read_text())
        replace(source, target)

    dvc_files.keep_whole()
    monkeypatch.setattr(os, "replace", replaced)
    written = []
    monkeypatch.setattr("builtins.open", _watched(open, name, written))
    with Repo() as repo:
        repo.reproduce()
    assert len(states) >= 2 and not written, "it was opened for writing in place"
    for text in states:
        assert YAML(typ="safe").load(text) is not None


def _watched(opened, name: str, written: list[str]):
    def watching(path, mode="r", *arguments, **options):
        if "w" in mode and str(path).endswith(name):
            written.append(str(path))
        return opened(path, mode, *arguments, **options)

    return watching


def test_a_write_that_fails_leaves_the_file_as_it_was(trained: Path, monkeypatch):
    before = dvc_files.LOCK.read_bytes()
    dvc_files.keep_whole()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(dvc_files, "write_text", full)
    with Repo() as repo, repo.lock, pytest.raises(OSError, match="No space left"):
        stage = next(iter(repo.index.stages))
        stage.dvcfile.dump_stages([stage], update_pipeline=False)
    assert dvc_files.LOCK.read_bytes() == before


def test_a_dvc_without_that_place_is_left_as_it_is(monkeypatch):
    monkeypatch.delattr("dvc_objects.fs.local.FsspecLocalFileSystem")
    before = dvc.dvcfile.modify_yaml
    dvc_files.keep_whole()
    assert dvc.dvcfile.modify_yaml is before


CONFLICT = "<<<<<<< HEAD\n{0}=======\n{0}>>>>>>> theirs\n"


def test_a_damaged_lock_is_put_back_and_said_and_dvc_goes_on(trained: Path, capsys):
    """As empty, in conflict, no text or something else. Where it is cut is below."""
    whole = dvc_files.LOCK.read_text()
    for damaged in (b"", CONFLICT.format(whole).encode(), b"\xff\x00\xfe", b"[1, 2]\n"):
        dvc_files.LOCK.write_bytes(damaged)
        assert first_tasks() == ([], []), damaged[:20]
        said = capsys.readouterr().err
        assert said.count("dvc.lock was damaged") == 1 and "as it was when last whole" in said
        assert dvc_files.LOCK.read_text() == whole
    with Repo() as repo:
        assert repo.status() == {}


def test_wherever_it_is_cut_nothing_is_run_again(trained: Path, capsys):
    """As a kill of a plain `dvc repro` leaves it. What lies behind the cut comes from the copy or the run cache."""
    whole = dvc_files.LOCK.read_bytes()
    chance = random.Random(0)
    for cut in {*chance.sample(range(len(whole)), 12), whole.index(b"  train@b"), len(whole) - 1}:
        dvc_files.LOCK.write_bytes(whole[:cut])
        assert first_tasks() == ([], []), cut
        assert dvc_files.LOCK.read_bytes() == whole, cut


def test_without_a_copy_it_is_that_of_the_last_commit_or_begun_anew(trained: Path, capsys):
    whole = dvc_files.LOCK.read_bytes()
    dvc_files.COPY.unlink()
    dvc_files.LOCK.write_bytes(whole[:200])
    assert first_tasks() == ([], []) and "begun anew" in capsys.readouterr().err
    assert dvc_files.LOCK.read_bytes() == whole, "the run cache had it"
    subprocess.run(["git", "init", "--quiet"], check=True)
    subprocess.run(["git", "add", "dvc.lock"], check=True)
    subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "lock"], check=True)
    dvc_files.COPY.unlink()
    dvc_files.LOCK.write_bytes(b"")
    assert any("as it was when last whole" in sentence for sentence in dvc_files.mend())
    assert dvc_files.LOCK.read_bytes() == whole


def test_a_half_written_rwlock_is_removed_and_said(trained: Path, capsys):
    for content in (b"", b'{"write": {"/a', b"\xff", b"[]"):
        dvc_files.RWLOCK.write_bytes(content)
        assert first_tasks() == ([], []) and "rwlock was half-written" in capsys.readouterr().err, content
        assert not dvc_files.RWLOCK.exists() or json.loads(dvc_files.RWLOCK.read_text()) is not None


def test_what_is_whole_is_left_alone_and_nothing_is_said(trained: Path, capsys):
    before = {path: path.stat().st_mtime_ns for path in (dvc_files.LOCK, dvc_files.COPY)}
    assert first_tasks() == ([], [])
    assert {path: path.stat().st_mtime_ns for path in before} == before and not capsys.readouterr().err
    dvc_files.COPY.write_text("another")  # as after a checkout of another branch
    assert dvc_files.mend() == []


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
    with Repo() as repo:
        repo.reproduce()


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
    with Repo() as repo:
        repo.reproduce()
    with locked_project() as project:
        oid = next(cell for cell in project.cells_of("train") if cell.key == "a")._stage.outs[0].hash_info.value
    cache = trained / ".dvc/cache/files/md5"
    listed = cache / oid[:2] / oid[2:]
    (entry,) = json.loads(listed.read_text())
    flip(listed if what != "a file" else cache / entry["md5"][:2] / entry["md5"][2:])
    subprocess.run(["rm", "-r", "data/runs"], check=True)
    tasks, _ = first_tasks()
    said = capsys.readouterr().err
    assert "train@a" in {task.name for task in tasks}
    assert "copy of what train@a made was damaged" in said
    assert dvc_files.damaged(cache, oid) == []


def test_a_folder_that_may_not_be_written_is_one_sentence(trained: Path, monkeypatch):
    monkeypatch.setattr("altgrad.execution.dvc_api.os.access", lambda *_: False)
    with pytest.raises(UserError, match="may not be written; allow it, or copy the project"):
        first_tasks()
