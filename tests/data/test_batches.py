"""Batches of text and pieces of documents. Oracles: slices of the token file, NumPy's Philox."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from altgrad.config import UserError
from altgrad.config.schema import LocalCorpus
from altgrad.config.tasks import Classifier, ComparedOn
from altgrad.data import hashed_split
from altgrad.data.batches import Pieces, TokenFile, raw_stream, training_batch, validation_sample
from tests.data.conftest import ALL, TOKENIZER, tokenize

DRAW = {"seed": 3, "step": 5, "micro": 1, "batch": 4, "context": 16}


@pytest.fixture(scope="module")
def file_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], TokenFile]:
    """Return a function that writes and opens a train split with the tokens 0, 1, 2, ..."""

    def write(count: int) -> TokenFile:
        folder = tmp_path_factory.mktemp("tokens")
        np.arange(count, dtype="<u2").tofile(folder / "train.bin")
        meta = {"dtype": "uint16", "vocab_size": 60_000, "splits": {"train": {"tokens": count}}}
        (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
        return TokenFile(folder, "train")

    return write


def test_targets_are_one_token_ahead_of_inputs(file_of: Callable[[int], TokenFile]) -> None:
    inputs, targets = training_batch(file_of(1000), **DRAW)
    assert inputs.shape == targets.shape == (4, 16)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.is_contiguous() and targets.is_contiguous()
    assert torch.equal(inputs, inputs[:, :1] + torch.arange(16))
    assert torch.equal(targets, inputs + 1)


def test_the_stream_is_pinned(file_of: Callable[[int], TokenFile]) -> None:
    """A change here makes every recorded run irreproducible; the numbers come from NumPy's Philox alone."""
    raw = np.random.Philox(key=[3, 5], counter=[0, 0, 0, 1]).random_raw(4)
    starts = [int(x) % (50_000 - 16) for x in raw]
    assert training_batch(file_of(50_000), **DRAW)[0][:, 0].tolist() == starts == [26663, 2160, 25135, 11933]


def test_the_numbers_of_no_two_micro_batches_are_correlated() -> None:
    places = list(itertools.product((0, 1, 2), (1, 2, 3), (0, 1, 2)))
    count = 4000
    drawn = np.stack([raw_stream(*place, count) / 2.0**64 for place in places])
    apart = np.corrcoef(drawn)[np.triu_indices(len(places), 1)]
    assert np.abs(apart).max() < 5 / count**0.5


def test_windows_start_everywhere_and_evenly(file_of: Callable[[int], TokenFile]) -> None:
    tokens = file_of(26)  # ten starts for a context of 16
    starts = torch.cat([training_batch(tokens, **{**DRAW, "step": s, "batch": 10})[0][:, 0] for s in range(1000)])
    counts = torch.bincount(starts, minlength=10)
    assert len(counts) == 10
    assert ((counts - 1000).abs() < 5 * 30).all()  # sigma = sqrt(10^4 * 0.1 * 0.9) = 30


@given(count=st.integers(2, 400), sequences=st.integers(1, 40), context=st.integers(1, 60))
@settings(max_examples=200, deadline=None)
def test_validation_windows_are_apart_evenly_spaced_and_span_the_split(
    file_of: Callable[[int], TokenFile], count: int, sequences: int, context: int
) -> None:
    if count < context + 1:
        return
    inputs, targets = validation_sample(file_of(count), sequences, context)
    starts = inputs[:, 0]
    assert len(inputs) == min(sequences, (count - 1) // context)
    assert torch.equal(targets, inputs + 1) and int(targets.max()) < count
    gaps = starts.diff()
    assert (gaps >= context).all()  # no target is scored twice
    if len(inputs) > 1:
        assert int(gaps.max() - gaps.min()) <= 1
        assert int(starts[0]) == 0 and int(targets.max()) == count - 1


def test_a_short_split_says_what_is_there_and_what_is_needed(file_of: Callable[[int], TokenFile]) -> None:
    tokens = file_of(16)
    for draw in (lambda: training_batch(tokens, **DRAW), lambda: validation_sample(tokens, 4, 16)):
        with pytest.raises(UserError, match=r"train split has 16 tokens.*context \+ 1 = 17.*model.context"):
            draw()
    assert len(validation_sample(file_of(17), 4, 16)[0]) == 1


def test_a_file_that_meta_does_not_describe_is_refused(file_of: Callable[[int], TokenFile]) -> None:
    folder = Path(file_of(100).tokens.filename).parent
    with pytest.raises(UserError, match="no split 'val'; known: train"):
        TokenFile(folder, "val")
    with open(folder / "train.bin", "ab") as file:
        file.write(b"\0")
    with pytest.raises(UserError, match="holds 201 bytes where meta.json says 200"):
        TokenFile(folder, "train")
    (folder / "train.bin").unlink()
    with pytest.raises(UserError, match="holds 0 bytes"):
        TokenFile(folder, "train")
    with pytest.raises(UserError, match="does not exist"):
        TokenFile(folder / "nowhere", "train")


@given(asked=st.integers(1, 300), tokens=st.integers(18, 2000), context=st.integers(1, 16))
@settings(max_examples=30, deadline=None)
def test_the_sequences_that_are_announced_are_those_that_are_taken(file_of, asked: int, tokens: int, context: int):
    taken = len(validation_sample(file_of(tokens), asked, context)[0])
    found = ComparedOn.of_splits({"val": {"documents": 40, "tokens": tokens}}, asked, context)
    assert found.sequences == taken and found.enough == (taken >= 30)
    assert any(f"has {taken}: all are taken" in note for note in found.notes(asked)) == (asked > taken)


def test_pieces_are_the_documents_from_their_starts(table: Callable[..., LocalCorpus], tmp_path: Path) -> None:
    tokenize(table(ALL), tmp_path / "tokens")
    end, context, chunks = TOKENIZER.vocab_size - 1, 16, 3
    pieces = Pieces(tmp_path / "tokens", "train", Classifier(chunks=chunks), context)
    stream = np.fromfile(tmp_path / "tokens/train.bin", "<u2").tolist()
    texts, own = [], []
    for token in stream:
        texts, own = ([*texts, own], []) if token == end else (texts, [*own, token])
    inputs, targets, owner = pieces.sample()
    assert sorted(set(owner)) == list(range(len(texts)))
    read = 0
    for number, text in enumerate(texts):
        mine = inputs[owner == number]
        assert len(mine) == min(chunks, -(-len(text) // context))
        cut = text[: chunks * context]
        assert mine.flatten().tolist() == cut + [end] * (mine.numel() - len(cut))
        assert (targets[owner == number].bool().numpy() == pieces.truth[number]).all()
        read += len(cut)
    assert pieces.share_read == pytest.approx(read / sum(map(len, texts)))
    few = pieces.sample(5 * chunks + 1)[2]
    assert len(set(few)) == 5 and few[0] == 0 and few[-1] == len(texts) - 1


@pytest.mark.parametrize("rest", [0, 1])
def test_a_batch_is_a_function_of_its_place_and_draws_every_piece(
    rest: int, table: Callable[..., LocalCorpus], tmp_path: Path
) -> None:
    """Also where the number of documents is one of pieces' multiples, and alike numbers would pair the two."""
    training = np.cumsum([hashed_split(f"row {number}") == "train" for number in range(len(ALL))])
    rows = next(number + 1 for number in range(len(ALL) - 1, 0, -1) if training[number] % 2 == rest)
    tokenize(table(ALL[:rows]), tmp_path / "tokens")
    pieces = Pieces(tmp_path / "tokens", "train", Classifier(chunks=2), 16)
    assert len(pieces.truth) % 2 == rest
    place = {"seed": 1, "step": 5, "micro": 0, "batch": 8}
    first = pieces.batch(**place)
    for name in ("seed", "step", "micro"):
        assert not (pieces.batch(**{**place, name: 9})[0] == first[0]).all()
    assert all((a == b).all() for a, b in zip(pieces.batch(**place), first, strict=True))
    drawn = pieces.batch(seed=0, step=1, micro=0, batch=4000)[0]
    assert {tuple(row) for row in drawn.tolist()} == {tuple(row) for row in pieces.sample()[0].tolist()}
