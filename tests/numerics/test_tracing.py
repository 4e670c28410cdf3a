"""Functions are marked for the compiler as torch would mark them."""

from __future__ import annotations

import torch

from altgrad.numerics.compile_utils import constant_in_graphs


def test_the_mark_is_torchs_own():
    theirs, ours = torch.compiler.assume_constant_result(lambda: 1), constant_in_graphs(lambda: 1)
    assert vars(ours) == vars(theirs) != {}


def test_a_graph_holds_what_the_function_returned():
    answers = iter([2.0, 3.0])
    read = constant_in_graphs(lambda: next(answers))  # which could not be traced
    double = torch.compile(lambda x: x * read(), backend="eager", fullgraph=True)
    assert [double(torch.tensor(1.0)).item() for _ in range(2)] == [2.0, 2.0]
