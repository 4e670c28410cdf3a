"""Philox and its streams, against the known answers of Random123 (its file kat_vectors) and counted frequencies."""

import itertools

import pytest
import torch

from altgrad.numerics import permutation, rounding, uniform
from altgrad.numerics.rounding import BITS, LANES, philox, words

LARGEST_SEED, LARGEST_STEP = 2**31 - 1, 10**7


def stream(seed: int, tensor: int, step: int) -> torch.Tensor:
    return torch.tensor([seed, tensor, step])


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000 " * 4, "00000000 " * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff " * 4, "ffffffff " * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_known_answers(counter, key, expected):
    found = philox(tuple(torch.tensor(int(word, 16)) for word in counter.split()), [int(k, 16) for k in key.split()])
    assert [f"{int(word):08x}" for word in found] == expected.split()


def test_a_place_has_its_word_of_its_block():
    """Written out for single places: word w of block b, (block, step, tensor, seed) being the counter."""
    seed, tensor, step = 11, 7, 5
    found = words(1000, stream(seed, tensor, step))
    for place in (0, 1, 15, 16, 17, 63, 64, 500, 999):
        row, rest = divmod(place, 4 * LANES)
        word, lane = divmod(rest, LANES)
        counter = tuple(torch.tensor(part) for part in (row * LANES + lane, step, tensor, seed))
        assert found[place] == philox(counter, (0, 0))[word]
    whole = uniform(torch.Size([10, 100]), stream(seed, tensor, step))
    assert torch.equal(uniform(torch.Size([7]), stream(seed, tensor, step), first=17), whole.flatten()[17:24])


def test_no_two_places_of_any_streams_share_a_word_of_a_counter(monkeypatch):
    """The law behind disjoint streams: counters are (block, step, tensor, seed), all different, and fit."""
    counters = []

    def recorded(counter, key):
        counters.append((torch.stack(torch.broadcast_tensors(*counter), dim=-1).reshape(-1, 4), key))
        return philox(counter, key)

    monkeypatch.setattr(rounding, "philox", recorded)
    parts = ((0, 1, LARGEST_SEED), (0, 1, 100), (0, 1, LARGEST_STEP))
    for seed, tensor, step in itertools.product(*parts):
        words(1000, stream(seed, tensor, step))
    assert {key for _, key in counters} == {(0, 0)}, "one key: a bijection of the counters"
    counted = torch.cat([counter for counter, _ in counters])
    assert len(counted.unique(dim=0)) == len(counted) == 27 * 256
    assert counted.min() >= 0 and counted.max() < 2**32


@pytest.mark.parametrize("changed", [(1, 0, 0), (0, 1, 0), (0, 0, 1)], ids=["seed", "tensor", "step"])
def test_each_part_of_a_stream_gives_other_numbers_without_correlation(changed):
    count = 1 << 18
    shape = torch.Size([count])
    first, second = uniform(shape, stream(3, 4, 5)), uniform(shape, stream(3, 4, 5) + torch.tensor(changed))
    assert (first == second).float().mean() < 1e-4
    # Correlation of independent numbers has the deviation 1 / sqrt(count).
    assert abs(torch.corrcoef(torch.stack([first, second]).double())[0, 1].item()) < 5 / count**0.5


@pytest.mark.parametrize(
    "at", [(7, 1, 1), (0, 0, 1), (LARGEST_SEED, 3, LARGEST_STEP)], ids=["usual", "zeros", "largest"]
)
def test_uniform_numbers_are_uniform(at):
    count, bins = 1 << 20, 256
    found = uniform(torch.Size([count]), stream(*at))
    assert found.min() > 0 and found.max() < 1 and found.dtype == torch.float32
    places = found.double() * 2 ** (BITS + 1)
    assert torch.equal(places, places.round()) and (places.long() % 2 == 1).all(), "odd multiples of 2^-24"
    parts = {"upper bits": places.long() >> (BITS + 1 - 8), "lower bits": (places.long() >> 1) % bins}
    pairs = places.long() >> (BITS + 1 - 4)
    parts["neighbours"] = pairs[::2] * 16 + pairs[1::2]
    for name, part in parts.items():
        counted, expected = torch.bincount(part, minlength=bins).double(), len(part) / bins
        chi2 = ((counted - expected) ** 2 / expected).sum().item()
        deviation = (2 * (bins - 1)) ** 0.5
        assert abs(chi2 - (bins - 1)) < 5 * deviation, name


@pytest.mark.slow
def test_compiled_and_eager_numbers_agree_to_the_bit():
    compiled = torch.compile(uniform, dynamic=True, fullgraph=True)
    for shape, at in (((67, 131), (1, 2, 3)), ((64,), (LARGEST_SEED, 100, LARGEST_STEP))):
        size = torch.Size(shape)
        assert torch.equal(compiled(size, stream(*at)), uniform(size, stream(*at)))


def test_a_permutation_is_one_and_of_seed_and_tensor_alone():
    count = 5000
    found = permutation(count, 3, 1)
    assert found.dtype == torch.int32
    assert torch.equal(found.sort().values, torch.arange(count, dtype=torch.int32))
    assert torch.equal(found, permutation(count, 3, 1))
    assert permutation(1, 0, 0).tolist() == [0] and permutation(0, 0, 0).tolist() == []
    # Of a shuffle and another 1 place on average stays, with deviation 1; seed + 1 is not the next tensor.
    others = [(3, 2), (4, 1), (4, 0), (2, 2), (1, 3), (LARGEST_SEED, 1), (3 + 2**16, 1)]
    for seed, tensor in others:
        assert (permutation(count, seed, tensor) == found).sum() < 10


def test_all_permutations_are_equally_likely():
    counted = torch.zeros(24)
    codes = {order: i for i, order in enumerate(itertools.permutations(range(4)))}
    draws = 1200
    for seed in range(draws):
        counted[codes[tuple(permutation(4, seed, 0).tolist())]] += 1
    chi2 = ((counted - draws / 24) ** 2 / (draws / 24)).sum().item()
    assert chi2 < 23 + 5 * 46**0.5
