"""Laws of the bisection. Oracle: every rung looked at."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from altgrad.stability import Edge, Ladder, edge_of, next_rung

LADDERS = st.tuples(st.integers(-8, 0), st.integers(0, 12)).filter(lambda ends: ends[0] < ends[1])


def walk(stable, ladder: Ladder) -> dict[int, bool]:
    """Return what is known at the end of a search, in the order in which it was found out."""
    known: dict[int, bool] = {}
    while (rung := next_rung(known, ladder)) is not None:
        assert rung not in known and ladder.low <= rung <= ladder.high
        known[rung] = stable(rung)
    return known


@given(ends=LADDERS, data=st.data())
def test_an_edge_anywhere_is_found_in_few_tries(ends, data):
    ladder = Ladder(*ends)
    first_unstable = data.draw(st.integers(ladder.low, ladder.high + 1))
    known = walk(lambda rung: rung < first_unstable, ladder)
    rungs = range(ladder.low, ladder.high + 1)
    below = [rung for rung in rungs if rung < first_unstable]
    above = [rung for rung in rungs if rung >= first_unstable]
    assert edge_of(known) == Edge(below[-1] if below else None, above[0] if above else None)
    assert len(known) <= 2 + math.ceil(math.log2(len(rungs)))
    assert next(iter(known)) == 0, "the arm's own rate comes first"


@given(ends=LADDERS, data=st.data())
def test_where_stability_comes_and_goes_what_is_found_is_an_edge(ends, data):
    ladder = Ladder(*ends)
    stable = {rung: data.draw(st.booleans()) for rung in range(ladder.low, ladder.high + 1)}
    edge = edge_of(walk(stable.__getitem__, ladder))
    assert edge.stable is None or stable[edge.stable]
    assert edge.unstable is None or not stable[edge.unstable]
    if edge.stable is not None and edge.unstable is not None:
        assert edge.unstable == edge.stable + 1


def test_what_is_stable_above_an_unstable_rung_is_no_edge():
    assert edge_of({0: True, 2: False, 5: True}) == Edge(0, 2)
    assert edge_of({2: False, 5: True}) == Edge(None, 2)


@pytest.mark.parametrize(
    ("ladder", "scales"), [(Ladder(-2, 2), [0.25, 0.5, 1, 2, 4]), (Ladder(0, 2, 10.0), [1, 10, 100])]
)
def test_rates_are_powers_and_whole_ones_are_written_so(ladder, scales):
    assert ladder.scales == scales
    assert [type(scale) for scale in ladder.scales] == [type(scale) for scale in scales], "DVC names cells after them"
