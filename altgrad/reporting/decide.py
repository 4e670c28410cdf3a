"""What the study's written-down tests say: each part's own statistic, from the files in its folder.

    python -m altgrad.reporting.decide reports/study/matrix [FOLDER ...]

HYPOTHESES.md, in the folder above, says which test decides what. Each folder gets a DECISION.md, and its
figures where it has any. A figure may show other parts that lie beside the folder.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from altgrad.config import UserError, run_stage
from altgrad.config.files import read_yaml, write_text
from altgrad.reporting import concentration, first_arms, gates, hypotheses, ladders
from altgrad.reporting.document import Block, Document, Section, Text
from altgrad.reporting.markdown import to_markdown
from altgrad.reporting.rungs import rungs
from altgrad.reporting.wording import joined

PARTS: dict[str, Callable[[pd.Series, str, Path], list[Block]]] = {
    "matrix": hypotheses.matrix, "low-bits": hypotheses.own_parts, "profile": hypotheses.profile,
    "profile-800": hypotheses.profile, "profile-3200": hypotheses.profile, "profile-nano": hypotheses.profile,
    "controls": hypotheses.controls, "masterless": hypotheses.masterless,
    "arms": first_arms.arms, "madam": first_arms.arms,
    "formats": ladders.larger_formats, "formats-muon": ladders.larger_formats,
    "splits": hypotheses.splits,
    "gate-formats": gates.gate_formats, "gate-formats-blocks": gates.gate_formats,
    "gate-rounding": gates.rounding,
    "what-if": gates.what_if, "no-significand": gates.no_significand,
    "length-800": ladders.longer, "length-3200": ladders.longer, "length-3200-twin": ladders.longer_twin,
    "length-3200-fading": ladders.longer_rival, "length-3200-permuted": ladders.longer_rival,
    "length-3200-rate": ladders.longer_rival, "length-3200-shared": ladders.larger,
    "length-3200-batch-4": ladders.larger, "length-800-batch-64": ladders.larger, "length-3200-slow": ladders.larger,
    "length-3200-pruned": concentration.pruned,
    "length-3200-masters": ladders.larger_with_twin,
    "length-3200-masterless": ladders.larger, "length-3200-masterless-twin": ladders.larger_twin,
    "ladder-nano": ladders.larger, "ladder-nano-3300": ladders.larger, "ladder-micro": ladders.larger,
    "ladder-nano-twin": ladders.larger_twin, "ladder-micro-twin": ladders.larger_twin,
    "ladder-micro-formats": ladders.larger_formats, "ladder-micro-null": ladders.larger_formats,
    "ladder-micro-arms": ladders.larger_arms, "ladder-micro-arms-twin": ladders.larger_twin,
    "ladder-micro-muon": ladders.larger_formats,
    "ladder-nano-shared": ladders.larger, "ladder-micro-shared": ladders.larger,
    "ladder-mini": ladders.larger, "ladder-mini-twin": ladders.larger_twin,
    "ladder-m50": ladders.larger_with_twin, "ladder-m124": ladders.larger_with_twin,
    "ladder-micro-3300": ladders.larger,
    "ladder-nano-formats": ladders.larger_formats, "ladder-nano-arms": ladders.larger_arms,
    "ladder-nano-arms-twin": ladders.larger_twin, "ladder-nano-bf16": ladders.beside_bf16,
    "ladder-nano-muon": ladders.larger_formats, "ladder-nano-3300-E4M3": ladders.larger,
    "corpus": hypotheses.corpus,
}  # fmt: skip
# What is made of several parts, in folders of its own.
OF_SEVERAL = {"gate-tokens": gates.gate_tokens, "length-3200-widths": concentration.widths, "rungs": rungs,
              "ladder-nano-rungs": rungs, "ladder-nano-rungs-own": rungs, "ladder-micro-rungs": rungs}  # fmt: skip
MAPS = ("profile", "profile-800", "profile-3200", "profile-nano")
# Parts that judge learning rates, and so need each one's losses.
BY_RATE = (*MAPS, "no-significand")
# Parts that say themselves which of their runs diverged.
MAY_DIVERGE = (*BY_RATE, "what-if")


def decide(folder: Path) -> str:
    """Return what the part in ``folder`` decides, as Markdown. Raises :class:`UserError` for one without a test."""
    if folder.name in OF_SEVERAL:
        lost = [cell for path in sorted(folder.glob("*/results.csv")) for cell in lost_in(path.parent)]
        return _written(folder, OF_SEVERAL[folder.name](folder), lost)
    if folder.name not in PARTS:
        raise UserError(f"{folder}: no test was written down for it; take {', '.join([*PARTS, *OF_SEVERAL])}")
    absent = [name for name in ("params.yaml", "results.csv") if not (folder / name).is_file()]
    if absent:
        raise UserError(f"{folder}: no {absent[0]}; make study PART={folder.name} makes it")
    arms = read_yaml(folder / "params.yaml")["optimizers"]
    results = pd.read_csv(folder / "results.csv")
    plain = next(name for name in dict.fromkeys(results["optimizer"]) if not arms[name].get("stiffness"))
    index = ["format", "optimizer", "seed"] + ["lr_scale"] * (folder.name in BY_RATE)
    lost = [] if folder.name in MAY_DIVERGE else lost_in(folder)
    return _written(folder, PARTS[folder.name](results.set_index(index)["val_loss"], plain, folder), lost)


def lost_in(folder: Path) -> list[str]:
    """Return the cells of a part's grid that ended without a loss, such as ``E3M4-rung-20``.

    Raises :class:`UserError` where an arm has none at all in a format: no test of it is left.
    """
    grid = read_yaml(folder / "params.yaml")["grid"]
    index = pd.MultiIndex.from_frame(pd.read_csv(folder / "results.csv")[["format", "optimizer", "seed"]])
    lost = []
    for entry, arm in itertools.product(grid["formats"], grid["optimizers"]):
        of_arm = [f"{entry}-{arm}-{seed}" for seed in grid["seeds"] if (entry, arm, seed) not in index]
        if len(of_arm) == len(grid["seeds"]):
            raise UserError(f"{folder}: {arm} has no loss in {entry}, with any seed, so that nothing can be said of it")
        lost += of_arm
    return lost


def _written(folder: Path, blocks: list[Block], lost: list[str]) -> str:
    if lost:
        cells = joined([f"`{cell}`" for cell in lost])
        of_them = "ended without a loss and is" if len(lost) == 1 else "ended without a loss and are"
        said = f"{cells} {of_them} in no pair, so that what they enter has fewer seeds than is said below."
        blocks = [*blocks[:-1], Text(said), blocks[-1]]
    question = "What the tests say that were written down before this part was trained (../HYPOTHESES.md)"
    if folder.name in MAPS:
        question = "A map, which no test was written down for (../HYPOTHESES.md)"
    document = Document(f"Decision: {folder.name}", question, blocks[:-1], [Section("The numbers", "", blocks[-1:])])
    return to_markdown(document).replace("## Answer so far\n\n", "", 1)


def main(arguments: list[str]) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m altgrad.reporting.decide", description=__doc__.split("\n")[0])
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    for folder in parser.parse_args(arguments).folders:
        write_text(folder / "DECISION.md", decide(folder))
        print(f"written: {folder / 'DECISION.md'}")


if __name__ == "__main__":
    run_stage(main)
