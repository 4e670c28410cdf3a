"""The loops in C++ on ARM: compiled for it and emulated, they have the bits that they have here (`make test-arm`).

The oracle is what the package's own libraries compute on this machine, whose bits other tests hold against their
definitions. What emulation does not show is speed, and Apple's toolchain.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from altgrad.numerics import loops
from altgrad.optim import update_cpu
from tests.arm.calls import Call, Recorder, record, to_bytes

HERE = Path(__file__).parent
TOOLS = {
    "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu", "qemu-aarch64-static": "qemu-user-static", "clang++": "clang",
}  # fmt: skip
ARM_GCC, ARM_CLANG = ("aarch64-linux-gnu-g++",), ("clang++", "--target=aarch64-linux-gnu")
QEMU = ("qemu-aarch64-static", "-cpu", "max")
# A build's compiler, its machine, the name of a processor's architecture there, and what runs it.
BUILDS = {
    "clang": (("clang++",), "x86_64", "native", ()),
    "ARM gcc": (ARM_GCC, "aarch64", "armv8.2-a", QEMU),  # Graviton2, Apple M1
    "ARM gcc sve": (ARM_GCC, "aarch64", "armv8.4-a+sve", QEMU),  # Graviton3, Grace
    "ARM clang": (ARM_CLANG, "aarch64", "armv8.2-a", QEMU),
    "ARM clang sve": (ARM_CLANG, "aarch64", "armv8.4-a+sve", QEMU),
}
SOURCES = dict.fromkeys(loops.SOURCES, "") | {update_cpu.SOURCE: update_cpu.DEFINITIONS}


def main() -> int:
    """Build, run and compare; return the exit status."""
    missing = [package for tool, package in TOOLS.items() if shutil.which(tool) is None]
    if missing:
        print(f"error: make test-arm needs packages of Debian that are not there: apt-get install {' '.join(missing)}")
        return 2
    others = ((source,) for source in SOURCES if source not in loops.SOURCES)
    if any(loops.load(*sources, definitions=SOURCES[sources[0]]) for sources in (loops.SOURCES, *others)):
        return 1  # it has warned
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        _prepare(Path(folder))
        built = [pool.submit(_compile, Path(folder), build, source) for build in BUILDS for source in SOURCES]
        checked = [pool.submit(_compile_with_torch, Path(folder), compiler, source)
                   for compiler in (ARM_GCC, ARM_CLANG) for source in SOURCES]  # fmt: skip
        recorder = Recorder([name for source in SOURCES for name in _operators(source)])
        record(recorder)
        print(f"{len(recorder.calls)} calls, {len(recorder.input) >> 20} MiB")
        for task in (*built, *checked):
            task.result()
        failed = [build for build in BUILDS if not _agrees(Path(folder), build, recorder)]
    return 1 if failed else 0


def _operators(source: Path) -> list[str]:
    return [line.split('"')[1] for line in source.read_text().splitlines() if "m.impl(" in line]


def _prepare(folder: Path) -> None:
    interface = folder / "stand_in/torch/csrc/stable"
    interface.mkdir(parents=True)
    for name in ("library", "ops", "tensor"):
        (interface / f"{name}.h").write_text('#include "torch_stand_in.h"\n')
    for source, definitions in SOURCES.items():
        (folder / source.stem).mkdir()
        (folder / source.stem / "definitions.h").write_text(loops.NUMERICS + definitions)


def _command(build: str, source: Path, folder: Path) -> list[str]:
    compiler, machine, march, _ = BUILDS[build]
    folders = [folder / "stand_in", folder / source.stem, HERE, loops.HEADERS]
    return [
        *compiler, *loops.processor_flags(machine, "Linux", march), *loops.FLAGS, *(f"-I{place}" for place in folders),
    ]  # fmt: skip


def _object(folder: Path, build: str, source: Path) -> Path:
    return folder / f"{build} {source.stem}.o"


def _run(command: Sequence[str | Path]) -> None:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stderr}")


def _compile(folder: Path, build: str, source: Path) -> None:
    _run([*_command(build, source, folder), "-c", source, "-o", _object(folder, build, source)])


def _compile_with_torch(folder: Path, compiler: Sequence[str], source: Path) -> None:
    """See that the source compiles for ARM with torch's own headers, as the package does it there."""
    root = Path(torch.__file__).parent / "include"
    folders = [loops.HEADERS, folder / source.stem, root, root / "torch/csrc/api/include"]
    flags = [*loops.processor_flags("aarch64", "Linux", "armv8.2-a"), *loops.FLAGS]
    _run([*compiler, *flags, *(f"-I{place}" for place in folders), "-fsyntax-only", source])


def _agrees(folder: Path, build: str, recorder: Recorder) -> bool:
    """Whether a build has the bits of this machine's libraries; prints the first that it has not."""
    program = folder / build
    objects = [_object(folder, build, source) for source in SOURCES]
    runner = BUILDS[build][-1]
    static = ["-static"] if runner else []
    _run([*_command(build, HERE / "main.cpp", folder), HERE / "main.cpp", *objects, *static, "-o", program])
    done = subprocess.run([*runner, program], input=recorder.input, capture_output=True, check=False)
    if done.returncode:
        print(f"{build}: exit status {done.returncode}: {done.stderr.decode()[-500:]}")
        return False
    place, wrong = 0, {}
    for call in recorder.calls:
        for i, t in enumerate(call.after):
            expected = to_bytes(t)
            found = done.stdout[place : place + len(expected)]
            place += len(expected)
            if found != expected and not _same(found, t):
                wrong.setdefault(call.name, []).append(_difference(call, i, found, expected))
    for name, lines in wrong.items():
        print(f"{build}: {name}: {len(lines)} tensors differ; the first: {lines[0]}")
    if not wrong:
        print(f"{build}: the same bits")
    return not wrong


def _same(found: bytes, expected: torch.Tensor) -> bool:
    """Whether both are equal, signs of zeros and places of NaN included: which NaN it is the compiler decides."""
    t = torch.frombuffer(bytearray(found), dtype=expected.dtype).view(expected.shape)
    return t.dtype.is_floating_point and to_bytes(t.nan_to_num(12345.0, torch.inf, -torch.inf)) == to_bytes(
        expected.nan_to_num(12345.0, torch.inf, -torch.inf)
    )


def _difference(call: Call, i: int, found: bytes, expected: bytes) -> str:
    """Return where a tensor of a call differs first, and what of its inputs lies there."""
    t = call.after[i]
    size, results = t.element_size(), len(call.after) - len(call.before)
    a, b = (np.frombuffer(x, f"u{size}") for x in (found, expected))
    place = int(np.flatnonzero(a != b)[0])
    inputs = [f"{_hex(x, place)}" for x in call.before if x.numel() == t.numel()]
    what = f"result {i}" if i < results else f"argument {i - results}"
    return (
        f"{call.label}: {what}, {int((a != b).sum())} of {len(a)} elements, first {place}: "
        f"{a[place]:#x}, here {b[place]:#x}; inputs there: {', '.join(inputs)}"
    )


def _hex(x: torch.Tensor, place: int) -> str:
    bits = np.frombuffer(to_bytes(x), f"u{x.element_size()}")[place]
    return f"{bits:#x} ({x.reshape(-1)[place].item():g})"


if __name__ == "__main__":
    sys.exit(main())
