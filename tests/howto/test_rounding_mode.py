"""A rounding mode is two branches and a name, as altgrad/numerics/ADD_A_MODE.md says.

Oracle: rounding to odd makes a later, coarser rounding to nearest even exact (Boldo and Melquiond 2008).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from altgrad.formats import FloatFormat, get_format
from altgrad.numerics import quantize
from tests.howto.conftest import Sources, blocks

PAGE = "numerics/ADD_A_MODE.md"
FILES = {"altgrad/numerics/rounding.py", "altgrad/numerics/reference.py"}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    """Return a copy to which the mode has been added."""
    copy = Sources(tmp_path_factory.mktemp("mode"))
    copy.take_tests("numerics")
    copy.patch(PAGE)
    assert copy.changed() == FILES
    return copy


def loaded(path: Path) -> ModuleType:
    """Return the module in ``path``, beside the one of its name here."""
    spec = importlib.util.spec_from_file_location(f"added_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["E4M3", "E7M0", "E0M7", "E5M2"])
def test_it_rounds_as_its_definition_says(project, name) -> None:
    rounding, reference = (loaded(project.folder / file) for file in sorted(FILES, reverse=True))
    assert "odd" in rounding.ROUNDING_MODES
    fmt = get_format(name)
    x = torch.cat([torch.tensor(fmt.values), torch.randn(500).double() * fmt.max / 3, torch.tensor([0.0, 1e-300])])
    expected = [reference.round_scalar(value, fmt, "odd") for value in x.tolist()]
    assert rounding.round_float64(x, fmt, "odd", "saturate").tolist() == expected


def test_a_second_rounding_errs_no_more_than_a_single_one(project) -> None:
    (round_float64,) = [loaded(project.folder / "altgrad/numerics/rounding.py").round_float64]
    finer, fmt = FloatFormat("finer", exponent_bits=5, mantissa_bits=8), get_format("E4M3")
    x = torch.linspace(-8, 8, 100_001, dtype=torch.float64)
    once, twice = quantize(x, fmt), quantize(round_float64(x, finer, "odd", "saturate"), fmt)
    assert torch.equal(once, twice) and not torch.equal(once, quantize(quantize(x, finer), fmt))


@pytest.mark.slow
def test_the_laws_and_the_oracles_hold_it(project) -> None:
    (command,) = blocks(PAGE, "console")
    said = project.run(*command.removeprefix("$ python ").split(), "-p", "no:cacheprovider", "-m", "not slow")
    assert " passed" in said and "skipped" not in said and "failed" not in said
