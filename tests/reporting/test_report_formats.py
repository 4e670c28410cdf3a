"""A card equals the format that training uses. Oracles: altgrad.numerics.Format, and the OCP values by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from altgrad.numerics import get_format, scale_target
from altgrad.numerics.registry import format_names
from altgrad.reporting.figures.weights import significant_bits
from altgrad.reporting.formats import SPECIALS_IN_WORDS, Card

NAMES = [*format_names(), "E2M4", "E4M0", "E5M5", "E2M5FNUZ"]


def card_of(name: str) -> Card:
    return Card.of(dataclasses.asdict(get_format(name)))


@pytest.mark.parametrize("name", NAMES)
def test_card_agrees_with_the_format(name: str) -> None:
    card, fmt = card_of(name), get_format(name)
    assert [card.magnitude(code) for code in range(card.max_code + 1)] == list(fmt.magnitudes)
    assert card.max == fmt.max
    assert card.smallest == fmt.smallest
    assert card.min_normal == fmt.min_normal
    assert card.min_subnormal == fmt.min_subnormal
    assert card.distinct_values == len(fmt.values)
    assert card.bits == fmt.bits
    assert card.scale_target == scale_target(fmt)
    assert card.specials in SPECIALS_IN_WORDS


@pytest.mark.parametrize(
    ("name", "largest", "min_normal", "min_subnormal", "distinct"),
    [
        ("E0M7", 127 / 128, None, 2**-7, 255),
        ("E3M4", 31, 2**-2, 2**-6, 255),
        ("E4M3", 448, 2**-6, 2**-9, 253),
        ("E5M2", 57344, 2**-14, 2**-16, 247),
        ("E7M0", 2**64, 2**-62, None, 255),
    ],
)
def test_cards_show_the_published_values(name, largest, min_normal, min_subnormal, distinct) -> None:
    card = card_of(name)
    assert (card.max, card.min_normal, card.min_subnormal, card.distinct_values) == (
        largest, min_normal, min_subnormal, distinct,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["E0M7", "E1M6", "E2M5", "E3M4", "E4M3", "E5M2", "E6M1", "E7M0"])
def test_significant_bits_count_the_values_of_a_binade(name: str) -> None:
    """A binade with n representable values holds 1 + log2(n) significant bits; one without any holds none."""
    card = card_of(name)
    values = get_format(name).magnitudes
    top = np.floor(np.log2(card.scale_target)) - 1  # the highest binade that scaling can fill
    for exponent in np.arange(top, max(top - 20, card.emin - card.mantissa_bits - 3), -1):
        count = ((values >= 2.0**exponent) & (values < 2.0 ** (exponent + 1))).sum()
        binades = np.array([exponent + 0.5]) - np.log2(card.scale_target)
        assert significant_bits(card, binades)[0] == (1 + np.log2(count) if count else 0), exponent
