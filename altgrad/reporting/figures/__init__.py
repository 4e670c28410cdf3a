"""The report's figures: `in_report` declares a function of any module here as a figure, and `draw` draws them all.

A figure that has nothing to show is left out of the report.

A format has one colour, marker and dash, the same in every figure and every report. The colours of the eight 8-bit
formats are from Okabe and Ito's and Tol's colour-blind-safe sets, ordered so that neighbours differ in lightness.
Marker and dash alone tell them apart in grey. The baseline is black and solid. Other entries (recipes, formats of the
user) and optimizers share a small reserve, in the order of the grid. ``.dvc/plots`` repeats these colours for DVC's own
plots.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from PIL import Image

from altgrad.common.files import replacing
from altgrad.config.resolve import JOINT
from altgrad.reporting.compare import Comparison, shown_optimizer
from altgrad.reporting.load import Study, every_rule
from altgrad.reporting.markdown import Picture, listed

if TYPE_CHECKING:
    from matplotlib.typing import RcKeyType

Draw = Callable[[Study, Comparison], Figure | None]

#: Where a figure may stand, in the report's order; `altgrad.reporting.report` has the titles and the tables there.
SECTIONS = ("gains", "costs", "updates", "curves", "layers", "weights")
_declared: dict[str, FigureSpec] = {}


@dataclass(frozen=True)
class FigureSpec:
    """A figure. ``name`` names its files and the function ``draw``; `in_report` explains the other fields."""

    name: str
    draw: Draw
    section: str
    order: int
    alt: str
    caption: str


def in_report(section: str, order: int, alt: str, caption: str) -> Callable[[Draw], Draw]:
    """Return a decorator that declares a function as a figure; the function returns None if there is nothing to show.

    Args:
        section: one of `SECTIONS`.
        order: the figure's place in the section: figures stand in ascending order.
        alt, caption: texts, with these words of the study filled in: ``{baseline}``, ``{optimizer}`` (the one that
            per-layer figures show), ``{entries}``, and of the primary metric ``{noun}`` (at the end of a run),
            ``{short}`` (at any step), ``{unit}``, ``{entry}``, ``{better}`` and ``{effect}``. ``{grad}``, ``{beyond}``
            and ``{spread}`` are empty where there is nothing to say.

    The decorator raises ValueError for an unknown section, and for a function whose name is taken.
    """

    def declared(draw: Draw) -> Draw:
        name = draw.__name__
        if section not in SECTIONS:
            raise ValueError(f"figure {name}: no section {section!r} in the report; there are {', '.join(SECTIONS)}")
        if name in _declared:
            raise ValueError(f"two figures are called {name}")
        _declared[name] = FigureSpec(name, draw, section, order, alt, caption)
        return draw

    return declared


@cache
def report_figures() -> list[FigureSpec]:
    """Return the figures that the modules of this folder declare, in the report's order."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return sorted(_declared.values(), key=lambda spec: (SECTIONS.index(spec.section), spec.order, spec.name))


def draw(specs: Sequence[FigureSpec], study: Study, comparison: Comparison, folder: Path) -> dict[str, Picture]:
    """Draw each of ``specs`` that has data as PNG and SVG in ``folder``; return the pictures by name, in order.

    Other PNG and SVG files in the folder are removed, so that it holds what the report shows.
    """
    words, pictures = _words(study, comparison), {}
    for spec in specs:
        with drawing():
            figure = spec.draw(study, comparison)
            if figure is None:
                continue
            save(figure, folder, spec.name)
        texts = (text.format(**words) for text in (spec.alt, spec.caption))
        pictures[spec.name] = Picture(spec.name, *(text[:1].upper() + text[1:].strip() for text in texts))
    for path in [*folder.glob("*.png"), *folder.glob("*.svg")]:
        if path.stem not in pictures:
            path.unlink()
    return pictures


def _words(study: Study, comparison: Comparison) -> dict[str, str]:
    """Return the text for each word in braces that `in_report` fills in."""
    rules = [rule for cell in study.resolved.values() for rule in every_rule(cell)]
    grads = {rule["grad"]["format"] for rule in rules if rule["grad"]}
    metric, gains = study.primary, comparison.gains.dropna(subset="claim")
    specific, spread = gains["beyond"].notna().any(), any(claim.difference.sd > 0 for claim in gains["claim"])
    return {
        "baseline": study.baseline or "the baseline",
        "optimizer": shown_optimizer(study, comparison),
        "entries": listed(study.formats),
        "grad": f"Incoming gradients are in {next(iter(grads))} in every column." if len(grads) == 1 else "",
        "beyond": f"Small hollow marks: the {metric.entry}-specific effect." if specific else "",
        "spread": ", with its 95 % interval" if spread else "",
        # Curves are of validation documents, and a classifier is compared on those of the test split.
        "short": metric.noun if metric.final == metric.on_validation else f"validation {metric.noun}",
        "noun": metric.full, "entry": metric.entry, "unit": metric.with_unit(""),
        "better": "right" if metric.higher_is_better else "left", "effect": f"{metric.smallest_effect:g}",
    }  # fmt: skip


@dataclass(frozen=True)
class Look:
    """Colour, marker and dash pattern of one format."""

    color: str
    marker: str
    dash: tuple[float, ...] = ()

    def lighter(self) -> Look:
        """Return the same look with its colour half way to white."""
        red, green, blue = (0.5 + 0.5 * part for part in to_rgb(self.color))
        return replace(self, color=to_hex((red, green, blue)))

    def line(self, **changes: Any) -> dict[str, Any]:
        """Return keyword arguments for ``Axes.plot``."""
        style = {"color": self.color, "marker": self.marker, "linestyle": (0, self.dash) if self.dash else "-"}
        return style | changes


LOOKS = {
    "bf16": Look("#000000", "o"),
    "E0M7": Look("#999933", "P", (6, 1.5)),
    "E1M6": Look("#E69F00", "v", (1, 1)),
    "E2M5": Look("#AA4499", "<", (4, 1, 1, 1)),
    "E3M4": Look("#0072B2", "s", (5, 2)),
    "E4M3": Look("#D55E00", "^"),
    "E5M2": Look("#009E73", "D", (3, 1)),
    "E6M1": Look("#56B4E9", ">", (1, 2)),
    "E7M0": Look("#882255", "X", (6, 1, 1, 1, 1, 1)),
}
RESERVE = (
    Look("#777777", "p", (2, 1)),
    Look("#332288", "h", (7, 2, 1, 2)),
    Look("#CC6677", "*", (3, 3)),
    Look("#44AA99", "d", (1, 1, 3, 1)),
)

RC: dict[RcKeyType, Any] = {
    "figure.dpi": 160,
    "figure.facecolor": "white",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],  # the first ships with matplotlib and is the widest
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "legend.handlelength": 3.2,
    "svg.hashsalt": "altgrad",  # ids in the SVG depend on the drawing alone
    "svg.fonttype": "none",  # text stays text: it can be searched and edited
}
WIDTH = 9.0  # inches; the page is laid out for it
LEGEND_WIDTH, LEGEND_MARK = 106, 7  # characters in a row of a legend, and how many of them a mark takes


def looks(entries: list[str]) -> dict[str, Look]:
    """Return the look of each entry of a grid, or of each optimizer.

    The first entry that joins a recipe and a format, such as ``virtual.E3M4``, has its format's look, but lighter.
    Others without a look of their own take the reserve in order, then the looks of formats that the grid lacks. Pass
    all entries of the grid, so that an entry looks alike in figures that show only some.
    """
    known = {name: LOOKS[name] for name in entries if name in LOOKS}
    for name in entries:
        fmt = name.partition(JOINT)[2]
        if fmt in LOOKS and LOOKS[fmt].lighter() not in known.values():
            known[name] = LOOKS[fmt].lighter()
    unknown = [name for name in entries if name not in known]
    spare = [*RESERVE, *(look for look in LOOKS.values() if look not in known.values())]
    return {name: known.get(name) or spare[unknown.index(name) % len(spare)] for name in entries}


@contextmanager
def drawing() -> Iterator[None]:
    """Apply the style inside the block, whatever the user's matplotlibrc says."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(RC)
        yield


def panels(
    rows: int, columns: int, height: float, *, width: float = WIDTH, **options: Any
) -> tuple[Figure, np.ndarray]:
    """Return a figure of ``height`` inches and its axes, an array of shape (rows, columns)."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def tiles(
    titles: Sequence[str], height: float, xlabel: str, ylabel: str = "", *, sharey: bool = True
) -> tuple[Figure, list[Axes]]:
    """Return a figure and its axes, one per title, which share their limits and the labels around all of them.

    Without ``sharey`` each has its own limits in y. At most four stand in a row of ``height`` inches; one alone is
    higher.
    """
    count = len(titles)
    across = 4 if count == 4 or count > 6 else min(3, count)
    rows = -(-count // across)
    figure, axes = panels(rows, across, 0.6 + height * (1.6 if count == 1 else rows), sharex=True, sharey=sharey)
    shown, spare = list(axes.flat[:count]), axes.flat[count:]
    for axis in spare:
        axis.set_visible(False)
    for axis in shown[-across:]:  # the lowest of each column, where shared axes leave the labels out
        axis.tick_params(labelbottom=True)
    for axis, title in zip(shown, titles, strict=True):
        axis.set_title(title)
    figure.supxlabel(xlabel, fontsize="medium")
    if ylabel:
        figure.supylabel(ylabel, fontsize="medium")
    return figure, shown


def framed(axes: Axes, values: pd.Series) -> None:
    """Limit the y axis to the finite ``values`` and a margin; other lines may leave the frame."""
    finite = values[np.isfinite(values)]
    if len(finite):
        low, high = finite.min(), finite.max()
        margin = 0.06 * (high - low or abs(high) or 1)
        axes.set_ylim(low - margin, high + margin)


def legend(figure: Figure, styles: dict[str, Look], names: list[str], **line: Any) -> None:
    """Put one legend of the entries ``names`` above all panels, in as many rows as it needs."""
    handles = [Line2D([], [], label=name, **styles[name].line(**line)) for name in names]
    rows = -(-sum(len(name) + LEGEND_MARK for name in names) // LEGEND_WIDTH)
    figure.legend(handles=handles, loc="outside upper center", ncols=-(-len(names) // rows), columnspacing=1.4)


def spread_axis(axes: Axes, which: Literal["x", "y"], values: pd.Series) -> None:
    """Make the "x" or "y" axis logarithmic away from zero if one of ``values`` would squeeze the others together.

    It stays linear around zero, up to about twice the median magnitude, and its label says so. Beyond, ticks are at
    powers of ten.
    """
    sizes = values.abs().dropna()
    threshold = 2 * sizes.median() if len(sizes) else 0.0
    if not 0 < threshold < sizes.max() / 3:
        axes.locator_params(axis=which, nbins=5)
        return
    power = 10.0 ** np.floor(np.log10(threshold))
    threshold = power * max(step for step in (1, 2, 5) if step * power <= threshold * 1.0001)
    decades = np.arange(np.floor(np.log10(threshold)), np.ceil(np.log10(sizes.max())) + 1)
    ticks = [tick for decade in decades for step in (1, 2, 5) if (tick := step * 10.0**decade) >= threshold * 0.999]
    powers = [tick for tick in ticks if np.isclose(np.log10(tick) % 1, 0)]
    ticks = ticks[:1] + powers if powers and powers[0] > 3 * ticks[0] else powers or ticks[:1]
    axis = getattr(axes, f"{which}axis")
    getattr(axes, f"set_{which}scale")("symlog", linthresh=threshold, linscale=1.2)
    axis.set_major_locator(FixedLocator([-tick for tick in ticks] + [0] + ticks))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}".replace("-", "−")))
    axis.set_minor_locator(NullLocator())
    axis.set_label_text(f"{axis.get_label_text()}\nlogarithmic beyond {threshold:g}")
    ends = min(1.4 * values.min(), -0.3 * threshold), 1.5 * max(values.max(), threshold)
    getattr(axes, f"set_{which}lim")(*ends)


def save(figure: Figure, folder: Path, name: str) -> None:
    """Write ``folder/name.png`` and ``.svg``; the bytes depend on the drawing alone.

    The PNG, which the page embeds, has a palette of 256 colours: enough for flat drawings, at a third of the size.
    """
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    figure.set_layout_engine("none")  # everything has its place now; laying it out again would take as long
    pixels = Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3])
    with replacing(folder / f"{name}.png") as path:
        pixels.quantize(256, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(
            path, format="png", optimize=True
        )
    with replacing(folder / f"{name}.svg") as path:
        # Not savefig, which first draws the whole figure once more to learn its size.
        FigureCanvasSVG(figure).print_svg(path, metadata={"Date": None, "Creator": None})
