"""``python -m altgrad.config``: is params.yaml valid by its schema? Takes a moment; stage `grid` checks the rest.

``--presets`` prints what params.yaml may name without declaring it, ``--reference`` the reference of all settings;
``--reference FOLDER`` writes its pages.
"""

import argparse
import sys
from pathlib import Path

from altgrad.config import load_params, presets, run_stage
from altgrad.config.recipe import PUBLISHED


def main(arguments: list[str]) -> None:
    """Read params.yaml, which raises UserError for what is wrong with it; or print or write the reference."""
    parser = argparse.ArgumentParser(prog="python -m altgrad.config", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--reference", nargs="?", const="-", metavar="FOLDER", help="print every setting, or write a page per section"
    )
    parser.add_argument("--presets", action="store_true", help="print the preset models, corpora, arms and recipes")
    given = parser.parse_args(arguments)
    if given.presets:
        for file in (presets.FILE, PUBLISHED):
            sys.stdout.write(file.read_text(encoding="utf-8"))
        return
    folder = given.reference
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
