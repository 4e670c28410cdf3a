"""The figure of scales and tokens. Oracles: gradients of a softmax, quantized; the results of the comparisons."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import pytest
import torch
from scipy.stats import spearmanr
from torch.nn import functional as F

from altgrad.numerics import compute_scale, quantize
from altgrad.reporting.study.curve import PROBABILITIES, clamped_share
from altgrad.reporting.study.questions import read_questions

ROOT = Path(__file__).parents[3]
STUDY = ROOT / "reports/study"
DRAWN = [question for question in read_questions(STUDY) if question.curve]


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


@pytest.mark.parametrize("question", DRAWN, ids=lambda question: question.name)
def test_the_committed_figure_names_its_series_and_readme_shows_it(question):
    for ending in ("", "-dark"):
        path = STUDY / f"figures/{question.name}{ending}.svg"
        words = set(re.findall(r">([^<>\n]+)</text>", path.read_text()))
        assert {f"gradients in {dtype}" for dtype in question.curve.values()} <= words
        assert f"figures/{path.name}" in (ROOT / "README.md").read_text()
    labels = [list(question.hypotheses[name].filled) for name in question.curve]
    assert labels and all(int(label) > 0 for own in labels for label in own)


def test_probabilities_are_quantiles_in_order():
    table = pd.read_csv(STUDY / "results" / PROBABILITIES)
    for _, own in table.groupby("gradients"):
        assert own["p"].is_monotonic_increasing and own["p"].between(0, 1).all() and len(own) == 64


def test_costs_follow_the_share_that_is_clamped():
    """X6, over the 22 batches of mx-scales, of the committed losses and shares."""
    shares = pd.read_csv(STUDY / "results/clamped.csv")
    losses = pd.read_csv(STUDY / "results/runs.csv").set_index("experiment")
    costs = []
    for tokens, gradients in zip(shares["tokens"], shares["gradients"], strict=True):
        own = losses.loc[f"tokens-{tokens}" + "-float32" * (gradients == "float32")]
        table = own.pivot_table(index="seed", columns="format", values="val_loss")
        costs.append((table["floor"] - table["MXFP8"]).mean())
    assert len(costs) == 22
    bf16 = (shares["gradients"] == "bf16").to_numpy()
    chosen = (bf16 | True, bf16, ~bf16)
    ranks = [spearmanr(shares["floor"][own], pd.Series(costs)[own]).statistic for own in chosen]
    assert [round(rank, 2) for rank in ranks] == [0.84, 0.87, 0.76]
    low = [cost for cost, share in zip(costs, shares["floor"], strict=True) if share < 0.0405]
    assert len(low) == 16 and max(low) < 0.0115 and all(cost > 0.069 for cost in costs if cost not in low)


def test_losses_follow_what_unbalances_the_gradient_of_the_logits():
    """The sentence of mx-remedies, of the committed losses and shares: |kept at right tokens - kept at wrong ones|."""
    kept = pd.read_csv(STUDY / "results/kept.csv").groupby(["tokens", "format", "rule"])[["right", "wrong"]].mean()
    means = pd.read_csv(STUDY / "results/runs.csv").groupby(["experiment", "format"])["val_loss"].mean()
    found = []
    for (tokens, fmt, rule), shares in kept.iterrows():
        experiment, entry = (f"tokens-{tokens}", "MXFP8") if fmt == "E4M3" else (f"{fmt}-{tokens}", "rceil")
        entry = "floor" if rule == "floor" else entry
        if (experiment, entry) in means:
            above = means[experiment, entry] - means[f"tokens-{tokens}", "bf16"]
            found.append((abs(shares["right"] - shares["wrong"]), above))
    assert len(found) == 14 and round(spearmanr(*zip(*found, strict=True)).statistic, 2) == 0.86
