"""The labels of documents: how corpora write them, and their files. Oracle: the texts and labels of each test.

Bad labels are refused in one sentence before anything is trained.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from altgrad.config import UserError
from altgrad.config.schema import HubCorpus, LocalCorpus
from altgrad.data import SPLITS, documents, hashed_split, label_names, label_text, labelled
from altgrad.data.batches import read_documents, read_labels
from tests.data.conftest import ALL, KINDS, TOKENIZER, rows_of, tokenize

Table = Callable[..., LocalCorpus]


def test_every_document_is_on_one_side_with_its_own_labels(table: Table, tmp_path: Path) -> None:
    rows = rows_of()
    meta = tokenize(table(rows), tmp_path / "tokens")
    names = [label["name"] for label in meta["labels"]]
    assert names == sorted(KINDS)
    end, seen = TOKENIZER.vocab_size - 1, []
    for split in SPLITS:
        mine = [row for number, row in enumerate(rows) if hashed_split(f"row {number}") == split]
        truth = read_labels(tmp_path / "tokens", split, len(names))
        assert [[name for name, has in zip(names, own, strict=True) if has] for own in truth] == [
            sorted(row["labels"]) for row in mine
        ]
        assert [label[split] for label in meta["labels"]] == truth.sum(axis=0).tolist()
        assert meta["unlabelled"][split] == (~truth.any(axis=1)).sum()
        assert (np.fromfile(tmp_path / f"tokens/{split}.bin", "<u2") == end).sum() == len(mine)
        assert [rows[int(number)] for number in read_documents(tmp_path / "tokens", split)] == mine
        seen += [row["text"].strip() for row in mine]
        assert [row.text for row in labelled(table(rows), split)] == list(documents(table(rows), split))
    assert sorted(seen) == sorted(row["text"].strip() for row in rows)


@pytest.mark.parametrize("kind", ["csv", "json", "jsonl", "parquet"])
def test_a_documents_number_is_its_row_by_pandas(kind: str, tmp_path: Path) -> None:
    """Blank lines, rows without text, short ones and near copies move no number."""
    path, rows = tmp_path / f"rows.{kind}", pd.DataFrame(rows_of(60))
    rows.loc[::7, "text"], rows.loc[1::7, "text"], rows.loc[2::7, "text"] = "", rows.text[10], "short"
    if kind == "csv":
        path.write_text(rows.assign(labels="red;blue").to_csv(index=False).replace("\n", "\n\n"))
    elif kind == "parquet":
        rows.to_parquet(path)
    else:
        rows.to_json(path, orient="records", lines=kind == "jsonl")
    read = {"csv": pd.read_csv, "parquet": pd.read_parquet, "json": pd.read_json, "jsonl": pd.read_json}[kind]
    table = read(path, **({"lines": True} if kind == "jsonl" else {}))
    corpus = LocalCorpus(source="local", path=str(path), min_characters=8)
    found = [row for split in SPLITS for row in labelled(corpus, split)]
    assert len(found) == (rows.text.str.len() >= 8).sum() > 30
    assert all(table.text[int(row.document)].strip() == row.text for row in found)


def test_near_copies_are_on_one_side(table: Table, tmp_path: Path) -> None:
    rows = rows_of(400)
    copies = [{**row, "text": f"{row['text'].upper()}!"} for row in rows[::9] if len(row["text"].split()) > 12]
    meta = tokenize(table(rows + copies, max_repeated=0.8), tmp_path / "tokens")
    assert sum(split["documents"] for split in meta["splits"].values()) == len(rows)
    assert meta["near_copies"] == len(copies) > 20
    numbers = [int(number) for split in SPLITS for number in read_documents(tmp_path / "tokens", split)]
    assert len(set(numbers)) == len(rows) and max(numbers) >= len(rows)


def test_a_label_that_moves_is_another_corpus(table: Table, tmp_path: Path) -> None:
    rows = rows_of()
    first = tokenize(table(rows), tmp_path / "a")
    number = next(n for n in range(len(rows)) if hashed_split(f"row {n}") == "test" and len(rows[n]["labels"]) == 1)
    rows[number] = {**rows[number], "labels": list(KINDS)}
    second = tokenize(table(rows), tmp_path / "b")
    assert first["labels_sha256"] != second["labels_sha256"]


def but_red(kept: Callable[[str], bool]) -> list[dict[str, object]]:
    """Return the rows with their labels in the splits that are ``kept``, and with one label elsewhere."""
    return [
        {**row, "labels": row["labels"] if kept(hashed_split(f"row {n}")) else ["red"]} for n, row in enumerate(ALL)
    ]


@pytest.mark.parametrize(("rows", "said"), [
    ([{**row, "labels": []} for row in ALL], "no document has a label; check the corpus' setting labels"),
    ([{"text": row["text"]} for row in ALL], "has no column 'labels'"),
    ([{**row, "labels": ["red", " "]} for row in ALL], "' ' is no label"),
    ([{**row, "labels": [{"name": "red"}]} for row in ALL], "is no label; a label is a name or a whole number"),
    ([{**row, "labels": ["red", *row["labels"]]} for row in ALL], "every training document has the label 'red'"),
    ([{**row, "labels": ["red"] * ("red" in row["labels"])} for row in ALL], "fewer than two labels"),
    (
        but_red(lambda split: split == "train"),
        "no val document has the label 'blue', 'green', so there is nothing to choose a threshold by",
    ),
    (
        but_red(lambda split: split != "test"),
        "no test document has the label 'blue', 'green', so there is nothing to measure",
    ),
    ([row for row, n in zip(ALL, range(7), strict=False)], "classifying needs train, val and test"),
])  # fmt: skip
def test_bad_labels_are_refused_in_a_sentence(
    rows: list[dict[str, object]], said: str, table: Table, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as raised:
        tokenize(table(rows), tmp_path / "tokens")
    message = str(raised.value)
    assert said in message and "\n" not in message
    assert not (tmp_path / "tokens/meta.json").exists()


def test_what_is_no_table_has_no_labels(folder_of: Table) -> None:
    with pytest.raises(UserError, match="has no labels; to classify, name a table"):
        next(labelled(folder_of({"a.txt": "text"}), "train"))


@pytest.mark.parametrize(("value", "names"), [
    (["b", "a", "b"], ("b", "a")), ("b; a;", ("b", "a")), (7, ("7",)), (None, ()), ("", ()),
    *((text, tuple(part.strip() for part in text.split(";")))  # brackets alone make no list
      for text in ("(a)", "a (b)", "{x}", "(1)", "(a) b; c (d)", "a [b]", '"a"')),
])  # fmt: skip
def test_labels_come_as_lists_as_text_and_one_by_one(value: object, names: tuple[str, ...]) -> None:
    assert label_names(value) == names


NAME = st.text("ab;,'\" \\[]é\n", min_size=1).filter(lambda name: name.strip())


@given(rows=st.lists(st.lists(NAME | st.integers(0, 9)), min_size=1, max_size=4))
@settings(max_examples=150, deadline=None)
def test_lists_that_pandas_or_json_wrote_into_a_table_are_those_lists(
    tmp_path_factory: pytest.TempPathFactory, rows: list[list[str | int]]
) -> None:
    path, texts = tmp_path_factory.mktemp("lists") / "rows.csv", [f"text {i}" for i in range(len(rows))]
    expected = {text: label_names(own) for text, own in zip(texts, rows, strict=True)}
    forms = [lambda own, by=by: json.dumps(own, separators=by) for by in ((", ", ":"), (",", ":"))]
    forms += [list, tuple, lambda own: label_text(label_names(own))]
    for form in forms:
        written = [form(own) for own in rows]
        pd.DataFrame({"text": texts, "labels": written}).to_csv(path, index=False)
        corpus = LocalCorpus(source="local", path=str(path))
        assert {row.text: row.labels for split in SPLITS for row in labelled(corpus, split)} == expected


@pytest.mark.parametrize("text", [
    str(np.array(["a", "b"])), str(np.array(["a"] * 40)), "[a, b]", "['a', b]", "['a';'b']", "[None]", "[1.5]",
    "{'a', 'b'}", "{'a': 1}", '{"a": 1}', "[['a'], ['b']]", "['a',  'b']",
])  # fmt: skip
def test_a_list_that_is_written_otherwise_is_no_label(tmp_path: Path, text: str) -> None:
    """NumPy's is one that Python's own reader would make another of: 'a' 'b' is 'ab'."""
    path = tmp_path / "rows.csv"
    pd.DataFrame({"text": ["one", "two"], "labels": ["a", text]}).to_csv(path, index=False)
    with pytest.raises(UserError, match=r"rows.csv, line 3: column 'labels': .* is no (list|label)"):
        for split in SPLITS:
            list(labelled(LocalCorpus(source="local", path=str(path)), split))


NAMES = ["law", "trade", "fish"]


@pytest.mark.parametrize(("record", "settings"), [
    ({"text": "t", "labels": [0, 2]}, {}),  # eurlex of lex_glue, multi_eurlex at level 1: numbers with names
    ({"text": "t", "eurovoc_concepts": ["law", "fish"]}, {"labels": "eurovoc_concepts"}),  # eurlex57k
    (
        {"text": {"en": "t", "de": "d"}, "eurovoc_concepts": {f"level_{n}": ["law", "fish"][: n] for n in (1, 2, 3)}},
        {"text": "text.en", "labels": "eurovoc_concepts.level_2"},
    ),
], ids=["named numbers", "names", "levels"])  # fmt: skip
def test_data_sets_of_the_hub_have_their_labels(
    record: dict, settings: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    for split in ("train", "validation", "test"):
        rows = datasets.Dataset.from_list([record] * 300)
        if "labels" in record:
            rows = rows.cast_column("labels", datasets.Sequence(datasets.ClassLabel(names=NAMES)))
        (folder / "data").mkdir(parents=True, exist_ok=True)
        rows.to_parquet(folder / f"data/{split}-0000.parquet")
    corpus = HubCorpus(source="hub", path=str(folder), **settings)
    assert list(labelled(corpus, "val")) == [("t", ("law", "fish"), str(number)) for number in range(300)]
    assert list(documents(corpus, "test")) == ["t"] * 300
    with pytest.raises(UserError, match="has no column 'lables'.*setting: labels"):
        next(labelled(corpus.but(labels="lables"), "train"))
    with pytest.raises(ValueError, match="label 3 is unknown; the column has names for 0 to 2"):
        label_names([3], datasets.ClassLabel(names=NAMES))
