"""A figure is one file, as altgrad/reporting/README.md says. Oracle: the report that shows it, and where."""

import pytest

from altgrad.reporting.figures.plate import Plate
from tests.howto.conftest import blocks


def test_a_figure_is_drawn_and_stands_where_it_says(copy) -> None:
    project = copy()
    (source,) = blocks("reporting/README.md", "python", "How to add a figure")
    (project.folder / "altgrad/reporting/figures/seeds.py").write_text(source)
    report = project.repro()
    curves = report.split("## Loss curves")[1].split("\n## ")[0]
    places = [curves.index(f"figures/{name}.") for name in ("loss_curves", "loss_differences", "final_losses")]
    assert places == sorted(places)
    assert "Final validation loss of bf16 and E4M3" in curves and "a mark per seed" in curves
    assert (project.folder / "reports/figures/final_losses.svg").stat().st_size > 0
    assert project.changed() == {"altgrad/reporting/figures/seeds.py"}


def test_a_spot_that_the_report_does_not_have_is_an_error() -> None:
    with pytest.raises(ValueError, match="no spot 'curve' in the report; there are .*curves"):
        Plate("mine", lambda *_: None, spot="curve", order=10, alt="", caption="")
