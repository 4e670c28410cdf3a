"""List every metric with its unit, definition and limit."""

import sys
from argparse import ArgumentParser
from collections.abc import Sequence

from altgrad.common.console import called, while_read
from altgrad.metrics.table import METRICS


def main(arguments: Sequence[str] = ()) -> None:
    """Print every metric: first the rows of `METRICS`, then the rows that modules of diagnostics define."""
    ArgumentParser(prog=called("metrics"), description=__doc__).parse_args(arguments)
    from altgrad.diagnostics import ANALYSES  # a command may look into all packages; nothing imports this module

    for metric in [*METRICS.values(), *(analysis.row for analysis in ANALYSES if analysis.row)]:
        print(f"{metric.name} [{metric.unit}]\n    {metric.text}")


if __name__ == "__main__":
    with while_read():
        main(sys.argv[1:])
