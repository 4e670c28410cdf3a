"""The report's figures: what each is called, how it is drawn, and what to read from it.

``{baseline}``, ``{optimizer}``, ``{formats}``, ``{entries}`` and ``{grad}`` in a text are filled in from the study.
A figure whose data the grid does not have is left out, and so is its place in the report. Records of `make bench`
have a figure each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from altgrad.reporting.compare import Comparison
from altgrad.reporting.document import Picture
from altgrad.reporting.figures import codes, comparison, curves, health, signals, speed, updates, weights
from altgrad.reporting.figures.select import shown_optimizer
from altgrad.reporting.figures.style import drawing, save
from altgrad.reporting.load import Study
from altgrad.reporting.machines import picture_name
from altgrad.reporting.wording import joined

Draw = Callable[[Study, Comparison], Figure | None]


@dataclass(frozen=True)
class Plate:
    """One figure of the report."""

    name: str
    draw: Draw
    alt: str
    caption: str


PLATES = [
    Plate(
        "final_differences",
        comparison.final_differences,
        "Final validation loss of {formats} minus that of {baseline}, with seeds, intervals and noise floor",
        "Final validation loss minus {baseline}'s: a small dot per seed, a large one for their mean, a line for the "
        "95 % interval of each by itself (cut at the frame). Grey: the A/A noise floor, where two equal arms end 19 "
        "times in 20. How the differences are read, all together, stands in the table.",
    ),
    Plate(
        "gains",
        comparison.gains,
        "Gain of each geometry-aware arm over the plain one, by format",
        "Final validation loss of the plain arm minus the geometry-aware arm's, each at its best learning rate, with "
        "the 95 % interval of each by itself. Right of zero is a gain. Grey: where a gain of nothing ends 19 times in "
        "20. Small hollow marks: what is left of the gain beyond that of the same geometry without the format.",
    ),
    Plate(
        "rungs_by_binade",
        updates.rungs_by_binade,
        "Rungs that a step moves weights by, against the size of the weight, for each arm and format",
        "How far a step moves a weight, in rungs of its grid, by the binade of its magnitude: mean over quantized "
        "weights, the watched steps of the second half of the run, layers and seeds. A flat line is a step that is the "
        "same in rungs for small weights and large ones.",
    ),
    Plate(
        "loss_curves",
        curves.loss_curves,
        "Training and validation loss by optimizer step for {entries}",
        "Thin lines are seeds, thick ones their mean. A thin line that ends in a cross is a run that diverged; it "
        "enters no mean.",
    ),
    Plate(
        "loss_differences",
        curves.loss_differences,
        "Training and validation loss minus those of {baseline} by optimizer step",
        "The same losses minus {baseline}'s with the same seed at the same step. Both saw the same batches from the "
        "same initial weights, so batch noise cancels. What stays is the format and the chaos of training, whose size "
        "the thin lines, one per seed, show.",
    ),
    Plate(
        "cost_against_precision",
        comparison.cost_against_precision,
        "Cost of each format against its mean signal-to-noise ratio for weights, inputs and gradients",
        "Each format's cost against the mean precision with which it held each kind of tensor (`{optimizer}`). A hint "
        "where the cost comes from, not a proof: precision and range trade off against each other in 8 bits. {grad}",
    ),
    Plate(
        "sqnr",
        partial(health.health_map, metric="sqnr_db"),
        "Heat map of signal-to-quantization-noise ratio by layer, format and role",
        "Precision by layer: mean SQNR over the second half of the run and over seeds (`{optimizer}`). Brighter is "
        "better. {grad}",
    ),
    Plate(
        "underflow",
        partial(health.health_map, metric="underflow_frac"),
        "Heat map of the share of non-zero elements that rounded to zero, by layer, format and role",
        "Share of the non-zero elements that the format rounded to zero (`{optimizer}`). Darker is worse. {grad}",
    ),
    Plate(
        "overflow",
        partial(health.health_map, metric="overflow_frac"),
        "Heat map of the share of elements beyond the format's maximum, by layer, format and role",
        "Share of the elements whose scaled magnitude exceeded the format's maximum before clamping (`{optimizer}`). "
        "Darker is worse.",
    ),
    Plate(
        "health_over_time",
        health.health_over_time,
        "Signal-to-noise ratio and underflow by optimizer step for weights, inputs and gradients",
        "The median layer over training, mean over seeds (`{optimizer}`). {grad}",
    ),
    Plate(
        "weight_grid",
        weights.weight_grid,
        "Histogram of weight magnitudes against the range and precision of each format",
        "Weights at the end of training by magnitude, in binades below the largest of their layer, which scaling puts "
        "on the format's largest value (`{optimizer}`, every layer and seed alike). Dark ground: normal values; light "
        "ground: subnormal ones; white: rounds to zero. Black line: significant bits of the format at that magnitude.",
    ),
    Plate(
        "code_usage",
        codes.code_usage,
        "Share of weights on each code of each format",
        "How often each representable value is used at the end of training, from the most negative rung to the most "
        "positive (`{optimizer}`, every layer and seed alike). Dotted: all used alike.",
    ),
    Plate(
        "bit_activity",
        codes.bit_activity,
        "Entropy of each bit of the weight codes of each format",
        "What each bit of the weight code carries at the end of training, by itself: 1 is a bit set in half of the "
        "weights, 0 one that never changes (`{optimizer}`). S sign, E exponent, M mantissa.",
    ),
    Plate(
        "misalignment",
        codes.misalignment,
        "Distribution of the distance of each weight from its rounded value",
        "Distance from each weight to its rounded value at the end of training (`{optimizer}`). Weights that pay no "
        "heed to the grid spread evenly between 0 and ½ (dotted).",
    ),
    Plate(
        "weight_kl",
        weights.weight_kl,
        "Heat map of the divergence of each layer's weight distribution from the baseline's",
        "How far each layer's distribution of weight magnitudes is from {baseline}'s with the same seed: "
        "Kullback-Leibler divergence over quarter binades at the end of training (`{optimizer}`). A last column, where "
        "there are two seeds, shows how far {baseline} is from itself with another seed.",
    ),
    Plate(
        "gradients",
        signals.gradients,
        "Gradient norm, gradient signal-to-noise ratio and cosine by layer",
        "Weight gradients by layer, input to output (`{optimizer}`): norm, and agreement of the quantized path with "
        "the float32 path on one batch. Dotted: the level at which the report flags a layer.",
    ),
    Plate(
        "kurtosis",
        signals.kurtosis,
        "Excess kurtosis of each block's output by step",
        "Excess kurtosis of each block's output (`{optimizer}`, mean over seeds): heavy tails cost a per-tensor scale "
        "its resolution. Dotted: the flag at 10.",
    ),
]


def draw_all(study: Study, result: Comparison, benches: list[dict[str, Any]], folder: Path) -> dict[str, Picture]:
    """Draw every figure that has data as PNG and SVG in ``folder``; return their pictures by name.

    Files of figures that this grid does not have are removed, so the folder holds what the report shows.
    """
    words = _words(study, result)
    pictures = _machines(benches, folder)
    for plate in PLATES:
        with drawing():
            figure = plate.draw(study, result)
            if figure is not None:
                save(figure, folder, plate.name)
                pictures[plate.name] = Picture(
                    plate.name, plate.alt.format(**words), plate.caption.format(**words).strip()
                )
    for path in folder.glob("*.*") if folder.is_dir() else ():
        if path.suffix in (".png", ".svg") and path.stem not in pictures:
            path.unlink()
    return pictures


def _machines(benches: list[dict[str, Any]], folder: Path) -> dict[str, Picture]:
    """Draw the step times of every machine that has any."""
    pictures = {}
    for bench in benches:
        with drawing():
            figure = speed.step_times(bench)
            if figure is not None:
                name, device = picture_name(bench), bench["device"]
                save(figure, folder, name)
                pictures[name] = Picture(
                    name,
                    f"Time of a training step on {device} over that of the bf16 step, by contestant and size",
                    f"{device}: time of a step over that of a bf16 step of the same round, median and quartiles. "
                    "Left of the line is faster than bf16.",
                )
    return pictures


def _words(study: Study, result: Comparison) -> dict[str, str]:
    optimizer = shown_optimizer(study, result)
    grads = {rule["grad"]["format"] for cell in study.resolved.values() for rule in cell["rules"] if rule["grad"]}
    same = f"Incoming gradients are in {next(iter(grads))} in every column." if len(grads) == 1 else ""
    others = [name for name in study.formats if name != study.baseline] or study.formats
    return {
        "baseline": study.baseline or "the baseline",
        "optimizer": optimizer,
        "formats": joined(others),
        "entries": joined(study.formats),
        "grad": same,
    }
