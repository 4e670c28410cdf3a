"""Building and loading loops in C++ for CPUs: two sources behind the operators of `operand`, and other packages'.

A source is compiled once per machine, by the compiler that `torch.compile` needs too (the two take 12 s and 14 s of a
core, an AMD EPYC, at the same time; the others 7 s each), into the folder where that keeps its kernels
(``TORCHINDUCTOR_CACHE_DIR``, else the user's cache). It uses torch's stable C++ interface alone, so that no part of
torch's own source is compiled along, and includes ``definitions.h``, which is made of Python's own numbers
(`definitions`). The file's name is a digest of all that the result depends on, and it appears under it complete:
processes that build at the same time do the work twice and get in no one's way. Where it cannot be built the operators
compute the same bits from tensor operations.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path

import torch

from altgrad.common.threads import processor_line
from altgrad.numerics.cpu.definitions import NUMERICS
from altgrad.numerics.tracing import constant_in_graphs

SOURCES = tuple(Path(__file__).with_name(name) for name in ("groups.cpp", "kernels.cpp"))
HEADERS = Path(__file__).parent
# Each operation rounds by itself, and none needs to raise a flag or errno.
FLAGS = ("-O3", "-std=c++20", "-fPIC", "-shared", "-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno")
# Names the processor to compile for, as GCC's -march does; without it that is this machine's. torch 2.13 reads it too,
# so that loops and graphs have the same instructions; 2.11 compiles its graphs for this machine.
MARCH = "TORCHINDUCTOR_CPP_MARCH"


@constant_in_graphs
def available() -> bool:
    """Whether the operators' loops are there; builds and loads them the first time."""
    return load(*SOURCES) is None


@cache
def load(*sources: Path, definitions: str = "") -> str | None:
    """Build ``sources``, at the same time, and load them; return what stands in the way, with a warning, if anything.

    ``definitions``: C++ for ``definitions.h``, beside those of this package.
    """
    try:
        with ThreadPoolExecutor(len(sources)) as pool:
            for path in pool.map(partial(_built, NUMERICS + definitions), sources):
                torch.ops.load_library(str(path))
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or str(error)
        warnings.warn(f"altgrad's CPU kernels are not in use, training is slower: {reason.strip()}", stacklevel=2)
        return reason
    return None


def _built(definitions: str, source: Path) -> Path:
    path = _library(source, definitions)
    if not _is_whole(path):
        _build(source, definitions, path)
    return path


def _build(source: Path, definitions: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder, path.name)
        Path(folder, "definitions.h").write_text(definitions)
        root = Path(torch.__file__).parent
        folders = (HEADERS, folder, root / "include", root / "include/torch/csrc/api/include")
        includes = [f"-I{place}" for place in folders]
        libraries = [f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"]
        command = [compiler(), *_processor_flags(), *FLAGS, *includes, str(source), "-o", str(made), *libraries]
        subprocess.run(command, check=True, capture_output=True, text=True)
        digest = Path(folder, "digest")
        digest.write_text(_digest(made))
        os.replace(digest, _digest_of(path))
        os.replace(made, path)


def _is_whole(path: Path) -> bool:
    """Whether a library is there as it was built: with a bit flipped it may load, and compute something else."""
    return path.exists() and _digest_of(path).exists() and _digest_of(path).read_text() == _digest(path)


def _digest_of(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _library(source: Path, definitions: str) -> Path:
    headers = [header.read_text() for folder in (HEADERS, source.parent) for header in sorted(folder.glob("*.h"))]
    flags = (*_processor_flags(), *FLAGS)
    parts = [source.read_text(), definitions, *headers, *flags, torch.__version__, compiler(), processor()]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return _folder() / "altgrad" / f"{source.stem}-{digest}.so"


def _folder() -> Path:
    chosen = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME")
    return Path(chosen) if chosen else Path.home() / ".cache"


def compiler() -> str:
    """Return the C++ compiler's name; ``OSError`` where there is none."""
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        if name and shutil.which(name):
            return name
    raise OSError("no C++ compiler found (g++ or clang++)")


def _march() -> str:
    return os.environ.get(MARCH) or "native"


def _processor_flags() -> list[str]:
    return processor_flags(platform.machine(), platform.system(), _march())


def processor_flags(machine: str, system: str, march: str) -> list[str]:
    """Return what GCC and Clang are told of the processor that they compile for.

    Args:
        machine: `platform.machine()`.
        system: `platform.system()`.
        march: an architecture by the name that -march has for it, or ``native``, this machine's.
    """
    if machine in ("x86_64", "AMD64"):
        return [f"-march={march}", "-mprefer-vector-width=512"]
    if march != "native":
        return [f"-march={march}"]
    # Clang before 15 takes no -march=native on ARM. Apple's has the oldest of its own processors as default.
    return [] if system == "Darwin" else ["-mcpu=native"]


def processor() -> str:
    """Return the kind of processor that is compiled for: this machine's, behind another name if any."""
    own = processor_line("flags", "Features")
    return own if _march() == "native" else f"{_march()} on {own}"
