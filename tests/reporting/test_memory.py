"""Loss against bytes: which runs nothing of as few bytes is as good as. Oracle: every pair, by the definition."""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd
import pytest

from altgrad.reporting import tables
from altgrad.reporting.figures import FIGURES
from altgrad.reporting.figures.memory import front
from altgrad.reporting.figures.style import drawing
from altgrad.reporting.select import BYTES, memory


@pytest.mark.parametrize("higher_is_better", [False, True])
def test_the_front_is_what_no_other_run_beats(higher_is_better) -> None:
    random = np.random.default_rng(0)
    for _ in range(50):
        size, value = random.integers(0, 5, (2, 8))
        found = front(pd.Series(size), pd.Series(value), higher_is_better=higher_is_better)
        cost = -value if higher_is_better else value
        beaten = [
            any(size[j] <= size[i] and cost[j] <= cost[i] and ((size[j], cost[j]) != (size[i], cost[i]) or j < i)
                for j in range(8) if j != i)
            for i in range(8)
        ]  # fmt: skip
        assert sorted(found) == [i for i in range(8) if not beaten[i]]
        assert list(size[found]) == sorted(set(size[found]))


def test_bytes_are_shown_where_runs_differ_in_them(study, comparison) -> None:
    (spec,) = [spec for spec in FIGURES if spec.name == "loss_against_bytes"]
    sizes = {name: 16.0 - i for i, name in enumerate(study.formats)}
    for column, shown in ((16.0, False), (study.cells["format"].map(sizes), True)):
        own = dataclasses.replace(study, cells=study.cells.assign(**{BYTES: column}))
        table = tables.results_table(own, comparison)
        heads = [column.head for column in table.columns]
        assert ("bytes" in heads) is shown and len(memory(own, comparison)) == (len(comparison.best) if shown else 0)
        with drawing():
            assert (spec.draw(own, comparison) is not None) is shown
        if shown:
            for row in table.rows:
                assert float(row[heads.index("bytes")]) == sizes[row[0].strip("*")]
