"""A second corpus that needs no download: the docstrings of installed packages.

    python -m altgrad.data.docstrings data/corpus/docstrings torch scipy pandas numpy matplotlib

writes one text per module, for a corpus with ``source: local``. Sources are parsed and nothing is imported, so the same
versions of packages and Python give the same texts on every machine. Left out are tests, modules that this Python
cannot parse, and docstrings that occurred earlier.
"""

import argparse
import ast
import importlib.util
import inspect
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from altgrad.common.errors import UserError, run_stage

LEAST = 500  # characters of a text; shorter modules have little more than a line for each function
DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def write_docstrings(folder: Path, packages: Sequence[str]) -> int:
    """Write a text per module of ``packages`` into the empty or new ``folder``; return the number of texts.

    Raises :class:`UserError` for a folder that is not empty, and for a package that is not installed.
    """
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty; name a new folder, so that the corpus is these texts alone")
    roots = [_root(package) for package in packages]
    folder.mkdir(parents=True, exist_ok=True)
    seen: set[str] = set()
    written = 0
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            module = (root.name, *path.relative_to(root).with_suffix("").parts)
            text = "" if "tests" in module else "\n\n".join(_new(docstrings(path.read_text(encoding="utf-8")), seen))
            if len(text) >= LEAST:
                (folder / f"{'.'.join(module)}.txt").write_text(text + "\n", encoding="utf-8")
                written += 1
    return written


def docstrings(source: str) -> Iterator[str]:
    """Yield the docstrings of a module and of its definitions, from top to bottom, without their indentation."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes in other people's strings
        try:
            tree = ast.parse(source)
        except SyntaxError:
            return
    defined = [node for node in ast.walk(tree) if isinstance(node, DEFINITIONS)]
    for node in (tree, *sorted(defined, key=lambda node: node.lineno)):
        text = ast.get_docstring(node, clean=False)
        if text and (cleaned := inspect.cleandoc(text).strip()):
            yield cleaned


def _new(texts: Iterator[str], seen: set[str]) -> Iterator[str]:
    for text in texts:
        if text not in seen:
            seen.add(text)
            yield text


def _root(package: str) -> Path:
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise UserError(f"{package} is no package that is installed here; install it, or name others")
    return Path(next(iter(found.submodule_search_locations)))


def main(arguments: list[str]) -> None:
    """Run the command."""
    first = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m altgrad.data.docstrings", description=first)
    parser.add_argument("folder", type=Path, help="new or empty: a text per module is written into it")
    parser.add_argument("packages", nargs="+", help="that are installed, such as torch")
    options = parser.parse_args(arguments)
    print(f"{options.folder}: {write_docstrings(options.folder, options.packages)} texts")


if __name__ == "__main__":
    run_stage(main)
