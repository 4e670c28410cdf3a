"""``python -m altgrad``, or ``altgrad``: the list of what can be run, and ``altgrad COMMAND`` to run it.

The list is read from the package each time: a command is a module that runs when it is the main one, its line the
first of its docstring. Nothing is imported for that, so the list is there at once and is never out of date.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import re
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from altgrad import __version__
from altgrad.common.console import while_read
from altgrad.common.errors import near_matches

PACKAGE = Path(__file__).parent
RUNS = re.compile(r'^if __name__ == "__main__":', re.MULTILINE)  # what a module that can be run ends in
# What runs as a module and is no command of its own, and who runs it or which page tells of it.
INTERNAL = {
    "data.docstrings": "make study, for the question of other texts",
    "reporting.simulate": "make simulate",
    "watch.track": "altgrad/watch/README.md",
    "benchmark.steps": "altgrad.benchmark, in a process for each step",
    "benchmark.probe": "altgrad.execution, for an estimate",
    "training.replica": "altgrad.training, for a cell of several processes",
    "reporting.dvc_outputs": "make, once, with the environment",
}
# Packages in the order in which they help: what a format is, what can be set, what is measured, then the rest by name.
# A package that is not listed has nothing to run. Diagnoses are made by the stage, `python -m stages.diagnose CELL`.
FIRST = ("formats", "config", "metrics")


def runnable(package: Path = PACKAGE) -> dict[str, Path]:
    """Return the modules below ``package`` that can be run, by what `altgrad` calls them, such as ``formats``."""
    found = {}
    for source in sorted(package.rglob("*.py")):
        name = ".".join(source.relative_to(package).with_suffix("").parts)
        if source.name == "__main__.py" or RUNS.search(source.read_text(encoding="utf-8")):
            found[name.removesuffix("__main__").rstrip(".")] = source
    found.pop("")  # this module
    rank = {package: place for place, package in enumerate(FIRST)}
    return dict(sorted(found.items(), key=lambda item: rank.get(item[0].split(".")[0], len(rank))))


def commands() -> dict[str, str]:
    """Return each command and the line that says what it does."""
    return {name: _line(source) for name, source in runnable().items() if name not in INTERNAL}


def main(arguments: Sequence[str] | None = None) -> int:
    """List the commands, or run the one named; 2 for a name that is none."""
    lines = commands()
    width = max(map(len, lines))
    listed = "\n".join(["commands:", *(f"  {name:<{width}}  {line}" for name, line in lines.items())])
    parser = argparse.ArgumentParser(
        prog="altgrad", formatter_class=argparse.RawDescriptionHelpFormatter, epilog=listed,
        usage="altgrad COMMAND [ARGUMENT ...]",
        description="`altgrad formats E3M4` is `python -m altgrad.formats E3M4`, and so for every command below.",
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.add_argument("command", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 0
    names = list(lines)
    if options.command not in names:
        known = {name.split(".")[-1]: name for name in names} | {name: name for name in names}
        near = [known[match] for match in near_matches(options.command, known)]
        hint = f"did you mean {near[0]}?" if near else "without a name it lists all"
        print(f"error: altgrad has no command {options.command!r}; {hint}", file=sys.stderr)
        return 2
    sys.argv = [f"altgrad {options.command}", *options.arguments]
    runpy.run_module(f"altgrad.{options.command}", run_name="__main__", alter_sys=True)
    return 0


def main_of(module: str) -> Callable[[list[str]], None]:
    """Return the ``main`` of a module such as ``reporting.figures.layers``, for a command of an earlier package.

    An earlier package may not import a later one; a command may end in what a later one does.
    """
    main: Callable[[list[str]], None] = importlib.import_module(f"altgrad.{module}").main
    return main


def _line(source: Path) -> str:
    """Return the first line of a module's docstring, without the command that it may begin with."""
    first = (ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or "").split("\n")[0]
    line = re.sub(r"^``[^`]*``: ", "", first).replace("``", "`")
    return line[:1].upper() + line[1:]


if __name__ == "__main__":
    with while_read():
        sys.exit(main())
