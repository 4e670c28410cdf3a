"""The only file that uses modules of DVC that it does not promise to keep; pyproject.toml pins its minor version.

DVC's commands cannot restore a stage from the run cache without running it if it is absent there. Nor can they put many
existing outputs into the cache and into dvc.lock at once. DVC's Python objects can.
"""

import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import psutil
from dvc.config import Config
from dvc.dependency import ParamsDependency
from dvc.exceptions import DvcException
from dvc.lock import LockError
from dvc.parsing import ResolveError
from dvc.repo import Repo
from dvc.stage import Stage
from dvc.stage.cache import RunCacheNotFoundError

from altgrad.common.errors import UserError
from altgrad.execution import dvc_files

OF_MODELS = "_models"  # ends the name of a matrix of cells of grid.models
END_S = 1.0  # seconds in which an interrupted process may end by itself


class CellStage:
    """A stage of the DVC project, usually one of a cell."""

    def __init__(self, stage: Stage, repo: Repo) -> None:
        self._stage, self._repo = stage, repo

    @property
    def name(self) -> str:
        """The name of the stage's task, such as ``train@E4M3-adamw-0-1``; for a stage without a cell DVC's name."""
        return self._stage.name.replace(f"{OF_MODELS}@", "@")

    @property
    def key(self) -> str:
        """The cell's key, such as ``E4M3-adamw-0-1``; empty for a stage without a cell."""
        return self.name.partition("@")[2]

    def has_changed(self) -> bool:
        return self._stage.changed()

    def remove_outputs(self) -> None:
        self._stage.remove_outs()

    def restore(self) -> bool:
        """Restore the stage's outputs from the run cache and save them; return whether all were there and undamaged."""
        self.drop_damaged()  # the objects that dvc.lock names
        try:
            self._repo.stage_cache.restore(self._stage)
        except RunCacheNotFoundError:
            return False
        if self.drop_damaged():  # the objects that the run cache names
            self.remove_outputs()
            return False
        self.save()
        return True

    def drop_damaged(self) -> bool:
        """Delete the stage's damaged outputs from the cache and print a note; return whether there were any."""
        kept = [(out.cache, out.hash_info) for out in self._stage.outs if out.hash_info and out.use_cache]
        bad = [path for cache, oid in kept for path in dvc_files.damaged(Path(cache.path), oid.value)]
        for path in bad:
            path.unlink(missing_ok=True)
        if bad:
            print(f"note: the cache's copy of what {self.name} made was damaged; it is made again", file=sys.stderr)
        return bool(bad)

    def is_there(self) -> bool:
        """Return whether all outputs of the stage exist."""
        return all(Path(out.fs_path).exists() for out in self._stage.outs)

    def hash_dependencies(self) -> tuple[str, ...]:
        """Return the hashes of the stage's dependencies as they are now."""
        self._stage.save_deps()
        return tuple(str(dep.hash_info) for dep in self._stage.deps)

    def save(self) -> None:
        """Put the stage's outputs into the cache. :meth:`DvcProject.write_lock_file` then records them in dvc.lock.

        Raises :class:`UserError` if DVC refuses them, for instance because one is missing.
        """
        try:
            self._stage.save()
            self._stage.commit()
        except DvcException as error:
            raise UserError(str(error)) from error


class DvcProject:
    """The DVC project of the working directory while this process holds DVC's lock on it."""

    def __init__(self, repo: Repo) -> None:
        self._repo = repo

    @cached_property
    def _stages(self) -> list[Stage]:
        """All stages. A dependency of several stages, such as the code, is read once.

        DVC would read it several times for each stage, three quarters of the time that it takes to check a grid.
        Raises :class:`UserError` if params.yaml lacks a setting that dvc.yaml reads.
        """
        try:
            stages = list(self._repo.index.stages)
        except ResolveError as error:
            raise UserError(f"params.yaml lacks a setting that dvc.yaml reads; add it: {error}") from error
        shared = Counter(dep.fs_path for stage in stages for dep in stage.deps)
        seen: dict[Any, Any] = {}
        for dep in (dep for stage in stages for dep in stage.deps):
            if isinstance(dep, ParamsDependency):
                dep.read_params = _once(dep.read_params, seen, (dep.fs_path, *dep.params))
            elif shared[dep.fs_path] > 1:
                dep._build = _once(dep._build, seen, dep.fs_path)
        return stages

    def cells_of(self, stage: str) -> list[CellStage]:
        """Return the stages of dvc.yaml's matrix ``stage``, such as ``train``, one for each cell, in its order.

        Those of the matrix ``train_models``, the cells of ``grid.models``, follow.
        """
        named = [(getattr(member, "name", ""), member) for member in self._stages]
        stages = [its for end in ("", OF_MODELS) for name, its in named if name.startswith(f"{stage}{end}@")]
        return [CellStage(member, self._repo) for member in stages]

    def others(self) -> list[CellStage]:
        """Return the stages that belong to no cell: those without a matrix."""
        stages = [member for member in self._stages if "@" not in (getattr(member, "name", None) or "")]
        return [CellStage(member, self._repo) for member in stages]

    def forget_others(self) -> None:
        """Remove from dvc.lock the entries of stages that the project no longer has."""
        dvc_files.prune({name for stage in self._stages if (name := getattr(stage, "name", None))})

    def write_lock_file(self, saved: list[CellStage]) -> None:
        """Record the stages ``saved``, whose outputs are in the cache, in dvc.lock with a single write."""
        stages = [cell._stage for cell in saved]
        if stages:
            stages[0].dvcfile.dump_stages(stages, update_pipeline=False)


def _once(read: Callable[..., Any], seen: dict[Any, Any], name: Any) -> Callable[..., Any]:
    """Return ``read`` with its results cached in ``seen``, by ``name`` and the boolean options of a call."""

    def reading(*arguments: Any, **options: Any) -> Any:
        key = name, tuple(sorted((option, value) for option, value in options.items() if isinstance(value, bool)))
        if key not in seen:
            seen[key] = read(*arguments, **options)
        return dict(seen[key]) if isinstance(seen[key], dict) else seen[key]

    return reading


@lru_cache(maxsize=1)  # to open it takes as long as to check a small grid
def _repository(folder: Path) -> Repo:
    logging.getLogger("dvc").setLevel(logging.WARNING)  # else DVC prints for every stage that it is cached
    dvc_files.write_lock_quickly()
    return Repo(str(folder))


@contextmanager
def locked_project() -> Iterator[DvcProject]:
    """Hold DVC's lock on the project of the working directory; repair its damaged files first.

    Raises :class:`UserError` if another DVC command holds the lock or the folder cannot be written.
    """
    if not os.access(".", os.W_OK):
        raise UserError(f"{Path.cwd()} may not be written; allow it, or copy the project to where it may")
    try:
        repo = _repository(Path.cwd())
        with repo.lock:
            for sentence in dvc_files.mend():
                print(f"note: {sentence}", file=sys.stderr)
            repo._reset()  # the files may have changed since the last time
            yield DvcProject(repo)
            repo._reset()
    except LockError:
        raise _locked() from None


def make_own(copy: Path) -> None:
    """Detach ``copy``, a copy of the present project, from it and from git; a cache in another folder stays shared."""
    cache = Config.from_cwd().get("cache", {}).get("dir")
    with Config(str(copy / ".dvc")).edit("local") as settings:
        settings.setdefault("core", {}).update(no_scm=True, site_cache_dir=str(copy / ".dvc/tmp/site"))
        if cache:
            settings.setdefault("cache", {})["dir"] = cache


def _locked() -> UserError:
    return UserError(
        "another DVC command holds this project's lock; wait for it and run the same command again, finished cells are "
        "kept"
    )


def reproduce(stages: list[str], *, alone: bool = False) -> None:
    """Run those of ``stages`` that have changed, after the stages that they depend on unless ``alone``.

    Raises :class:`UserError` if a stage fails; the stage itself prints the reason.
    """
    # In the main thread DVC would keep an interrupt from its stage.
    with ThreadPoolExecutor(1) as thread:
        try:
            thread.submit(_reproduce, stages, alone).result()
        except KeyboardInterrupt:
            stop_children()
            raise


def _reproduce(stages: list[str], alone: bool) -> None:
    try:
        _repository(Path.cwd()).reproduce(targets=stages, single_item=alone)
    except LockError:
        raise _locked() from None
    except DvcException as error:
        raise UserError(str(error)) from None


def stop_children() -> None:
    """End all descendants of this process: wait `END_S`, terminate those that still run, then kill the last."""
    children = psutil.Process().children(recursive=True)
    for end, seconds in ((None, END_S), (psutil.Process.terminate, 10 * END_S), (psutil.Process.kill, 10 * END_S)):
        for child in filter(_is_at_work, children):
            with suppress(psutil.NoSuchProcess):
                if end:
                    end(child)
        ends = time.monotonic() + seconds
        while any(map(_is_at_work, children)) and time.monotonic() < ends:
            time.sleep(0.05)


def _is_at_work(process: psutil.Process) -> bool:
    """Return whether ``process`` runs. Its exit status is left to DVC, which waits for its stage."""
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False
