"""The ladders of the study: whether a gain lasts in longer runs, and whether it holds in larger models.

Each part is called as those of :mod:`altgrad.reporting.hypotheses`.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from altgrad.reporting.document import Block, Column, Picture, Table, Text
from altgrad.reporting.figures.decisions import Interval, draw_courses
from altgrad.reporting.hypotheses import (
    VIRTUAL,
    each_over_plain,
    gains_over,
    names,
    own_part,
    seeds_of,
    sides,
    tested,
    told_apart,
    values_of,
)
from altgrad.reporting.multiplicity import holm
from altgrad.reporting.paired import interval, two_sided, with_interval
from altgrad.reporting.parts import MILLIONS, parts_in
from altgrad.reporting.tables import words
from altgrad.reporting.wording import joined, p_value

#: Which hypothesis a part decides; which ones a part of many formats: over the plain arm, and over the null; which ones
#: one with twins besides: over the plain arm, and the format's own; and which ones a part with a rival of `STIFF`: both
#: over the plain arm, and the one over the other.
OF = {"ladder-nano": "L2", "ladder-nano-twin": "L3", "ladder-nano-3300": "L4", "ladder-micro": "L5",
      "ladder-micro-twin": "L6", "ladder-nano-3300-E4M3": "L10", "ladder-nano-arms-twin": "L13",
      "length-3200-masterless": "L14", "length-3200-masterless-twin": "L15",
      "ladder-mini": "L16", "ladder-mini-twin": "L17", "length-3200-shared": "L18",
      "ladder-nano-arms": "L9", "ladder-micro-arms": "L21", "ladder-nano-shared": "L22",
      "ladder-micro-arms-twin": "L36", "ladder-micro-3300": "L49",
      "ladder-micro-shared": "L59",
      "length-3200-batch-4": "L25", "length-800-batch-64": "L26", "length-3200-slow": "L31"}  # fmt: skip
OF_FORMATS = {"formats": ("L38", "L39"), "formats-muon": ("L40",), "ladder-nano-formats": ("L7", "L8"),
              "ladder-micro-formats": ("L19",), "ladder-micro-null": ("L19", "L35"),
              "ladder-nano-muon": ("L32",), "ladder-micro-muon": ("L57",)}  # fmt: skip
OF_BOTH = {"ladder-m50": ("L45", "L46"), "ladder-m124": ("L47", "L48"), "length-3200-masters": ("L60", "L61")}
OF_RIVALS = {"length-3200-fading": ("L11", "L12"), "length-3200-permuted": ("L23", "L24"),
             "length-3200-rate": ("L29", "L30")}  # fmt: skip
#: The parts that train a model in E3M4 for some length, each at rates of its own: longer and longer, then larger ones.
RUNGS = ("controls", "length-800", "length-3200", "ladder-nano", "ladder-nano-3300", "ladder-micro",
         "ladder-micro-3300", "ladder-mini", "ladder-m50", "ladder-m124")  # fmt: skip
STIFF, SHUFFLED, RUNG, MUON = "stiff_matched", "permuted_matched", "rung", "muon"
#: What each of the arms is held against in a larger model: its null, or the arm of its regime that knows no geometry.
OVER = {STIFF: SHUFFLED, "best_profile": "adamw", MUON: "adamw", "adamw_sr": "adamw", RUNG: "adamw_sr"}


def larger(losses: pd.Series, plain: str, folder: Path) -> list[Block]:
    """What each arm gains in the first format in a larger model, or in longer runs."""
    return [*each_over_plain(OF[folder.name], losses, plain)]


def larger_with_twin(losses: pd.Series, plain: str, folder: Path) -> list[Block]:
    """The same, and the format's own part of it: what the first arm gains in the format beyond what it gains without.

    At the top of the ladder, beside it, what `STIFF` gains in all parts of it: a figure.
    """
    over_plain, of_own = OF_BOTH[folder.name]
    said, table = each_over_plain(over_plain, losses, plain)
    arm = next(name for name in values_of(losses, "optimizer") if name != plain)
    blocks = [said, own_part(of_own, losses, plain, arm)]
    if folder.name == RUNGS[-1]:
        blocks.append(_ladder(folder, plain, values_of(losses, "format")[0]))
    return [*blocks, table]


def _ladder(folder: Path, plain: str, entry: str) -> Picture:
    """Draw what `STIFF` gains in ``entry`` by the model's size, a line for each number of tokens."""
    gains: dict[int, dict[float, Interval]] = {}
    for part in parts_in(folder.parent, RUNGS):
        of_size = gains.setdefault(part.tokens, {})
        of_size[MILLIONS[part.model]] = interval(gains_over(part.losses, plain, STIFF, entry))
    drawn = {f"{tokens / 1e6:.1f} M tokens": dict(sorted(gains[tokens].items())) for tokens in sorted(gains)}
    draw_courses(drawn, "parameters, in millions", folder / "figures", "ladder")
    alt = f"Gain of {STIFF} over AdamW in {entry} by the model's size, after {joined(list(drawn))}"
    caption = f"Mean gain of `{STIFF}` over `{plain}`, with 95 % intervals; both at their rates of each part."
    return Picture("ladder", alt, caption)


def longer(losses: pd.Series, plain: str, folder: Path) -> list[Block]:
    """What each arm gains in the first format, longer trained.

    Beside it the same gains in the parts of fewer steps that lie next to ``folder``: a figure.
    """
    said, table = each_over_plain("L1", losses, plain)
    entry = values_of(losses, "format")[0]
    arms = [arm for arm in values_of(losses, "optimizer") if arm != plain]
    gains: dict[str, dict[float, Interval]] = {arm: {} for arm in arms}
    for part in parts_in(folder.parent, RUNGS[: RUNGS.index(folder.name) + 1]):
        for arm in arms:
            gains[arm][part.steps] = interval(gains_over(part.losses, plain, arm, entry))
    draw_courses(gains, "training steps", folder / "figures", "lengths")
    alt = f"Gain over AdamW in {entry} by the number of training steps, for {joined(arms)}"
    caption = f"Mean gain over {plain}, nats per token, with 95 % intervals; each arm at its rate of each length."
    return [said, Picture("lengths", alt, caption), table]


def longer_twin(losses: pd.Series, plain: str, _: Path) -> list[Block]:
    """What each arm gains in the format and without it: exploratory."""
    return each_over_plain("Exploratory", losses, plain)


def longer_rival(losses: pd.Series, plain: str, folder: Path) -> list[Block]:
    """What `STIFF` and the part's last arm, which differs from it in one thing, gain, and the one over the other."""
    over_plain, over_stiff = OF_RIVALS[folder.name]
    said, table = each_over_plain(over_plain, losses, plain)
    entry, rival = values_of(losses, "format")[0], values_of(losses, "optimizer")[-1]
    gain = gains_over(losses, STIFF, rival, entry)
    return [said, Text(f"**{over_stiff}.** What `{rival}` gains over `{STIFF}`: {tested(gain)}."), table]


def larger_twin(losses: pd.Series, plain: str, folder: Path) -> list[Block]:
    """The format's own part of what its geometry gains in a larger model, or in longer runs."""
    _said, table = each_over_plain("", losses, plain)  # whose decision is that of the part without twins
    arm = STIFF if STIFF in values_of(losses, "optimizer") else RUNG
    return [own_part(OF[folder.name], losses, plain, arm), table]


def larger_formats(losses: pd.Series, plain: str, folder: Path) -> list[Block]:
    """What each format's geometry, or Muon, gains in a larger model over the plain arm, and over its null."""
    entries, trained = values_of(losses, "format"), values_of(losses, "optimizer")
    arm = STIFF if STIFF in trained else MUON
    over = {
        reference: {entry: gains_over(losses, reference, arm, entry) for entry in entries}
        for reference in (plain, SHUFFLED)
        if reference in trained
    }
    levels = {reference: holm({e: two_sided(gain) for e, gain in gains.items()}) for reference, gains in over.items()}

    said = []
    for hypothesis, (reference, gains) in zip(OF_FORMATS[folder.name], over.items(), strict=True):
        lower, higher, _apart = sides(levels[reference], gains)
        said.append(
            f"**{hypothesis}.** `{arm}` ends lower than `{reference}` in {names(lower)}; higher in {names(higher)}; of "
            f"the {len(entries)} formats."
        )
    rows = [
        [f"**{entry}**", *(part for reference, gains in over.items()
                           for part in (with_interval(gains[entry]), p_value(levels[reference][entry])))]
        for entry in entries
    ]  # fmt: skip
    of_each = [column for reference in over for column in (Column(f"gain over {reference}"), Column("p"))]
    columns = [words("format"), *of_each]
    note = (
        f"Gains of `{arm}`, nats per token, with 95 % intervals over {seeds_of(losses)} seeds, each "
        f"by itself; p by Holm over the {len(entries)} formats of a column."
    )
    return [*map(Text, said), Table(columns, rows, note)]


def larger_arms(losses: pd.Series, _plain: str, folder: Path) -> list[Block]:
    """What the arms gain in a larger model, each over the arm that it is held against."""
    entry, trained = values_of(losses, "format")[0], values_of(losses, "optimizer")
    gains = {arm: gains_over(losses, OVER[arm], arm, entry) for arm in trained if OVER.get(arm) in trained}
    p, told = told_apart(gains, "the arm that each is held against")
    rows = [[f"`{arm}`", f"`{OVER[arm]}`", with_interval(gain), p_value(p[arm])] for arm, gain in gains.items()]
    note = (
        f"Gain over that arm, nats per token, with 95 % intervals over {seeds_of(losses)} seeds, each "
        f"by itself; p by Holm over the {len(gains)} arms."
    )
    columns = [words("arm"), words("over"), Column(f"gain in {entry}"), Column("p")]
    return [Text(f"**{OF[folder.name]}.** In {entry}, {told}."), Table(columns, rows, note)]


def beside_bf16(losses: pd.Series, plain: str, _: Path) -> list[Block]:
    """What Muon gains by the format, and how whole rungs without masters end beside the plain arm in bf16."""
    entry = values_of(losses, "format")[0]
    bf16 = VIRTUAL + entry  # which to arms that look at no format is bf16
    by_seed = losses.unstack(["format", "optimizer"])

    def gain(arm: str, name: str) -> pd.Series:
        return by_seed[bf16, plain] - by_seed[name, arm]

    said = Text(f"**L28.** What `{RUNG}` in {entry} gains over `{plain}` in bf16: {tested(gain(RUNG, entry))}.")
    rows = [
        [f"`{arm}`", with_interval(gain(arm, entry)), "–" if arm == plain else with_interval(gain(arm, bf16))]
        for arm in values_of(losses, "optimizer")
    ]
    note = (
        f"Gain over `{plain}` in bf16, nats per token, with 95 % intervals over {seeds_of(losses)} "
        f"seeds, each by itself. Without the format: weights in bf16, or of `adamw_sr` and `{RUNG}` on a grid of the "
        "same shape, 256 times finer."
    )
    columns = [words("arm"), Column(f"in {entry}"), Column("without it")]
    return [own_part("L27", losses, plain, MUON), said, Table(columns, rows, note)]
