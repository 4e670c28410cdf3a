"""STACKS.md says what is found: every stack in one process with every recipe. Those of several: test_fully_shard.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.model import stacks

# Compiling takes a minute for all recipes. That checkpoints in a graph run in eager mode, or are refused,
# test_checkpointing has too.
SLOW = dict.fromkeys((stacks.compiled, stacks.recomputed_compiled, stacks.recomputed_in_a_graph), pytest.mark.slow)
CASES = [pytest.param(stack, id=stack.__name__, marks=SLOW.get(stack, ())) for stack in stacks.STACKS]


@pytest.mark.parametrize("stack", CASES)
def test_the_page_of_stacks_says_what_a_stack_does(stack: Callable[[str], None]) -> None:
    cells = [stacks.cell_of(stack, recipe) for recipe in stacks.RECIPES]
    line = f"| {(stack.__doc__ or '').rstrip('.')} | {' | '.join(cells)} |"
    assert line in stacks.PAGE.read_text(encoding="utf-8")
