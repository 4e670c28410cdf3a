"""Measures what a machine can do (``make bench``, on a GPU ``make gpu``), the most useful checks and timings first.

A GPU is rented by the hour or lent for minutes. So nothing is installed, nothing needs a network, each result is
written at once, and nothing is measured twice. This file imports no library, so that it can report missing ones.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

TORCH = (2, 11)
# The needed packages: {name to import: name to install}.
NEEDED = {
    "torch": "torch", "numpy": "numpy", "pandas": "pandas", "pyarrow": "pyarrow", "scipy": "scipy",
    "pydantic": "pydantic", "ruamel.yaml": "ruamel.yaml", "safetensors": "safetensors", "tiktoken": "tiktoken",
    "tqdm": "tqdm", "matplotlib": "matplotlib", "PIL": "pillow", "jinja2": "jinja2",
}  # fmt: skip
# Packages that only some measurements need, and what is left out without them.
OPTIONAL = {"torchao": "steps of torchao's layers", "pytest": "checks", "hypothesis": "checks"}


def missing() -> str | None:
    """Return a sentence that names the missing packages and how to install them; ``None`` if all are there."""
    absent = [name for module, name in NEEDED.items() if not _is_there(module)]
    if absent:
        return (
            f"not installed: {', '.join(absent)}; run `make env`, or carry their wheels "
            f"(`pip download --no-deps {' '.join(absent)}`) and name their folder in PYTHONPATH"
        )
    installed = version("torch")
    if tuple(map(int, re.findall(r"\d+", installed)[:2])) < TORCH:
        return f"torch {installed} is too old; torch {'.'.join(map(str, TORCH))} or newer is needed"
    return None


def left_out() -> dict[str, str]:
    """Return ``{package: what is left out}`` for the optional packages that are not installed."""
    return {name: what for name, what in OPTIONAL.items() if not _is_there(name)}


def installed_version(name: str) -> str | None:
    """Return the version of the distribution ``name``, such as ``"3.5.0"``; ``None`` if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False
