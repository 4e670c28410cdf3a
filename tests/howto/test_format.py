"""A format is added by params.yaml alone, as altgrad/formats/README.md says. Oracle: the report that has it."""

from tests.howto.conftest import blocks


def test_a_format_of_ones_own_is_in_the_report(copy) -> None:
    project = copy()
    (settings,) = blocks("formats/README.md", "yaml", "How to add a format")
    project.settle(settings)
    report = project.repro()
    assert "| **low** | adamw |" in report and "E4M3 | adamw" not in report
    assert "bias 11" in report or "30" in report
    assert project.changed() == set()
