"""Made-up projects on disk, and the study and comparison that are read from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from altgrad.reporting.compare import Comparison, compare
from altgrad.reporting.load import Study
from altgrad.reporting.report import write_report
from tests.reporting.synthetic_project import SMALL, read, write_project

LOST = {"diverged": {"E7M0-adamw-1-1": 40}, "missing": ("E5M2-adamw-1-1",)}


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven formats, two seeds, one cell diverged, one missing. Shared: tests must not change it."""
    root = tmp_path_factory.mktemp("project")
    write_project(root, ["bf16", "E4M3", "E5M2", "E3M4", "E1M6", "E0M7", "E7M0"], **LOST, **SMALL)
    return root


@pytest.fixture(scope="session")
def study(project: Path) -> Study:
    return read(project)


@pytest.fixture(scope="session")
def comparison(study: Study) -> Comparison:
    return compare(study)


@pytest.fixture(scope="session")
def report(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the project's report, of the revision 0123456789. Shared: tests must not change it."""
    out = tmp_path_factory.mktemp("reports")
    write_report(project / "data", out, "0123456789")
    return out


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Study]:
    """Return a function that writes a project of its own with these settings and returns its study."""

    def make(*args, **settings) -> Study:
        write_project(tmp_path, *args, **SMALL | settings)
        return read(tmp_path)

    return make
