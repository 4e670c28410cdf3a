"""The wheel alone does what the README's page on the numerics does: in an environment that has nothing of a checkout.

The environment is a fresh one. What AltGrad depends on it finds where the tests have it, by a line of a ``.pth`` file,
which reads no other such file: so an editable installation beside it is not seen. The loops in C++ are built anew,
from what the wheel holds of them.
"""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from altgrad.numerics import loops

PROJECT = Path(__file__).parents[1]
SOURCES = ("altgrad", "stages", "tests", "pyproject.toml", "README.md", "LICENSE")
# Of what a package has besides pages to read.
SUFFIXES = (".py", ".cpp", ".h", ".j2", ".typed", ".html", ".css", ".js", ".yaml")

PROGRAM = """
import sys
from pathlib import Path

import altgrad
import torch
from altgrad.model import Recipe, quantize_model
from altgrad.numerics import quantize, quantize_operand
from altgrad.numerics import loops
from altgrad.optim import Arm, build_optimizer, update_cpu

assert Path(altgrad.__file__).is_relative_to(sys.prefix), altgrad.__file__

x = torch.tensor([0.1, 1.03, -7.7, 40.0])
assert quantize(x, "E3M4").tolist() == [0.09375, 1.0, -7.75, 31.0]
if LOOPS:
    assert loops.available()
    assert loops.load(update_cpu.SOURCE, definitions=update_cpu.DEFINITIONS) is None

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 8))
model = quantize_model(model, Recipe.uniform("E3M4", grad="E5M2"))
assert model[0].recipe.format_names() == {"weight": "E3M4", "input": "E3M4", "grad": "E5M2"}
optimizer = build_optimizer(model, Arm(lr=1e-2, stiffness="ulp"))
inputs, targets = torch.randn(128, 64), torch.randint(8, (128,))
losses = []
for _ in range(3):
    loss = torch.nn.functional.cross_entropy(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert losses[2] < losses[1] < losses[0], losses
print("done")
"""


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Run a command that must succeed, without what would lead Python to the checkout; return what it printed."""
    settings = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    words, settings = [str(part) for part in command], settings | environment
    done = subprocess.run(words, cwd=cwd, env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy, because building leaves folders beside the sources."""
    copy, made = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        if (PROJECT / name).is_dir():
            shutil.copytree(PROJECT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(PROJECT / name, copy / name)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", made, copy, cwd=copy)
    (path,) = made.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel into an environment of its own and return the folder of that."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=folder)
    packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])", cwd=folder).strip())
    ours = sysconfig.get_paths()
    (packages / "dependencies.pth").write_text("".join(f"{ours[kind]}\n" for kind in ("purelib", "platlib")))
    return folder


def test_the_wheel_has_every_source_of_the_package_and_no_test(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    files = [file for file in (PROJECT / "altgrad").rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    sources = {file.relative_to(PROJECT).as_posix() for file in files}
    assert {name for name in sources if name.endswith(SUFFIXES)} <= names
    assert not [name for name in sources if not name.endswith((*SUFFIXES, ".md"))], "a kind to think about"
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"altgrad", "stages"}


def test_the_wheel_says_its_licence_and_carries_it(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        facts = email.message_from_bytes(archive.read(metadata))
        licence = archive.read(metadata.replace("METADATA", "licenses/LICENSE"))
    assert facts["License-Expression"] == "Apache-2.0" and facts["License-File"] == "LICENSE"
    assert licence == (PROJECT / "LICENSE").read_bytes()


def test_the_commands_are_installed_with_the_wheel(environment: Path, tmp_path: Path) -> None:
    command = environment / "bin" / "altgrad"
    assert "formats" in run(command, cwd=tmp_path)
    assert run(command, "formats", "E3M4", cwd=tmp_path).startswith("E3M4 (3 exponent bits, 4 mantissa bits")
    program = "from altgrad.config.recipe import Recipe; print(Recipe.named('NVFP4').rules[0].hadamard)"
    assert run(environment / "bin" / "python", "-c", program, cwd=tmp_path) == "16\n"


@pytest.mark.slow
def test_the_wheel_rounds_and_trains_with_its_own_loops(environment: Path, tmp_path: Path) -> None:
    """Where there is no compiler for the loops, with tensor operations."""
    python, there = environment / "bin" / "python", f"LOOPS = {loops.available()}\n"
    assert run(python, "-c", there + PROGRAM, cwd=tmp_path, TORCHINDUCTOR_CACHE_DIR=str(tmp_path)) == "done\n"
