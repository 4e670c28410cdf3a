"""Build and load the C++ loops for CPUs, of this package and of other packages.

A library is compiled once per machine, by the compiler that `torch.compile` needs too. On one core of an AMD EPYC
`kernels.cpp` and `block_scales.cpp` take 12 and 14 s, `update_cpu.cpp` 7 s. The library goes where
`torch.compile` keeps its kernels: ``TORCHINDUCTOR_CACHE_DIR``, else the user's cache. A source uses torch's stable C++
interface alone, so no part of torch is compiled along. Each source includes ``definitions.h``, which this module
generates from Python's constants.

A library's file name is a digest of its sources, definitions, flags, compiler, torch version and processor. The file
appears when it is complete, so processes that build at the same time do not disturb each other. If a library cannot be
built, the operators compute the same bits with tensor operations.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import ModuleType

import torch

from altgrad.common.machine import processor_line
from altgrad.numerics import constants
from altgrad.numerics.compile_utils import constant_in_graphs

HEADERS = Path(__file__).with_name("cpu")
SOURCES = (HEADERS / "kernels.cpp", HEADERS / "block_scales.cpp")
# Each operation rounds by itself: no fused multiply-adds. None needs to raise a flag or errno.
FLAGS = ("-O3", "-std=c++20", "-fPIC", "-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno")
# This variable names the processor to compile for, as GCC's -march does; unset means this machine's. torch 2.13 reads
# it too, so that loops and graphs have the same instructions; 2.11 compiles its graphs for this machine.
MARCH = "TORCHINDUCTOR_CPP_MARCH"


# --- C++ definitions made of Python's names and numbers --------------------------------------------------------------
# A C++ constant lives in a namespace and is called ``kNanCode`` for Python's ``NAN_CODE`` or ``"nan_code"``.


def enumeration(scope: str, names: Iterable[str]) -> str:
    """Return a C++ enumeration of ``names`` in namespace ``scope``, numbered from 0."""
    return f"namespace altgrad::{scope} {{\nenum Name : int {{ {', '.join(_constant(name) for name in names)} }};\n}}\n"


def numbers(scope: str, values: dict[str, int | float]) -> str:
    """Return C++ constants in namespace ``scope``: an int as 32-bit ``unsigned``, a float as exact ``float``."""
    lines = [
        f"constexpr float {_constant(name)} = {value.hex()}f;"
        if isinstance(value, float)
        else f"constexpr unsigned {_constant(name)} = {value}u;"
        for name, value in values.items()
    ]
    return "\n".join([f"namespace altgrad::{scope} {{", *lines, "}\n"])


def of_module(scope: str, module: ModuleType, names: str) -> str:
    """Return `numbers` of the constants of ``module`` that ``names`` lists, such as ``"MAX ULPS"``."""
    return numbers(scope, {name: getattr(module, name) for name in names.split()})


def _constant(name: str) -> str:
    return "k" + "".join(part.capitalize() for part in name.split("_"))


NUMERICS = "".join([
    "#pragma once\n",
    of_module("packed", constants, "MAX ULPS SPACING ROOT ZERO TARGET SIZE"),
    of_module("table", constants, "FIRST SHIFT BUCKETS TABLE_NUMBERS LOOKUP"),
    enumeration("learns", constants.LEARNS),
    enumeration("scale_rule", (*constants.SCALE_RULES, "two_level", "four_over_six")),  # the last: TWO_LEVEL and on
    of_module("codes", constants, "NAN_CODE"),
    of_module("philox", constants, "BITS LANES ROUNDS"),
    numbers("philox", {f"multiplier{i}": value for i, value in enumerate(constants.MULTIPLIERS)}),
    numbers("philox", {f"weyl{i}": value for i, value in enumerate(constants.WEYL)}),
])  # fmt: skip


# --- building and loading --------------------------------------------------------------------------------------------


@constant_in_graphs
def available() -> bool:
    """Whether the loops of this package's operators can be used; builds and loads them the first time."""
    return load(*SOURCES) is None


@cache
def load(*sources: Path, definitions: str = "") -> str | None:
    """Build one library from ``sources`` and load it. Return None; after a failure warn and return the reason.

    ``definitions``: C++ text that ``definitions.h`` has behind the definitions of this package.
    """
    try:
        torch.ops.load_library(str(_library(sources, NUMERICS + definitions)))
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or str(error)
        warnings.warn(f"altgrad's CPU kernels are not in use, training is slower: {reason.strip()}", stacklevel=2)
        return reason
    return None


def _library(sources: Sequence[Path], definitions: str) -> Path:
    """Return the path of the library; build it if the file is missing or differs from its checksum."""
    path = _path(sources, definitions)
    checksum = path.with_suffix(".sha256")
    # A library with a flipped bit may still load and compute wrong results.
    if not (path.exists() and checksum.exists() and checksum.read_text() == _sha256(path)):
        _build(sources, definitions, path, checksum)
    return path


def _build(sources: Sequence[Path], definitions: str, path: Path, checksum: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        complete, written = Path(folder, path.name), Path(folder, "sha256")
        Path(folder, "definitions.h").write_text(definitions)
        root = Path(torch.__file__).parent
        places = (HEADERS, folder, root / "include", root / "include/torch/csrc/api/include")
        command = [compiler(), *_flags()]
        objects = {source: str(Path(folder, f"{path.stem}-{source.stem}.o")) for source in sources}
        compiling = [
            [*command, *(f"-I{place}" for place in places), "-c", str(source), "-o", target]
            for source, target in objects.items()
        ]
        with ThreadPoolExecutor(len(sources)) as pool:
            list(pool.map(_run, compiling))
        libraries = [f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"]
        _run([*command, "-shared", *objects.values(), "-o", str(complete), *libraries])
        written.write_text(_sha256(complete))
        os.replace(written, checksum)
        os.replace(complete, path)


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _path(sources: Sequence[Path], definitions: str) -> Path:
    folders = (HEADERS, sources[0].parent)
    texts = [path.read_text() for path in (*sources, *(h for f in folders for h in sorted(f.glob("*.h"))))]
    parts = [*texts, definitions, *_flags(), torch.__version__, compiler(), processor()]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    chosen = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME")
    cache_folder = Path(chosen) if chosen else Path.home() / ".cache"
    return cache_folder / "altgrad" / f"{sources[0].stem}-{digest}.so"


def compiler() -> str:
    """Return the C++ compiler's name; ``OSError`` where there is none."""
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        if name and shutil.which(name):
            return name
    raise OSError("no C++ compiler found (g++ or clang++)")


def _march() -> str:
    return os.environ.get(MARCH) or "native"


def _flags() -> tuple[str, ...]:
    return (*processor_flags(platform.machine(), platform.system(), _march()), *FLAGS)


def processor_flags(machine: str, system: str, march: str) -> list[str]:
    """Return the options that tell GCC and Clang which processor to compile for.

    Args:
        machine: `platform.machine()`.
        system: `platform.system()`.
        march: an architecture as -march names it, or ``native`` for this machine's.
    """
    if machine in ("x86_64", "AMD64"):
        return [f"-march={march}", "-mprefer-vector-width=512"]
    if march != "native":
        return [f"-march={march}"]
    # Clang before 15 takes no -march=native on ARM. Apple's has the oldest of its own processors as default.
    return [] if system == "Darwin" else ["-mcpu=native"]


def processor() -> str:
    """Return a text that identifies the target: this machine's processor features, after the name in `MARCH`."""
    this_machine = processor_line("flags", "Features")
    return this_machine if _march() == "native" else f"{_march()} on {this_machine}"
