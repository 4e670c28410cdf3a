"""The threads of a process of the pool. Oracle: how torch divides a machine for one process."""

from __future__ import annotations

import pytest

from altgrad.config.process import usable_cores
from altgrad.execution.local import threads_each


@pytest.mark.parametrize(("own", "jobs", "each"), [(1, 1, 1), (1, 4, 1), (1000, 1, usable_cores()), (1000, 10**6, 1)])
def test_one_job_has_the_threads_that_torch_gives_a_process(own, jobs, each, monkeypatch):
    """torch counts physical cores, or what OMP_NUM_THREADS says."""
    monkeypatch.setattr("torch.get_num_threads", lambda: own)
    assert threads_each(jobs) == each
