"""Recipes whose scales clamp the head's gradient are found. Oracle: the tokens of a step, counted by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from altgrad.common.files import read_yaml, write_json
from altgrad.config import Cell, Resolver, load_params
from altgrad.config.cell import clamped_head, clamped_heads

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


@pytest.mark.parametrize("rounding", ["rceil", "ceil", "even"])
def test_other_rules_are_left_alone(tmp_path, rounding):
    assert not clamped_heads(cells(tmp_path, rounding))


@pytest.mark.parametrize("head", [None, "MXFP8", "E4M3", "E5M2"])
def test_it_is_the_heads_gradient_that_counts(tmp_path, head):
    assert not clamped_heads(cells(tmp_path, head=head))


@pytest.mark.parametrize(("fmt", "cut"), [("E5M2", 12.5), ("E2M3", 6.25), ("E2M1", 25)])
@pytest.mark.parametrize("granularity", ["block", "row", "tensor"])
def test_any_format_and_granularity_with_powers_of_two_counts(tmp_path, fmt, cut, granularity):
    head = {"format": fmt, "granularity": granularity, "scale": "E8M0", "scale_rounding": "floor"}
    found = clamped_head(cells(tmp_path, "rceil", head)[0])
    assert found is not None and 100 * found.cut == pytest.approx(cut, abs=1e-3)
