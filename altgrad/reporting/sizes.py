"""What every arm gains in every format in models of every size, gathered from the parts of the study.

    python -m altgrad.reporting.sizes reports/study

Writes SIZES.md and its figure into the folder. It holds no test: those are in each part's DECISION.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd

from altgrad.config import UserError, run_stage
from altgrad.config.files import write_text
from altgrad.reporting.document import Block, Column, Document, Picture, Section, Table, Text
from altgrad.reporting.figures.decisions import Interval, draw_courses
from altgrad.reporting.hypotheses import VIRTUAL, gains_over
from altgrad.reporting.markdown import to_markdown
from altgrad.reporting.paired import interval, with_interval
from altgrad.reporting.parts import MILLIONS, Part, parts_in
from altgrad.reporting.tables import words
from altgrad.reporting.wording import NONE, joined

#: The short runs of each model, in which parts to look for a gain: the first one that has all of its cells has it. One
#: that is a folder for each format is one part.
PARTS = {
    "pico": ("formats", "controls", "splits", "formats-muon", "arms", "rungs/*"),
    "nano": ("ladder-nano-formats", "ladder-nano-twin", "ladder-nano-bf16", "ladder-nano-muon", "ladder-nano-arms",
             "ladder-nano-rungs-own/*", "ladder-nano-rungs/*"),
    "micro": ("ladder-micro-null", "ladder-micro-twin", "ladder-micro-arms", "ladder-micro-arms-twin",
              "ladder-micro-muon", "ladder-micro-rungs/*"),
    "mini": ("ladder-mini-twin",),
    "m50": ("ladder-m50",),
    "m124": ("ladder-m124",),
}  # fmt: skip
FORMATS = ("E4M3", "E5M2", "E3M4", "E1M6")
#: Arms and what each is held against.
GAINS = (("stiff_matched", "adamw"), ("stiff_matched", "permuted_matched"), ("best_profile", "adamw"),
         ("muon", "adamw"), ("adamw_sr", "adamw"), ("rung", "adamw_sr"))  # fmt: skip
#: Those of which a part may be the format's own, since they look at it, or as a check of those that do not.
OWN = (("stiff_matched", "adamw"), ("muon", "adamw"), ("rung", "adamw_sr"))
#: The figures: gains in one format, in which most arms were trained; own parts of the arm whose steps are the format's
#: rungs, in each format, and of another in that one.
DRAWN, DRAWN_IN = (
    (("stiff_matched", "adamw"), ("best_profile", "adamw"), ("muon", "adamw"), ("rung", "adamw_sr")),
    "E3M4",
)
OWN_DRAWN = {
    **{entry: ("rung", "adamw_sr", entry) for entry in FORMATS},
    "stiff_matched": ("stiff_matched", "adamw", DRAWN_IN),
}


def gathered(study: Path) -> dict[str, list[Part]]:
    """Return the parts of each model that are there. Raises :class:`UserError` if there is none."""
    found = {model: [part for name in names for part in _of_name(study, name)] for model, names in PARTS.items()}
    if not any(found.values()):
        raise UserError(f"{study}: no part of {joined(list(PARTS))} in it; make study PART=formats makes one")
    return {model: parts for model, parts in found.items() if parts}


def _of_name(study: Path, name: str) -> list[Part]:
    folders = parts_in(study, [name])
    return [Part(pd.concat([folder.losses for folder in folders]), folders[0].params)] if folders else []


def gain_in(parts: Sequence[Part], arm: str, over: str, entry: str) -> pd.Series | None:
    """Return the gain by seed in the first part that has both arms in ``entry``, None if there is none."""
    return _first(parts, [(entry, over), (entry, arm)], lambda losses: gains_over(losses, over, arm, entry))


def own_in(parts: Sequence[Part], arm: str, over: str, entry: str) -> pd.Series | None:
    """Return the gain minus that in the virtual twin, by seed, of the first part that has both."""
    twin = VIRTUAL + entry
    return _first(
        parts,
        [(name, which) for name in (entry, twin) for which in (over, arm)],
        lambda losses: gains_over(losses, over, arm, entry) - gains_over(losses, over, arm, twin),
    )


def _first(
    parts: Sequence[Part], needed: Sequence[tuple[str, str]], of: Callable[[pd.Series], pd.Series]
) -> pd.Series | None:
    for part in parts:
        seeds = part.losses.index.unique("seed")
        if all((entry, arm, seed) in part.losses.index for entry, arm in needed for seed in seeds):
            return of(part.losses)
    return None


def table(found: dict[str, list[Part]]) -> Table:
    """Return gains and own parts, a row for each arm and format that any model has."""
    rows = []
    for arm, over in GAINS:
        measures = [(f"`{arm}` over `{over}`", gain_in)]
        measures += [(f"own part of `{arm}`", own_in)] if (arm, over) in OWN else []
        for label, measure in measures:
            for entry in FORMATS:
                gains = [measure(parts, arm, over, entry) for parts in found.values()]
                if any(gain is not None for gain in gains):
                    shown = [NONE if gain is None else with_interval(gain) for gain in gains]
                    rows.append([label, f"**{entry}**", *shown])
    heads = [Column(f"{MILLIONS[model]} M") for model in found]
    note = (
        "Nats per token, with 95 % intervals by Student's t over seeds, each by itself; by millions of parameters. Own "
        "part: the gain minus that in the virtual twin. A dash: no part has all of its cells."
    )
    return Table([words("gain"), words("format"), *heads], rows, note)


def page(study: Path) -> str:
    """Return SIZES.md and draw its figures beside it."""
    found = gathered(study)
    trained = ", ".join(
        f"{parts[0].tokens / 1e6:.1f} M tokens with {MILLIONS[model]} M parameters" for model, parts in found.items()
    )
    blocks: list[Block] = [
        Text(f"Runs are short: {trained}. Learning rates were tuned for each arm and model on other seeds, "
             "those of rungs in each format too; the null has those of `stiff_matched`. Decay and the rate of "
             "embeddings are those of the smallest model; `ladder-nano-shared` and `ladder-micro-shared` tune them. "
             "The parts that train longer say what becomes of these gains."),
    ]  # fmt: skip
    blocks.append(Text("A number is of the first of these parts that has all of its cells: " + "; ".join(
        f"{MILLIONS[model]} M, " + ", ".join(f"`{name}`" for name in PARTS[model] if _of_name(study, name))
        for model in found
    ) + "."))  # fmt: skip
    gains = {arm: _by_size(found, gain_in, arm, over, DRAWN_IN) for arm, over in DRAWN}
    held = joined([f"`{arm}` over `{over}`" for arm, over in DRAWN if gains[arm]])
    said = f"Mean gain in {DRAWN_IN} with 95 % intervals: {held}."
    blocks += _drawn(gains, study / "figures", "sizes", "gain", f"Gain in {DRAWN_IN}", said)
    own = {label: _by_size(found, own_in, *of) for label, of in OWN_DRAWN.items()}
    said = (
        "Own part, the gain minus that in the virtual twin, with 95 % intervals: under a format's name that of `rung`, "
        f"beside it that of `stiff_matched` in {DRAWN_IN}."
    )
    blocks += _drawn(own, study / "figures", "own_parts", "own part", "Own part of the gain", said)
    document = Document("Sizes", "What every arm gains in every format, by the model's size", blocks,
                        [Section("The numbers", "", [table(found)])])  # fmt: skip
    return to_markdown(document).replace("## Answer so far\n\n", "", 1)


def _by_size(
    found: dict[str, list[Part]], measure: Callable[..., pd.Series | None], arm: str, over: str, entry: str
) -> dict[float, Interval]:
    gains = {MILLIONS[model]: measure(parts, arm, over, entry) for model, parts in found.items()}
    return {size: interval(gain) for size, gain in gains.items() if gain is not None}


def _drawn(
    courses: dict[str, dict[float, Interval]], folder: Path, name: str, of: str, shown: str, said: str
) -> list[Block]:
    """Return a figure of the courses that have a point, and draw it; none if none has."""
    if not (courses := {label: points for label, points in courses.items() if points}):
        return []
    draw_courses(courses, "parameters, in millions", folder, name, of)
    return [Picture(name, f"{shown} by the model's number of parameters, for {joined(list(courses))}", said)]


def main(arguments: list[str]) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m altgrad.reporting.sizes", description=__doc__.split("\n")[0])
    parser.add_argument("study", type=Path, metavar="FOLDER")
    study = parser.parse_args(arguments).study
    write_text(study / "SIZES.md", page(study))
    print(f"written: {study / 'SIZES.md'}")


if __name__ == "__main__":
    run_stage(main)
