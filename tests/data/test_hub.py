"""Data sets of the hub. Oracle: a data set in the hub's layout, written to a folder by each test.

Such a folder takes the library's own path from README.md to rows. What needs a network is tested
against an address where nobody listens, and against the exceptions that the library documents.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from altgrad.config import UserError
from altgrad.config.schema import HubCorpus
from altgrad.data import documents

datasets = pytest.importorskip("datasets")

Dataset = Callable[..., HubCorpus]
CONTENT = {"train": ["one", "two", "", None, " \n"], "validation": ["three"], "test": ["four", "five"]}
README = """---
configs:
- config_name: default
  data_files:
{files}
- config_name: other
  data_files:
  - split: train
    path: other/train.parquet
---
# A data set
"""


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Dataset:
    """Return a function that writes a data set with these splits and returns its corpus."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)

    def write(content: dict[str, list[str | None]] = CONTENT, **settings: object) -> HubCorpus:
        folder = tmp_path / "eurlex"
        for name, texts in {**content, "other": ["elsewhere"]}.items():
            path = folder / ("other/train.parquet" if name == "other" else f"data/{name}.parquet")
            path.parent.mkdir(parents=True, exist_ok=True)
            labels = [[i] for i in range(len(texts))]
            pyarrow.parquet.write_table(pyarrow.table({"text": texts, "labels": labels}), path)
        files = "\n".join(f"  - split: {name}\n    path: data/{name}.parquet" for name in content)
        (folder / "README.md").write_text(README.format(files=files), encoding="utf-8")
        return HubCorpus(source="hub", path=str(folder), **({"name": "default"} | settings))

    return write


def message(corpus: HubCorpus, split: str = "train") -> str:
    """Return the one-line error of reading ``split``."""
    with pytest.raises(UserError) as raised:
        list(documents(corpus, split))
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_each_split_gives_its_rows_without_blanks(dataset: Dataset) -> None:
    corpus = dataset()
    found = {split: list(documents(corpus, split)) for split in ("train", "val", "test")}
    assert found == {"train": ["one", "two"], "val": ["three"], "test": ["four", "five"]}
    assert list(documents(corpus, "train")) == ["one", "two"]
    assert list(documents(dataset(name="other", splits={"train": "train", "val": "train"}), "val")) == ["elsewhere"]


def test_a_data_set_without_a_test_split_has_no_test_documents(dataset: Dataset) -> None:
    two = {name: CONTENT[name] for name in ("train", "validation")}
    assert list(documents(dataset(two), "test")) == []
    assert list(documents(dataset(two, splits={"train": "train", "val": "validation"}), "test")) == []
    asked = dataset(two, splits={"train": "train", "val": "validation", "test": "tset"})
    assert "no split 'tset' (for test)" in message(asked, "test")


def test_a_wrong_split_column_or_configuration_gets_a_suggestion_and_a_way_out(dataset: Dataset) -> None:
    text = message(dataset(splits={"train": "train", "val": "validaton"}), "val")
    assert "did you mean validation? To go on" in text and text.endswith("set corpus: licences")
    text = message(dataset(text="txt", fallback="wikitext"))
    assert "no column 'txt' (setting: text); did you mean text? To" in text and text.endswith("set corpus: wikitext")
    assert "holds list, not text" in message(dataset(text="labels"))
    text = message(dataset(name="defualt"))
    assert "name: defualt" in text and "'default', 'other'" in text and "licences" in text


def test_a_script_a_damaged_file_and_a_folder_without_data_are_named(dataset: Dataset, tmp_path: Path) -> None:
    corpus = dataset()
    (Path(corpus.path) / "data" / "train.parquet").write_bytes(b"not parquet")
    text = message(corpus)
    assert "eurlex" in text and "licences" in text
    (Path(corpus.path) / "eurlex.py").write_text("raise SystemExit", encoding="utf-8")
    assert "without running its own code" in message(corpus)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/README.md").write_text("nothing", encoding="utf-8")
    assert "holds no data files" in message(HubCorpus(source="hub", path=str(tmp_path / "empty")))


@pytest.mark.parametrize(("content", "said"), [
    ('text\na\n"Big\nb\n"News" c\n', "line 3: the row that begins here is not valid CSV"),
    ('text,labels\n"He said \\"hi\\"",a\n', "line 2: the row that begins here is not valid CSV"),
    ("id,text,labels\n1,first\nsecond,a\n", "line 2: 2 values for 3 columns"),
    ("text\na,b\nc,d\n", "line 2: more values than the columns, 1"),
    ('text\n"a, ""b"""\n', None),
    ('---\nconfigs:\n- config_name: default\n  sep: ";"\n---\ntext;labels\n"a, ""b""";0\n', None),
])  # fmt: skip
def test_csv_files_of_a_folder_are_as_strict_as_a_table(tmp_path, monkeypatch, content, said) -> None:
    """The library reads them with pandas, which cuts and fills; where the folder says another separator it is right."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    *readme, table = content.rpartition("---\n")
    (folder / "README.md").write_text("".join(readme), encoding="utf-8")
    for split in ("train", "validation", "test"):
        (folder / f"{split}.csv").write_text(table, encoding="utf-8")
    corpus = HubCorpus(source="hub", path=str(folder))
    if said:
        assert f"train.csv, {said}" in message(corpus)
    else:
        assert list(documents(corpus, "train")) == ['a, "b"']


def test_an_unreachable_hub_is_reported_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # the discard port: nobody listens
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    start = time.monotonic()
    text = message(HubCorpus(source="hub", path="someone/eurlex", fallback="licences"))
    assert "hub cannot be reached" in text and text.endswith("set corpus: licences")
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (datasets.exceptions.DatasetNotFoundError("No such data set."), "neither a folder here nor"),
        (FileNotFoundError("Couldn't find any data file."), "holds no data files"),
        (ConnectionError("Couldn't reach 'x' on the Hub"), "cannot be reached"),
        (RuntimeError("Dataset scripts are no longer supported"), "its own code"),
        (ValueError("BuilderConfig 'a' not found.\nAvailable: ['b']"), "Available: ['b']"),
    ],
)
def test_every_refusal_of_the_library_names_the_fallback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception, words: str
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    text = message(HubCorpus(source="hub", path=str(tmp_path), fallback="wikitext"))
    assert words in text and text.endswith("set corpus: wikitext")
