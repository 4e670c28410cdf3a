"""The record of a machine: a later part erases no earlier one, and every result names its session."""

from __future__ import annotations

from pathlib import Path

import pytest

from altgrad.benchmark.machines import PARTS, commands
from altgrad.benchmark.record import GROUPS, Record
from altgrad.benchmark.session import Session
from altgrad.benchmark.tables import TABLES, as_text
from altgrad.config.files import read_json

MACHINE = {"device": "A processor", "on_gpu": False, "threads": 2}


def session(path: Path, command: str) -> Record:
    return Record(path, MACHINE, {"command": command, "commit": "c1"})


def step(model: str, batch: int, name: str) -> dict[str, object]:
    return {"model": model, "batch": batch, "name": name}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "machine.json"


def test_every_part_is_written_at_once_and_kept_by_later_sessions(path):
    groups = {"model": "nano", "batch": 16, "elements": 4, "cells": 3, "name": "ours"}
    for part in GROUPS:
        session(path, part).put(part, [groups])
        assert read_json(path)[part][0]["session"] == str(1 + list(GROUPS).index(part))
    session(path, "limits").put_limits({"copy_bytes_per_s": 2})
    record = read_json(path)
    assert set(record) == {*MACHINE, "sessions", "limits", *TABLES}
    assert {part: commands(record, part) for part in PARTS} == {part: [(part, "c1")] for part in PARTS}


def test_a_part_is_in_every_place_that_has_to_know_it():
    """The limits are one row, which the record and the report keep apart."""
    assert set(GROUPS) == set(TABLES) and set(TABLES) - set(PARTS) == {"checks", "operands", "at_once", "parts_of_runs"}
    assert set(PARTS) - set(TABLES) == {"limits"}
    assert [part for part in PARTS if not hasattr(Session, f"_{part}")] == []


def test_a_size_measured_again_replaces_itself_alone(path):
    first = session(path, "first")
    first.put("steps", [step("nano", 16, "bf16"), step("nano", 16, "E7M0")])
    first.put("steps", [step("nano", 8, "bf16")])
    session(path, "second").put("steps", [step("nano", 16, "bf16")])
    found = [(result["batch"], result["name"], result["session"]) for result in read_json(path)["steps"]]
    assert found == [(8, "bf16", "1"), (16, "bf16", "2")]


def test_a_session_whose_results_are_all_replaced_is_forgotten(path):
    for command in ("first", "second"):
        session(path, command).put("compile", [step("nano", 16, "bf16")])
    assert read_json(path)["sessions"] == {"2": {"command": "second", "commit": "c1"}}


def test_lines_for_the_terminal_say_what_is_absent():
    rows = [{**step("nano", 16, name), "peak_mb": peak} for name, peak in (("bf16", 100.2), ("fp32", None))]
    head, _, first, second = as_text("memory", rows, {}).splitlines()
    assert head == "memory:" and " ".join(first.split()) == "bf16 100 (1.00)"
    assert " ".join(second.split()) == "fp32 not measured"
    absent = {"name": "QPyTorch", "format": "E4M3", "elements": 4, "absent": "not installed"}
    assert "not installed" in as_text("quantizers", [absent], {})
