"""Show what a format can represent: `altgrad formats E3M4`; without a name, an overview of all formats."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from altgrad.common.console import called, while_read
from altgrad.formats.format import Format
from altgrad.formats.registry import UnknownFormatError, format_names, get_format

_COLUMNS = 6


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a card per format named, or the overview. Return 0; an unknown name exits with status 2."""
    parser = argparse.ArgumentParser(
        prog=called("formats"), description="Print range, spacing and codes of floating-point formats."
    )
    parser.add_argument("formats", nargs="*", metavar="FORMAT", help="such as E3M4; default: an overview of all")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the format into FILE, such as E3M4.svg")
    options = parser.parse_args(arguments)
    if options.plot and len(options.formats) != 1:
        parser.error("--plot draws exactly one format")
    try:
        formats = [get_format(name) for name in options.formats]
    except UnknownFormatError as error:
        parser.error(str(error))
    if formats:
        print("\n\n\n".join(card(fmt) for fmt in formats))
    else:
        print(overview([get_format(name) for name in format_names()]))
    if options.plot:
        plot(formats[0], options.plot)
        print(f"\ndrawn in {options.plot}")
    return 0


def overview(formats: list[Format]) -> str:
    """Return a text table with one line per format."""
    rows = [("format", "bits", "specials", "bias", "max", "min normal", "smallest", "binades", "values")]
    for fmt in formats:
        binades = fmt.emax - int(np.floor(np.log2(fmt.smallest))) + 1
        ends = _number(fmt.max), "-" if fmt.min_normal is None else _number(fmt.min_normal), _number(fmt.smallest)
        rows.append((fmt.name, str(fmt.bits), fmt.specials, str(fmt.bias), *ends, str(binades), str(len(fmt.values))))
    return _table(rows)


def card(fmt: Format) -> str:
    """Return a text with range, special codes, spacing per binade and, up to 8 bits, the value of each code."""
    sections = [str(fmt), _facts(fmt), _spacing(fmt)]
    if fmt.bits <= 8:
        sections.append(_codes(fmt))
    return "\n\n".join(sections)


def plot(fmt: Format, path: Path) -> None:
    """Draw a number line of the values and a plot of the spacing; the suffix of ``path`` sets the image type."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (line, spacing) = pyplot.subplots(2, 1, figsize=(8, 4.5), height_ratios=(1, 3), layout="constrained")
    line.vlines(fmt.values, 0, 1, color="#1f4e79", linewidth=0.6)
    line.set(yticks=[], xlabel="value", title=str(fmt))
    line.spines[["left", "right", "top"]].set_visible(False)

    positive = fmt.magnitudes[fmt.magnitudes > 0]
    steps = np.append(np.diff(positive), np.nan)
    spacing.step(positive, steps, where="post", color="#1f4e79", label="spacing to the next value")
    spacing.step(positive, steps / positive / 2, where="post", color="#c55a11", label="half of it, relative to value")
    spacing.set_xscale("log", base=2)
    spacing.set_yscale("log", base=2)
    spacing.set(xlabel="magnitude")
    spacing.legend(frameon=False)
    spacing.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _facts(fmt: Format) -> str:
    lowest = fmt.values[0]
    facts = [
        ("largest, smallest", f"{_number(fmt.max)}, {_number(lowest)}"),
        ("smallest normal", "none" if fmt.min_normal is None else _number(fmt.min_normal)),
        ("smallest subnormal", "none" if fmt.min_subnormal is None else _number(fmt.min_subnormal)),
        ("distinct finite values", str(len(fmt.values))),
        ("scaling target", _number(fmt.scale_target)),
        ("infinity", _code(fmt.inf_code, fmt)),
        ("NaN", _code(fmt.nan_code, fmt)),
        ("negative zero", _code(fmt.sign_code if fmt.has_negative_zero else None, fmt)),
    ]
    return "\n".join(f"{name:<24}{value}" for name, value in facts)


def _spacing(fmt: Format) -> str:
    """Return a text table: range, spacing and number of values of each binade. Subnormals count as the first one."""
    magnitudes = fmt.magnitudes
    exponents = np.maximum(np.floor(np.log2(np.maximum(magnitudes, fmt.smallest))).astype(int), fmt.emin)
    rows = [("from", "to", "spacing", "values")]
    for exponent in np.unique(exponents):
        binade = magnitudes[exponents == exponent]
        spacing = _number(2.0 ** int(exponent - fmt.mantissa_bits))
        rows.append((_number(binade[0]), _number(binade[-1]), spacing, str(len(binade))))
    return _table(rows)


def _codes(fmt: Format) -> str:
    cells = [f"{_code(code, fmt)} {_number(value):<14}" for code, value in enumerate(fmt.code_values)]
    height = -(-len(cells) // _COLUMNS)
    rows = ["".join(cells[row::height]).rstrip() for row in range(height)]
    return "\n".join(rows)


def _code(code: int | None, fmt: Format) -> str:
    return "none" if code is None else f"0x{code:0{-(-fmt.bits // 4)}X}"


def _number(value: float) -> str:
    """Return powers of two up to 2^-12 and from 2^17 as ``"2^-14"``, other numbers in up to seven digits."""
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
