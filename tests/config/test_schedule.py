"""The learning rate of each step and what decay leaves, and recipes whose scales clamp the head's gradient.

Oracles: the product over the steps, written out; the tokens of a step, counted by hand.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from altgrad.common.files import read_yaml, write_json
from altgrad.config import Cell, Resolver, load_params
from altgrad.config.cell import clamped_head, clamped_heads
from altgrad.config.schema import kept_by_decay, learning_rate

PARAMS = Path(__file__).parents[2] / "params.yaml"
MX = {"granularity": "block", "scale": "E8M0"}


def cells(folder: Path, rounding: str = "floor", head: Any = ..., **train: Any) -> list[Cell]:
    """Return cells of MXFP8 with scales of gradients by ``rounding``; a step has 1,024 tokens unless ``train`` says."""
    grad = {"format": "E4M3", "scale_rounding": rounding, **MX}
    rules = [
        {"layers": "*", "weight": "MXFP8", "input": "MXFP8", "grad": grad},
        {"layers": "head", "weight": "MXFP8", "grad": grad if head is ... else head},
    ]
    params = read_yaml(PARAMS)
    params["recipes"] = (params.get("recipes") or {}) | {"mine": rules}
    params["grid"] |= {"formats": ["mine", "MXFP8", "E4M3", "bf16"], "optimizers": ["adamw"], "seeds": [0, 1]}
    params["train"] |= train
    write_json(folder / "params.yaml", params)
    return list(Resolver(load_params(folder / "params.yaml")).cells())


@pytest.mark.parametrize(
    ("train", "cut"),
    [
        ({"batch": 16}, 12.5), ({"batch": 17}, 100 * (1 - 0.875 * 17 / 16)), ({"batch": 18}, 1.5625),
        ({"batch": 19}, None), ({"batch": 24}, None), ({"batch": 31}, None), ({"batch": 32}, 12.5),
        ({"batch": 8, "grad_accumulation": 2}, 12.5), ({"batch": 8, "grad_accumulation": 3}, None),
        ({"loss_scale": 0.75}, None), ({"loss_scale": 1024}, 12.5), ({"batch": 24, "loss_scale": 1.5}, 12.5),
    ],
    ids=str,
)  # fmt: skip
def test_all_tokens_of_a_step_count_and_the_factor_of_its_loss(tmp_path, train, cut):
    found = clamped_heads(cells(tmp_path, **train))
    assert list(found.values()) == ([] if cut is None else [["mine"]])  # once, whatever the seeds; never MXFP8 itself
    for clamped in found:
        assert 100 * clamped.cut == pytest.approx(cut, abs=1e-3)
        first, last = clamped.unclamped
        assert clamped.tokens < first < last
        assert f"with {clamped.tokens:,} tokens a step they clamp up to {cut:.3g} %" in str(clamped)


def test_other_rules_and_the_gradients_of_other_layers_are_left_alone(tmp_path):
    assert not any(clamped_heads(cells(tmp_path, rounding)) for rounding in ("rceil", "ceil", "even"))
    assert not any(clamped_heads(cells(tmp_path, head=head)) for head in (None, "MXFP8", "E4M3", "E5M2"))


@pytest.mark.parametrize(
    ("fmt", "cut", "granularity"), [("E5M2", 12.5, "block"), ("E2M3", 6.25, "row"), ("E2M1", 25, "tensor")]
)
def test_any_format_and_granularity_with_powers_of_two_counts(tmp_path, fmt, cut, granularity):
    head = {"format": fmt, "granularity": granularity, "scale": "E8M0", "scale_rounding": "floor"}
    found = clamped_head(cells(tmp_path, "rceil", head)[0])
    assert found is not None and 100 * found.cut == pytest.approx(cut, abs=1e-3)


@pytest.mark.parametrize(("steps", "warmup", "final"), [(300, 0.1, 0.1), (7, 0.0, 0.0), (1, 1.0, 0.5), (50, 1.0, 0.1)])
@pytest.mark.parametrize("decay", [0.0, 3e-4, 0.2])
def test_what_decay_leaves_is_the_product_over_the_steps(steps, warmup, final, decay):
    kept, rising = 1.0, round(warmup * steps)
    for step in range(1, steps + 1):
        share = step / rising if step <= rising else 1.0
        if step > rising:
            along = (step - rising) / (steps - rising)
            share = final + (1 - final) * (1 + math.cos(math.pi * along)) / 2
        kept -= kept * decay * share
    assert kept_by_decay(decay, steps=steps, warmup=warmup, final=final) == pytest.approx(kept, rel=1e-12)


def test_the_default_arms_keep_95_percent_of_their_weights():
    """The figure of the reports for 300 steps: the peaks add up to 0.545 of the steps."""
    kept = kept_by_decay(3e-4, steps=300, warmup=0.1, final=0.1)
    mean = sum(learning_rate(s, peak=1.0, steps=300, warmup=0.1, final=0.1) for s in range(1, 301)) / 300
    assert kept == pytest.approx(math.exp(-3e-4 * 300 * mean), rel=1e-4)
    assert kept == pytest.approx(0.952, abs=5e-4)
