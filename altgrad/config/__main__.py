"""Check params.yaml against the schema of its settings, or print a reference of all settings.

This takes a moment. What needs the corpus or the model is checked by the stage `grid`.
"""

import argparse
import sys
from pathlib import Path

from altgrad.config import load_params, run_stage
from altgrad.console import called


def main(arguments: list[str]) -> None:
    """Read params.yaml, which raises UserError for what is wrong with it; or print or write the reference."""
    parser = argparse.ArgumentParser(prog=called("config"), description=__doc__)
    parser.add_argument(
        "--reference", nargs="?", const="-", metavar="FOLDER",
        help="print the reference of all settings, or write its pages into FOLDER",
    )  # fmt: skip
    folder = parser.parse_args(arguments).reference
    if folder is None:
        load_params()
        return
    from altgrad.config import reference

    if folder == "-":
        sys.stdout.write("\n".join(reference.pages().values()))
    else:
        reference.write(Path(folder))


if __name__ == "__main__":
    run_stage(main)
