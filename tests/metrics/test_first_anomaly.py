"""What is named as the first anomaly of a bad run. Oracle: histories made by hand, with excursions put into them."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pandas as pd
import pytest

from altgrad.metrics import METRICS
from altgrad.metrics.first_anomaly import (
    LEAST_PEERS,
    THRESHOLD,
    UPDATE_THRESHOLD,
    Peers,
    Trace,
    first_anomaly,
    from_binades,
    tensor_bands,
    threshold_of,
    to_binades,
)

STEPS = [1, 10, 20, 30, 40, 50]
LAYERS = ["blocks.0.attn.qkv", "blocks.0.mlp.up", "blocks.1.mlp.up"]
ROLES = ("input", "weight", "grad")
UPDATE = ("update", "update_l2", 0.01)
FAR = [("amax", 4.0), ("amax", 0.05), ("sqnr_db", 12.0), ("overflow_frac", 0.2)]
VALUES = {"amax": 0.5, "sqnr_db": 31.0, "overflow_frac": 0.0, "underflow_frac": 0.01, "nonfinite": 0.0}


def made(seed=0, *, changed=(), losses=None, without=(), diverged=None, nonfinite="", last=50) -> Trace:
    """Return a run that differs from others by a percent.

    ``changed`` holds (layer, role, metric, step, value, steps that it lasts); ``without`` metrics that are missing.
    """
    random = np.random.default_rng(seed)
    rows = []
    for step in [step for step in STEPS if step <= last]:
        for layer in LAYERS:
            for role, metric, usual in [*((role, *item) for role in ROLES for item in VALUES.items()), UPDATE]:
                value = usual * (1 + 0.01 * random.standard_normal())
                here = [change[4] for change in changed if change[:3] == (layer, role, metric)
                        and change[3] <= step < change[3] + change[5]]  # fmt: skip
                if metric not in without:
                    rows.append((step, layer, role, metric, here[0] if here else value))
    monitors = pd.DataFrame(rows, columns=["step", "layer", "role", "metric", "value"])
    loss = {step: 4.0 - step / 25 + 0.01 * random.standard_normal() for step in STEPS if step <= last} | (losses or {})
    history = pd.DataFrame({"step": list(loss), "train_loss": list(loss.values()), "val_loss": math.nan})
    return Trace(monitors, history, diverged, nonfinite)


PEERS = Peers(made(seed) for seed in range(1, 6))
PLACE = ("blocks.0.mlp.up", "weight", "sqnr_db")


def named(run: Trace, peers=PEERS) -> tuple | None:
    first = first_anomaly(run, Peers(peers)).excursion
    return None if first is None else (first.layer, first.role, first.metric, first.step)


def test_a_healthy_run_has_none_and_its_loss_shows_nothing() -> None:
    for i, run in enumerate(PEERS):
        found = first_anomaly(run, Peers(PEERS[:i] + PEERS[i + 1 :]))
        assert found.excursion is None and found.loss_step is None and found.lead is None and found.peers == 4


@pytest.mark.parametrize(("layer", "role"), zip(LAYERS, ROLES, strict=True))
@pytest.mark.parametrize(("metric", "value"), FAR)
def test_an_injected_excursion_is_named_with_its_range_and_its_lead_on_the_loss(layer, role, metric, value) -> None:
    run = made(changed=[(layer, role, metric, 20, value, 99)], losses={40: 9.0, 50: 9.0})
    found = first_anomaly(run, PEERS)
    first = found.excursion
    assert (first.layer, first.role, first.metric, first.step) == (layer, role, metric, 20)
    assert first.value == pytest.approx(value)
    rows = [trace.monitors.set_index(["step", "layer", "role", "metric"])["value"] for trace in PEERS]
    own = [row[20, layer, role, metric] for row in rows]
    assert [first.low, first.high] == pytest.approx([min(own), max(own)])
    assert found.loss_step == 40 and found.lead == 20


def test_an_excursion_after_the_loss_rose_is_not_named() -> None:
    changed = [(*PLACE, 30, 12.0, 99)]
    late = first_anomaly(made(changed=changed, losses=dict.fromkeys((20, 30, 40, 50), 9.0)), PEERS)
    assert late.excursion is None and late.loss_step == 20
    same = first_anomaly(made(changed=changed, losses=dict.fromkeys((30, 40, 50), 9.0)), PEERS)
    assert same.excursion.step == 30 and same.lead == 0
    assert named(made(changed=changed, diverged=29)) is None and named(made(changed=changed, diverged=30)) is not None


def test_the_earliest_is_named_however_far_out_later_ones_are() -> None:
    changed = [(*PLACE, 20, 20.0, 99), ("blocks.1.mlp.up", "input", "amax", 30, 1e6, 99)]
    assert named(made(changed=changed)) == (*PLACE, 20)


def test_of_one_pass_the_farthest_out_is_named_and_of_equals_the_one_computed_first() -> None:
    near, far = ("blocks.0.attn.qkv", "input", "amax", 20, 5.0, 99), ("blocks.1.mlp.up", "grad", "amax", 20, 500.0, 99)
    assert named(made(changed=[near, far])) == far[:4]
    equal = [(layer, role, "nonfinite", 20, 3.0, 1) for layer in LAYERS for role in ("input", "grad")]
    assert named(made(changed=equal)) == equal[0][:4]  # forward first, from the first layer on
    assert named(made(changed=equal[1::2])) == ("blocks.1.mlp.up", "grad", "nonfinite", 20)  # then back from the last
    weight = ("blocks.1.mlp.up", "weight", "nonfinite", 20, 1.0, 1)
    assert named(made(changed=[*equal, weight])) == weight[:4]  # it was there before


def test_what_the_next_pass_does_not_have_is_no_excursion_unless_it_is_the_last() -> None:
    assert named(made(changed=[(*PLACE, 20, 12.0, 1)])) is None
    assert named(made(changed=[(*PLACE, 50, 12.0, 1)])) == (*PLACE, 50)
    there_and_back = [(*PLACE, 20, 12.0, 1), (*PLACE, 30, 60.0, 1)]
    assert named(made(changed=there_and_back)) is None


def test_nan_needs_no_next_pass_and_no_peers() -> None:
    run = made(changed=[("blocks.1.mlp.up", "input", "nonfinite", 30, 2.0, 1)])
    for peers in (PEERS, Peers()):
        assert named(run, peers) == ("blocks.1.mlp.up", "input", "nonfinite", 30)
    ended = made(diverged=23, nonfinite="blocks.1.mlp.up grad", last=20)
    assert named(ended) == named(ended, []) == ("blocks.1.mlp.up", "grad", "nonfinite", 23)
    assert first_anomaly(ended, PEERS).lead == 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_metric_that_is_not_finite_where_healthy_runs_are_is_an_excursion(value) -> None:
    assert named(made(changed=[(*PLACE, 20, value, 99)])) == (*PLACE, 20)
    assert named(made(), [made(seed, changed=[(*PLACE, 20, value, 1)]) for seed in range(1, 6)]) is None


def test_missing_metrics_and_missing_steps_are_no_excursions() -> None:
    assert named(made(without=("sqnr_db", "nonfinite"))) is None
    fewer = [made(seed, without=("sqnr_db",)) for seed in range(1, 6)]
    changed = [(*PLACE, 20, 12.0, 99), ("blocks.0.mlp.up", "weight", "amax", 40, 9.0, 99)]
    assert named(made(changed=changed), fewer) == ("blocks.0.mlp.up", "weight", "amax", 40)
    short = [made(seed, last=20) for seed in range(1, 6)]
    assert named(made(changed=[(*PLACE, 40, 12.0, 99)]), short) is None
    assert named(Trace(PEERS[0].monitors.iloc[:0], PEERS[0].history)) is None


def test_without_enough_healthy_runs_the_limits_of_the_rows_decide() -> None:
    limit = METRICS["overflow_frac"].limit.value
    changed = [("blocks.0.mlp.up", "input", "overflow_frac", 30, 2 * limit, 1), (*PLACE, 10, 1.0, 99)]
    found = first_anomaly(made(changed=changed), Peers(PEERS[: LEAST_PEERS - 1]))
    first = found.excursion
    assert (first.layer, first.metric, first.step) == ("blocks.0.mlp.up", "overflow_frac", 30)
    assert math.isnan(first.low) and found.peers == 0
    assert named(made(changed=changed), PEERS[:LEAST_PEERS]) == (*PLACE, 10)


def test_of_one_step_a_tensor_comes_before_the_update_that_is_made_of_it() -> None:
    changed = [("blocks.0.attn.qkv", "update", "update_l2", 20, 1e6, 99), (*PLACE, 20, 12.0, 99)]
    assert named(made(changed=changed)) == (*PLACE, 20)
    assert named(made(changed=changed[:1]))[1:] == ("update", "update_l2", 20)


@pytest.mark.parametrize(("role", "metric", "usual", "threshold"), [
    ("update", "update_l2", 0.01, UPDATE_THRESHOLD), ("weight", "amax", 0.5, THRESHOLD)
])  # fmt: skip
def test_a_value_inside_the_threshold_is_none_and_one_beyond_it_is(role, metric, usual, threshold) -> None:
    # Healthy runs differ by a percent, so the floor of the spread decides: a 16th of a binade, one more run's worth.
    reach = threshold / 16 * math.sqrt(1 + 1 / len(PEERS))
    place = ("blocks.0.mlp.up", role, metric, 20)
    assert threshold_of(role) == threshold
    assert named(made(changed=[(*place, usual * 2 ** (0.9 * reach), 99)])) is None
    assert named(made(changed=[(*place, usual * 2 ** (1.1 * reach), 99)])) == place


def test_binades_are_undone() -> None:
    values = np.array([0.001, 0.03, 0.5, 0.99])
    for metric in ("amax", "sqnr_db", "overflow_frac", "kurtosis", "cosine_adamw"):
        assert from_binades(metric, to_binades(metric, values)) == pytest.approx(values)


def test_bands_are_of_the_values_that_peers_have_at_the_runs_own_places() -> None:
    """Oracle: numpy's median, minimum and maximum, of runs that lack metrics, steps and layers of each other's."""
    lacking = made(6, without=("amax",)), made(7, last=30), made(8, changed=[(*PLACE, 20, math.nan, 99)])
    peers, run = Peers((*PEERS[:2], *lacking)), made(9, without=("underflow_frac",), last=40)
    bands = tensor_bands(run, peers)
    stack = np.stack([
        peer.tensors.replace(np.inf, np.nan).reindex(index=bands.values.index, columns=bands.values.columns)
        for peer in peers
    ])  # fmt: skip
    assert np.isnan(stack).any() and stack.shape[1:] == bands.middle.shape == run.tensors.shape
    enough = np.isfinite(stack).sum(axis=0) >= LEAST_PEERS
    with warnings.catch_warnings(action="ignore"):  # of places without any value
        expected = np.nanmedian(stack, axis=0), np.nanmin(stack, axis=0), np.nanmax(stack, axis=0)
    assert np.allclose(bands.middle, np.where(enough, expected[0], np.nan), equal_nan=True)
    assert np.array_equal(bands.low, expected[1], equal_nan=True)
    assert np.array_equal(bands.high, expected[2], equal_nan=True)


def test_the_spread_of_a_band_is_half_the_tensors_own_and_half_that_of_its_kind_in_all_layers() -> None:
    """Oracle: numpy over all places, where layers, roles and metrics spread each by so much of their own."""
    random, layers, roles, metrics = np.random.default_rng(0), LAYERS, ("input", "weight", "grad"), ("amax", "l2")
    size = {
        (layer, role, metric): 0.1 * 3**i * 1.7**j * 1.3**k
        for i, layer in enumerate(layers) for j, role in enumerate(roles) for k, metric in enumerate(metrics)
    }  # fmt: skip

    def drawn() -> Trace:
        rows = [(step, *key, 2 ** (own * random.standard_normal())) for key, own in size.items() for step in STEPS]
        history = pd.DataFrame({"step": STEPS, "train_loss": 4.0, "val_loss": math.nan})
        return Trace(pd.DataFrame(rows, columns=["step", "layer", "role", "metric", "value"]), history)

    peers = Peers(drawn() for _ in range(5))
    bands = tensor_bands(drawn(), peers)
    stack = np.stack([peer.tensors.loc[bands.values.index, bands.values.columns] for peer in peers])
    squares = ((stack - np.median(stack, axis=0)) ** 2).sum(axis=(0, 2)) / ((len(peers) - 1) * len(STEPS))
    own = dict(zip(bands.values.index, squares, strict=True))
    for (layer, role, metric), found in zip(bands.values.index, bands.spread, strict=True):
        common = np.median([own[other, role, metric] for other in layers])
        assert found == pytest.approx(math.sqrt((own[layer, role, metric] + common) / 2 * (1 + 1 / len(peers))))
        assert found.min() > 0.07, "above the floor"
