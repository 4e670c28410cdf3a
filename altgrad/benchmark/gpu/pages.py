"""What README.md and this package's page say of GPUs, between marks, read from the records."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

from altgrad.benchmark.gpu.tables import gpu_blocks, gpu_sentence
from altgrad.benchmark.machines import load_benches
from altgrad.config.files import write_text
from altgrad.reporting.markdown import blocks_to_markdown, text_to_markdown

MARKED = re.compile(r"(<!-- make gpu -->\n).*?(<!-- -->\n)", re.DOTALL)
PAGES = ("README.md", "altgrad/benchmark/README.md")
WIDTH = 120


def write_pages(root: Path) -> list[Path]:
    """Write both pages anew from ``root/reports/bench`` and return them."""
    written = []
    for path, text in pages(root).items():
        write_text(path, text)
        written.append(path)
    return written


def pages(root: Path) -> dict[Path, str]:
    """Return the content of each page, with what the records say now."""
    benches = [bench for bench in load_benches(root / "reports/bench") if bench["on_gpu"]]
    sentence = "\n".join(_wrapped(text_to_markdown(gpu_sentence(benches))))
    whole = blocks_to_markdown([block for bench in benches for block in gpu_blocks(bench)]) or sentence
    said = {}
    for name, text in zip(PAGES, (sentence, whole), strict=True):
        page = root / name
        found, count = MARKED.subn(partial(_filled, text), page.read_text())
        if count != 1:
            raise ValueError(f"{page} has {count} places for what GPUs can do, not one")
        said[page] = found
    return said


def _filled(text: str, place: re.Match[str]) -> str:
    return f"{place[1]}{text}\n{place[2]}"


def _wrapped(text: str) -> list[str]:
    """Return an item of a list in lines of the pages' width."""
    import textwrap

    return textwrap.wrap(f"- {text}", WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
