"""``python -m altgrad``, or ``altgrad``: the list of what can be run, and ``altgrad COMMAND`` to run it.

A command is a package with a ``__main__.py`` or a module that runs as the main one. The first line of its docstring
says what it does. The list is read from the sources on each call, without importing them.
"""

import argparse
import ast
import re
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from altgrad import __version__
from altgrad.common.console import while_read
from altgrad.common.errors import near_matches

PACKAGE = Path(__file__).parent
RUNS = re.compile(r'^if __name__ == "__main__":', re.MULTILINE)  # stands in a module that can be run
# Modules that can be run but are not listed as commands, with the program that runs them or the page about them.
INTERNAL = {
    "data.docstrings": "make study, for the question of other texts",
    "reporting.simulate": "make simulate",
    "watch.track": "altgrad/watch/README.md",
    "benchmark.steps": "altgrad.benchmark, in a process for each step",
    "benchmark.runs": "make estimate, and altgrad.benchmark",
    "reporting.dvc_outputs": "make, once, with the environment",
}
# Packages that are listed first: formats, settings, metrics. The others follow by name.
FIRST = ("formats", "config", "metrics")


def runnable(package: Path = PACKAGE) -> dict[str, Path]:
    """Return the file of each module in ``package`` that can be run, by command name, such as ``formats``."""
    found = {}
    for source in sorted(package.rglob("*.py")):
        name = ".".join(source.relative_to(package).with_suffix("").parts)
        if source.name == "__main__.py" or RUNS.search(source.read_text(encoding="utf-8")):
            found[name.removesuffix("__main__").rstrip(".")] = source
    found.pop("")  # this module
    rank = {package: place for place, package in enumerate(FIRST)}
    return dict(sorted(found.items(), key=lambda item: rank.get(item[0].split(".")[0], len(rank))))


def commands() -> dict[str, str]:
    """Return the description of each listed command, by name: the first line of the module's docstring."""
    found = {}
    for name, source in runnable().items():
        if name not in INTERNAL:
            first = (ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or "").split("\n")[0]
            line = re.sub(r"^``[^`]*``: ", "", first).replace("``", "`")
            found[name] = line[:1].upper() + line[1:]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the commands, or run the one that ``arguments`` name first; return the exit status, 2 for no such name."""
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


if __name__ == "__main__":
    with while_read():
        sys.exit(main())
