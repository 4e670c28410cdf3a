"""A copy of the project for `make estimate`: what changes of settings, outputs and dvc.lock changes there alone."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from altgrad.execution import dvc_api

COPIED = (".dvc", "altgrad", "stages", "reports")
LINKED = ("data", ".dvc/cache")  # whose files are replaced and removed, and never written in place


@contextmanager
def copied_project() -> Iterator[None]:
    """Work in a copy of the working directory's project, which is removed in the end.

    What may be large are hard links there, or copies where the file system has none. What is compiled and logged goes
    where the project itself has it, and outlives the copy.
    """
    root = Path.cwd()
    scratch = root / "scratch"
    scratch.mkdir(exist_ok=True)
    os.environ.setdefault("ALTGRAD_COMPILE_CACHE", str(scratch / "compiled"))
    with TemporaryDirectory(prefix="estimate-", dir=scratch) as folder:
        copy = Path(folder)
        (copy / ".dvc").mkdir()
        for name in filter(os.path.isdir, COPIED):
            shutil.copytree(name, copy / name, ignore=shutil.ignore_patterns("tmp", "cache"), dirs_exist_ok=True)
        for name in filter(os.path.isdir, LINKED):
            shutil.copytree(name, copy / name, copy_function=_link, dirs_exist_ok=True)
        for entry in root.iterdir():
            if entry.is_file():
                shutil.copy2(entry, copy)
            elif entry.name != ".git" and not (copy / entry.name).exists():
                (copy / entry.name).symlink_to(entry)
        dvc_api.make_own(copy)
        os.chdir(copy)
        try:
            yield
        finally:
            os.chdir(root)


def _link(source: str, target: str) -> None:
    """Give a file a second name, or copy it; one that is gone meanwhile was another command's temporary one."""
    with suppress(FileNotFoundError):
        try:
            os.link(os.path.realpath(source), target)
        except FileNotFoundError:
            raise
        except OSError:
            shutil.copy2(source, target)
