"""The report's comparison of runs that something else has trained, from a CSV file of their losses."""

from __future__ import annotations

import argparse
from pathlib import Path

from altgrad.config import run_stage


def main(arguments: list[str]) -> None:
    """Read, compare, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m altgrad.compare", description=__doc__)
    parser.add_argument("results", type=Path, help="the columns configuration, optimizer, seed and loss; a row per run")
    parser.add_argument("--curves", type=Path, metavar="FILE", help="the same columns and step; a row per run and step")
    parser.add_argument("--family", type=Path, metavar="FILE", help="YAML: what is asked; a flag below goes before it")
    parser.add_argument("--reference", metavar="CONFIGURATION", help="what the other configurations are compared with")
    parser.add_argument("--reference-optimizer", metavar="OPTIMIZER", help="likewise for optimizers")
    parser.add_argument("--metric", metavar="COLUMN", help="the column that is compared; default: loss")
    parser.add_argument("--higher-is-better", action="store_true", default=None, help="as of an accuracy")
    parser.add_argument("--smallest-effect", type=float, metavar="X", help="less is no effect; default: 0.005")
    parser.add_argument("-o", "--out", type=Path, default=Path("comparison"), help="a folder; default: %(default)s")
    options = vars(parser.parse_args(arguments))

    from altgrad.reporting.external.family import Family
    from altgrad.reporting.external.page import write_comparison

    results, curves, out, declared = (options.pop(name) for name in ("results", "curves", "out", "family"))
    print(write_comparison(results, Family.read(declared, options), curves, out))
    print(f"written: {out / 'REPORT.md'} and {out / 'index.html'}")


if __name__ == "__main__":
    run_stage(main)
