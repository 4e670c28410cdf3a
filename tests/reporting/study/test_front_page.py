"""What the README and ABOUT.md say of runs is what `runs.csv` holds. Oracle: Student's t over its rows, by hand."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
from scipy.stats import t

ROOT = Path(__file__).parents[3]
RUNS = pd.read_csv(ROOT / "reports/study/results/runs.csv")
TABLE = re.findall(r"^\| ([\d.]+) M \| ([\d.]+) M \| (.*?) \| (.*?)\| (.*?)\|$", (ROOT / "README.md").read_text(), re.M)
COSTS = re.findall(r"^\| (E\dM\d.*?|MXFP8|NVFP4) \|(.*?)\|(.*?)\|(.*?)\|$", (ROOT / "README.md").read_text(), re.M)
SIZES = [(0.17, 0.2), (0.17, 3.3), (1.3, 0.8)]  # of the columns: millions of parameters, and of tokens
SPACING, MUON, ADAMW = "spacing_scaled", "muon", "adamw"
COLUMNS = [{("E3M4", SPACING): 1, ("E3M4", ADAMW): -1}, {}, {("E3M4", MUON): 1, ("E3M4", ADAMW): -1}]
COLUMNS[1] = COLUMNS[0] | {("virtual.E3M4", SPACING): -1, ("virtual.E3M4", ADAMW): 1}


def of_contrast(
    millions: float, tokens: float, contrast: dict[tuple[str, str], int]
) -> Iterator[tuple[float, float]]:
    """Yield mean and half the 95 % interval in each experiment of this size that has the whole contrast."""
    size = ((RUNS.parameters / 1e6 / millions - 1).abs() < 0.05) & ((RUNS.tokens / 1e6).round(1) == tokens)
    for _, runs in RUNS[size & (RUNS.lr_scale == 1) & (RUNS.purpose == "test")].groupby("experiment"):
        losses = runs.pivot_table("val_loss", "seed", ["format", "optimizer"])
        if set(contrast) <= set(losses):
            delta = sum(sign * losses[run] for run, sign in contrast.items()).dropna()
            yield delta.mean(), t.ppf(0.975, len(delta) - 1) * delta.sem()


def differences(millions: float, tokens: float, contrast: dict[tuple[str, str], int]) -> set[tuple[str, ...]]:
    """Return mean and 95 % interval, to three decimals, as `of_contrast` has them."""
    found = of_contrast(millions, tokens, contrast)
    return {tuple(f"{value:+.3f}" for value in (mean, mean - half, mean + half)) for mean, half in found}


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row[0]}M-{row[1]}M")
def test_the_front_pages_numbers_are_of_the_table_of_runs_and_what_is_empty_was_not_run(row: tuple[str, ...]) -> None:
    for cell, contrast in zip(row[2:], COLUMNS, strict=True):
        said = tuple(f"{float(number.replace('−', '-')):+.3f}" for number in re.findall(r"[+−]?\d\.\d{3}", cell))
        measured = {tuple(number.replace("-0.000", "+0.000") for number in one) for one in
                    differences(float(row[0]), float(row[1]), contrast)}  # fmt: skip
        assert (said in measured) if said else not measured, measured


@pytest.mark.parametrize("row", COSTS, ids=lambda row: row[0].strip())
def test_what_formats_cost_is_what_the_studys_pages_say(row: tuple[str, ...]) -> None:
    """The format minus bf16, or minus its unquantized control: difference, half the interval, significance.

    The difference is that of the table of runs too.
    """
    name = row[0].split()[0]
    for (millions, tokens), cell in zip(SIZES, row[1:], strict=True):
        if said := re.fullmatch(r" (\**)\+(\d\.\d{4}) ± (\d\.\d{4})(\**) ", cell):
            mean, half = float(said[2]), float(said[3])
            assert f"{mean:+.4f}" in {
                f"{own:+.4f}" for reference in ("bf16", f"virtual.{name}")
                for own, _ in of_contrast(millions, tokens, {(name, ADAMW): 1, (reference, ADAMW): -1})
            }  # fmt: skip
            assert any(
                (what, size) == (name, (millions, tokens)) and delta == mean and significant == bool(said[1])
                and mean - half == pytest.approx(low, abs=1.1e-4) and mean + half == pytest.approx(high, abs=1.1e-4)
                for what, size, delta, low, high, significant in costs_of_pages()
            )  # fmt: skip
        else:
            assert not cell.strip()


def costs_of_pages() -> Iterator[tuple[str, tuple[float, float], float, float, float, bool]]:
    """Yield format, millions of parameters and of tokens, difference, interval, and whether it is significant."""
    of_format = r"`adamw in (\w+) - (?:bf16|virtual\.\1)` \| ([\d.]+) M, ([\d.]+) M \| (\S+) \| (.*?) \| "
    of_format += r".*?\[(\S+), (\S+)\]"
    for page in ("replications", "format-costs"):
        for found in re.findall(of_format, (ROOT / f"reports/study/{page}.md").read_text()):
            delta, low, high = (float(found[i].replace("−", "-")) for i in (3, 5, 6))
            yield found[0], (float(found[1]), round(float(found[2]), 1)), delta, low, high, "**higher**" in found[4]


def test_every_larger_size_that_was_tried_is_on_the_front_page() -> None:
    tried = RUNS[RUNS.experiment.str.fullmatch(r"ladder-\w+") & RUNS.format.eq("E3M4") & RUNS.optimizer.eq(SPACING)]
    for millions in tried.parameters.unique() / 1e6:
        assert any(abs(millions / float(size) - 1) < 0.05 for size, *_ in TABLE), millions


def test_the_counts_of_machines_are_those_of_the_table_of_runs() -> None:
    text = (ROOT / "reports/study/ABOUT.md").read_text()
    for machine in ("AMD EPYC bf16", "Intel Xeon float32", "NVIDIA H200"):
        assert re.search(rf"\b{(RUNS.machine == machine).sum():,} (runs are )?of an {machine.rsplit(' ', 1)[0]}", text)
