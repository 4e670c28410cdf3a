"""Groups of elements under scales: the loops are the definition to the bit, and that is what its sources say.

Oracles: exact fractions; torchao's DeepSeek blocks in tensor operations; scipy's Hadamard matrix.
"""

from __future__ import annotations

import ast
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.linalg import hadamard
from torch import Tensor

from altgrad.formats import get_format
from altgrad.numerics import (
    decode,
    encode_two_level,
    format_constants,
    operand_scale,
    quantize,
    quantize_operands,
    rotate_rows,
)
from altgrad.numerics.constants import FOUR_OVER_SIX, HADAMARD_SIGNS, SCALE_RULES, TWO_LEVEL
from altgrad.numerics.ms_eden import random_signs
from altgrad.numerics.operand import rotate_by_tensors
from altgrad.numerics.operand_definition import ONE_SCALE, ROWS, quantize_by_tensors
from altgrad.numerics.operators import has_loops, quantize_by_operator

STREAM = torch.tensor([3, 4, 5])
NVFP4 = {"granularity": "block", "block": 16, "scale_format": "E4M3"}


def spread(shape: tuple[int, ...], seed: int = 0, binades: float = 4.0) -> Tensor:
    """Return numbers of some ``binades``, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * (binades * torch.randn(shape, generator=generator)).exp2()
    return torch.where(torch.rand(shape, generator=generator) < 0.05, 0.0, x)


def unusual(x: Tensor, kind: str) -> Tensor:
    """Return ``x`` with what the name says."""
    x = x.clone()
    if kind in ("inf", "nan"):
        x.view(-1)[x.numel() // 2] = float(kind)
    return {"tiny": x * 1e-38, "huge": x * 1e30, "zero": torch.zeros_like(x)}.get(kind, x)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether both are equal, signs of zeros and places of NaN included."""
    a, b = (t.float().nan_to_num(nan=12345.0) for t in (a, b))
    return a.shape == b.shape and torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("stream", [None, STREAM], ids=["nearest", "by chance"])
@pytest.mark.parametrize("block", [ONE_SCALE, ROWS, 16, 5, -16, -7, 128, -128])
def test_loops_are_the_definition_to_the_bit(block, stream):
    assert has_loops(torch.zeros(1))
    rules = [*range(len(SCALE_RULES)), *([] if block in (ONE_SCALE, ROWS) else [TWO_LEVEL, FOUR_OVER_SIX])]
    cases = [("E2M1", "as drawn"), ("E4M3", "tiny"), ("E3M0", "nan"), ("E5M2", "huge"), ("E0M7", "inf"),
             ("E7M0", "as drawn"), ("E2M3", "zero")]  # fmt: skip
    for seed, (name, kind) in enumerate(cases):
        for rule in rules:
            constants = format_constants(name, scale_format="E4M3" if rule >= TWO_LEVEL else "float32")
            for dim, shape, dtypes in (
                (0, (37, 83), (torch.float32, torch.float32)),
                (1, (37, 83), (torch.bfloat16, torch.float32)),
                (1, (3, 130), (torch.float32, torch.bfloat16)),
            ):
                x = unusual(spread(shape, seed), kind).to(dtypes[0])
                known = None if block == ROWS else torch.tensor(3.0 if seed % 2 else 0.0)
                arguments = (x, constants, known, block, dim, rule, dtypes[1], stream, 11)
                defined = quantize_by_tensors(*arguments)
                for overwrite in (False, True):  # where x was, if it has the values' dtype
                    ours = quantize_by_operator(x.clone(), *arguments[1:], overwrite)
                    assert all(map(same_bits, ours, defined)), (name, kind, rule, dim)


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("block", [ONE_SCALE, ROWS, 16, 48, 7])
def test_what_is_unusual_is_noticed_wherever_it_stands_alone(block, rule):
    """Alone in the first row or column, in one in the middle and in the last, and under rules that saturate.

    Else it hides: loops that look at some of the groups would round the others without a limit.
    """
    assert has_loops(torch.zeros(1))
    constants, none = format_constants("E4M3"), torch.tensor(0.0)
    for dim, shape in ((0, (37, 150)), (1, (150, 37))):
        for place in (0, shape[1 - dim] // 2, shape[1 - dim] - 1):
            for value in (1.99, torch.inf, -torch.inf, torch.nan, 3e38, 1e-40):
                x = torch.ones(shape)  # whose scale is exact: none but `value` saturates by the rule floor
                x.select(1 - dim, place)[shape[dim] // 2] = value
                arguments = (x, constants, none, block, dim, SCALE_RULES.index(rule), torch.float32, None, 11)
                defined = quantize_by_tensors(*arguments)
                ours = quantize_by_operator(x.clone(), *arguments[1:])
                single = torch.ops.altgrad.quantize_operand(*arguments[:7])
                for found in (ours, single):
                    assert all(map(same_bits, found, defined)), (dim, place, value)


@pytest.mark.parametrize("name", ["E4M3", "E2M1", "E3M0", "E5M2"])
@pytest.mark.parametrize("scale_format", ["float32", "E8M0", "E4M3"])
def test_a_tile_has_one_scale_and_the_values_of_both_products(name, scale_format):
    x, constants = spread((40, 56)), format_constants(name, scale_format=scale_format)
    options = {"granularity": "tile", "block": 16, "scale_format": scale_format, "dtype": torch.float32}
    forward, backward = (quantize_operands([x], [constants], dim=dim, **options)[0] for dim in (1, 0))
    assert same_bits(forward.values, backward.values)
    flipped = quantize_operands([x.t().contiguous()], [constants], **options)[0]
    assert same_bits(flipped.values.t(), forward.values)
    for top in range(0, 40, 16):  # and no tile reads another
        for left in range(0, 56, 16):
            own = x[top : top + 16, left : left + 16].contiguous()
            if scale_format != "E4M3":
                alone = quantize_operands([own], [constants], **options)[0].values
                assert same_bits(alone, forward.values[top : top + 16, left : left + 16])


def test_blocks_of_deepseek_are_those_of_torchao():
    """Inputs and gradients 1x128, weights 128x128, in E4M3: the same codes, and the scale's reciprocal beside them."""
    kernels = torchao_functions("torch_blockwise_scale_act_quant_lhs", "torch_blockwise_scale_weight_quant")
    x, constants = spread((256, 384), binades=2.0), format_constants("E4M3")
    codes, back = kernels["torch_blockwise_scale_act_quant_lhs"](x)
    check_codes(x, constants, codes, back.repeat_interleave(128, 1), granularity="block")
    codes, back = kernels["torch_blockwise_scale_weight_quant"](x)
    spread_back = back.repeat_interleave(128, 0).repeat_interleave(128, 1)
    check_codes(x, constants, codes, spread_back, granularity="tile")


def torchao_functions(*names: str) -> dict[str, Any]:
    """Return functions of a module whose kernels need triton, which is not there, by themselves."""
    package = pytest.importorskip("torchao")
    source = Path(package.__file__).parent / "prototype/blockwise_fp8_training/kernels.py"
    wanted = [node for node in ast.parse(source.read_text()).body if getattr(node, "name", None) in names]
    found = {"torch": torch, "e4m3_dtype": torch.float8_e4m3fn, "EPS": 1e-12}
    exec(compile(ast.Module(wanted, []), str(source), "exec"), found)
    return found


def check_codes(x: Tensor, constants: Tensor, codes: Tensor, back: Tensor, granularity: str) -> None:
    scale = operand_scale(x, constants, granularity=granularity, block=128)
    assert torch.equal(quantize(x * scale, "E4M3"), codes.float())
    assert torch.equal(1.0 / scale, back)
    operand = quantize_operands([x], [constants], granularity=granularity, block=128, dtype=torch.float32)[0]
    assert operand.scale is None
    assert torch.equal(operand.values, (codes.double() / scale.double()).float())


@pytest.mark.parametrize("name", ["E2M1", "E2M3", "E4M3", "E3M2"])
def test_four_over_six_takes_the_nearer_of_two_scales(name):
    """The definition in exact fractions, for each block; where both errors are alike to 2^-20 either may be taken."""
    fmt, own = get_format(name), get_format("E4M3")
    x = spread((12, 64), seed=2, binades=1.5)
    constants = format_constants(name, scale_format="E4M3")
    chosen = operand_scale(x, constants, scale_rounding="4/6", **NVFP4)
    lower = max(2.0**e for e in range(-10, 17) if 2.0**e < fmt.scale_target)
    top = max(2.0**e for e in range(9) if Fraction(2) ** e * Fraction(fmt.scale_target) / Fraction(lower) <= own.max)
    whole = torch.tensor(fmt.scale_target * top / x.abs().max().double().item()).float().item()
    taken = [0, 0]
    for row, scales in zip(x.split(16, dim=1), chosen.split(16, dim=1), strict=True):
        for elements, scale in zip(row, scales, strict=True):
            amax = elements.abs().max().double().item()
            found = []
            for target in (fmt.scale_target, lower):
                wanted = torch.tensor(amax * whole / target).float()
                block = quantize(wanted, own).clamp(min=own.min_subnormal).item()
                factor = torch.tensor(whole / block).float()
                scaled = elements * factor
                exact = [Fraction(v) for v in scaled.double().tolist()]
                rounded = [Fraction(v) for v in quantize(scaled, fmt).double().tolist()]
                error = sum(((q - v) * Fraction(block)) ** 2 for q, v in zip(rounded, exact, strict=True))
                found.append((error, factor.item()))
            (first, of_first), (second, of_second) = found
            best = of_second if second < first else of_first
            close = abs(first - second) <= max(first, second) * Fraction(1, 1 << 20)
            assert scale[0].item() == best or close
            taken[best == of_second] += 1
    assert all(taken)


def test_four_over_six_of_nvfp4_maps_to_6_or_to_4_under_a_scale_of_256():
    x = torch.zeros(2, 16)
    x[0, :4] = torch.tensor([6.0, 3.0, 1.5, 0.5])  # as they are, at 6
    x[1, :4] = torch.tensor([6.0, 4.5, 3.0, 1.5])  # at 4: 4, 3, 2, 1
    constants = format_constants("E2M1", scale_format="E4M3")
    options = {**NVFP4, "dtype": torch.float32}
    values, whole = quantize_operands([x], [constants], scale_rounding="4/6", **options)[0]
    assert whole.item() == 256 and torch.equal(values / whole, x)
    _, plain = quantize_operands([x], [constants], **options)[0]
    assert plain.item() == 448


def test_two_level_operands_are_what_is_stored():
    """Of loops as of tensors: the codes of elements and scales give the operand."""
    x = spread((24, 80), seed=5)
    constants = format_constants("E2M1", scale_format="E4M3")
    for dim in (0, 1):
        values, whole = quantize_operands([x], [constants], dim=dim, dtype=torch.bfloat16, **NVFP4)[0]
        stored = encode_two_level(x, "E2M1", dim=dim)
        scales = decode(stored.scales, "E4M3").repeat_interleave(16, dim)[: x.shape[0], : x.shape[1]]
        assert torch.equal(values.float(), decode(stored.elements, "E2M1") * scales)
        assert torch.equal(whole, stored.tensor_scale)


@pytest.mark.parametrize("rows", [16, 37, 1, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_is_the_hadamard_matrix_with_the_signs(rows, dtype):
    """Exact for whole numbers; of others the loops have the definition's bits."""
    matrix = hadamard(16) @ np.diag(HADAMARD_SIGNS)
    whole = torch.randint(-9, 9, (rows, 21), generator=torch.Generator().manual_seed(rows)).to(dtype)
    padded = np.pad(whole.float().numpy(), ((0, -rows % 16), (0, 0)))
    expected = np.concatenate([matrix @ part / 4 for part in np.split(padded, len(padded) // 16)])
    assert torch.equal(rotate_rows(whole), torch.from_numpy(expected).float())
    x = spread((rows, 150), seed=3).to(dtype)
    for size in (16, 128, 2):
        signs = random_signs(STREAM, 0)[:size]
        assert same_bits(rotate_rows(x, signs), rotate_by_tensors(x, signs))


def test_rotating_both_operands_leaves_their_product():
    a, b = (spread((48, n), seed=n, binades=1.0) for n in (5, 7))
    turned = rotate_rows(a).t().double() @ rotate_rows(b).double()
    assert torch.allclose(turned, a.t().double() @ b.double(), rtol=0, atol=1e-5 * turned.abs().max().item())
