"""A part of `make bench` is a module and three lines, as altgrad/benchmark/README.md says. Oracle: the page."""

from __future__ import annotations

import json

FILES = {"altgrad/benchmark/calls.py", "altgrad/benchmark/session.py", "altgrad/benchmark/tables.py"}


def test_it_is_a_module_and_three_places(followed) -> None:
    assert followed.changes["a part"] == FILES


def test_it_is_in_the_record_with_its_command(followed) -> None:
    records = [json.loads(path.read_text()) for path in followed.project.folder.glob("reports/bench/*.json")]
    (record,) = [record for record in records if "calls" in record]
    (row,) = record["calls"]
    assert row["name"] == "x + x" and 0 < row["call_us"] < 1e5
    assert record["sessions"][row["session"]]["command"].endswith("altgrad.benchmark --only calls")


def test_the_page_shows_it(followed) -> None:
    speed = (followed.project.folder / "reports/bench/README.md").read_text()
    assert "| operation | µs |" in speed and "| `x + x` |" in speed and "the price of the call itself" in speed
