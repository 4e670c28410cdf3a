"""What each tracker's own reader finds are the numbers of history.csv, each once, however often one is interrupted.

Oracles: the readers of TensorBoard, MLflow and Weights & Biases (offline).
"""

from __future__ import annotations

import json
import struct
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from altgrad.common.files import read_json
from altgrad.config import UserError
from altgrad.config.tasks import HISTORY
from altgrad.execution import progress
from altgrad.watch import track
from altgrad.watch.track import Told, Tracking

Found = dict[str, dict[tuple[str, int], float]]  # by cell: a number by its name and step


class Written:
    """A tracker that keeps what it is told."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.ended: dict[str, tuple[dict[str, float], str]] = {}
        self.rows: list[tuple[str, int, dict[str, float]]] = []

    def begin(self, run: str, settings: Any) -> None:
        self.begun.append(run)

    def log(self, run: str, step: int, numbers: dict[str, float]) -> None:
        self.rows.append((run, step, numbers))

    def end(self, run: str, numbers: dict[str, float], outcome: str) -> None:
        assert run not in self.ended
        self.ended[run] = numbers, outcome

    def close(self) -> None:
        pass


@pytest.fixture
def game(play, monkeypatch):
    """Return the play of two cells; a run is named after its cell."""
    monkeypatch.setattr(track, "run_names", lambda cells, tokens: {cell.key: cell.key for cell in cells})
    monkeypatch.setattr(track.Cell, "model_validate", lambda settings: track.Cell.model_construct(**settings))
    return play(seeds=(0,))


def expected(game: Any, key: str) -> dict[tuple[str, int], float]:
    """Return every number of a cell's history."""
    rows = [dict(zip(HISTORY, row, strict=True)) for row in game.history(key)]
    return {
        (name, row["step"]): value for row in rows for name, value in row.items()
        if name != "step" and value is not None
    }  # fmt: skip


def test_each_row_is_told_once_though_runs_are_resumed_and_the_teller_is_restarted(game, tmp_path):
    tracker, kept = Written(), tmp_path / "told.json"
    for step in (10, 30, 50):
        for key in game.keys:
            game.train(key, step)
        told = Told(tracker, kept)
        Tracking(game.root, [told]).look()
        told.close()
        game.resume(game.keys[0], 20)
    for key in game.keys:
        game.finish(key)
    for _ in range(2):
        told = Told(tracker, kept)
        tracking_ = Tracking(game.root, [told])
        tracking_.look()
        tracking_.look()
        told.close()
    for key in game.keys:
        rows = [(step, numbers) for run, step, numbers in tracker.rows if run == key]
        assert [step for step, _ in rows] == [row[0] for row in game.history(key)]
        found = {(name, step): value for step, numbers in rows for name, value in numbers.items()}
        assert found == expected(game, key)
        numbers, outcome = tracker.ended[key]
        metrics = read_json(game.root / "data/runs" / key / "metrics.json")
        assert outcome == "completed" and numbers["val_loss"] == metrics["val_loss"]


def tell(game: Any, name: str) -> Path:
    """Tell a real tracker of two cells, in two halves by two tellers; return the folder that it wrote to."""
    for step in (30, 60):
        for key in game.keys:
            game.train(key, step)
        if step == 60:
            for key in game.keys:
                game.finish(key)
        told = Told(track.open_tracker(name, game.root), game.root / "told.json")
        Tracking(game.root, [told]).look()
        told.close()
    return game.root / track.FOLDER / name


def assert_same(found: dict[tuple[str, int], float], game: Any, key: str, rel: float = 0.0) -> None:
    wanted = expected(game, key)
    assert {place: found[place] for place in wanted} == pytest.approx(wanted, rel=rel, abs=0.0)
    final = {name for name, _ in found if name.startswith(("final/", "final_"))}
    assert {name[6:] for name in final} >= {"val_loss", "val_loss_best", "outcome_step"} - (
        {"outcome_step"} if read_json(game.root / "data/runs" / key / "metrics.json")["outcome_step"] is None else set()
    )


def test_tensorboard_reads_back_every_number(game):
    pytest.importorskip("tensorboard")
    folder = tell(game, "tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for key in game.keys:
        events = EventAccumulator(str(folder / key), size_guidance={"scalars": 0})
        events.Reload()
        found = {
            (name, event.step): event.value
            for name in events.Tags()["scalars"] for event in events.Scalars(name)
        }  # fmt: skip
        assert_same(found, game, key, rel=1e-6)  # it keeps float32
        assert all(len(events.Scalars(name)) == len({e.step for e in events.Scalars(name)}) for name in HISTORY[1:])


def test_mlflow_reads_back_every_number(game, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder = tell(game, "mlflow")
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    runs = client.search_runs([client.get_experiment_by_name("altgrad").experiment_id])
    assert sorted(run.info.run_name for run in runs) == sorted(game.keys)
    for run in runs:
        key = run.info.run_name
        found = {
            (name, metric.step): metric.value
            for name in run.data.metrics for metric in client.get_metric_history(run.info.run_id, name)
        }  # fmt: skip
        assert_same(found, game, key)
        assert run.info.status == "FINISHED" and run.data.tags["outcome"] == "completed"
        assert run.data.params["train.steps"] == "60"


def log_records(content: bytes) -> Iterator[bytes]:
    """Return the records of a ``.wandb`` file: LevelDB's log format after a header of 7 bytes.

    Blocks of 32 KiB hold pieces: checksum (4 bytes), length (2), kind (1: whole, 2 to 4: first, middle, last), data.
    """
    place, whole = 7, b""
    while place + 7 <= len(content):
        if place % 32768 > 32768 - 7:
            place += -place % 32768  # a tail too short for a piece
            continue
        length, kind = struct.unpack_from("<HB", content, place + 4)
        whole += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield whole
            whole = b""


def test_wandb_keeps_every_number_offline(game, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = tell(game, "wandb")
    from wandb.proto import wandb_internal_pb2

    found: Found = defaultdict(dict)
    for path in folder.rglob("*.wandb"):
        rows, key = {}, ""
        for data in log_records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            key = record.run.display_name or key
            row = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            rows |= {(name, row["_step"]): value for name, value in row.items()}
            for item in record.summary.update:  # which has each number's last value too
                rows["/".join(item.nested_key) or item.key, -1] = json.loads(item.value_json)
        found[key] |= rows
    assert set(found) == set(game.keys)
    for key in game.keys:
        assert_same(found[key], game, key)


def test_every_tracker_of_the_settings_has_an_adapter_and_an_extra():
    import tomllib
    from typing import get_args

    from altgrad.config.schema import Tracker

    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert set(get_args(Tracker)) == set(track.TRACKERS) <= set(extras["optional-dependencies"])


def test_cells_do_not_run_where_a_tracker_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(track, "find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=r"wandb is not installed; pip install 'altgrad\[wandb\]', or take it out"
    ) as error:
        track.require("wandb")
    refuses = f"import sys; sys.exit({f'error: {error.value}'!r})"
    monkeypatch.setattr(progress, "TRACK", [sys.executable, "-c", refuses])
    with pytest.raises(UserError, match="^tracking: wandb is not installed"), progress.tracked(["wandb"]):
        pytest.fail("cells ran")


def test_cells_run_on_when_a_tracker_fails_and_the_user_hears_of_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code = "import sys; sys.exit(0 if '--check' in sys.argv else 'the network is away')"
    monkeypatch.setattr(progress, "TRACK", [sys.executable, "-c", code])
    with progress.tracked(["wandb"]):
        while not progress.TRACK_LOG.read_text():
            time.sleep(0.05)
    assert "trackers were not told of everything" in capsys.readouterr().err
    assert progress.TRACK_LOG.read_text() == "the network is away\n"
