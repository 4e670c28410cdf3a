"""A new base is three files, as altgrad/optim/ADD_A_BASE.md says. Oracles: the law of the loops, and the report."""

import pytest

from tests.howto.conftest import Copy, Sources, blocks

PAGE = "optim/ADD_A_BASE.md"
FILES = {"altgrad/config/arms.py", "altgrad/optim/update.py", "altgrad/optim/update_cpu.cpp"}


@pytest.mark.slow  # builds the loops anew
def test_a_new_base_takes_three_files_and_is_held_to_the_law_of_the_loops(tmp_path) -> None:
    project = Copy(tmp_path / "copy")
    project.patch(PAGE)
    assert project.changed() == FILES
    (settings,) = blocks(PAGE, "yaml")
    project.settle(settings)
    project.take_tests("optim")
    (command,) = blocks(PAGE, "console")
    said = project.run(*command.removeprefix("$ python ").split(), "-p", "no:cacheprovider", "-m", "not slow")
    assert " passed" in said and "skipped" not in said
    assert "| **E4M3** | lion |" in project.repro()[0]
    assert (project.folder / "data/runs/E4M3-lion-0-1/metrics.json").is_file()


def test_the_patches_fit_and_the_new_base_has_to_look_at_the_quantization_grid(tmp_path) -> None:
    project = Sources(tmp_path)
    project.patch(PAGE)
    assert project.changed() == FILES
    with pytest.raises(AssertionError, match="base lion without a stiffness would be its plain form; name a formula"):
        project.run("-c", "from altgrad.config.arms import Arm; Arm(lr=1, base='lion')")
