"""Lines of a growing file come once, in order and whole, wherever writer and reader are interrupted."""

from __future__ import annotations

import os

from hypothesis import given, settings
from hypothesis import strategies as st

from altgrad.watch import project
from altgrad.watch.project import Lines

LETTERS = st.characters(blacklist_characters="\n", blacklist_categories=["Cs"])
TEXT = st.lists(st.text(LETTERS, max_size=20), max_size=20)


@settings(deadline=None, max_examples=50)
@given(lines=TEXT, cuts=st.lists(st.integers(0, 400), max_size=10), at_once=st.integers(100, 300))
def test_lines_come_once_and_in_order_wherever_the_writing_is_cut(tmp_path_factory, lines, cuts, at_once):
    path = tmp_path_factory.mktemp("log") / "rows"
    whole = "".join(f"{line}\n" for line in lines).encode()
    follower, found = Lines(path), []
    before, project.AT_ONCE = project.AT_ONCE, at_once  # more than a line, less than the file
    try:
        start = 0
        for cut in [*sorted(cuts), len(whole)]:
            with open(path, "ab") as file:
                file.write(whole[start:cut])
            start = max(start, min(cut, len(whole)))
            found += follower.new()
        while more := follower.new():
            found += more
    finally:
        project.AT_ONCE = before
    assert [line.decode() for line in found] == lines
    assert follower.new() == [] and not follower.restarted


def test_there_is_nothing_where_there_is_no_file(tmp_path):
    assert Lines(tmp_path / "none").new() == []


def test_a_file_in_the_place_of_another_is_read_from_its_beginning(tmp_path):
    path, other = tmp_path / "rows", tmp_path / "other"
    path.write_bytes(b"a\nb\nc\n")
    follower = Lines(path)
    assert follower.new() == [b"a", b"b", b"c"] and not follower.restarted
    other.write_bytes(b"a\nb\n2\n3\n")  # longer than what has been read: its size alone does not tell
    os.replace(other, path)
    assert follower.new() == [b"a", b"b", b"2", b"3"] and follower.restarted
    with open(path, "ab") as file:
        file.write(b"4\n")
    assert follower.new() == [b"4"] and not follower.restarted


def test_a_file_that_became_shorter_is_read_from_its_beginning(tmp_path):
    path = tmp_path / "rows"
    path.write_bytes(b"a\nb\nc\n")
    follower = Lines(path)
    follower.new()
    with open(path, "r+b") as file:
        file.truncate(2)
    assert follower.new() == [b"a"] and follower.restarted
