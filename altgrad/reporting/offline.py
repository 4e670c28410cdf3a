"""Vega for DVC's plot page, so that ``dvc plots show`` works without a network.

DVC's page loads Vega from the web and stays blank offline. The page's template in ``.dvc/plots``
loads it from ``vega.js`` beside it when that file is there. It is 0.9 MB that vl-convert can write at
any time, so it is not kept in the repository: ``python -m altgrad.reporting.offline`` writes it.
"""

from __future__ import annotations

from pathlib import Path

import vl_convert

from altgrad.common.files import write_text

VEGA_LITE = "5.21"  # the last of the major version that the templates name


def write_vega(folder: Path) -> Path:
    """Write Vega, Vega-Lite and Vega-Embed as one script to ``folder/vega.js`` and return its path.

    The bundle is wrapped in a function: at the top of a page its many short names would collide with
    the variables of DVC's own scripts.
    """
    bundle = vl_convert.javascript_bundle(vl_version=VEGA_LITE)  # type: ignore[call-arg] # the stub lacks a default
    path = folder / "vega.js"
    write_text(path, "(function () {\n" + bundle + "\n})();\n")
    return path


if __name__ == "__main__":
    print(write_vega(Path(".dvc/plots")))
