"""A part of `make bench` is a module and four lines, as altgrad/benchmark/README.md says. Oracle: the page."""

from __future__ import annotations

import json

FILES = {
    "altgrad/benchmark/calls.py", "altgrad/benchmark/session.py", "altgrad/benchmark/tables.py",
    "altgrad/benchmark/machines.py", "altgrad/benchmark/record.py",
}  # fmt: skip


def test_it_is_a_module_and_four_places(followed) -> None:
    assert followed.changes["a part"] == FILES


def test_it_is_in_the_record_with_its_command(followed) -> None:
    records = [json.loads(path.read_text()) for path in followed.project.folder.glob("reports/bench/*.json")]
    (record,) = [record for record in records if "calls" in record]
    (row,) = record["calls"]
    assert row["name"] == "x + x" and 0 < row["call_us"] < 1e5
    assert record["sessions"][row["session"]]["command"].endswith("altgrad.benchmark --parts calls --rounds 5")


def test_the_page_shows_it_and_names_it_where_it_was_not_measured(followed) -> None:
    speed = (followed.project.folder / "reports/bench/README.md").read_text()
    assert "| operation | µs |" in speed and "| `x + x` |" in speed and "the price of the call itself" in speed
    assert "--parts calls --rounds 5`" in speed and ": the cost of a call." in speed
