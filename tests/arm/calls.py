"""Calls of the loops' operators, written down with all that goes in and comes out.

Inputs come from a fixed generator: numbers as a training run has them, ties, subnormal and huge ones, NaN of all kinds,
infinities and any bits at all.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from altgrad.formats import get_format
from altgrad.numerics import format_constants
from altgrad.numerics.constants import HADAMARD_SIGNS, SCALE_RULES, TWO_LEVEL
from altgrad.numerics.ms_eden import ms_eden
from altgrad.numerics.operand import quantize_by_operator
from altgrad.optim import Arm
from tests.optim.arms import make, normal_weights
from tests.optim.test_loops import CASES, arm_named
from tests.optim.test_state import coded_by_loops, spread

FORMATS = ("E4M3", "E5M2", "E2M1", "E0M7", "E7M0", "E3M0", "E4M3FNUZ")
SHAPES = (37, 83), (3, 130), (1, 1), (130, 3)
LARGE = (70, 400)  # more than is added up by itself
DTYPES = tuple(product((torch.float32, torch.bfloat16), repeat=2))
SCALAR_TYPES = {
    torch.uint8: 0, torch.int32: 3, torch.int64: 4, torch.float32: 6, torch.float64: 7, torch.bfloat16: 15,
}  # fmt: skip
SPECIAL = np.array(
    [0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x00800000, 0x3F800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000,
     0xFF800000, 0x7FC00000, 0xFFC00000, 0x7FC12345, 0xFFD54321, 0x7F812345, 0xFF800001],
    np.uint32,
)  # fmt: skip


@dataclass
class Call:
    """One call of an operator: ``before`` are its arguments, ``after`` its results and then its arguments again."""

    label: str
    name: str
    before: list[Tensor]
    after: list[Tensor]


class Recorder(TorchDispatchMode):
    """Writes down calls of the operators that C++ has, while it is entered."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self._names, self.label = names, ""
        self.calls: list[Call] = []
        self.input = bytearray()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name.removeprefix("altgrad::")
        if name not in self._names:
            return function(*args, **kwargs or {})
        self.input += struct.pack("<q", len(name)) + name.encode()
        for argument in args:
            self.input += _packed(argument)
        written = [bool(a.alias_info and a.alias_info.is_write) for a in function._schema.arguments]
        read = [_copies([argument]) for argument in args]  # that one of them is another's memory concerns nobody
        result = function(*args)
        kept = zip(args, written, read, strict=True)
        after = [_copies([argument]) if is_written else was for argument, is_written, was in kept]
        before, after = ([*chain.from_iterable(tensors)] for tensors in (read, after))
        self.calls.append(Call(self.label, name, before, _copies([result]) + after))
        return result


def to_bytes(t: Tensor) -> bytes:
    """Return the elements of ``t`` as they lie in memory."""
    return t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _copies(arguments: Sequence[Any]) -> list[Tensor]:
    found = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            found.append(argument.detach().clone())
        elif isinstance(argument, list | tuple):
            found += _copies(argument)
    return found


def _packed(argument: Any) -> bytes:
    if isinstance(argument, Tensor):
        numbers = SCALAR_TYPES[argument.dtype], argument.ndim, *argument.shape
        return struct.pack(f"<{len(numbers)}q", *numbers) + to_bytes(argument)
    if isinstance(argument, list | tuple):
        return struct.pack("<q", len(argument)) + b"".join(map(_packed, argument))
    if isinstance(argument, torch.dtype):
        return struct.pack("<q", SCALAR_TYPES[argument])
    return struct.pack("<d" if isinstance(argument, float) else "<q", argument)


def record(recorder: Recorder) -> None:
    """Make all calls."""
    with recorder:
        for make_calls in (_operands, _codes_and_rotations, _arms, _states):
            make_calls(recorder)


# --- inputs ----------------------------------------------------------------------------------------------------------


def _inputs(shape: tuple[int, int], fmt: str) -> dict[str, Tensor]:
    """Return inputs by the names of their kinds, float32."""
    rng = np.random.default_rng([*shape, *fmt.encode()])
    usual = (rng.standard_normal(shape) * np.exp2(3 * rng.standard_normal(shape))).astype(np.float32)
    values = np.float32(get_format(fmt).values)
    halfway = (values[:-1].astype(np.float64) + values[1:]).astype(np.float32) / 2
    ties = rng.choice(halfway, shape).view(np.int32) + rng.integers(-1, 2, shape, np.int32)
    ties = np.nan_to_num(ties.view(np.float32))  # of a largest value at 1 or 2^k, so that the scale moves none
    special = np.where(rng.random(shape) < 0.1, rng.choice(SPECIAL, shape).view(np.float32), usual)
    finite = np.where(np.isfinite(special), special, usual)
    bits = rng.integers(0, 1 << 32, shape, np.uint32).view(np.float32)
    alone = usual.copy()
    alone.flat[alone.size // 2] = np.uint32(0x7FC12345).view(np.float32)
    found = {"usual": usual, "ties": ties, "special": special, "finite": finite, "bits": bits, "alone": alone,
             "tiny": usual * np.float32(2e-39), "huge": usual * np.float32(1e33), "zero": usual * 0}  # fmt: skip
    return {kind: torch.from_numpy(np.ascontiguousarray(x, np.float32)) for kind, x in found.items()}


def _streams() -> tuple[Tensor | None, ...]:
    return None, torch.tensor([3, 4, 5]), torch.tensor([2**32 - 1, 2**31, 77])


# --- operands --------------------------------------------------------------------------------------------------------


def _operands(recorder: Recorder) -> None:
    rules = (*range(len(SCALE_RULES)), TWO_LEVEL, TWO_LEVEL + 1)
    for i, (fmt, shape, block) in enumerate(product(FORMATS, SHAPES, (0, -1, 1, 5, 16, 32, 128, -16, -7))):
        for j, ((kind, x), stream) in enumerate(product(_inputs(shape, fmt).items(), _streams())):
            source, target = DTYPES[(i + j) % 4]
            for rule in (rules[(i + j) % 7], rules[(i + 3 * j + 5) % 7]):
                if rule >= TWO_LEVEL and block in (0, -1):
                    continue
                scale_format = ("E4M3", "E5M2")[i % 2] if rule >= TWO_LEVEL else "float32"
                constants = format_constants(fmt, scale_format=scale_format)
                history = torch.tensor([0.0, 3.0, float("nan")]) if j % 5 == 0 and block != -1 else None
                recorder.label = f"{fmt} {shape} {kind} {source} to {target}, block {block}, rule {rule}, {stream}"
                how = {"block": block, "dim": j % 2, "rule": rule, "dtype": target, "first": 7 * j, "stream": stream}
                how |= {"overwrite": j % 4 == 0, "method": ("most-recent", "max")[j % 2], "learns": "each"}
                quantize_by_operator(x.to(source), constants, history, **how)


def _codes_and_rotations(recorder: Recorder) -> None:
    operators = torch.ops.altgrad
    signs = torch.tensor(HADAMARD_SIGNS, dtype=torch.float32)
    for fmt, shape in product(FORMATS, SHAPES):
        constants = format_constants(fmt)
        for kind, x in _inputs(shape, fmt).items():
            for dtype in (torch.float32, torch.bfloat16):
                recorder.label = f"{fmt} {shape} {kind} {dtype}"
                quantized, _ = quantize_by_operator(x.to(dtype), constants, None, 0, 1, 0, torch.float32)
                operators.encode_operand(quantized.to(dtype), constants)
                operators.encode_operand(x.to(dtype), constants)
                operators.decode_operand(torch.arange(256, dtype=torch.uint8), constants, dtype)
                operators.rotate_rows(x.to(dtype), signs)
                operators.rotate_rows(x.to(dtype), signs.repeat(8))
                operators.rotate_rows(x.to(dtype), signs[:4])
    for i, stream in enumerate(_streams()[1:]):
        for first in (0, 1024, 2**33, 2**34 - 4096):
            recorder.label = f"stream {stream.tolist()} from {first}"
            operators.random_signs(stream, first, 128)
        for kind, x in _inputs((256, 37), "E2M1").items():
            for source, target in DTYPES:
                recorder.label = f"MS-EDEN of {kind} {source} to {target}"
                ms_eden(x.to(source), format_constants("E2M1", scale_format="E4M3"), stream, 5 * i, 16, target)


# --- steps -----------------------------------------------------------------------------------------------------------


def _gradients(weights: list[nn.Parameter], seed: int) -> None:
    """Set usual gradients, among them some that are special in the last step."""
    for p in weights:
        p.grad = spread(p.shape, 1e-3, seed)
        p.grad[5:9] = 0
        p.grad[20:21, :3] = torch.tensor([1e30, 1e-30, -1e19])
        if seed == 2:
            rng = np.random.default_rng(0)
            finite = SPECIAL[np.isfinite(SPECIAL.view(np.float32))]  # a step on others is skipped
            p.grad[10:12] = torch.from_numpy(rng.choice(finite, (2, p.shape[1])).view(np.float32))


def _arms(recorder: Recorder) -> None:
    for fmt, (case, (name, changes)) in product(("E4M3", "E0M7", "E7M0"), CASES.items()):
        arm = arm_named(name, **changes)
        weights, optimizer = make(arm, fmt, normal_weights((37, 131)), steps=20, seed=3, reference=True)
        for seed in range(3):
            recorder.label = f"step {seed} of {case} in {fmt}"
            _gradients(weights, seed)
            optimizer.step()


def _states(recorder: Recorder) -> None:
    for state in coded_by_loops():
        arm = Arm(lr=1e-2, stiffness="ulp", normalise="none", state=state | {"least": 0})
        weights, optimizer = make(arm, "E4M3", [nn.Parameter(spread((37, 131), 0.1))], seed=4)
        weights += [nn.Parameter(spread(shape, 0.1, seed=2)) for shape in ((35, 77), (21, 520))]
        optimizer.add_param_group({"params": weights[1:]})
        for seed in range(3):
            recorder.label = f"step {seed} of state {state}"
            _gradients(weights, seed)
            optimizer.step()
