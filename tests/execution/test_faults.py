"""The campaign of `make faults` in short: a stop of each kind at a moment that once broke a project, and its damages.

Oracle: the files of a run that nothing disturbed.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from reports.faults import campaign, damages
from reports.faults.campaign import Bench

# SIGKILL is in test_cells.py.
SHORT = [("writing dvc.lock", signal.SIGINT), ("reporting", signal.SIGTERM)]


@pytest.fixture(scope="module")
def bench(finished: Path, planned: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("faults") / "bench", finished, planned)


@pytest.mark.long
@pytest.mark.parametrize(("moment", "signum"), SHORT)
def test_a_stop_ends_in_one_sentence_and_the_next_command_in_the_same_bits(bench: Bench, moment, signum):
    found = campaign.stopped_at(bench, moment, signum)
    assert found.good and found.outcome == "same bits", found


# What becomes of a damaged dvc.lock or rwlock is in test_dvc_files.py too, every day.
@pytest.mark.slow
@pytest.mark.parametrize(("fault", "place"), damages.DAMAGES)
def test_every_damage_ends_in_the_same_bits_or_one_sentence(bench: Bench, fault, place):
    found = damages.damaged(bench, fault, place)
    assert found.good, found


def test_a_stop_that_breaks_something_is_found(bench: Bench, monkeypatch):
    """The campaign can fail: without a command that makes it good, damage is a bad end."""
    monkeypatch.setattr(campaign, "COMMAND", ["true"])
    project = bench.copy(bench.finished)
    damages.cut(project.folder / "data/runs/E4M3-adamw-0-1/metrics.json")
    found = bench.after(project, "cut", "a run's metrics", "")
    assert not found.good and found.outcome == "OTHER BITS"
