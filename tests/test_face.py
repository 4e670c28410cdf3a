"""What a visitor meets first: the list of commands, and the files that say licence, citation and changes.

Oracle for the list: the sources, searched as text for what runs as a program.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import altgrad
from altgrad.__main__ import FIRST, INTERNAL, commands, main, runnable
from altgrad.common.console import called, while_read
from altgrad.common.files import read_yaml

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "altgrad"


def programs() -> set[str]:
    """Return what runs as ``python -m altgrad.NAME``, found by the words in its source."""
    found = set()
    for source in PACKAGE.rglob("*.py"):
        name = source.relative_to(PACKAGE).as_posix().removesuffix(".py").replace("/", ".")
        if re.search(r"^if __name__ == .__main__.", source.read_text(encoding="utf-8"), re.MULTILINE):
            found.add(name.removesuffix(".__main__"))
    return found - {"__main__"}


def test_every_program_of_the_package_is_listed_or_internal() -> None:
    listed = set(commands())
    assert listed | set(INTERNAL) == programs() and not listed & set(INTERNAL)
    assert set(FIRST) <= listed and len(listed) <= 12, "more than a newcomer reads"


def test_no_package_loads_what_runs_as_a_program() -> None:
    """Python would warn of it in front of what the program says."""
    modules = [f"altgrad.{name}" for name, source in runnable().items() if source.name != "__main__.py"]
    imported = "importlib.import_module(name.rpartition('.')[0])"  # in the order of `FIRST`, then by name
    code = f"import importlib, sys; print([name for name in {modules} if {imported} and name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert modules and done.stdout == "[]\n"


def test_every_command_has_a_line_that_says_what_it_does() -> None:
    for name, line in commands().items():
        assert len(line.split()) > 3 and line[0].isupper() and line[-1] in ".?)", f"{name}: {line}"


def test_without_a_name_the_commands_are_printed_and_nothing_heavy_is_imported() -> None:
    code = (
        "import sys; from altgrad.__main__ import main; code = main([]); "
        "sys.exit(code or ' '.join({'torch', 'numpy', 'pydantic'} & set(sys.modules)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name, line in commands().items():
        assert re.search(rf"^  {re.escape(name)} +{re.escape(line)}$", done.stdout, re.MULTILINE), name


@pytest.mark.parametrize("arguments", [["E3M4"], ["--help"], ["E3M4x"]])
def test_a_command_does_what_its_module_does(arguments: list[str]) -> None:
    ways = [["-m", "altgrad", "formats"], ["-m", "altgrad.formats"]]
    outcomes = [
        subprocess.run([sys.executable, *way, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        for way in ways
    ]
    first, second = [
        (done.returncode, done.stdout.replace(name, "NAME"), done.stderr.replace(name, "NAME"))
        for name, done in zip(("python -m altgrad formats", "python -m altgrad.formats"), outcomes, strict=True)
    ]
    assert first == second and (first[1] or first[2])


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (["/bin/python", "/bin/altgrad", "compare", "x.csv"], "altgrad compare"),
        (["python", "-m", "altgrad.compare"], "python -m altgrad.compare"),
        (["python", "-m", "altgrad", "compare", "-h"], "python -m altgrad compare"),
        (["python", "-m", "pytest"], "altgrad compare"),
    ],
)
def test_help_names_the_command_as_it_was_called(written: list[str], said: str, monkeypatch) -> None:
    monkeypatch.setattr("sys.orig_argv", written)
    assert called("compare") == said


def test_every_commands_help_names_it_so() -> None:
    for name in commands():
        assert f'called("{name}")' in runnable()[name].read_text(encoding="utf-8"), name


@pytest.mark.parametrize(
    ("command", "unbuffered"),
    [("altgrad", ""), ("altgrad formats", ""), ("altgrad.formats", "1"), ("altgrad.config --reference", "")],
)
def test_a_command_that_nobody_reads_ends_without_a_word_as_the_signal_would_end_it(command, unbuffered) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    run, own = [sys.executable, "-m", *command.split()], os.environ | {"PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(run, cwd=ROOT, env=own, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_every_program_of_the_package_ends_so() -> None:
    """Those above are run; of the others, some load torch, it is read that they go the same way."""
    for name in programs() - set(INTERNAL) | {"__main__"}:
        path = PACKAGE / name.replace(".", "/")
        source = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__main__.py"
        last = source.read_text(encoding="utf-8").split("__name__ ==")[-1]
        assert "run_stage(main" in last or "with while_read():" in last, name


def test_another_pipe_that_breaks_is_an_error_as_ever() -> None:
    with pytest.raises(BrokenPipeError, match="a worker's"), while_read():
        raise BrokenPipeError("a worker's")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [("format", "did you mean formats?"), ("prove", "did you mean numerics.prove?"), ("xyzzy", "lists all"),
     ("benchmark.runs", "benchmark"), ("Formats", "did you mean formats?")],
)  # fmt: skip
def test_an_unknown_command_is_one_sentence_and_two(wrong: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([wrong, "--jobs", "2"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert said.err.startswith(f"error: altgrad has no command '{wrong}'") and words in said.err


def test_the_citation_says_what_the_package_says() -> None:
    citation = read_yaml(ROOT / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= set(citation)  # what version 1.2.0 of the form requires
    assert citation["cff-version"] == "1.2.0" and citation["version"] == altgrad.__version__
    assert citation["license"] == "Apache-2.0" and citation["authors"] == [{"name": "The AltGrad authors"}]


def test_the_changelog_ends_with_a_section_per_released_version_or_none_is_released() -> None:
    headings = re.findall(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[0] == "Unreleased" and len(set(headings)) == len(headings)
