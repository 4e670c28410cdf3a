"""A cluster on this machine: cells come out as they do without it, whatever is lost on the way.

Oracle: the same pipeline run locally. Nodes are Ray's own, several of them on one host.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from altgrad.common.files import read_json
from altgrad.model.hardware import SWITCH, multiplies_bf16
from tests.pipeline.conftest import Project, environment, results

cluster_utils = pytest.importorskip("ray.cluster_utils")
CELLS = ("bf16-adamw-0-1", "E4M3-adamw-0-1")
LONG = "E4M3-adamw-0-1"

RUN = """
from altgrad.common.errors import run_stage
from altgrad.execution.cells import run_cells
from altgrad.execution.on_ray import RayCluster

if __name__ == "__main__":
    run_stage(lambda _: run_cells(RayCluster(keep_every=0)) and None)
"""


class Cluster:
    """Nodes of one core each, and the environment in which they are found."""

    def __init__(self, nodes: int) -> None:
        self._cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        self.nodes = [self.add() for _ in range(nodes)]
        self.environment = environment() | {"RAY_ADDRESS": self._cluster.address}

    def add(self, **variables: str) -> object:
        return self._cluster.add_node(num_cpus=1, env_vars=variables)

    def remove(self, node: object) -> None:
        self._cluster.remove_node(node, allow_graceful=False)

    def at_work(self) -> dict[int, int]:
        """Return the process that trains, if there is one, on each node, by the node's process."""
        found = {}
        for process in Path("/proc").iterdir():
            command = _command(process)
            if "multiprocessing.forkserver" in command and "multiprocessing.forkserver" in _command(_parent(process)):
                ancestors = [process]
                while ancestors[-1].name not in ("0", "1"):
                    ancestors.append(_parent(ancestors[-1]))
                raylet = next((a for a in ancestors if "raylet/raylet" in _command(a)), None)
                if raylet is not None:
                    found[int(raylet.name)] = int(process.name)
        return found

    def busy(self) -> object:
        """Return the node that trains."""
        (pid,) = self.at_work()
        return next(node for node in self.nodes if pid in {p.process.pid for p in node.all_processes["raylet"]})

    def close(self) -> None:
        self._cluster.shutdown()


def _command(process: Path) -> str:
    try:
        return (process / "cmdline").read_text().replace("\0", " ") if process.name.isdigit() else ""
    except OSError:
        return ""


def _parent(process: Path) -> Path:
    try:
        return Path("/proc") / (process / "stat").read_text().rpartition(")")[2].split()[1]
    except OSError:
        return Path("/proc/0")


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    made = Cluster(request.param)
    yield made
    made.close()


def long_project(folder: Path) -> Project:
    """Return a project of one cell that trains for a while, uncompiled, with a checkpoint every few steps."""
    project = Project(folder)
    settings = {
        "grid.formats": ["E4M3"], "grid.baseline": "E4M3", "train.steps": 800, "train.eval_every": 200,
        "train.log_every": 20, "train.checkpoint_every": 20, "train.compile": "off", "monitor.every": 400,
    }  # fmt: skip
    for path, value in settings.items():
        project.set(path, value)
    (project.folder / "run.py").write_text(RUN)
    return project


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return what the long project's cell comes to without a cluster."""
    project = long_project(tmp_path_factory.mktemp("long") / "project")
    project.run(sys.executable, "-m", "altgrad.execution")
    return results(project)


def started(project: Project, cluster: Cluster, *command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *(command or ["run.py"])], cwd=project.folder, env=cluster.environment, text=True,
        start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def until(happened: Callable[[], object], running: subprocess.Popen[str], seconds: float = 120) -> None:
    ends = time.monotonic() + seconds
    while not happened():
        assert running.poll() is None and time.monotonic() < ends, running.communicate()[0]
        time.sleep(0.1)


def checkpoint_of(project: Project) -> Callable[[], list[Path]]:
    """Return what tells whether a checkpoint of the cell has come home."""
    return lambda: sorted((project.folder / "scratch").glob(f"{LONG}-*/step-*.json"))


def ended(project: Project, running: subprocess.Popen[str]) -> str:
    said, _ = running.communicate(timeout=180)
    assert running.returncode == 0, said
    return said


def resumed(project: Project) -> int:
    return read_json(project.folder / f"data/runs/{LONG}/timing.json")["resumed"]


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [2], indirect=True)
def test_a_cluster_gives_what_one_machine_does_and_dvc_has_it(project, tmp_path, cluster):
    other = Project(tmp_path / "other")
    said = ended(other, started(other, cluster, "-m", "altgrad.execution", "--engine", "ray"))
    assert results(other) == results(project)
    assert other.repro() == set()
    assert "1 at a time" in said
    before = (other.folder / "dvc.lock").read_bytes()
    ended(other, started(other, cluster, "-m", "altgrad.execution", "--engine", "ray"))
    assert (other.folder / "dvc.lock").read_bytes() == before
    classes = {read_json(path)["machine_class"] for path in other.folder.glob("data/runs/*/timing.json")}
    assert len(classes) == 1


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [1], indirect=True)
def test_cells_of_a_seed_run_on_one_class_of_machine_where_there_are_two(tmp_path, cluster):
    """The other node computes products as a CPU of the other kind does, and so gives other bits."""
    cluster.add(**{SWITCH: "off" if multiplies_bf16() else "on"})
    project = Project(tmp_path / "project")
    project.set("grid.seeds", [0, 1])
    said = ended(project, started(project, cluster, "-m", "altgrad.execution", "--engine", "ray"))
    classes: dict[int, set[str]] = {0: set(), 1: set()}
    for path in project.folder.glob("data/runs/*/timing.json"):
        classes[int(path.parent.name.split("-")[2])].add(read_json(path)["machine_class"])
    assert [len(found) for found in classes.values()] == [1, 1] and classes[0] != classes[1]
    assert all(name in said for name in set.union(*classes.values()))
    project.repro()
    condition = "Cells of a seed trained on one class of machine | **yes**"
    assert condition in (project.folder / "reports/REPORT.md").read_text()


def node_is_lost(project: Project, running: subprocess.Popen[str], cluster: Cluster) -> None:
    cluster.remove(cluster.busy())
    assert "is lost" in ended(project, running)
    assert not checkpoint_of(project)()


def process_is_killed(project: Project, running: subprocess.Popen[str], cluster: Cluster) -> None:
    for process in cluster.at_work().values():
        os.kill(process, signal.SIGKILL)
    ended(project, running)


def driver_is_killed(project: Project, running: subprocess.Popen[str], cluster: Cluster) -> None:
    os.killpg(running.pid, signal.SIGKILL)
    running.wait()
    ends = time.monotonic() + 60
    while cluster.at_work():  # what was training is told to stop
        assert time.monotonic() < ends
        time.sleep(0.2)
    ended(project, started(project, cluster))


def interrupted_and_one_machine_goes_on(project: Project, running: subprocess.Popen[str], cluster: Cluster) -> None:
    os.kill(running.pid, signal.SIGINT)
    said, _ = running.communicate(timeout=60)
    assert running.returncode == 130 and "run the same command to resume" in said
    project.run(sys.executable, "-m", "altgrad.execution")


@pytest.mark.slow
@pytest.mark.parametrize(("cluster", "happens"), [
    (2, node_is_lost), (1, process_is_killed), (1, driver_is_killed), (1, interrupted_and_one_machine_goes_on),
], indirect=["cluster"])  # fmt: skip
def test_a_cell_goes_on_from_its_checkpoint_with_the_same_bits(undisturbed, tmp_path, cluster, happens):
    project = long_project(tmp_path / "project")
    running = started(project, cluster)
    until(checkpoint_of(project), running)
    happens(project, running, cluster)
    assert results(project) == undisturbed and resumed(project) >= 1


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [1], indirect=True)
def test_a_machine_that_joins_takes_its_share(project, tmp_path, cluster):
    """There is none at first that could do anything."""
    cluster.remove(cluster.nodes[0])
    other = Project(tmp_path / "other")
    (other.folder / "run.py").write_text(RUN)
    running = started(other, cluster)
    time.sleep(10)
    cluster.add()
    ended(other, running)
    assert results(other) == results(project)
    assert other.repro() == {"report"}


STAGE = """
import sys
from pathlib import Path
key, folder = sys.argv[1], Path("FOLDER")
if key.startswith("full"):
    try:
        (folder / key).mkdir()
    except FileExistsError:
        sys.exit(0)
    sys.exit("error: the disk is full; free some space")
if key.startswith("raises"):
    with open(folder / "raised", "a") as file:
        file.write("x")
    raise RuntimeError("a bug")
"""
TELL = """
import json, time
from altgrad.execution import LOGS, Task
from altgrad.execution.on_ray import RayCluster

if __name__ == "__main__":
    LOGS.mkdir(parents=True)
    executor, found = RayCluster(), {}
    tasks = [Task("train", key, (), 1) for key in ("full-1", "raises-1", "good-1", "good-2")]
    executor.submit(tasks)
    while len(found) < len(tasks):
        found |= {outcome.task.key: outcome.status for outcome in executor.poll().ended}
        time.sleep(0.05)
    print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [2], indirect=True)
def test_a_full_disk_costs_a_node_and_a_cell_that_raises_is_not_tried_again(tmp_path, cluster):
    (tmp_path / "stages").mkdir()
    (tmp_path / "stages/__init__.py").touch()
    (tmp_path / "stages/train.py").write_text(STAGE.replace("FOLDER", str(tmp_path)))
    (tmp_path / "tell.py").write_text(TELL)
    done = subprocess.run(
        [sys.executable, "tell.py"], cwd=tmp_path, env=cluster.environment, capture_output=True, text=True, check=False,
        timeout=200,
    )  # fmt: skip
    assert json.loads(done.stdout) == {"full-1": 0, "raises-1": 1, "good-1": 0, "good-2": 0}
    assert done.stderr.count("its disk is full, it gets no more cells") == 1
    assert (tmp_path / "raised").read_text() == "x"
