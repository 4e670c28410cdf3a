"""Show what a format can represent: `altgrad formats E3M4`; without a name, an overview of all formats."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from altgrad.common.console import called, while_read
from altgrad.formats.card import card, overview, plot
from altgrad.formats.registry import UnknownFormatError, format_names, get_format


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the card of each format named, or the overview; 2 for a name that is not known."""
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


if __name__ == "__main__":
    with while_read():
        sys.exit(main())
