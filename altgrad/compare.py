"""Compare runs of any program, given as a CSV file of optimizers, seeds and losses: tables, figures and one page.

This file gives the command its name, ``altgrad compare``; `altgrad.reporting.external` does the work.
"""

import argparse
from pathlib import Path

from altgrad.common.console import called
from altgrad.common.errors import run_stage


def main(arguments: list[str]) -> None:
    """Read the CSV files, compare the runs, and write REPORT.md and index.html to the output folder."""
    parser = argparse.ArgumentParser(prog=called("compare"), description=__doc__.split("\n")[0])
    parser.add_argument(
        "results", type=Path,
        help="CSV file, a row per run; columns: optimizer or configuration or both, seed (runs of the same seed are "
        "paired), loss; other columns are not read",
    )  # fmt: skip
    parser.add_argument("--curves", type=Path, metavar="FILE", help="CSV file of the same columns and step")
    parser.add_argument("--family", type=Path, metavar="FILE", help="YAML file of the options below, and of controls")
    parser.add_argument("--reference", metavar="CONFIGURATION", help="the other configurations are compared with it")
    parser.add_argument("--reference-optimizer", metavar="OPTIMIZER", help="the other optimizers are compared with it")
    parser.add_argument("--metric", metavar="COLUMN", help="the column to compare; default: loss")
    parser.add_argument("--higher-is-better", action="store_true", default=None, help="for a metric such as accuracy")
    parser.add_argument(
        "--smallest-effect", type=float, metavar="X",
        help="differences within ±X count as no effect; default: 0.005, meant for nats per token",
    )  # fmt: skip
    parser.add_argument("-o", "--out", type=Path, default=Path("comparison"), help="folder; default: %(default)s")
    options = vars(parser.parse_args(arguments))

    from altgrad.reporting.external import Family, write_comparison

    results, curves, out, declared = (options.pop(name) for name in ("results", "curves", "out", "family"))
    print(write_comparison(results, Family.read(declared, options), curves, out))
    print(f"written: {out / 'REPORT.md'} and {out / 'index.html'}")


if __name__ == "__main__":
    run_stage(main)
