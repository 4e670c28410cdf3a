"""Show what a format can represent: `altgrad formats POSIT8`; without a name, an overview of all formats."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from altgrad.common.console import called, while_read
from altgrad.formats.floats import FloatFormat
from altgrad.formats.format import Format
from altgrad.formats.registry import UnknownFormatError, format_names, get_format
from altgrad.formats.tables import TableFormat

_COLUMNS = 6


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a card per format named, or the overview. Return 0; an unknown name exits with status 2."""
    parser = argparse.ArgumentParser(
        prog=called("formats"), description="Print range, spacing and codes of number formats."
    )
    parser.add_argument("formats", nargs="*", metavar="FORMAT", help="such as E3M4; default: an overview of all")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw one or two formats into FILE, such as E3M4.svg")
    options = parser.parse_args(arguments)
    if options.plot and len(options.formats) not in (1, 2):
        parser.error("--plot draws one format, or two side by side")
    try:
        formats = [get_format(name) for name in options.formats]
    except UnknownFormatError as error:
        parser.error(str(error))
    if formats:
        print("\n\n\n".join(card(fmt) for fmt in formats))
    else:
        print(overview([get_format(name) for name in format_names()]))
    if options.plot:
        plot(formats, options.plot)
        print(f"\ndrawn in {options.plot}")
    return 0


def overview(formats: list[Format]) -> str:
    """Return a text table with one line per format."""
    rows = [("format", "bits", "kind", "bias", "max", "min normal", "smallest", "binades", "values", "scale to")]
    for fmt in formats:
        binades = fmt.emax - int(np.floor(np.log2(fmt.smallest))) + 1
        kind, bias = (fmt.specials, str(fmt.bias)) if isinstance(fmt, FloatFormat) else ("table", "-")
        ends = _number(fmt.max), _number(fmt.min_normal, "-"), _number(fmt.smallest)
        counts = str(binades), str(len(fmt.values))
        rows.append((fmt.name, str(fmt.bits), kind, bias, *ends, *counts, _scaling(fmt)))
    return _table(rows)


def _scaling(fmt: Format) -> str:
    return f"{_number(fmt.scale_target)} of {fmt.scale_statistic}"


def card(fmt: Format) -> str:
    """Return a text with range, special codes, spacing per binade and, up to 8 bits, the value of each code."""
    sections = [str(fmt), _facts(fmt), _spacing(fmt)]
    if fmt.bits <= 8:
        sections.append(_codes(fmt))
    return "\n\n".join(sections)


def plot(formats: Sequence[Format], path: Path) -> None:
    """Draw number lines, spacing and values per binade of one or two formats; ``path``'s suffix sets the image type."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    count = len(formats)
    size, heights = (8, 4.5 + 2 * count), (*[1] * count, 3, 3)
    figure, axes = pyplot.subplots(count + 2, 1, figsize=size, height_ratios=heights, layout="constrained")
    *lines, spacing, binades = axes
    for place, (fmt, line, color) in enumerate(zip(formats, lines, ("#1f4e79", "#c55a11"), strict=False)):
        line.vlines(fmt.values, 0, 1, color=color, linewidth=0.6)
        line.set(yticks=[], title=fmt.name)
        line.spines[["left", "right", "top"]].set_visible(False)
        positive = fmt.values[fmt.values > 0]
        steps = np.append(np.diff(positive), np.nan)
        spacing.step(positive, steps / positive / 2, where="post", color=color, label=fmt.name)
        exponents, numbers = np.unique(np.frexp(positive)[1] - 1, return_counts=True)
        width = 0.8 / count
        binades.bar(exponents + (place - (count - 1) / 2) * width, numbers, width, color=color, label=fmt.name)
    lines[-1].set(xlabel="value")
    spacing.set_xscale("log", base=2)
    spacing.set_yscale("log", base=2)
    spacing.set(xlabel="magnitude", ylabel="half a spacing,\nrelative to the value")
    binades.set_yscale("log", base=2)
    binades.set(xlabel="binade: exponent of its lowest magnitude", ylabel="positive values\nin the binade")
    for axis in (spacing, binades):
        axis.legend(frameon=False)
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _facts(fmt: Format) -> str:
    facts = [
        ("largest, smallest", f"{_number(fmt.max)}, {_number(fmt.values[0])}"),
        ("smallest normal", _number(fmt.min_normal)),
        ("smallest subnormal", _number(fmt.min_subnormal)),
        ("distinct finite values", str(len(fmt.values))),
        ("scaling target", _scaling(fmt)),
        ("infinity", _code(fmt.inf_code, fmt)),
        ("NaN", _code(fmt.nan_code, fmt)),
        ("negative zero", _code(1 << fmt.bits - 1 if fmt.has_negative_zero else None, fmt)),
    ]
    if isinstance(fmt, TableFormat):
        facts[1:3] = [("smallest positive", _number(fmt.smallest)), ("rounding", fmt.rule)]
    elif isinstance(fmt, FloatFormat) and fmt.exponent_bits:
        facts.append(("bias", f"{fmt.bias}; another one changes nothing under a float32 scale that follows the tensor"))
    return "\n".join(f"{name:<24}{value}" for name, value in facts)


def _spacing(fmt: Format) -> str:
    """Return a text table: range, spacing and number of values of each binade. Subnormals count as the first one."""
    magnitudes = fmt.values[fmt.values >= 0]
    exponents = np.floor(np.log2(np.maximum(magnitudes, fmt.smallest))).astype(int)
    if isinstance(fmt, FloatFormat):
        exponents = np.maximum(exponents, fmt.emin)
    rows = [("from", "to", "spacing", "values")]
    for exponent in np.unique(exponents):
        binade = magnitudes[exponents == exponent]
        widths = np.unique(fmt.spacing(binade))
        spacing = _number(widths[0]) if len(widths) == 1 else f"{_number(widths[0])} to {_number(widths[-1])}"
        rows.append((_number(binade[0]), _number(binade[-1]), spacing, str(len(binade))))
    return _table(rows)


def _codes(fmt: Format) -> str:
    cells = [f"{_code(code, fmt)} {_number(value):<14}" for code, value in enumerate(fmt.code_values)]
    height = -(-len(cells) // _COLUMNS)
    rows = ["".join(cells[row::height]).rstrip() for row in range(height)]
    return "\n".join(rows)


def _code(code: int | None, fmt: Format) -> str:
    return "none" if code is None else f"0x{code:0{-(-fmt.bits // 4)}X}"


def _number(value: float | None, none: str = "none") -> str:
    """Return powers of two up to 2^-12 and from 2^17 as ``"2^-14"``, other numbers in up to seven digits."""
    if value is None:
        return none
    significand, exponent = np.frexp(value)
    if abs(significand) == 0.5 and not -11 < exponent < 18:
        return f"{'-' if value < 0 else ''}2^{exponent - 1}"
    return f"{value:.7g}"


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


if __name__ == "__main__":
    with while_read():
        sys.exit(main())
