"""The study's figures and README's tables show what the runs have.

Oracles: means and Student's t over the rows of `runs.csv`; bits counted by hand; quantized gradients of a softmax.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
import torch
from scipy.stats import spearmanr, t
from torch.nn import functional as F

from altgrad.numerics import compute_scale, quantize
from altgrad.reporting.study.figures import (
    GAP,
    PROBABILITIES,
    Cost,
    apart,
    bits_per_element,
    clamped_share,
    costs,
    draw_costs,
)
from altgrad.reporting.study.questions import answered, read_questions
from altgrad.reporting.study.runs import RunTable

ROOT = Path(__file__).parents[3]
STUDY = ROOT / "reports/study"
README = (ROOT / "README.md").read_text()
RUNS = pd.read_csv(STUDY / "results/runs.csv")


def words_of(figure: str) -> list[str]:
    """Return the texts of a committed figure that README shows."""
    assert f"figures/{figure}.svg" in README
    return re.findall(r">([^<>\n]+)</text>", (STUDY / f"figures/{figure}.svg").read_text())


# --- costs by bits ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shown() -> list[Cost]:
    runs = RunTable.read(STUDY / "results")
    return costs([answer for question in read_questions(STUDY) for answer in answered(question, runs)], runs)


def test_every_cost_is_the_mean_difference_of_rows_and_of_the_most_seeds(shown):
    rows = RUNS[(RUNS.optimizer == "adamw") & (RUNS.purpose == "test")]
    rows = rows[(rows.lr_scale == 1) & (rows.parameters == 168256)]
    # The questions of number systems and of other shapes are not drawn on the front page.
    rows = rows[~rows.experiment.str.match("systems-|gpt-")]
    assert len({(cost.format, cost.tokens) for cost in shown}) == len(shown) >= 22
    for cost in shown:
        found = []
        for _, experiment in rows[rows.tokens == cost.tokens].groupby("experiment"):
            losses = experiment.pivot_table("val_loss", "seed", "format")
            for reference in {"bf16", f"virtual.{cost.format}"} & set(losses):
                found += [(losses[name] - losses[reference]).dropna() for name in losses if name == cost.format]
        same = [one for one in found if abs(one.mean() - cost.mean) < 1e-9]
        assert cost.seeds == max(map(len, found)) == max(map(len, same)), cost


def test_bits_have_their_part_of_a_blocks_scale():
    found = {name: bits_per_element(name) for name in ("E1M1", "E2M1", "E4M3", "MXFP8", "MXFP4", "NVFP4")}
    assert found == {"E1M1": 3, "E2M1": 4, "E4M3": 8, "MXFP8": 8 + 8 / 32, "MXFP4": 4 + 8 / 32, "NVFP4": 4 + 8 / 16}


@pytest.mark.parametrize("figure", ["costs", "costs-dark"])
def test_the_committed_figures_name_every_format_for_each_length(figure, shown):
    words, names = words_of(figure), sorted(cost.format for cost in shown)
    assert sorted(word for word in words if word in names) == names
    assert {f"after {cost.tokens / 1e6:.1f} M tokens" for cost in shown} <= set(words)


def test_a_cost_that_is_not_significant_is_hollow_and_one_below_the_axis_is_drawn(tmp_path):
    filled = []
    for significant in (True, False):
        draw_costs([Cost("E4M3", 8, 204800, -0.02, 5, significant)], tmp_path)
        assert {path.name for path in tmp_path.iterdir()} >= {"costs.svg", "costs-dark.svg"}
        filled.append((tmp_path / "costs-dark.svg").read_text().count("fill: #56b4e9; stroke"))
    assert filled[0] == filled[1] + 1


def test_labels_of_a_column_are_apart_and_stay_in_order():
    assert apart([0.0, 5 * GAP]) == [0.0, 5 * GAP]
    moved = apart([0.0, 0.0, 0.01, 5.0])
    gaps = [high - low for low, high in itertools.pairwise(moved)]
    assert all(gap >= 0.999 * GAP for gap in gaps) and sum(moved[:3]) == pytest.approx(0.01)


# --- costs by tokens -------------------------------------------------------------------------------


@pytest.mark.parametrize("bf16", [False, True])
def test_the_share_is_that_of_gradients_quantized_by_floor(bf16):
    for tokens in (48, 56, 60, 64, 65, 68, 72, 100):
        logits = 2 * torch.randn(tokens, 32, generator=torch.Generator().manual_seed(tokens), dtype=torch.float64)
        targets = torch.arange(tokens) % 32
        logits[torch.arange(tokens), targets] -= 1
        F.cross_entropy(logits.requires_grad_(), targets).backward()
        right = (torch.arange(tokens), targets)
        gradient = logits.grad.to(torch.bfloat16 if bf16 else torch.float32).double()[right].abs()
        scale = compute_scale(gradient, "E4M3", scale_format="E8M0", scale_rounding="floor").double()
        kept = torch.minimum(gradient, 448 / scale)
        assert ((quantize(gradient, "E4M3", scale=scale) - kept).abs() <= kept / 16).all()
        p = logits.detach().softmax(dim=-1)[right].tolist()
        wanted = 1 - (kept.sum() / gradient.sum()).item()
        assert clamped_share(tokens, p, bf16=bf16) == pytest.approx(wanted, abs=1e-6)


def test_the_committed_figure_names_its_series():
    for question in (question for question in read_questions(STUDY) if question.curve):
        for ending in ("", "-dark"):
            series = {f"gradients in {dtype}" for dtype in question.curve.values()}
            assert series <= set(words_of(f"{question.name}{ending}"))


def test_probabilities_are_quantiles_in_order():
    table = pd.read_csv(STUDY / "results" / PROBABILITIES)
    for _, quantiles in table.groupby("gradients")["p"]:
        assert quantiles.is_monotonic_increasing and quantiles.between(0, 1).all() and len(quantiles) == 64


def test_costs_follow_the_share_that_is_clamped():
    """X6, over the 22 batches of mx-scales, of the committed losses and shares."""
    shares = pd.read_csv(STUDY / "results/clamped.csv")
    losses = RUNS.set_index("experiment")
    found = []
    for tokens, gradients in zip(shares["tokens"], shares["gradients"], strict=True):
        experiment = losses.loc[f"tokens-{tokens}" + "-float32" * (gradients == "float32")]
        table = experiment.pivot_table(index="seed", columns="format", values="val_loss")
        found.append((table["floor"] - table["MXFP8"]).mean())
    assert len(found) == 22
    bf16 = (shares["gradients"] == "bf16").to_numpy()
    ranks = [spearmanr(shares["floor"][rows], pd.Series(found)[rows]).statistic for rows in (bf16 | True, bf16, ~bf16)]
    assert [round(rank, 2) for rank in ranks] == [0.84, 0.87, 0.76]
    low = [cost for cost, share in zip(found, shares["floor"], strict=True) if share < 0.0405]
    assert len(low) == 16 and max(low) < 0.0115 and all(cost > 0.069 for cost in found if cost not in low)


def test_losses_follow_what_unbalances_the_gradient_of_the_logits():
    """The sentence of mx-remedies, of the committed losses and shares: |kept at right tokens - kept at wrong ones|."""
    kept = pd.read_csv(STUDY / "results/kept.csv").groupby(["tokens", "format", "rule"])[["right", "wrong"]].mean()
    means = RUNS.groupby(["experiment", "format"])["val_loss"].mean()
    found = []
    for (tokens, fmt, rule), shares in kept.iterrows():
        experiment, entry = (f"tokens-{tokens}", "MXFP8") if fmt == "E4M3" else (f"{fmt}-{tokens}", "rceil")
        entry = "floor" if rule == "floor" else entry
        if (experiment, entry) in means:
            above = means[experiment, entry] - means[f"tokens-{tokens}", "bf16"]
            found.append((abs(shares["right"] - shares["wrong"]), above))
    assert len(found) == 14 and round(spearmanr(*zip(*found, strict=True)).statistic, 2) == 0.86


# --- README's tables -------------------------------------------------------------------------------

# Of the columns of costs: millions of parameters and of tokens, and whether the shape is Llama's.
SIZES = [(0.17, 0.2, False), (0.17, 3.3, False), (1.3, 0.8, False), (0.17, 0.2, True), (1.3, 0.8, True)]
SPACING, MUON, ADAMW = "spacing_scaled", "muon", "adamw"
TABLE = re.findall(r"^\| ([\d.]+) M(, Llama)? \| ([\d.]+) M \| (.*?) \| (.*?)\| (.*?)\|$", README, re.MULTILINE)
COSTS = re.findall(r"^\| (E\dM\d.*?|MXFP8|NVFP4) \|(.*?)\|(.*?)\|(.*?)\|(.*?)\|(.*?)\|$", README, re.MULTILINE)
GAIN = {("E3M4", SPACING): 1, ("E3M4", ADAMW): -1}
COLUMNS = [
    GAIN, GAIN | {("virtual.E3M4", SPACING): -1, ("virtual.E3M4", ADAMW): 1},
    {("E3M4", MUON): 1, ("E3M4", ADAMW): -1},
]  # fmt: skip


def of_contrast(
    millions: float, tokens: float, llama: bool, contrast: dict[tuple[str, str], int]
) -> Iterator[tuple[float, float]]:
    """Yield mean and half the 95 % interval in each experiment of this size and shape with the whole contrast."""
    size = ((RUNS.parameters / 1e6 / millions - 1).abs() < 0.05) & ((RUNS.tokens / 1e6).round(1) == tokens)
    shape = RUNS.experiment.str.startswith("llama") == llama
    for _, runs in RUNS[size & shape & (RUNS.lr_scale == 1) & (RUNS.purpose == "test")].groupby("experiment"):
        losses = runs.pivot_table("val_loss", "seed", ["format", "optimizer"])
        if set(contrast) <= set(losses):
            delta = sum(sign * losses[run] for run, sign in contrast.items()).dropna()
            yield delta.mean(), t.ppf(0.975, len(delta) - 1) * delta.sem()


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row[0]}M{row[1]}-{row[2]}M")
def test_readmes_gains_are_of_the_table_of_runs_and_what_is_empty_was_not_run(row: tuple[str, ...]) -> None:
    for cell, contrast in zip(row[3:], COLUMNS, strict=True):
        said = tuple(float(number.replace("−", "-")) for number in re.findall(r"[+−]?\d\.\d{3}", cell))
        measured = [tuple(round(end, 3) for end in (mean, mean - half, mean + half))
                    for mean, half in of_contrast(float(row[0]), float(row[2]), bool(row[1]), contrast)]  # fmt: skip
        assert (said in measured) if said else not measured, measured


@pytest.mark.parametrize("row", COSTS, ids=lambda row: row[0].strip())
def test_readmes_costs_are_those_of_the_studys_pages_and_of_the_table_of_runs(row: tuple[str, ...]) -> None:
    """The format minus bf16, or minus its unquantized control: difference, half the interval, significance."""
    name = row[0].split()[0]
    for size, cell in zip(SIZES, row[1:], strict=True):
        if said := re.fullmatch(r" (\**)([+−]\d\.\d{4}) ± (\d\.\d{4})(\**) ", cell):
            mean, half = float(said[2].replace("−", "-")), float(said[3])
            assert mean in {
                round(delta, 4) for reference in ("bf16", f"virtual.{name}")
                for delta, _ in of_contrast(*size, {(name, ADAMW): 1, (reference, ADAMW): -1})
            }  # fmt: skip
            assert any(
                (what, of_page) == (name, size) and delta == mean and significant == bool(said[1])
                and mean - half == pytest.approx(low, abs=1.1e-4) and mean + half == pytest.approx(high, abs=1.1e-4)
                for what, of_page, delta, low, high, significant in costs_of_pages()
            )  # fmt: skip
        else:
            assert not cell.strip()


def costs_of_pages() -> Iterator[tuple[str, tuple[float, float, bool], float, float, float, bool]]:
    """Yield format, millions of parameters and of tokens and shape, difference, interval, whether it is significant."""
    of_format = r"`adamw in (\w+) - (?:bf16|virtual\.\1)` \| ([\d.]+) M, ([\d.]+) M \| (\S+) \| (.*?) \| "
    of_format += r".*?\[(\S+), (\S+)\]"
    for page in ("replications", "format-costs", "modern-shape"):
        for found in re.findall(of_format, (STUDY / f"{page}.md").read_text()):
            delta, low, high = (float(found[i].replace("−", "-")) for i in (3, 5, 6))
            size = float(found[1]), round(float(found[2]), 1), page == "modern-shape"
            yield found[0], size, delta, low, high, "**higher**" in found[4]


def test_every_larger_size_that_was_tried_is_on_the_front_page() -> None:
    tried = RUNS[RUNS.experiment.str.fullmatch(r"ladder-\w+") & RUNS.format.eq("E3M4") & RUNS.optimizer.eq(SPACING)]
    for millions in tried.parameters.unique() / 1e6:
        assert any(abs(millions / float(size) - 1) < 0.05 for size, *_ in TABLE), millions


def test_the_counts_of_machines_are_those_of_the_table_of_runs() -> None:
    text = (STUDY / "ABOUT.md").read_text()
    for machine in ("AMD EPYC bf16", "Intel Xeon float32", "NVIDIA H200"):
        assert re.search(rf"\b{(RUNS.machine == machine).sum():,} (runs are )?of an {machine.rsplit(' ', 1)[0]}", text)
