"""Experiment trackers behind one small adapter each: TensorBoard, MLflow and Weights & Biases.

A tracker is told of runs by name: that one has begun and its settings, its logged rows under the names of history.csv,
and the numbers of its metrics.json at its end. It may be told of many runs at a time. Each writes where its own
environment variables say, or without them below ``scratch/tracking``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from altgrad.config import UserError
from altgrad.config.files import canonical_json

FOLDER = Path("scratch/tracking")
PROJECT = "altgrad"

Numbers = Mapping[str, float]


class Tracker(Protocol):
    """Who is told of runs. Telling again of a run that had begun continues it."""

    def begin(self, run: str, settings: Mapping[str, Any]) -> None:
        """Take in that ``run`` trains with ``settings``."""

    def log(self, run: str, step: int, numbers: Numbers) -> None:
        """Take in the numbers of a step."""

    def end(self, run: str, numbers: Numbers, outcome: str) -> None:
        """Take in what came of ``run``."""

    def close(self) -> None:
        """Write what has not been written."""


class TensorBoard:
    """Event files: ``tensorboard --logdir scratch/tracking/tensorboard``."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._open = lambda run: SummaryWriter(str(folder / run))
        self._writers: dict[str, Any] = {}

    def begin(self, run: str, settings: Mapping[str, Any]) -> None:
        self._writers[run] = self._open(run)
        self._writers[run].add_text("settings", f"```\n{canonical_json(dict(settings))}\n```")

    def log(self, run: str, step: int, numbers: Numbers) -> None:
        for name, value in numbers.items():
            self._writers[run].add_scalar(name, value, step)
        self._writers[run].flush()

    def end(self, run: str, numbers: Numbers, outcome: str) -> None:
        for name, value in numbers.items():
            self._writers[run].add_scalar(f"final/{name}", value)
        self._writers[run].add_text("outcome", outcome)
        self._writers.pop(run).close()

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()


class MLflow:
    """Runs of the experiment ``altgrad``, where ``MLFLOW_TRACKING_URI`` says or in an SQLite file."""

    def __init__(self, folder: Path) -> None:
        from mlflow.tracking import MlflowClient

        folder.mkdir(parents=True, exist_ok=True)
        here = f"sqlite:///{folder.resolve()}/mlflow.db"  # mlflow 3 refuses plain folders
        self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI", here))
        known = self._client.get_experiment_by_name(PROJECT)
        self._experiment = known.experiment_id if known else self._client.create_experiment(PROJECT)
        self._ids: dict[str, str] = {}

    def begin(self, run: str, settings: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        found = self._client.search_runs([self._experiment], f"attributes.run_name = '{run}'", max_results=1)
        if found:
            self._ids[run] = found[0].info.run_id
            return
        self._ids[run] = self._client.create_run(self._experiment, run_name=run).info.run_id
        params = [Param(name, str(value)[:500]) for name, value in flat(settings).items()]
        for start in range(0, len(params), 100):  # as many as a server takes at once
            self._client.log_batch(self._ids[run], params=params[start : start + 100])

    def log(self, run: str, step: int, numbers: Numbers) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self._client.log_batch(self._ids[run], [Metric(name, value, now, step) for name, value in numbers.items()])

    def end(self, run: str, numbers: Numbers, outcome: str) -> None:
        for name, value in numbers.items():
            self._client.log_metric(self._ids[run], f"final_{name}", value)
        self._client.set_tag(self._ids[run], "outcome", outcome)
        self._client.set_terminated(self._ids.pop(run), "FINISHED")

    def close(self) -> None:
        """Leave the runs that still train open."""


class WandB:
    """Runs of the project ``altgrad``; ``WANDB_MODE=offline`` keeps them on this machine."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._runs: dict[str, Any] = {}

    def begin(self, run: str, settings: Mapping[str, Any]) -> None:
        import wandb

        quiet = wandb.Settings(silent=True, console="off", x_disable_stats=True)
        self._runs[run] = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT), name=run, id=run, resume="allow", reinit="create_new",
            config=flat(settings), dir=str(self._folder), settings=quiet,
        )  # fmt: skip

    def log(self, run: str, step: int, numbers: Numbers) -> None:
        self._runs[run].log(dict(numbers), step=step)

    def end(self, run: str, numbers: Numbers, outcome: str) -> None:
        final = {f"final/{name}": value for name, value in numbers.items()}
        self._runs[run].summary.update(final | {"outcome": outcome})
        self._runs.pop(run).finish()

    def close(self) -> None:
        for run in self._runs.values():
            run.finish()


# By the names that `tracking:` takes, which are those of the packages that they need, and of what installs these.
TRACKERS: dict[str, Callable[[Path], Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}


def require(name: str) -> None:
    """Raise :class:`UserError` if the package of a tracker is not there."""
    if find_spec(name) is None:
        raise UserError(f"tracking: {name} is not installed; pip install 'altgrad[{name}]', or take it out of tracking")


def open_tracker(name: str, root: Path = Path()) -> Tracker:
    """Return the tracker that ``tracking:`` calls ``name``, for the project in ``root``."""
    require(name)
    return TRACKERS[name](root / FOLDER / name)


def flat(settings: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return nested settings as one level, with dots in the names; lists as JSON has them."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{above}{name}.")
        else:
            found[above + name] = value if isinstance(value, str | int | float | bool | None) else canonical_json(value)
    return found
