"""The record of a machine: a later part erases no earlier one, and every result names its session."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from altgrad.benchmark.gpu.tables import TABLES as GPU_TABLES
from altgrad.benchmark.machines import PARTS, commands, read_bench
from altgrad.benchmark.record import Record
from altgrad.benchmark.session import Session
from altgrad.benchmark.speed_tables import TABLES
from altgrad.benchmark.tables import ROWS, table

MACHINE = {"device": "A processor", "on_gpu": False, "threads": 2}
EARLY = {**MACHINE, "command": "early", "commit": "c0", "limits": {"copy_bytes_per_s": 1},
         "steps": [{"model": "nano", "batch": 16, "name": "bf16"}]}  # fmt: skip


def session(path: Path, command: str) -> Record:
    return Record(path, MACHINE, {"command": command, "commit": "c1"})


def step(model: str, batch: int, name: str) -> dict[str, object]:
    return {"model": model, "batch": batch, "name": name}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "machine.json"


def test_every_part_is_written_at_once_and_kept_by_later_sessions(path):
    groups = {"model": "nano", "batch": 16, "elements": 4, "cells": 3, "name": "ours"}
    for part in ROWS:
        session(path, part).put(part, [groups])
        assert read_bench(path)[part][0]["session"] == str(1 + list(ROWS).index(part))
    session(path, "limits").put_limits({"copy_bytes_per_s": 2})
    record = read_bench(path)
    assert set(record) == {*MACHINE, "sessions", *PARTS, *GPU_TABLES}
    assert {part: commands(record, part) for part in PARTS} == {part: [(part, "c1")] for part in PARTS}


def test_a_part_is_in_every_place_that_has_to_know_it():
    """The limits are one row, which the record and the report keep apart."""
    assert set(ROWS) == set(PARTS) - {"limits"} | set(GPU_TABLES)
    together = {"steps", "memory", "compile"}  # whose tables and figure show several together
    assert set(TABLES) == set(PARTS) - {"limits"} - together
    assert [part for part in PARTS if not hasattr(Session, f"_{part}")] == []


def test_a_size_measured_again_replaces_itself_alone(path):
    first = session(path, "first")
    first.put("steps", [step("nano", 16, "bf16"), step("nano", 16, "E7M0")])
    first.put("steps", [step("nano", 8, "bf16")])
    session(path, "second").put("steps", [step("nano", 16, "bf16")])
    found = [(result["batch"], result["name"], result["session"]) for result in read_bench(path)["steps"]]
    assert found == [(8, "bf16", "1"), (16, "bf16", "2")]


def test_a_session_whose_results_are_all_replaced_is_forgotten(path):
    for command in ("first", "second"):
        session(path, command).put("compile", [step("nano", 16, "bf16")])
    assert read_bench(path)["sessions"] == {"2": {"command": "second", "commit": "c1"}}


def test_a_record_of_one_session_keeps_its_command(path):
    path.write_text(json.dumps(EARLY))
    session(path, "memory").put("memory", [step("nano", 16, "bf16")])
    record = read_bench(path)
    assert commands(record, "steps", "limits") == [("early", "c0")] and commands(record, "memory") == [("memory", "c1")]
    assert "command" not in record and record["limits"]["copy_bytes_per_s"] == 1


def test_lines_for_the_terminal_say_what_is_absent():
    lines = table("memory", [{**step("nano", 16, "bf16"), "peak_mb": 100.2, "state_mb": 16}, step("nano", 16, "fp32")])
    head, first, second = lines.splitlines()
    assert "memory: nano, batch 16" in head and first.split() == ["bf16", "100", "16"] and "not measured" in second
    assert "not installed" in table("quantizers", [{"name": "QPyTorch", "elements": 4, "absent": "not installed"}])
    assert "make repro" in table("pipeline", [{"cells": 3, "first_s": 2.0, "per_cell_s": 0.6, "no_op_s": 1.0}])
