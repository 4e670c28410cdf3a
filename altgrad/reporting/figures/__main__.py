"""Draw every figure of today's study, those too that the report leaves out because they have no findings.

python -m altgrad.reporting.figures [NAME ...] [--into FOLDER]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from altgrad.config import UserError, run_stage
from altgrad.reporting.compare import compare
from altgrad.reporting.figures import FIGURES, draw
from altgrad.reporting.load import load_study
from altgrad.reporting.wording import joined


def main(argv: list[str]) -> None:
    """Draw the figures that are named, or all, and say which the study has no data for."""
    parser = argparse.ArgumentParser(prog="python -m altgrad.reporting.figures", description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(spec.name for spec in FIGURES)}")
    parser.add_argument("--into", type=Path, default=Path("scratch/figures"), metavar="FOLDER")
    options = parser.parse_args(argv)
    known = {spec.name: spec for spec in FIGURES}
    if unknown := [name for name in options.names if name not in known]:
        raise UserError(f"no figure {joined(unknown)}; there are {', '.join(known)}")
    data = Path("data")
    study = load_study(*(data / part for part in ("grid", "tokens", "runs", "diag")))
    wanted = [known[name] for name in options.names or known]
    found = draw(wanted, study, compare(study), options.into)
    print(f"{len(found)} figures, as PNG and SVG, in {options.into}")
    if absent := [spec.name for spec in wanted if spec.name not in found]:
        print(f"no data for {joined(absent)}")


if __name__ == "__main__":
    run_stage(main)
