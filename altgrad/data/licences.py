"""Licence texts: real legal English that one small wheel installs, so the bench works offline.

``licensedcode-data`` (data under CC-BY-4.0) has the licence texts and the notices ("rules") of the ScanCode licence
detector, one file each, with a YAML header between two ``---`` lines. Most notices are variations of one another, and
near copies are dropped (`altgrad.data`). Whole licences come before notices and long texts before short ones:
the fullest version of each text is kept. Texts that the detector must *not* take for a licence are dropped too.

With the defaults: 4,217 documents and 12.25 million characters; train 3,331, val 470, test 416.
"""

import importlib.util
import os
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from altgrad.common.errors import UserError
from altgrad.config.schema import LicencesCorpus
from altgrad.data import Labelled, NearCopies, Split, hashed_split

PACKAGE = "licensedcode"
REQUIREMENT = "licensedcode-data==32.1.0"

# The header may be empty and may end the file. It is YAML, but only a few of its top-level lines are needed. A YAML
# parser would take most of the time of reading 37,000 files.
HEADER = re.compile(r"\A---[ \t]*\n(.*?)^---[ \t]*(?:\n|\Z)", re.DOTALL | re.MULTILINE)
LANGUAGE = re.compile(r"^language:[ \t]*(\S+)", re.MULTILINE)
FALSE_POSITIVE = re.compile(r"^is_false_positive:[ \t]*(?:yes|true)\b", re.MULTILINE)
# ScanCode's marks around the words that a match must contain: annotation, not part of the text.
REQUIRED_PHRASE = re.compile(r"\{\{|\}\}")

# Labels by the line of the header that sets them: what kind of text it is, and what it names.
FLAGS = {
    "text": "is_license_text", "notice": "is_license_notice", "reference": "is_license_reference",
    "tag": "is_license_tag", "exception": "is_exception", "names urls": "ignorable_urls",
    "names copyrights": "ignorable_copyrights", "names holders": "ignorable_holders",
    "names authors": "ignorable_authors", "names emails": "ignorable_emails", "names files": "referenced_filenames",
}  # fmt: skip
LINE = re.compile(r"^(\w+):[ \t]*(.*?)[ \t]*$", re.MULTILINE)
OPERATORS = ("and", "or", "with")  # between licences in ``license_expression``


class LicenceFile(NamedTuple):
    """A file of the package: its name (a hash of it decides the split), its header, and the text below the header."""

    name: str
    header: str
    text: str


def rows(corpus: LicencesCorpus, split: Split, *, labels: bool) -> Iterator[Labelled]:
    """Yield the texts of ``split``, with ``labels`` if asked; raise :class:`UserError` if the package is missing.

    With ``corpus.labels`` ``"categories"``, labels are the categories of the text's licences, such as Permissive. With
    ``"flags"`` there are also the kind of the text, such as notice, and what it names, such as URLs.
    """
    folder = package_folder()
    categories = _categories(folder) if labels else {}
    for file in _selected(folder, corpus.min_characters, corpus.max_repeated):
        if hashed_split(file.name) == split:
            names = _labels(file, categories) if labels else []
            kept = names if corpus.labels == "flags" else [name for name in names if name not in FLAGS]
            yield Labelled(REQUIRED_PHRASE.sub("", file.text).strip(), tuple(kept), file.name)


def _labels(file: LicenceFile, categories: dict[str, str]) -> list[str]:
    header: dict[str, str] = dict(LINE.findall(file.header))
    licences = re.findall(r"[\w.+-]+", header.get("license_expression") or header.get("key", ""))
    labels = [categories[licence] for licence in licences if licence.lower() not in OPERATORS]
    labels += ["text"] if file.name.endswith(".LICENSE") else []
    labels += [label for label, line in FLAGS.items() if header.get(line, "no") not in ("no", "false")]
    return list(dict.fromkeys(labels))


@lru_cache(maxsize=1)
def _categories(folder: Path) -> dict[str, str]:
    headers = (dict(LINE.findall(parse(_read(path))[0])) for path in (folder / "licenses").glob("*.LICENSE"))
    return {said["key"]: said["category"] for said in headers}


def package_folder() -> Path:
    """Return the package's data folder; raise :class:`UserError` if it is missing. ScanCode itself is not imported."""
    spec = importlib.util.find_spec(PACKAGE)
    for location in (spec.submodule_search_locations or ()) if spec else ():
        folder = Path(location) / "data"
        if (folder / "licenses").is_dir() and (folder / "rules").is_dir():
            return folder
    raise UserError(f"the licences corpus needs the package {REQUIREMENT}; run: pip install {REQUIREMENT}")


def parse(content: str) -> tuple[str, str]:
    """Return (header, text) of a file's content, with newlines as ``\\n`` and the text stripped. No header: ``""``."""
    content = content.replace("\r\n", "\n").replace("\r", "\n")
    header = HEADER.match(content)
    if header is None:
        return "", content.strip()
    return header[1], content[header.end() :].strip()


@lru_cache(maxsize=1)  # selecting takes seconds, and serves all three splits
def _selected(folder: Path, min_characters: int, max_repeated: float) -> tuple[LicenceFile, ...]:
    copies = NearCopies(max_repeated)
    return tuple(file for file in _in_order(folder, min_characters) if not copies.drops(file.text))


def _in_order(folder: Path, min_characters: int) -> Iterator[LicenceFile]:
    """Yield the English documents of ``min_characters`` or more: licences before rules, long before short, by name."""
    for subfolder, suffix in (("licenses", ".LICENSE"), ("rules", ".RULE")):
        files = []
        for entry in os.scandir(folder / subfolder):
            # A character is at least a byte, so most rules are too short and need not be opened.
            if entry.name.endswith(suffix) and entry.stat().st_size >= min_characters:
                header, text = parse(_read(Path(entry.path)))
                language = LANGUAGE.search(header)
                english = language is None or language[1] == "en"
                if english and len(text) >= min_characters and not FALSE_POSITIVE.search(header):
                    files.append(LicenceFile(entry.name, header, text))
        yield from sorted(files, key=lambda file: (-len(file.text), file.name))


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{path} is damaged; run: pip install --force-reinstall {REQUIREMENT}") from None
