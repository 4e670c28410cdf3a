"""Check params.yaml against the schema of its settings, or print its presets or a reference of all settings.

This takes a moment. What needs the corpus or the model is checked by the stage `grid`.
"""

import argparse
import sys
from pathlib import Path

from altgrad.common.console import called
from altgrad.common.errors import run_stage
from altgrad.config import load_params, presets
from altgrad.config.recipe import PUBLISHED


def main(arguments: list[str]) -> None:
    """Read params.yaml, which raises UserError for what is wrong with it; or print presets, or the reference."""
    parser = argparse.ArgumentParser(prog=called("config"), description=__doc__)
    parser.add_argument("--presets", action="store_true", help="print the preset models, corpora, arms and recipes")
    parser.add_argument(
        "--reference", nargs="?", const="-", metavar="FOLDER",
        help="print the reference of all settings, or write its pages into FOLDER",
    )  # fmt: skip
    given = parser.parse_args(arguments)
    if given.presets:
        for file in (presets.FILE, PUBLISHED):
            sys.stdout.write(file.read_text(encoding="utf-8"))
    elif given.reference is None:
        load_params()
    else:
        from altgrad.config import reference

        if given.reference == "-":
            sys.stdout.write("\n".join(reference.pages().values()))
        else:
            reference.write(Path(given.reference))


if __name__ == "__main__":
    run_stage(main)
