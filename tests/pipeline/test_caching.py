"""Laws of the cache: a change reruns what it can affect and nothing else.

Run against the real dvc.yaml and the real DVC. Each test undoes its change at the end, and the undoing
is a law as well: nothing that was ever computed is computed twice.
"""

from __future__ import annotations

import json
import shutil

import pytest

from altgrad.common.fingerprint import write_digests
from tests.pipeline.conftest import CELLS, Project, stages_of


def test_a_second_run_after_an_edited_comment_runs_nothing(project: Project):
    project.append("params.yaml", "\n# a remark\n")
    assert project.repro() == set()
    assert (project.folder / "reports/index.html").exists()
    assert not list((project.folder / "scratch").glob("*-adamw-*")), "finished cells leave no checkpoints"


@pytest.mark.long
def test_an_edited_text_of_ones_own_is_tokenized_again(project: Project):
    before = (project.folder / "data/corpus/mine.txt").read_text()
    project.append("data/corpus/mine.txt", "\n\nA last word.\n")
    assert {"tokenize", *stages_of(*CELLS)} <= project.repro("diagnose")
    (project.folder / "data/corpus/mine.txt").write_text(before)
    assert project.repro("diagnose") == set()


@pytest.mark.long
def test_an_override_and_an_added_format_run_their_cells_alone_and_their_undoing_only_the_report(project: Project):
    added = "E3M4-adamw-0-1"
    project.set("overrides", {"E4M3": {"train": {"clip": 0.5}}})
    project.set("grid.formats", ["bf16", "E4M3", "E3M4"])
    assert project.repro() == {"grid", "report"} | stages_of("E4M3-adamw-0-1", added)
    clip = {key: json.loads((project.folder / f"data/grid/{key}.json").read_text())["train"]["clip"]
            for key in (*CELLS, added)}  # fmt: skip
    assert clip["E4M3-adamw-0-1"] == 0.5 and 0.5 not in (clip["bf16-adamw-0-1"], clip[added])
    project.set("overrides", {})
    project.set("grid.formats", ["bf16", "E4M3"])
    assert project.repro() <= {"grid", "report"}
    assert not (project.folder / "data/runs" / added).exists(), "a cell that left the grid is pruned"
    project.set("grid.formats", ["bf16", "E4M3", "E3M4"])
    assert project.repro("diagnose") <= {"grid"}, "its results come back from the cache"
    assert (project.folder / "data/runs" / added / "metrics.json").exists()
    project.set("grid.formats", ["bf16", "E4M3"])
    project.repro()


@pytest.mark.long
def test_a_further_model_runs_its_own_cells_alone_and_the_report_has_its_section(project: Project):
    before = {key: (project.folder / f"data/runs/{key}/metrics.json").read_bytes() for key in CELLS}
    project.set("models.tiny-2", {"layers": 2, "width": 16, "heads": 2, "context": 16})
    project.set("grid.models", ["tiny-2"])
    project.set("overrides", {"tiny-2": {"train": {"steps": 4}, "arm": {"lr": 0.002}}})
    cells = [f"{key}-tiny-2" for key in CELLS]
    own = {f"{stage}_models@{cell}" for cell in cells for stage in ("train", "diagnose")}
    assert project.repro() == {"grid", "report"} | own
    assert before == {key: (project.folder / f"data/runs/{key}/metrics.json").read_bytes() for key in CELLS}
    for cell in cells:
        metrics = json.loads((project.folder / f"data/runs/{cell}/metrics.json").read_text())
        assert (metrics["key"], metrics["model_name"], metrics["steps"]) == (cell, "tiny-2", 4)
    report = (project.folder / "reports/REPORT.md").read_text()
    assert "## Model tiny-2" in report and "figures/cost_by_model.png" in report
    assert not list((project.folder / "scratch").glob("*-adamw-*")), "finished cells leave no checkpoints"
    project.run("git", "checkout", "params.yaml")
    assert project.repro() <= {"grid", "report"}
    assert not (project.folder / "data/runs" / cells[0]).exists(), "a cell that left the grid is pruned"


def test_an_edit_reaches_the_stages_that_depend_on_it_and_no_other(project: Project):
    """As `dvc status` has it; what DVC then runs, the last test but one sees of training code."""
    folder, before, digests = project.folder, {}, {}
    names = {"": "", "diagnostics": "saved", "training": "records", "reporting": "markdown"}
    for package, module in names.items():
        if package:
            path = folder / f"altgrad/{package}/{module}.py"
            before[path] = path.read_text()
            path.write_text(before[path] + "\n# a remark\n")
        write_digests(folder, folder / "data/code")
        digests[package] = [(folder / f"data/code/{stage}.json").read_text() for stage in ("train", "diagnose")]
    settings = folder / "params.yaml"
    before[settings] = settings.read_text()
    project.set("models.huge", {"layers": 99, "width": 1024, "heads": 8, "context": 64})  # which is not picked
    project.set("optimizers.slow", {"base": "adamw", "lr": 1e-5})
    found = json.loads(project.run("dvc", "status", "--json").stdout)
    for path, text in before.items():
        path.write_text(text)
    write_digests(folder, folder / "data/code")
    none, diagnosis, training, report = digests.values()
    assert none[0] == diagnosis[0] != training[0] and none[1] != diagnosis[1] == training[1] and report == training
    parts = {stage: {name for entry in entries if isinstance(entry, dict) for name in entry.get("changed deps", ())}
             for stage, entries in found.items()}  # fmt: skip
    expected = {"grid": {"params.yaml"}, "report": {"altgrad/reporting"}}
    expected["code"] = {"altgrad/training", "altgrad/diagnostics"}
    expected |= {f"{stage}@{cell}": {f"data/code/{stage}.json"} for stage in ("train", "diagnose") for cell in CELLS}
    assert parts == expected
    assert project.repro("grid") == set(), "and back"


@pytest.mark.long
def test_edited_training_code_reruns_every_cell_but_no_diagnosis_of_equal_results(project: Project):
    project.append("altgrad/training/records.py", "\n# a remark\n")
    ran = project.repro()
    assert {f"train@{cell}" for cell in CELLS} <= ran
    assert ran <= {f"train@{cell}" for cell in CELLS} | {"code", "report"}


def test_a_fresh_clone_with_the_cache_runs_nothing(project: Project, tmp_path):
    project.run("git", "add", "--all")
    project.run("git", "-c", "user.name=t", "-c", "user.email=t@t", "commit", "--quiet", "--message", "done")
    assert project.run("git", "status", "--porcelain").stdout == ""
    project.run("git", "clone", "--quiet", ".", str(tmp_path / "clone"))
    clone = Project.at(tmp_path / "clone")
    shutil.copy(project.folder / "data/corpus/mine.txt", clone.folder / "data/corpus")  # which git does not hold
    clone.run("dvc", "cache", "dir", "--local", str(project.folder / ".dvc/cache"))
    assert clone.repro() <= {"report"}
    assert clone.run("git", "status", "--porcelain").stdout == ""
