"""Where the tests of this room run: on a GPU if there is one, else on the CPU, so that they never go stale."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Return what is held against the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
