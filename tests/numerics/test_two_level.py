"""Two-level scales: the definition in exact fractions, NVFP4 by others, 4/6, and what becomes of unusual blocks.

Oracles: `round_scalar`, which shares no code with what is tested, and float32's own rounding written out here; the
4- and 8-bit dtypes of ml_dtypes; torchao's DeepSeek blocks, in tensor operations on the CPU.
"""

from __future__ import annotations

import ast
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from altgrad import numerics
from altgrad.formats import format_names, get_format
from altgrad.model.quantized.linear import exact_in_bfloat16
from altgrad.numerics import (
    amax,
    broadcast_scale,
    compute_scale,
    decode,
    decode_two_level,
    encode_two_level,
    format_constants,
    operand_scale,
    quantize,
    quantize_operand,
)
from altgrad.numerics.operand import Quantized
from altgrad.numerics.reference import round_scalar
from altgrad.numerics.two_level import element_scale, two_level_scales
from tests.numerics.numerics_oracles import spread

PAIRS = [("E2M1", "E4M3"), ("E4M3", "E4M3"), ("E3M4", "E5M2"), ("E2M3", "E7M0"), ("E0M7", "E0M3"), ("E5M2FNUZ", "E6M1")]


def blocks_of_all_sizes() -> Tensor:
    """Return (6, 37): ordinary, zero, tiny, huge and mixed blocks, values at ties; no power of two divides 37."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 37, generator=generator)
    x[1, :16] = 0.0
    x[2, :16] *= 1e-12
    x[3, 16:32] *= 3e4
    x[4] *= torch.exp2(torch.randint(-40, 12, (37,), generator=generator).float())
    x[5] = (x[5] * 8).round() / 4
    x[5, 0] = -0.0
    return x


def float32(x: Fraction) -> Fraction:
    """Round a fraction to the nearest normal float32, ties to even."""
    if x == 0:
        return x
    exponent = math.frexp(abs(float(x)))[1] - 1
    exponent -= abs(x) < Fraction(2) ** exponent
    unit = Fraction(2) ** (exponent - 23)
    return round(x / unit) * unit  # Python rounds fractions to even


def in_fractions(x: Tensor, fmt: str, scale_format: str, block: int) -> tuple[Fraction, list[list[Fraction]], Tensor]:
    """Return s, d_b and q of a 2-d tensor with blocks along its rows."""
    elements, scales = get_format(fmt), get_format(scale_format)
    target, top, smallest = (Fraction(v) for v in (elements.scale_target, scales.scale_target, scales.smallest))
    rows = [[Fraction(v) for v in row] for row in x.tolist()]
    whole = float32(target * top / max(abs(v) for row in rows for v in row))
    found, q = [], torch.zeros(x.shape, dtype=torch.float64)
    for i, row in enumerate(rows):
        found.append([])
        for first in range(0, len(row), block):
            part = row[first : first + block]
            wanted = min(float32(max(map(abs, part)) * whole / target), top)
            scale = max(Fraction(round_scalar(wanted, scales)), smallest)
            found[-1].append(scale)
            for j, value in enumerate(part, first):
                q[i, j] = round_scalar(float32(value * float32(whole / scale)), elements)
    return whole, found, q


@pytest.mark.parametrize(("fmt", "scale_format"), PAIRS)
@pytest.mark.parametrize("block", [16, 5, 64])
def test_scales_elements_and_operands_are_those_of_exact_fractions(fmt, scale_format, block):
    x = blocks_of_all_sizes()
    whole, blocks, q = in_fractions(x, fmt, scale_format, block)
    stored = encode_two_level(x, fmt, scale_format, block=block)
    assert Fraction(stored.tensor_scale.item()) == whole
    assert [[Fraction(d) for d in row] for row in decode(stored.scales, scale_format).tolist()] == blocks
    assert torch.equal(decode(stored.elements, fmt, torch.float64), q)
    spread = torch.tensor([[float(d) for d in row] for row in blocks], dtype=torch.float64)
    exact = q * broadcast_scale(spread, x.shape[1], block=block)
    assert torch.equal(decode_two_level(stored, fmt, scale_format, block=block), exact.float() / stored.tensor_scale)
    dtypes = [torch.float32]
    if exact_in_bfloat16(get_format(fmt), get_format(scale_format)):
        dtypes.append(torch.bfloat16)
    for dtype in dtypes:
        for dim, t in ((1, x), (0, x.t())):
            found = of(t, fmt, scale_format, block=block, dim=dim, dtype=dtype)
            assert found.scale == stored.tensor_scale and found.values.dtype == dtype
            assert torch.equal(found.values.double(), exact if dim == 1 else exact.t())


@pytest.mark.parametrize("largest", [3.7, 1.3, 2.9, 5.1, 7.7])
def test_each_quotient_is_rounded_once_also_next_to_ties(largest):
    scales = get_format("E4M3")
    whole = float32(Fraction(6 * 448) / Fraction(torch.tensor(largest).item()))
    ties = torch.tensor((scales.magnitudes[1:] + scales.magnitudes[:-1]) / 2 * 6 / float(whole)).float()
    beside = [torch.nextafter(ties, torch.tensor(toward)) for toward in (0.0, torch.inf)]
    amaxes = torch.cat([ties, *beside, torch.tensor([largest])])
    found, blocks = two_level_scales(amaxes, format_constants("E2M1", scale_format="E4M3"))
    wanted = [round_scalar(float32(Fraction(a) * whole / 6), scales) for a in amaxes.tolist()]
    assert Fraction(found.item()) == whole and blocks.tolist() == [max(d, scales.smallest) for d in wanted]
    quotients = [float(float32(whole / Fraction(d))) for d in blocks.tolist()]
    assert element_scale(found, blocks).tolist() == quotients


def of(x: Tensor, fmt: str = "E2M1", scale_format: str = "E4M3", **options) -> Quantized:
    """Return the operand of ``x`` with two-level scales."""
    options = {"granularity": "block", "block": 16, "scale_format": scale_format, **options}
    return quantize_operand(x, format_constants(fmt, scale_format=scale_format), **options)


def test_nvfp4_has_the_codes_of_ml_dtypes():
    x = blocks_of_all_sizes()
    stored = encode_two_level(x, "E2M1")
    wanted = (amax(x, "block", block=16).double() * stored.tensor_scale.double() / 6).float().numpy()
    smallest = np.float32(2.0**-9)
    scales = np.maximum(wanted.astype(ml_dtypes.float8_e4m3fn), smallest.astype(ml_dtypes.float8_e4m3fn))
    assert np.array_equal(scales.view(np.uint8), stored.scales.numpy())
    factors = np.repeat(stored.tensor_scale.numpy() / scales.astype(np.float32), 16, axis=1)[:, :37]
    elements = (x.numpy() * factors).astype(ml_dtypes.float4_e2m1fn)
    assert np.array_equal(elements.view(np.uint8) & 15, stored.elements.numpy())


def test_a_tensor_of_zeros_stays_one_and_keeps_its_signs():
    x = torch.tensor([[0.0, -0.0] * 10])
    found = of(x, dtype=torch.float32)
    assert found.scale == 1 and torch.equal(found.values.signbit(), x.signbit()) and not found.values.any()
    assert encode_two_level(x, "E2M1").scales.tolist() == [[1, 1]]
    assert of(torch.empty(0, 4)).values.shape == (0, 4)


def test_a_block_whose_scale_would_be_zero_keeps_what_the_smallest_scale_can_show():
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 16:] = 2688.0, 2.0**-10  # s is 1
    x[0, 20:] = 2.0**-14
    stored = encode_two_level(x, "E2M1")
    assert stored.scales.tolist() == [[126, 1]] and stored.tensor_scale == 1
    shown = decode_two_level(stored, "E2M1")[0, 16:]
    assert shown.tolist() == [2.0**-10] * 4 + [0.0] * 12
    assert ((shown - x[0, 16:]).abs() <= x[0, 16:].abs()).all()


def test_what_is_not_finite_makes_all_under_the_tensors_scale_nan():
    for bad in (torch.inf, -torch.inf, torch.nan):
        for place in (0, 3, 39):
            x = torch.full((2, 40), 12.0)
            x[0, place] = bad
            values = of(x, dtype=torch.float32)
            assert values.scale.isnan() and values.values.isnan().all()


@pytest.mark.parametrize(("fmt", "scale_format"), [*PAIRS, ("E7M0", "E7M0"), ("E0M7", "E5M2")])
def test_every_amax_gives_usable_scales(fmt, scale_format):
    constants = format_constants(fmt, scale_format=scale_format)
    for exponent in (-149, -127, -100, -60, 0, 60, 126, 127.999):
        amaxes = torch.tensor([[2.0**exponent, 2.0 ** max(exponent - 20, -149), 0.0]], dtype=torch.float64).float()
        whole, blocks = two_level_scales(amaxes, constants)
        factors = element_scale(whole, blocks)
        for found in (whole, blocks, factors):
            assert (found.isfinite() & (found > 0) & (1 / found).isfinite() & (1 / found > 0)).all()
        assert (factors >= 2.0**-126).all() and (factors <= 2.0**127).all()


def test_both_levels_are_one_scale_for_whoever_looks_at_the_spacing():
    x = blocks_of_all_sizes()
    constants = format_constants("E2M1", scale_format="E4M3")
    scale = operand_scale(x, constants, granularity="block", block=16, scale_format="E4M3")
    whole, blocks = two_level_scales(amax(x, "block", block=16), constants)
    assert torch.equal(scale, broadcast_scale(element_scale(whole, blocks), 37, block=16))
    assert whole == compute_scale(amax(x), 6.0 * 448)


@pytest.mark.parametrize("scales", ["E2M1", "E4M3", "E5M2", "E3M4", "E7M0", "E0M7"])
def test_exactness_of_a_product_is_judged_as_the_cast_judges_it(scales):
    scale = torch.tensor(get_format(scales).magnitudes)
    scale = scale[scale <= get_format(scales).scale_target]
    for name in (*format_names(), "E4M7"):
        fmt = get_format(name)
        if fmt.signed and fmt.bits <= 12:
            products = torch.tensor(fmt.values)[:, None] * scale
            exact = torch.equal(products.bfloat16().double(), products)
            assert exact_in_bfloat16(fmt, get_format(scales)) == exact, name


def test_the_page_says_which_pairs_bfloat16_holds():
    text = (Path(numerics.__file__).parent / "USE.md").read_text()
    lines = text[text.index("| elements |") :].split("\n\n")[0].splitlines()
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    assert len(rows) > 5
    for row in rows:
        for scales, said in zip(head[2:], row[2:], strict=True):
            assert (said == "bf16") == exact_in_bfloat16(get_format(row[0]), get_format(scales)), (row[0], scales)


def test_errors_name_the_argument():
    x = torch.ones(2, 4)
    with pytest.raises(ValueError, match="^constants: "):
        quantize_operand(x, format_constants("E2M1"), granularity="block", scale_format="E4M3")
    with pytest.raises(ValueError, match="^scale_format: "):
        quantize_operand(x, format_constants("E2M1"), granularity="row", scale_format="E4M3")
    with pytest.raises(ValueError, match="^fmt: "):
        format_constants("E2M1", scale_format="BF16")


# --- 4/6, and blocks of one level ------------------------------------------------------------------------------------


NVFP4 = {"granularity": "block", "block": 16, "scale_format": "E4M3"}


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
    operand = quantize_operand(x, constants, granularity=granularity, block=128, dtype=torch.float32)
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
    values, whole = quantize_operand(x, constants, scale_rounding="4/6", **options)
    assert whole.item() == 256 and torch.equal(values / whole, x)
    _, plain = quantize_operand(x, constants, **options)
    assert plain.item() == 448
