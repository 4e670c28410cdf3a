"""A source of text is a section and a module, as altgrad/data/README.md says. Oracle: the files of a package."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path


def test_it_is_a_section_and_a_module(followed) -> None:
    assert followed.changes["a source"] == {"altgrad/config/schema.py", "altgrad/data/package.py"}


def test_the_command_made_its_rows_in_the_reference(followed) -> None:
    page = (followed.project.folder / "altgrad/config/settings/corpora.md").read_text(encoding="utf-8")
    assert "## PackageCorpus" in page and "| `source` | `package` | – | which kind of corpus this is |" in page


def test_every_module_of_the_package_is_a_document(followed) -> None:
    meta = json.loads((followed.project.folder / "elsewhere/data/tokens/meta.json").read_text())
    texts = [path.read_text(encoding="utf-8") for path in Path(asyncio.__file__).parent.rglob("*.py")]
    found = {unit: sum(split[unit] for split in meta["splits"].values()) for unit in ("documents", "characters")}
    assert meta["corpus"] == "asyncio" and found == {"documents": len(texts), "characters": sum(map(len, texts))}
    assert set(meta["splits"]) >= {"train", "val"}


def test_mistakes_are_sentences_that_know_of_it(followed) -> None:
    assert "asincio is no package that is installed here" in followed.said
    assert "corpora.asyncio: source is missing; add source: licences, hub, local, package" in followed.said
