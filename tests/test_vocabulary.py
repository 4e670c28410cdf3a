"""README, reports, help texts and docstrings use the field's words. Oracle: the list of private words that went."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: Private words and what stands for them.
GONE = {
    "not told apart": "not significant, or inconclusive", "told apart": "significant",
    "rounding by chance": "stochastic rounding", "rounded by chance": "stochastically rounded",
    "own part": "format-specific effect", "virtual twin": "unquantized control",
    "virtual geometry": "unquantized control", "matched size": "RMS-matched update", "null arm": "shuffled control",
    "foreign geometry": "another format's spacing", "plain arm": "baseline optimizer",
    "masterless": "without master weights", "foretold": "predicted", "where resolution binds": "at low bit widths",
    "lie evenly": "uniform grid", "lost cell": "diverged or failed run", "ends above": "loss higher by",
    "ends below": "loss lower by", "indication": "p < 0.10, or no test", "whole rungs": "whole code steps",
    "first cause": "first anomalous tensor", "planted fault": "injected fault",
}  # fmt: skip
PLACES = ("README.md", "CONTRIBUTING.md", "params.yaml", "dvc.yaml", "Makefile", "reports", "altgrad", "stages")
READ = {".md", ".py", ".yaml", ".html", ".j2", ".js", ""}
#: Names of experiments, by which the runs of the study are kept, and what torch calls two tensors apart.
NAMES = re.compile(r"[\w-]+-masterless[\w-]*|\bmasterless: \{|like: masterless|of: masterless|tuning-masterless")


@pytest.fixture(scope="module")
def pages() -> dict[Path, str]:
    """Return what each page says, but for names."""
    found = [path for place in PLACES for path in (ROOT / place, *(ROOT / place).rglob("*"))]
    read = [path for path in found if path.is_file() and path.suffix in READ and "__pycache__" not in path.parts]
    return {path.relative_to(ROOT): NAMES.sub("", path.read_text(encoding="utf-8")) for path in read}


@pytest.mark.parametrize("word", GONE)
def test_no_page_has_a_private_word(pages, word):
    pattern = re.compile(rf"\b{word}s?\b", re.IGNORECASE)
    found = [
        f"{path}:{number}: {line.strip()[:100]}"
        for path, text in pages.items() if pattern.search(text)
        for number, line in enumerate(text.splitlines(), 1) if pattern.search(line)
    ]  # fmt: skip
    assert not found, f"write {GONE[word]!r} for {word!r}:\n" + "\n".join(found)
