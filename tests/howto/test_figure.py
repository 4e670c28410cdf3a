"""A figure is one file, as altgrad/reporting/README.md says. Oracle: the report that shows it, and where."""

import pytest

from altgrad.reporting.figures import SECTIONS, in_report, report_figures


def test_it_is_one_file_and_stands_where_it_says(followed) -> None:
    assert followed.changes["a figure"] == {"altgrad/reporting/figures/seeds.py"}
    curves = followed.report.split("## Loss curves")[1].split("\n## ")[0]
    places = [curves.index(f"figures/{name}.") for name in ("loss_curves", "loss_differences", "final_losses")]
    assert places == sorted(places)
    assert "Final validation loss of bf16, E4M3" in curves and "a mark per seed" in curves
    assert (followed.project.folder / "reports/figures/final_losses.svg").stat().st_size > 0


def test_a_spot_that_the_report_does_not_have_is_an_error() -> None:
    with pytest.raises(ValueError, match="no section 'curve' in the report; there are .*curves"):
        in_report(section="curve", order=10, alt="", caption="")(lambda *_: None)


def test_two_figures_of_one_name_are_an_error() -> None:
    def gains(*_: object) -> None:
        """Named like one of the report's."""

    assert "gains" in {spec.name for spec in report_figures()}
    with pytest.raises(ValueError, match="two figures are called gains"):
        in_report(section="gains", order=99, alt="", caption="")(gains)


def test_figures_stand_in_the_order_that_they_say_whatever_their_files_are_called() -> None:
    places = [(SECTIONS.index(spec.section), spec.order) for spec in report_figures()]
    assert places == sorted(places) and len(set(places)) == len(places)
