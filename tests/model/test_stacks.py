"""STACKS.md says what is found: every stack in one process, with every recipe, both ways, on either kind of CPU.

The cells are the product of `STACKS`, `RECIPES` and `WAYS`, so that a new stack or recipe fails until the page has it.
Those of several processes: test_fully_shard.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

import pytest

from tests.model import stacks

SLOW = (stacks.moves.compiled, stacks.moves.recomputed_in_a_graph)  # which compile
TRACED = [
    pytest.param(stack, id=stack.__name__, marks=pytest.mark.long if stack in SLOW else ()) for stack in stacks.TRACED
]


@cache
def rows() -> dict[str, list[str]]:
    """Return the page's cells by the name of their stack."""
    table = stacks.PAGE.read_text(encoding="utf-8").partition("| stack |")[2].splitlines()[2:]
    split = [[cell.strip() for cell in line.strip("|").split(" |")] for line in table]
    return {cells[0]: cells[1:-1] for cells in split}


def said(stack: Callable[..., None], way: str) -> list[str]:
    """Return what the page says of one way of each recipe."""
    of_ways = [re.findall(r"(?:(\w+) )?(\w+)", cell) for cell in rows()[(stack.__doc__ or "").rstrip(".")]]
    return [dict(cell).get(way) or dict(cell)[""] for cell in of_ways]


def require(stack: stacks.Stack, way: str) -> None:
    assert [stacks.cell_of(stack, recipe, stacks.WAYS[way]) for recipe in stacks.RECIPES] == said(stack, way)


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("stack", stacks.STACKS, ids=lambda stack: stack.__name__)
def test_the_page_says_what_a_stack_does(stack: stacks.Stack) -> None:
    require(stack, "eager")


@pytest.mark.long
@pytest.mark.parametrize("stack", stacks.STACKS, ids=lambda stack: stack.__name__)
def test_the_page_says_what_a_stack_does_to_a_compiled_model(stack: stacks.Stack) -> None:
    """With the products that this machine has; a second for each recipe."""
    require(stack, "compiled")


@pytest.mark.slow
@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("stack", stacks.STACKS, ids=lambda stack: stack.__name__)
def test_the_page_says_what_a_stack_does_to_a_compiled_model_with_either_product(stack: stacks.Stack) -> None:
    require(stack, "compiled")


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("stack", TRACED)
def test_the_page_says_what_tracing_does(stack: Callable[[str], None]) -> None:
    assert [stacks.cell_of(stack, recipe) for recipe in stacks.RECIPES] == said(stack, "")


def test_the_page_has_each_cell_and_no_other() -> None:
    names = [stack.__doc__.rstrip(".") for stack in (*stacks.STACKS, *stacks.TRACED) if stack.__doc__]
    assert list(rows()) == [*names, *stacks.OF_PROCESSES]
    assert all(len(cells) == len(stacks.RECIPES) for cells in rows().values())
