"""The whole report, from any grid. Oracles: the files' bytes, html.parser, PIL, the JSON standard."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from PIL import Image
from ruamel.yaml import YAML
from scipy import stats

from altgrad.common.files import read_json, read_yaml, write_json
from altgrad.config import Resolver, load_params, write_grid
from altgrad.reporting.load import Study, load_study
from altgrad.reporting.report import proposal, write_report
from tests.reporting.synthetic_project import SMALL, write_project

DIVERGED = {"bf16-adamw-0-1": 40, "E3M4-adamw-0-1": 10}
GRIDS = {
    "one cell, no baseline": {"formats": ["E3M4"], "seeds": (0,)},
    "baseline alone": {"formats": ["bf16"], "seeds": (0,)},
    "nothing trained": {"formats": ["bf16", "E3M4"], "seeds": (0,), "missing": ("bf16-adamw-0-1", "E3M4-adamw-0-1")},
    "all diverged": {"formats": ["bf16", "E3M4"], "seeds": (0,), "diverged": DIVERGED},
    "no plain arm, and one stale": {
        "formats": ["bf16", "E4M3"], "optimizers": ["stiff"], "arms": {"stiff": {"stiffness": "ulp"}},
        "stale": ("E4M3-stiff-0-1",),
    },
    "arms and rates": {
        "formats": ["bf16", "E7M0"], "optimizers": ["adamw", "stiff"], "lr_scales": (0.5, 1, 2),
        "arms": {"stiff": {"stiffness": "ulp"}},
    },
}  # fmt: skip


def test_what_runs_began_with_is_said(tmp_path: Path) -> None:
    (key,) = write_project(tmp_path, ["bf16"], seeds=(0,), **SMALL)
    path, diagnosis = (tmp_path / f"data/{place}/{key}.json" for place in ("grid", "diag"))
    cell = read_json(path)
    start = {"folder": "data/weights/own", "sha256": "", "vocab_size": 512}
    cell |= {"model": cell["model"] | {"start": start}, "lora": {"rank": 8, "alpha": 16}}
    write_json(path, cell)
    write_json(diagnosis, read_json(diagnosis) | {"cell_sha256": hashlib.sha256(path.read_bytes()).hexdigest()})
    write_report(tmp_path / "data", tmp_path / "out", None)
    text = (tmp_path / "out/REPORT.md").read_text()
    assert "on `licences`, from the weights in `data/weights/own` with adapters of rank 8." in text


@pytest.mark.parametrize("rounding", ["floor", "rceil"])
def test_scales_that_clamp_the_heads_gradient_are_said_in_the_first_lines(rounding: str, tmp_path: Path) -> None:
    """What the instrumented passes saw of it stands beside what the tokens of a step say."""
    keys = write_project(tmp_path, ["bf16", "E4M3"], seeds=(0, 1), **SMALL)
    for key in keys:
        path, run = tmp_path / f"data/grid/{key}.json", tmp_path / f"data/runs/{key}/monitors.parquet"
        cell = read_json(path)
        for rule in cell["rules"]:
            grad = {"format": "E4M3", "granularity": "block", "scale": "E8M0", "scale_rounding": rounding}
            rule["grad"] = rule["grad"] | grad
        write_json(path, cell)
        diagnosis = tmp_path / f"data/diag/{key}.json"
        write_json(diagnosis, read_json(diagnosis) | {"cell_sha256": hashlib.sha256(path.read_bytes()).hexdigest()})
        rows = pd.read_parquet(run)
        seen = {"step": 50, "layer": "head", "role": "grad", "metric": "block_clamped_frac"}
        values = [0.03, 0.05] if cell["format"] == "E4M3" else []
        pd.concat([rows, pd.DataFrame([seen | {"value": value} for value in values])]).to_parquet(run, index=False)
    write_report(tmp_path / "data", tmp_path / "out", None)
    text = (tmp_path / "out/REPORT.md").read_text()
    clamps = "clamp up to 12.5 % of the right token's gradient" in text.split("\n## ")[0]
    assert clamps == (rounding == "floor")
    assert ("That was 4 % of all its blocks' largest elements." in text) == clamps
    assert f"E8M0 scale by {rounding} per block of 32" in text


def digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


WHY = "../altgrad/reporting/STATISTICS.md"  # from the folder of the committed report, and said there


def check(out: Path) -> None:
    """Assert what holds for every report."""
    page, text = (out / "index.html").read_text(), (out / "REPORT.md").read_text()
    figures = {path.stem for path in (out / "figures").glob("*")} if (out / "figures").is_dir() else set()
    linked = re.findall(r"!\[([^\]]+)\]\(([^)]+)\)", text)
    assert {Path(target).stem for _, target in linked} == figures
    for alt, target in linked:
        assert len(alt) > 20 and Image.open(out / target).size[0] > 500
        assert (out / target).with_suffix(".svg").read_text().rstrip().endswith("</svg>")
    for word in ("nan", "inf", "None"):
        assert not re.search(rf"(?<![\w`/]){word}(?![\w`/])", text), word
    assert "`None`" not in text
    assert page.count("<img ") == len(figures)
    cells = (out / "cells.html").read_text()
    for own, leads_to in ((page, "cells.html#"), (cells, "index.html")):
        assert not re.findall(rf"(?:src|href)=[\"'](?!data:image/png|#|{leads_to}|{WHY})", own)
        assert "<script src" not in own and "<link" not in own and "@import" not in own and "{%" not in own
    assert page.count("<script") == 1 and cells.count("<script") == 2
    assert len(page) < 1.5e6 and len(text.splitlines()) <= 250
    numbers = json.loads((out / "summary.json").read_text(), parse_constant=pytest.fail)
    assert set(numbers) == {
        "cells", "best", "val_loss", "delta_format", "delta_optimizer", "delta_format_specific", "noise_floor",
        "flags",
    }  # fmt: skip


def test_a_report_is_whole(report: Path) -> None:
    check(report)
    results = pd.read_csv(report / "results.csv")
    assert results["p_alone"].notna().any() and results["p_adjusted"].isna().all(), "two seeds make no test"
    assert (Path(__file__).parents[2] / "reports" / WHY).is_file()
    page = (report / "index.html").read_text()
    for expected in ("E5M2-adamw-1-1", "not trained", "0123456789", "Example processor"):
        assert expected in page


def test_the_table_of_results_has_each_paired_t_test_alone(tmp_path: Path) -> None:
    """Oracle: scipy, over the losses of the table of runs."""
    arms = {"stiff": {"stiffness": "ulp"}, "shuffled": {"stiffness": "permuted"}}
    write_project(tmp_path, ["bf16", "E7M0"], ["adamw", *arms], seeds=(0, 1, 2, 3, 4), arms=arms, **SMALL)
    write_report(tmp_path / "data", tmp_path, None)
    losses = pd.read_csv(tmp_path / "plots/results.csv").pivot_table(
        "primary", "seed", ["format", "optimizer"], aggfunc="first"
    )
    found = pd.read_csv(tmp_path / "results.csv")
    assert set(found["comparison"]) >= {"cost", "gain", "control"}
    for row in found[found["comparison"].isin(["cost", "gain", "control"])].itertuples():
        beside = (row.against, row.optimizer) if row.comparison == "cost" else (row.format, row.against)
        pair = losses[[(row.format, row.optimizer), beside]].dropna()
        oracle = stats.ttest_rel(*pair.to_numpy().T)
        assert row.seeds == len(pair)
        if row.result == "identical":
            assert not pair.diff(axis=1).iloc[:, 1].any() and math.isnan(row.p_alone)
            continue
        low, high = oracle.confidence_interval()
        expected = [oracle.statistic, oracle.pvalue, low, high]
        assert [row.t_alone, row.p_alone, row.ci_low_alone, row.ci_high_alone] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("settings", GRIDS.values(), ids=GRIDS)
def test_every_kind_of_grid_gives_a_whole_report(settings: dict, tmp_path: Path) -> None:
    write_project(tmp_path, **SMALL | settings)
    old = tmp_path / "reports/figures/of_an_earlier_grid.png"
    old.parent.mkdir(parents=True)
    old.write_bytes(b"old")
    write_report(tmp_path / "data", tmp_path / "reports", None)
    check(tmp_path / "reports")  # all figures there are linked
    text = (tmp_path / "reports/REPORT.md").read_text()
    assert "not a git checkout" in text
    lacks_baseline = "bf16" not in settings["formats"]
    assert ("`grid.baseline` is `bf16`, which is not in `grid.formats`" in text.split("\n## ")[0]) == lacks_baseline


@pytest.mark.parametrize("roles", [[], ["update"]], ids=["nothing", "updates alone"])
def test_a_run_that_was_hardly_watched_gives_a_whole_report(roles: list[str], tmp_path: Path) -> None:
    write_project(tmp_path, ["bf16", "E4M3"], **SMALL)
    for path in tmp_path.glob("data/runs/*/monitors.parquet"):
        rows = pd.read_parquet(path)
        rows[rows["role"].isin(roles)].to_parquet(path, index=False)
    write_report(tmp_path / "data", tmp_path / "reports", None)
    check(tmp_path / "reports")


def test_the_same_files_give_the_same_bytes_in_another_process(report: Path, project: Path, tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from altgrad.reporting.report import write_report
write_report(Path({str(project / "data")!r}), Path({str(tmp_path)!r}), "0123456789")
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONHASHSEED": "99", "MPLBACKEND": "svg"})
    assert digests(tmp_path) == digests(report)


def test_the_report_needs_no_torch() -> None:
    code = "import sys, altgrad.reporting.report; sys.exit('torch' in sys.modules or 'altgrad.numerics' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_summary_holds_the_numbers_of_the_runs(report: Path, project: Path) -> None:
    numbers = json.loads((report / "summary.json").read_text())
    final = json.loads((project / "data/runs/E5M2-adamw-0-1/metrics.json").read_text())["val_loss"]
    assert numbers["cells"] == {"total": 14, "completed": 12, "diverged": 1, "missing": 1}
    assert numbers["val_loss"]["E5M2"]["adamw"] == pytest.approx(final, rel=1e-11)
    assert numbers["delta_format"]["bf16"]["adamw"] is None
    assert numbers["best"]["format"] == "E3M4"


# --- what a run proposes next; oracle: params.yaml, resolved as stage `grid` does ------------------------

PARAMS = Path(__file__).parents[2] / "params.yaml"
FIVE = [0, 1, 2, 3, 4]
LONGER = 4 * read_yaml(PARAMS)["train"]["steps"]


def resolved(params: dict[str, Any], folder: Path) -> Study:
    """Return the study of a grid of which nothing is trained."""
    (folder / "params.yaml").write_text(json.dumps(params))
    resolver = Resolver(load_params(folder / "params.yaml"))
    shutil.rmtree(folder / "data", ignore_errors=True)
    write_grid(list(resolver.cells()), resolver.selected(), folder / "data/grid")
    (folder / "data/tokens").mkdir()
    (folder / "data/tokens/meta.json").write_text("{}")
    return load_study(folder / "data")


def followed(grid: dict[str, Any], folder: Path, times: int) -> list[str]:
    """Return what is proposed, one after another, each with the ones before it in the settings."""
    params, found = read_yaml(PARAMS), []
    params["grid"] |= grid
    for _ in range(times):
        command = shlex.split(proposal(resolved(params, folder)))
        assert command[:4] == ["dvc", "exp", "run", "-S"]
        name, _, value = command[4].partition("=")
        section, setting = name.split(".")
        value = YAML(typ="safe").load(value)
        assert params[section][setting] != value, "what has just been run"
        params[section][setting] = value
        found.append(command[4])
    return found


def test_the_baseline_comes_first_then_seeds_then_the_control_then_length(tmp_path: Path) -> None:
    grid = {"formats": ["E4M3"], "optimizers": ["adamw", "spacing_scaled"], "seeds": [1, 7]}
    assert followed(grid, tmp_path, 5) == [
        "grid.formats=[bf16,E4M3]", "grid.seeds=[1,7,0,2,3]", "grid.formats=[bf16,E4M3,virtual.E4M3]",
        f"train.steps={LONGER}",
        f"train.steps={4 * LONGER}",
    ]  # fmt: skip


@pytest.mark.parametrize("grid", [
    {},  # params.yaml's own, where E1M6 alone has no control: its spacing is everywhere the same
    {"optimizers": ["adamw"]}, {"optimizers": ["adamw", "spacing_shuffled"]},
    {"formats": ["bf16", "MXFP8", "uniform_row.E3M4"], "optimizers": ["adamw", "spacing_scaled"]},
    {"formats": ["bf16"]},
], ids=["default", "no spacing", "a control alone", "no control to be had", "bf16"])  # fmt: skip
def test_a_control_is_proposed_only_where_there_is_one_to_ask(grid: dict[str, Any], tmp_path: Path) -> None:
    assert followed({"formats": ["bf16", "E4M3"], "seeds": FIVE} | grid if grid else {}, tmp_path, 1) == [
        f"train.steps={LONGER}"
    ]


@pytest.mark.parametrize(("names", "shown"), [([], False), (["one"], False), (["two", "one", "none"], True)])
def test_two_experiments_at_hand_are_compared(names: list[str], shown: bool, tmp_path: Path) -> None:
    said = proposal(resolved(read_yaml(PARAMS), tmp_path), names)
    assert ("dvc plots diff one two" in said) == shown and ("plots" in said) == shown
