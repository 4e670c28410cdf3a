"""Laws of metrics.json, which DVC shows. Oracles: the losses that were put in, and DVC's own tables of 120 columns."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from dvc.commands.experiments.show import show_experiments
from dvc.repo.experiments.serialize import ExpState, SerializableExp
from dvc.repo.experiments.show import tabulate
from dvc.ui import ui
from rich.console import Console

from altgrad.common.files import read_yaml
from altgrad.reporting.compare import compare
from altgrad.reporting.metrics import metrics
from tests.reporting.made_losses import ADAMW, STIFF, study_of, with_formats
from tests.reporting.synthetic_project import read, write_project

SHUFFLED = {"base": "adamw", "stiffness": "permuted"}
ARMS = {"adamw": ADAMW, "muon": {"base": "muon"}, "spacing_scaled": STIFF, "spacing_shuffled": SHUFFLED}


def made(formats: list[str], optimizers: list[str], seeds: int = 5) -> tuple[dict, dict]:
    """Return metrics.json of a grid with random losses, and the losses by (entry, optimizer)."""
    random = np.random.default_rng(0)
    losses = {(entry, arm): random.normal(3.5, 0.1, seeds).tolist() for entry in formats for arm in optimizers}
    study = with_formats(study_of(losses, {arm: ARMS[arm] for arm in optimizers}))
    return metrics(study, compare(study)), losses


@pytest.fixture(scope="module")
def default() -> tuple[dict, dict]:
    grid = read_yaml(Path(__file__).parents[2] / "params.yaml")["grid"]
    return made(grid["formats"], grid["optimizers"])


def to_four(number: float) -> object:
    return pytest.approx(number, abs=5.01e-5)


def leaves(found: dict) -> list[object]:
    return [leaf for value in found.values() for leaf in (leaves(value) if isinstance(value, dict) else [value])]


def test_the_default_grid_has_at_most_twelve_numbers(default) -> None:
    numbers = leaves(default[0])
    assert 8 <= len(numbers) <= 12
    assert all(isinstance(number, int | float) for number in numbers)


def test_each_number_is_what_the_losses_make_it(default) -> None:
    found, losses = default
    means = {run: np.mean(values) for run, values in losses.items()}
    entries = {entry for entry, _ in losses}
    formats = [entry for entry in entries if entry != "bf16" and not entry.startswith("virtual.")]
    assert found["runs"] == sum(map(len, losses.values())) and found["diverged"] == found["missing"] == 0
    assert found["loss"] == {"bf16": to_four(means["bf16", "adamw"])}
    assert found["Δ"] == {
        entry: to_four(means[entry, "adamw"] - means["bf16", "adamw"]) for entry in formats
    }  # fmt: skip

    def gain(entry: str) -> float:
        return means[entry, "spacing_scaled"] - means[entry, "adamw"]

    assert found["ΔΔ"] == {
        entry: to_four(gain(entry) - gain(f"virtual.{entry}"))
        for entry in formats if f"virtual.{entry}" in entries
    }  # fmt: skip


@pytest.mark.parametrize(("optimizers", "arm"), [
    (["adamw", "muon", "spacing_scaled"], "spacing_scaled"), (["adamw", "spacing_shuffled", "muon"], "muon"),
], ids=["of two, the one that follows the spacing", "no control"])  # fmt: skip
def test_the_effect_is_of_the_headline_optimizer(optimizers: list[str], arm: str) -> None:
    found, losses = made(["bf16", "E4M3", "virtual.E4M3"], optimizers)
    means = {run: np.mean(values) for run, values in losses.items()}
    gain = {entry: means[entry, arm] - means[entry, "adamw"] for entry in ("E4M3", "virtual.E4M3")}
    assert found["ΔΔ"] == {"E4M3": to_four(gain["E4M3"] - gain["virtual.E4M3"])}


def test_without_a_baseline_every_format_has_its_loss() -> None:
    found, losses = made(["E4M3", "E3M4"], ["adamw"])
    assert found == {
        "runs": 10, "diverged": 0, "missing": 0,
        "loss": {entry: to_four(np.mean(losses[entry, "adamw"])) for entry in ("E4M3", "E3M4")},
    }  # fmt: skip


def test_what_no_run_says_is_null_and_counted(tmp_path: Path) -> None:
    lost = {"diverged": {"E4M3-adamw-0-1": 40}, "missing": ("E4M3-adamw-1-1",)}
    write_project(tmp_path, ["bf16", "E4M3"], steps=60, blocks=1, **lost)
    study = read(tmp_path)
    found = metrics(study, compare(study))
    assert (found["runs"], found["diverged"], found["missing"], found["Δ"]) == (4, 1, 1, {"E4M3": None})


@pytest.mark.parametrize("pair", [("E3M4", "E5M2"), ("E4M3", "E1M6")], ids=" ".join)
def test_two_experiments_beside_the_default_run_fit_in_120_columns(
    pair: tuple[str, str], default, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"main": default[0]} | {f"├── 0123456 [{name}]": made(["bf16", name], ["adamw"])[0] for name in pair}
    states = [
        ExpState(rev="a" * 40, name=name, data=SerializableExp("a" * 40, metrics={"metrics.json": {"data": numbers}}))
        for name, numbers in found.items()
    ]  # fmt: skip
    monkeypatch.setattr(ui, "_enabled", True)
    monkeypatch.setattr(ui, "rich_console", Console(width=120, file=StringIO()))
    table, headers = tabulate(states, precision=5)
    show_experiments(table, headers, drop=[".*/", "Created"], pager=False, only_changed=True)
    shown = ui.rich_console.file.getvalue()
    assert "…" not in shown and max(map(len, shown.splitlines())) <= 120
    assert {str(number) for name in ("Δ", "ΔΔ") for number in default[0][name].values()} <= set(shown.split())
