"""Laws of the figures. Oracles: matplotlib's bounding boxes, sums by hand, a format's values, every pair of runs."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text
from scipy import stats

from altgrad.formats import get_format
from altgrad.reporting import tables
from altgrad.reporting.compare import BYTES, compare, memory
from altgrad.reporting.figures import (
    LOOKS,
    RESERVE,
    FigureSpec,
    draw,
    drawing,
    looks,
    panels,
    report_figures,
    spread_axis,
)
from altgrad.reporting.figures.layers import (
    BINS_PER_BINADE,
    LOWEST,
    relative_histogram,
    significant_bits,
    weight_format,
)
from altgrad.reporting.figures.losses import courses, front, loss_curves
from altgrad.reporting.load import IDENTITY, Study
from tests.reporting.made_losses import ADAMW, STIFF, study_of, texts


@pytest.fixture(scope="module")
def troubled(study):
    """The study with two sizes, which a figure is there to show."""
    cells = study.cells.assign(bytes_per_parameter=study.cells["format"].map({"bf16": 16.0}).fillna(13.0))
    return replace(study, cells=cells)


def figure_of(name: str) -> FigureSpec:
    return next(spec for spec in report_figures() if spec.name == name)


@pytest.mark.parametrize("spec", report_figures(), ids=lambda spec: spec.name)
def test_no_text_leaves_its_figure(spec, troubled, made) -> None:
    study = troubled
    if spec.section == "gains":
        arms = {"spacing_unmatched": {"stiffness": "ulp"}}
        study = made(["bf16", "E4M3", "E3M4"], ["adamw", "spacing_unmatched"], (0, 1, 2), arms=arms)
    with drawing():
        assert outside(spec.draw(study, compare(study))) == []


def outside(figure: Figure) -> list[str]:
    """Return the texts of ``figure`` that are not wholly inside its frame."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    frame = figure.bbox.padded(1)
    hidden = _labels_of_ticks_out_of_range(figure)
    texts = [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip() and id(t) not in hidden]
    boxes = {text.get_text(): text.get_window_extent(renderer) for text in texts}
    return [name for name, box in boxes.items() if not (frame.contains(*box.min) and frame.contains(*box.max))]


@pytest.mark.parametrize("twin", [False, True])
def test_the_caption_of_the_gains_speaks_of_hollow_marks_where_there_are_some(tmp_path, twin) -> None:
    arms, entries = {"adamw": ADAMW, "stiff": STIFF}, ["bf16", "E3M4", *["virtual.E3M4"] * twin]
    losses = {(entry, arm): [3.5, 3.6, 3.55] for entry in entries for arm in arms}
    losses["E3M4", "stiff"] = [3.3, 3.42, 3.34]
    study = study_of(losses, arms)
    spec = figure_of("gains")
    with drawing():
        figure = spec.draw(study, compare(study))
    marks = [line.get_markerfacecolor() for axis in figure.axes for line in axis.lines]
    caption = draw([spec], study, compare(study), tmp_path)["gains"].caption
    assert ("white" in marks) == twin == ("hollow" in caption) and "{" not in caption


def _labels_of_ticks_out_of_range(figure: Figure) -> set[int]:
    """Return the identities of tick labels that matplotlib keeps, beyond the ends of an axis, and does not draw."""
    hidden = set()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]:
                if not axes.get_visible() or not low <= tick.get_loc() <= high:
                    hidden |= {id(tick.label1), id(tick.label2)}
    return hidden


def test_every_pair_of_formats_differs_in_colour_and_in_marker() -> None:
    everyone = [*LOOKS.values(), *RESERVE]
    for i, one in enumerate(everyone):
        for other in everyone[i + 1 :]:
            assert np.abs(np.subtract(to_rgb(one.color), to_rgb(other.color))).max() > 0.08
            assert one.marker != other.marker
    assert len({look.dash for look in LOOKS.values()}) >= 7


def test_an_entry_looks_alike_in_every_grid_and_an_unquantized_control_as_its_format_but_lighter() -> None:
    assert looks(["E3M4"])["E3M4"] == looks(["bf16", "mine", "E3M4"])["E3M4"] == LOOKS["E3M4"]
    shown = looks(["bf16", "E3M4", "virtual.E3M4", "uniform_row.E3M4", "virtual.mine"])
    assert shown["virtual.E3M4"].marker == shown["E3M4"].marker and shown["virtual.E3M4"].color == "#80b8d8"
    assert len({(look.color, look.marker) for look in shown.values()}) == 5


@pytest.mark.parametrize(("values", "label"), [
    ([0.01, 0.02, 0.03], "cost"), ([0.0, 0.0], "cost"), ([], "cost"),
    ([0.01, 0.02, 0.03, 2.0], "cost\nlogarithmic beyond 0.05"),
])  # fmt: skip
def test_an_axis_is_linear_unless_one_value_would_squeeze_the_others(values: list[float], label: str) -> None:
    _, ((axis,),) = panels(1, 1, 2.0)
    axis.set_ylabel("cost")
    spread_axis(axis, "y", pd.Series(values, dtype="float64"))
    assert (axis.get_yscale() == "symlog") == (label != "cost") and axis.get_ylabel() == label
    assert label == "cost" or axis.get_ylim()[0] < 0 < 2.0 < axis.get_ylim()[1]


def test_a_panel_of_curves_has_the_mean_over_seeds_of_each_optimizer_and_ends_a_run_that_diverged(made) -> None:
    arms = {"stiff": {"stiffness": "ulp"}}
    study = made(["bf16", "E4M3"], ["adamw", "stiff"], (0, 1, 2), arms=arms, diverged={"E4M3-stiff-1-1": 40}, steps=60)
    with drawing():
        panels_of = {axis.get_title(loc="left"): axis for axis in loss_curves(study, compare(study)).axes}
    assert list(panels_of) == ["bf16", "E4M3"]
    losses = study.history[study.history["train_loss"].notna()]
    for name, axis in panels_of.items():
        drawn = [np.column_stack(line.get_data()) for line in axis.lines]
        for arm in ("adamw", "stiff"):
            own = losses[(losses["format"] == name) & (losses["optimizer"] == arm)]
            if (name, arm) == ("E4M3", "stiff"):
                own = own[own["seed"] != 1]
            mean = own.groupby("step")["train_loss"].mean().reset_index().to_numpy()
            assert any(line.shape == mean.shape and line == pytest.approx(mean) for line in drawn), (name, arm)
        crosses = [line.get_xdata() for line in axis.lines if line.get_marker() == "x"]
        assert [list(at) for at in crosses] == ([[40]] if name == "E4M3" else [])


def test_the_chart_of_gains_has_a_row_for_each_optimizer_and_format(made) -> None:
    arms = {"stiff": {"stiffness": "ulp"}, "shuffled": {"stiffness": "permuted"}}
    spec = figure_of("gains")
    for formats, labels in ((["E5M2", "E4M3"], ["", "E5M2", "E4M3"] * 2),
                            (["E4M3"], ["stiff minus adamw", "shuffled minus adamw"])):  # fmt: skip
        study = made(formats, ["adamw", *arms], (0, 1, 2), arms=arms, baseline=formats[0])
        comparison = compare(study)
        with drawing():
            (axis,) = spec.draw(study, comparison).axes
        assert [tick.get_text() for tick in axis.get_yticklabels()] == labels
        places = [line.get_data() for line in axis.lines if line.get_markersize() == 6]
        rows = [row for arm in arms for row in comparison.gains.itertuples() if row.optimizer == arm]
        means = [row.claim.difference.mean for row in rows]
        assert [x[0] for x, _ in places] == pytest.approx(means)
        assert [labels[y[0]] for _, y in places] == [label for label in labels if label]


def test_moving_a_histogram_keeps_its_mass() -> None:
    """Layers of different amax, one reaching beyond the left end; all mass stays, in the bins where it belongs."""
    rows = pd.DataFrame({
        "format": "E4M3", "seed": 0, "layer": ["a", "a", "b", "b"], "x": [-4.0, -2.0, -9.0, -30.0],
        "value": [0.25, 0.75, 0.5, 0.5],
    })  # fmt: skip
    amax = pd.Series({("E4M3", 0, "a"): 2.0**-1.1, ("E4M3", 0, "b"): 1.0})
    shares = relative_histogram(rows, amax)
    assert shares.sum() == pytest.approx(1.0)
    edges = LOWEST + np.arange(len(shares)) / BINS_PER_BINADE
    assert shares[edges == -9.0] == pytest.approx(0.25)
    assert shares[(edges >= -1.0) & (edges <= -0.75)].sum() == pytest.approx(0.375)  # -2 + 1.1 = -0.9
    assert shares[0] == pytest.approx(0.25)


def test_codes_are_shown_for_the_layers_of_one_format(study) -> None:
    """A recipe that mixes formats: the last matching rule decides, and most layers win."""
    cell = study.resolved["E3M4-adamw-0-1"]
    head = cell["rules"][0] | {"layers": "head", "weight": cell["rules"][0]["grad"]}
    mixed = cell | {"format": "mixed", "rules": [*cell["rules"], head]}
    plain = cell | {"format": "plain", "rules": [{"layers": "*", "weight": None}]}
    other = replace(study, resolved={"a": mixed, "b": plain})
    fmt, layers = weight_format(other, "mixed", ["blocks.0.mlp.up", "head", "blocks.0.attn.out", "head"])
    assert (fmt.name, layers) == ("E3M4", ["blocks.0.mlp.up", "blocks.0.attn.out"])
    assert weight_format(other, "plain", ["head"]) is None


@pytest.mark.parametrize("name", ["E0M7", "E1M6", "E2M5", "E3M4", "E4M3", "E5M2", "E6M1", "E7M0"])
def test_significant_bits_count_the_values_of_a_binade(name: str) -> None:
    """A binade with n representable values holds 1 + log2(n) significant bits; one without any holds none."""
    fmt = get_format(name)
    values = fmt.magnitudes
    top = np.floor(np.log2(fmt.scale_target)) - 1  # the highest binade that scaling can fill
    for exponent in np.arange(top, max(top - 20, fmt.emin - fmt.mantissa_bits - 3), -1):
        count = ((values >= 2.0**exponent) & (values < 2.0 ** (exponent + 1))).sum()
        binades = np.array([exponent + 0.5]) - np.log2(fmt.scale_target)
        assert significant_bits(fmt, binades, fmt.scale_target)[0] == (1 + np.log2(count) if count else 0), exponent


# --- loss against bytes ----------------------------------------------------------------------------


@pytest.mark.parametrize("higher_is_better", [False, True])
def test_the_front_is_what_no_other_run_beats(higher_is_better) -> None:
    random = np.random.default_rng(0)
    for _ in range(50):
        size, value = random.integers(0, 5, (2, 8))
        found = front(pd.Series(size), pd.Series(value), higher_is_better=higher_is_better)
        cost = -value if higher_is_better else value
        beaten = [
            any(size[j] <= size[i] and cost[j] <= cost[i] and ((size[j], cost[j]) != (size[i], cost[i]) or j < i)
                for j in range(8) if j != i)
            for i in range(8)
        ]  # fmt: skip
        assert sorted(found) == [i for i in range(8) if not beaten[i]]
        assert list(size[found]) == sorted(set(size[found]))


def test_bytes_are_shown_where_runs_differ_in_them(study, comparison) -> None:
    spec = figure_of("loss_against_bytes")
    sizes = {name: 16.0 - i for i, name in enumerate(study.formats)}
    for column, shown in ((16.0, False), (study.cells["format"].map(sizes), True)):
        own = replace(study, cells=study.cells.assign(**{BYTES: column}))
        table = tables.results_table(own, comparison)
        heads = [column.head for column in table.columns]
        assert ("bytes" in heads) is shown and len(memory(own, comparison)) == (len(comparison.best) if shown else 0)
        with drawing():
            assert (spec.draw(own, comparison) is not None) is shown
        if shown:
            for row in texts(table):
                assert float(row[heads.index("bytes")]) == sizes[row[0].strip("*")]


# --- gains over a run ----------------------------------------------------------------------------------

STEPS = (0, 10, 20, 40, 80)
NOISE = (0.0, 0.01, -0.01)  # what an arm gains more with each seed


def rises_and_falls(step: int) -> float:
    return 0.1 if step == 20 else -0.2 if step == 80 else 0.0


def course(lost: tuple[str, str, int] | None = None, seeds: int = 3) -> Study:
    """An arm that gains as `rises_and_falls` says in E3M4, and nothing in bf16, at the first of two rates.

    ``lost`` is a cell that diverged after a loss of 99.
    """
    losses = {
        (entry, arm, rate): [None if (entry, arm, seed) == lost else 3 + rate for seed in range(seeds)]
        for entry, arm, rate in itertools.product(("bf16", "E3M4"), ("adamw", "stiff"), (1, 2))
    }
    study = study_of(losses, {"adamw": ADAMW, "stiff": STIFF})
    rows = []
    for (entry, arm, rate), seed, step in itertools.product(losses, range(seeds), STEPS):
        gain = (rises_and_falls(step) + NOISE[seed]) * ((entry, arm) == ("E3M4", "stiff"))
        loss = 99.0 if (entry, arm, seed) == lost else 5 - 0.01 * step + 0.3 * seed + rate - gain
        rows += [(entry, arm, seed, rate, step, np.nan, loss), (entry, arm, seed, rate, step + 5, 1.0, np.nan)]
    columns = [*IDENTITY, "step", "train_loss", "val_loss"]
    return replace(study, history=pd.DataFrame(rows, columns=columns))


def test_a_gain_is_held_against_the_same_seed_after_the_same_step():
    study = course()
    found = courses(study, compare(study))
    assert list(found) == [("E3M4", "stiff")], "in bf16 it has no spacing to follow"
    for own in found.values():
        assert list(own.index) == [10, 20, 40, 80], "before training nothing is gained"
        for step, row in own.iterrows():
            known = [-rises_and_falls(step) - noise for noise in NOISE]
            assert row.to_numpy() == pytest.approx(known, abs=1e-12)


def test_a_run_that_diverged_takes_part_in_no_gain():
    study = course(("E3M4", "adamw", 1))
    own = courses(study, compare(study))["E3M4", "stiff"]
    assert own[1].isna().all() and own[[0, 2]].notna().all(axis=None)


@pytest.mark.parametrize("seeds", [1, 3])
def test_the_figure_draws_the_mean_of_the_seeds_and_its_interval(seeds):
    study = course(seeds=seeds)
    spec = figure_of("gains_over_run")
    with drawing():
        figure = spec.draw(study, compare(study))
    (axis,) = figure.axes
    assert axis.get_title(loc="left") == "E3M4", "in bf16 the optimizer is its plain form"
    drawn = [line.get_ydata() for line in axis.lines]
    means = [-rises_and_falls(step) - np.mean(NOISE[:seeds]) for step in STEPS[1:]]
    assert any(len(line) == len(means) and line == pytest.approx(means) for line in drawn)
    known = stats.t.interval(0.95, 2, means[-1], 0.01 / np.sqrt(3)) if seeds > 1 else ()
    ends = {y for band in axis.collections for path in band.get_paths() for x, y in path.vertices if x == STEPS[-1]}
    assert all(any(y == pytest.approx(end) for y in ends) for end in known)


def test_an_interval_that_is_wide_early_in_the_run_hides_no_line():
    study = course()
    wild = (study.history["step"] == 10) & (study.history["optimizer"] == "stiff") & (study.history["format"] == "E3M4")
    shift = study.history["seed"].map({0: 50.0, 1: -50.0, 2: 0.0})
    history = study.history.assign(val_loss=study.history["val_loss"] + shift * wild)
    study = replace(study, history=history)
    spec = figure_of("gains_over_run")
    with drawing():
        figure = spec.draw(study, compare(study))
    assert max(end for path in figure.axes[0].collections[0].get_paths() for _, end in path.vertices) > 50
    means = [-rises_and_falls(step) - np.mean(NOISE) for step in STEPS[1:]]
    for axis in figure.axes:
        low, high = axis.get_ylim()
        assert -1 < low < min(means) and max(means) < high < 1
