"""The tests of this package run on a GPU if there is one, else on the CPU, with less to do, so that none goes stale."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Return what is held against the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def formats(device: torch.device) -> tuple[str, ...]:
    """Return the formats to try."""
    return tuple(f"E{e}M{7 - e}" for e in range(8)) if device.type == "cuda" else ("E4M3",)
