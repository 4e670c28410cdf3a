"""Send the cells of a study to the experiment trackers that `tracking:` in params.yaml names.

Each tracker gets each row once: its file has the last step sent of each run, so that a resumed or earlier run
continues. Training does not wait for a tracker, and does not notice if one fails.

TensorBoard, MLflow and Weights & Biases have one small adapter each. README.md says what they get and where they write.
"""

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from altgrad.common.console import handled
from altgrad.common.errors import UserError, run_stage
from altgrad.common.files import canonical_json, write_json
from altgrad.config import Cell, load_params
from altgrad.config.cell import run_names
from altgrad.watch import Change, Project

FOLDER = Path("scratch/tracking")
PROJECT = "altgrad"

Numbers = Mapping[str, float]
EVERY = 2.0  # seconds between two looks
ENDED = "ended"


class Tracker(Protocol):
    """An adapter to a tracker. Several runs may be open at a time, and ``begin`` continues a run that it knows."""

    def begin(self, run: str, settings: Mapping[str, Any]) -> None:
        """Begin or continue ``run``, which trains with ``settings``."""

    def log(self, run: str, step: int, numbers: Numbers) -> None:
        """Record ``numbers``, by name, for ``step`` of ``run``."""

    def end(self, run: str, numbers: Numbers, outcome: str) -> None:
        """Record the final numbers and the ``outcome`` of ``run``, and end it."""

    def close(self) -> None:
        """Write everything to disk."""


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
    """Runs of the experiment ``altgrad`` at ``MLFLOW_TRACKING_URI``, or by default in an SQLite file."""

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


# By the names that `tracking:` takes, which are also the names of the packages and of the extras that install them.
TRACKERS: dict[str, Callable[[Path], Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}


def require(name: str) -> None:
    """Raise :class:`UserError` if the package of a tracker is not installed."""
    if find_spec(name) is None:
        raise UserError(f"tracking: {name} is not installed; pip install 'altgrad[{name}]', or take it out of tracking")


def open_tracker(name: str, root: Path = Path()) -> Tracker:
    """Return the tracker called ``name`` in ``tracking:``, for the project in ``root``."""
    require(name)
    return TRACKERS[name](root / FOLDER / name)


def flat(settings: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return nested settings as one flat dict, with names such as ``train.batch`` and lists as JSON."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{above}{name}.")
        else:
            found[above + name] = value if isinstance(value, str | int | float | bool | None) else canonical_json(value)
    return found


class Told:
    """Sends runs to one tracker, and keeps the last step sent of each run in the file ``path``."""

    def __init__(self, tracker: Tracker, path: Path) -> None:
        self._tracker, self._path = tracker, path
        self._steps: dict[str, int | str] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        self._open: set[str] = set()

    def tell(self, run: str, change: Change) -> None:
        """Send the rows of ``change`` that the tracker lacks and, once the cell has trained, the end of the run."""
        last, cell = self._steps.get(run, -1), change.cell
        if isinstance(last, str):  # `ENDED`
            return
        rows = [row for row in change.rows if row.step > last]
        if (rows or cell.is_over) and run not in self._open:
            self._tracker.begin(run, cell.settings)
            self._open.add(run)
        for row in rows:
            measured = {name: value for name, value in row.values.items() if value is not None}
            self._tracker.log(run, row.step, measured)
            self._steps[run] = row.step
        if cell.is_over:
            numbers = {name: value for name, value in cell.metrics.items() if type(value) in (int, float)}
            self._tracker.end(run, numbers, cell.outcome)
            self._open.remove(run)
            self._steps[run] = ENDED

    def close(self) -> None:
        self._tracker.close()
        self.keep()

    def keep(self) -> None:
        write_json(self._path, self._steps)


class Tracking:
    """Sends the cells of the project in ``root`` to trackers."""

    def __init__(self, root: Path, told: Sequence[Told]) -> None:
        self._root, self._told = root, told
        self._project = Project(root)
        self._runs: dict[str, str] = {}  # by cell

    def look(self) -> None:
        """Send each tracker the changes since the last look; do nothing if no grid has been planned yet."""
        if not self._project.is_planned:
            return
        changes = self._project.look()
        if self._project.restarted:
            self._runs = {}
        if changes and self._project.recorded:
            self._runs = {key: key for key in self._project.cells}
        elif changes and not self._runs:  # not earlier: the tokens may be missing until a cell trains
            cells = (Cell.model_validate(cell.settings) for cell in self._project.cells.values())
            self._runs = run_names(cells, self._root / "data/tokens")
        for one in self._told:
            for change in changes:
                one.tell(self._runs[change.cell.key], change)
            one.keep()


def main(arguments: list[str]) -> None:
    """Send the trackers everything that they lack; with ``--follow``, also what comes later."""
    parser = argparse.ArgumentParser(prog="python -m altgrad.watch.track", description=__doc__.split("\n")[0])
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--follow", action="store_true", help="and of what cells do from now on, until interrupted")
    group.add_argument("--until-closed", action="store_true", help="the same, until standard input is closed")
    group.add_argument("--check", action="store_true", help="tell nobody, but fail if a tracker is not installed")
    parser.add_argument("--tracker", action="append", choices=TRACKERS, help="instead of those in params.yaml")
    options = parser.parse_args(arguments)
    names = options.tracker or load_params().tracking
    if not names:
        raise UserError("tracking in params.yaml names no tracker; name one, such as tracking: [tensorboard]")
    for name in names:
        require(name)
    if options.check:
        return
    over = threading.Event()
    if options.until_closed:

        def wait_for_end_of_input() -> None:
            sys.stdin.read()
            over.set()

        threading.Thread(target=wait_for_end_of_input, daemon=True).start()
    with ExitStack() as stack:
        stack.enter_context(handled(lambda signum, frame: over.set()))
        told = [stack.enter_context(closing(Told(open_tracker(n), FOLDER / f"{n}.json"))) for n in dict.fromkeys(names)]
        tracking = Tracking(Path(), told)
        while True:
            # Asked before the look, so that the last look sees the end of the cells.
            ending = over.is_set() or not (options.follow or options.until_closed)
            tracking.look()
            if ending:
                return
            over.wait(EVERY)


if __name__ == "__main__":
    run_stage(main)
