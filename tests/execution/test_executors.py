"""Laws of every executor, and the one from the package's README put to work on the real pipeline.

Oracle: stages of one's own, which do what the key says and write down that they did.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.execution.conftest import example
from tests.pipeline.conftest import CELLS, Project, environment, results, stages_of

EXECUTORS = {
    "local": "from altgrad.execution import local\nlocal.LIBRARIES = []\nexecutor = local.LocalPool(2)\n",
    "ray": """
if __name__ == "__main__":
    import atexit, os, ray
    from ray.cluster_utils import Cluster
    from altgrad.execution.on_ray import RayCluster
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    atexit.register(lambda: (ray.shutdown(), cluster.shutdown()))
    os.environ["RAY_ADDRESS"] = cluster.address
    executor = RayCluster()
""",
    "the README's": example() + "\nexecutor = OneByOne()\n",
}

# Stands in for stages/train.py. A cell that waits is at work until a signal comes, and then takes its time; without
# one it ends well after a minute, which the laws take for what it is.
STAGE = """
import signal, sys, time
from pathlib import Path

key, folder = sys.argv[1], Path("FOLDER")  # of the laws, wherever the stage is run
received = []
for signum in (signal.SIGINT, signal.SIGTERM):
    signal.signal(signum, lambda signum, frame: received.append(signum))
(folder / f"started-{key}").touch()
print("this is", key, flush=True)
print("and this its last word", file=sys.stderr, flush=True)
until = time.monotonic() + 60
while key.startswith("waits") and time.monotonic() < until:
    time.sleep(0.05)
    if received:
        time.sleep(1)
        (folder / f"stopped-{key}").write_text(str(received))
        sys.exit(128 + received[0])
sys.exit(3 if key.startswith("fails") else 0)
"""

# Runs tasks to their end, then cancels others in the middle, and prints what was seen of both.
DRIVER = """
import json, signal, time
from pathlib import Path

from altgrad.execution import LOGS, Task

def run_to_the_end(cancel_after):
    outcomes, seen = [], set()
    while True:
        status = executor.poll()
        seen |= {task.key for task in status.running}
        outcomes += [[outcome.task.key, outcome.status] for outcome in status.ended]
        if cancel_after and Path(f"started-{cancel_after}").exists():
            time.sleep(1)  # the stage sets its handlers first, but a slow machine may be slow
            executor.cancel(signal.SIGTERM)
            cancel_after, report["cancelled"] = None, True
        if not status.running and (report["cancelled"] or len(outcomes) == len(tasks)):
            return {"outcomes": outcomes, "seen": sorted(seen)}
        time.sleep(0.05)

if __name__ == "__main__":  # an executor may import this module in its processes
    LOGS.mkdir(parents=True)
    report = {"cancelled": False}
    executor.poll()  # there need not be anything to do
    tasks = [Task("train", key, (), 1) for key in ("good-1", "fails-1", "good-2", "good-3")]
    executor.submit(tasks)
    report["all"] = run_to_the_end(None)
    report["logs"] = {task.key: task.log.read_text() for task in tasks}
    executor.submit([Task("train", key, (), 1) for key in ("waits-1", "waits-2", "waits-3", "good-4")])
    report["stopped"] = run_to_the_end("waits-1")
    executor.submit([Task("train", key, (), 1) for key in ("waits-alone", "waits-5")])
    while not all(Path(f"started-{key}").exists() for key in ("waits-alone",)):
        executor.poll()
        time.sleep(0.05)
    time.sleep(1)
    executor.cancel(signal.SIGTERM, ["train@waits-alone"])
    alone = []
    while not alone:
        alone = [[outcome.task.key, outcome.status] for outcome in executor.poll().ended]
        time.sleep(0.05)
    report["alone"] = alone
    while not Path("started-waits-5").exists():
        executor.poll()
        time.sleep(0.05)
    time.sleep(1)
    executor.cancel(signal.SIGTERM)
    while executor.poll().running:
        time.sleep(0.05)
    report["afterwards"] = [len(executor.poll().running), len(executor.poll().ended)]
    print(json.dumps(report))
"""


@pytest.fixture(scope="module", params=[
    name if name != "ray" else pytest.param(name, marks=pytest.mark.long) for name in EXECUTORS
])  # fmt: skip
def reported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """Return what happened to eight tasks in a folder of their own, and the folder."""
    folder = tmp_path_factory.mktemp("executor")
    (folder / "stages").mkdir()
    (folder / "stages/__init__.py").touch()
    (folder / "stages/train.py").write_text(STAGE.replace("FOLDER", str(folder)))
    (folder / "driver.py").write_text(EXECUTORS[request.param] + DRIVER)
    done = subprocess.run(
        [sys.executable, "driver.py"], cwd=folder, env=environment(), capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), folder


def test_every_task_runs_and_is_told_once_with_its_exit_status(reported):
    report, folder = reported
    assert sorted(report["all"]["outcomes"]) == [["fails-1", 3], ["good-1", 0], ["good-2", 0], ["good-3", 0]]
    assert all((folder / f"started-{key}").exists() for key, _ in report["all"]["outcomes"])


def test_what_a_task_prints_is_in_its_log_and_nobody_waits_for_what_runs(reported):
    """A poll that waited for a task would wait for ever: this one ends when it is cancelled, after a poll."""
    assert reported[0]["logs"]["fails-1"] == "this is fails-1\nand this its last word\n"
    assert "waits-1" in reported[0]["stopped"]["seen"]


def test_cancelled_tasks_get_the_signal_and_are_left_to_end(reported):
    report, folder = reported
    started = {path.name.partition("-")[2] for path in folder.glob("started-waits-*")}
    stopped = {path.name.partition("-")[2]: path.read_text() for path in folder.glob("stopped-*")}
    assert started and stopped == dict.fromkeys(started, str([int(signal.SIGTERM)]))
    outcomes = dict(report["stopped"]["outcomes"])
    first = started - {"waits-alone", "waits-5"}
    assert {key: outcomes[key] for key in first} == dict.fromkeys(first, 128 + signal.SIGTERM)
    assert all(outcomes[key] < 0 for key in set(outcomes) - first)  # whose process had not come to the stage yet


def test_one_task_can_be_told_to_stop_and_the_others_go_on(reported):
    """One that runs beside it, or waits behind it."""
    report, folder = reported
    assert report["alone"] == [["waits-alone", 128 + signal.SIGTERM]]
    assert (folder / "started-waits-5").exists()


def test_nothing_starts_after_cancelling(reported):
    report, folder = reported
    assert not (folder / "started-good-4").exists() and not (folder / "started-waits-3").exists()
    assert report["afterwards"] == [0, 0]


WITH_THE_EXAMPLE = """
from altgrad.common.errors import run_stage
from altgrad.execution.cells import run_cells

class Recording(OneByOne):
    def submit(self, tasks):
        print(*(task.name for task in tasks), flush=True)
        super().submit(tasks)

run_stage(lambda _: run_cells(Recording()))
"""


@pytest.mark.long
def test_an_executor_written_as_the_readme_says_trains_cells_that_dvc_then_has(planned, project: Project, tmp_path):
    other = Project.at(shutil.copytree(planned, tmp_path / "other", symlinks=True))
    (other.folder / "example.py").write_text(example() + WITH_THE_EXAMPLE)
    done = other.run(sys.executable, "example.py")
    given = {word for word in done.stdout.split() if "@" in word}
    assert given == stages_of(*CELLS)
    assert results(other) == results(project)
    assert other.repro() == {"report"}
