"""``python -m altgrad.diagnostics``: which tensor of a run left its band first, and how long before the loss showed it.

    python -m altgrad.diagnostics explain E4M3-adamw-0-1

It reads what the pipeline left in ``data/`` and trains nothing; the figure is drawn beside the words.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from altgrad.config import run_stage


def main(arguments: list[str]) -> None:
    """Run the command. Raises :class:`altgrad.config.UserError` for a cell that is not there."""
    parser = argparse.ArgumentParser(prog="python -m altgrad.diagnostics", description=__doc__.split("\n")[0])
    explain = parser.add_subparsers(required=True, metavar="explain").add_parser("explain", help="tell the first cause")
    explain.add_argument("cell", metavar="CELL", help="such as E4M3-adamw-0-1")
    explain.add_argument("--data", type=Path, default=Path("data"), help="what the pipeline left (default %(default)s)")
    explain.add_argument(
        "--out", type=Path, default=Path("scratch/explain"), help="where the figure goes (default %(default)s)"
    )
    settings = parser.parse_args(arguments)
    # A command may look into all rooms; nothing imports this module.
    from altgrad.reporting.causes import case, sentences
    from altgrad.reporting.figures.first_cause import first_cause_figure
    from altgrad.reporting.figures.style import drawing, save
    from altgrad.reporting.load import load_study

    data = settings.data
    found = case(load_study(data / "grid", data / "tokens", data / "runs", data / "diag"), settings.cell)
    print("\n".join(sentences(found)))
    with drawing():
        save(first_cause_figure(found), settings.out, found.key)
    print(f"figure: {settings.out / found.key}.png")


if __name__ == "__main__":
    run_stage(main)
