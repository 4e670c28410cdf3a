"""The only file that uses DVC's inner modules, which DVC does not promise to keep.

DVC's commands know no "take this from the run cache if it is there, else only say so" and no "these outputs are
made, put them into the cache and all of them into dvc.lock at once"; its Python objects do. What is used of them is
listed in ``MEMBERS``. Whatever the installed DVC lacks is said in one sentence before anything is touched.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import dvc

from altgrad.common.errors import UserError
from altgrad.execution import dvc_files
from altgrad.execution.children import stop_children

# With these the tests of this file passed, and a grid was trained and handed over. README.md says how to try another.
TRIED_VERSIONS = ("3.67.0", "3.67.1")

# Members of the objects that DVC makes, by the name of their class here: for a method, the arguments that it is given;
# None for what is only read.
MEMBERS: dict[str, dict[str, tuple[str, ...] | None]] = {
    "Repo": {"index": None, "lock": None, "stage_cache": None, "reproduce": ("targets", "single_item")},
    "Index": {"stages": None},
    "StageCache": {"restore": ("stage",)},
    "Stage": {
        "name": None, "deps": None, "outs": None, "dvcfile": None,
        "changed": (), "remove_outs": (), "save_deps": (), "save": (), "commit": (),
    },
    "Output": {"hash_info": None, "fs_path": None, "use_cache": None, "cache": None},
    "Dependency": {"hash_info": None, "fs_path": None, "_build": None},
    "ParamsDependency": {"params": None, "read_params": ("flatten",)},
    "DvcFile": {"dump_stages": ("stages", "update_pipeline")},
}  # fmt: skip


def changed_api(what: str) -> UserError:
    """Return the error for an installed DVC that is not as this file needs it; ``what`` says in what."""
    tried = " or ".join(TRIED_VERSIONS)
    return UserError(
        f"DVC {dvc.__version__} is not as altgrad/execution/dvc_api.py needs it: {what}; "
        f"it was tried with DVC {tried}: install that, or run `dvc repro`, which does the same one stage at a time"
    )


try:
    from dvc.config import Config
    from dvc.dependency import ParamsDependency
    from dvc.exceptions import DvcException
    from dvc.lock import LockError
    from dvc.repo import Repo
    from dvc.stage import Stage
    from dvc.stage.cache import RunCacheNotFoundError
except ImportError as error:
    raise changed_api(str(error).partition(" (")[0]) from None  # without the path of the module


def check_members(found: object, class_name: str) -> None:
    """Raise :class:`UserError` unless ``found`` has the members that ``MEMBERS`` lists under ``class_name``.

    No property is evaluated: some of them read every file of a project.
    """
    for name, arguments in MEMBERS[class_name].items():
        missing = object()
        if inspect.getattr_static(found, name, missing) is missing:
            raise changed_api(f"{class_name}.{name} is missing")
        if arguments is None:
            continue
        try:
            inspect.signature(getattr(found, name)).bind(**dict.fromkeys(arguments))
        except TypeError as error:
            raise changed_api(f"{class_name}.{name} cannot be given ({', '.join(arguments)}): {error}") from None


class CellStage:
    """A stage as DVC knows it, mostly of one cell."""

    def __init__(self, stage: Stage, repo: Repo) -> None:
        check_members(stage, "Stage")
        check_members(stage.dvcfile, "DvcFile")
        for out in stage.outs:
            check_members(out, "Output")
        self._stage, self._repo = stage, repo

    @property
    def name(self) -> str:
        """DVC's name, such as ``train@E4M3-adamw-0-1``."""
        return self._stage.name

    @property
    def key(self) -> str:
        """The cell, such as ``E4M3-adamw-0-1``."""
        return self.name.partition("@")[2]

    def has_changed(self) -> bool:
        return self._stage.changed()

    def remove_outputs(self) -> None:
        self._stage.remove_outs()

    def restore(self) -> bool:
        """Take its outputs from the run cache and save it; return whether they were there, undamaged."""
        self.drop_damaged()  # what dvc.lock names
        try:
            self._repo.stage_cache.restore(self._stage)
        except RunCacheNotFoundError:
            return False
        if self.drop_damaged():  # what the run cache names
            self.remove_outputs()
            return False
        self.save()
        return True

    def drop_damaged(self) -> bool:
        """Remove from the cache what is damaged of its outputs there, and say so; return whether anything was."""
        kept = [(out.cache, out.hash_info) for out in self._stage.outs if out.hash_info and out.use_cache]
        bad = [path for cache, oid in kept for path in dvc_files.damaged(Path(cache.path), oid.value)]
        for path in bad:
            path.unlink(missing_ok=True)
        if bad:
            print(f"note: the cache's copy of what {self.name} made was damaged; it is made again", file=sys.stderr)
        return bool(bad)

    def is_there(self) -> bool:
        return all(Path(out.fs_path).exists() for out in self._stage.outs)

    def hash_dependencies(self) -> tuple[str, ...]:
        """Return hashes of what it depends on, as that is now."""
        self._stage.save_deps()
        return tuple(str(dep.hash_info) for dep in self._stage.deps)

    def save(self) -> None:
        """Put its outputs into the cache; dvc.lock learns of them from :meth:`Project.write_lock_file`.

        Raises :class:`UserError` when DVC does not take them, for instance because one is missing.
        """
        try:
            self._stage.save()
            self._stage.commit()
        except DvcException as error:
            raise UserError(str(error)) from error


class Project:
    """The project of the working directory while this process holds DVC's lock on it."""

    def __init__(self, repo: Repo) -> None:
        check_members(repo.index, "Index")
        check_members(repo.stage_cache, "StageCache")
        self._repo = repo
        self._built: dict[tuple[str, bool], Any] = {}
        self._read: dict[tuple[str, tuple[str, ...], bool], dict[str, Any]] = {}

    @cached_property
    def _stages(self) -> list[Stage]:
        """All stages. What several of them depend on, as all cells do on the code and on params.yaml, is read once.

        DVC would do it for each of them anew, and several times: three quarters of what it takes to look at a grid.
        """
        stages = list(self._repo.index.stages)
        shared = Counter(dep.fs_path for stage in stages for dep in stage.deps)
        for dep in (dep for stage in stages for dep in stage.deps):
            check_members(dep, "Dependency")
            if isinstance(dep, ParamsDependency):
                check_members(dep, "ParamsDependency")
                dep.read_params = partial(self._read_once, dep.read_params, dep.fs_path, tuple(dep.params))
            elif shared[dep.fs_path] > 1:
                dep._build = partial(self._once, dep._build, dep.fs_path)
        return stages

    def _once(self, build: Callable[..., Any], path: str, *args: Any, dry_run: bool = False, **kwargs: Any) -> Any:
        """Do for the first dependency that has ``path`` what DVC would do for each, and tell the others."""
        if (path, dry_run) not in self._built:
            self._built[path, dry_run] = build(*args, dry_run=dry_run, **kwargs)
        return self._built[path, dry_run]

    def _read_once(
        self, read: Callable[..., dict[str, Any]], path: str, names: tuple[str, ...], *, flatten: bool = True
    ) -> dict[str, Any]:
        """Read for the first stage that depends on ``names`` of a parameter file, and tell the others."""
        if (path, names, flatten) not in self._read:
            self._read[path, names, flatten] = read(flatten=flatten)
        return dict(self._read[path, names, flatten])

    def cells_of(self, stage: str) -> list[CellStage]:
        """Return the stages of dvc.yaml's matrix ``stage``, one for each cell, in its order."""
        stages = [found for found in self._stages if getattr(found, "name", "").startswith(f"{stage}@")]
        return [CellStage(found, self._repo) for found in stages]

    def others(self) -> list[CellStage]:
        """Return the stages that are no cell's: those of dvc.yaml without a matrix, and any other of the project."""
        stages = [found for found in self._stages if "@" not in (getattr(found, "name", None) or "")]
        return [CellStage(found, self._repo) for found in stages]

    def forget_others(self) -> None:
        """Remove from dvc.lock what it has of stages that are none of the project's any more."""
        dvc_files.prune({name for stage in self._stages if (name := getattr(stage, "name", None))})

    def write_lock_file(self, saved: list[CellStage]) -> None:
        """Write what is in the cache of stages that were saved into dvc.lock, all of them at once."""
        stages = [cell._stage for cell in saved]
        if stages:
            stages[0].dvcfile.dump_stages(stages, update_pipeline=False)


@contextmanager
def locked_project() -> Iterator[Project]:
    """Hold DVC's lock on the project of the working directory, whose files are mended first.

    Raises :class:`UserError` when another DVC command holds it.
    """
    logging.getLogger("dvc").setLevel(logging.WARNING)  # it would say of every stage that it is cached
    dvc_files.keep_whole()
    if not os.access(".", os.W_OK):
        raise UserError(f"{Path.cwd()} may not be written; allow it, or copy the project to where it may")
    try:
        with Repo() as repo:
            check_members(repo, "Repo")
            with repo.lock:
                for sentence in dvc_files.mend():
                    print(f"note: {sentence}", file=sys.stderr)
                yield Project(repo)
                dvc_files.keep_copy()
    except LockError:
        raise _locked() from None


def make_own(copy: Path) -> None:
    """Make a copy of the working directory's project its own, outside git; a cache that lies elsewhere is shared."""
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
    """Run ``stages`` and, but ``alone``, what they depend on, as far as they have changed.

    Raises :class:`UserError` when one fails, which has said why itself.
    """
    logging.getLogger("dvc").setLevel(logging.WARNING)
    dvc_files.keep_whole()
    # In the main thread DVC would let nobody interrupt a stage.
    with ThreadPoolExecutor(1) as thread:
        try:
            thread.submit(_reproduce, stages, alone).result()
        except KeyboardInterrupt:
            stop_children()
            raise


def _reproduce(stages: list[str], alone: bool) -> None:
    try:
        with Repo() as repo:
            check_members(repo, "Repo")
            repo.reproduce(targets=stages, single_item=alone)
        dvc_files.keep_copy()
    except LockError:
        raise _locked() from None
    except DvcException as error:
        raise UserError(str(error)) from None
