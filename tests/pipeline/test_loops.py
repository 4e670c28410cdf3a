"""What is built ahead is all that training takes, where it looks for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import altgrad
from altgrad.training import machine

# A compiler that makes a file of the name it is asked for, and nothing that could be loaded.
COMPILER = """#!/bin/sh
while [ "$1" != -o ]; do shift; done
echo made > "$2"
"""


def test_every_source_of_the_project_is_built_in_the_folder_of_its_graphs(tmp_path, monkeypatch):
    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    cache = tmp_path / "cache"
    variables = {"CXX": str(compiler), "ALTGRAD_COMPILE_CACHE": str(cache)}
    command = [sys.executable, "-m", "stages.loops"]
    subprocess.run(command, env={**os.environ, **variables}, check=True, capture_output=True)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    machine.use_compile_cache(cache)
    made = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"], "altgrad").glob("*.so")
    sources = {source.stem for source in Path(altgrad.__file__).parent.rglob("*.cpp")}
    assert {file.stem.rpartition("-")[0] for file in made} == sources != set()
