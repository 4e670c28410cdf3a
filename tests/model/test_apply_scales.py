"""A product is finite and right wherever the true one is, at any magnitudes of its factors.

Oracles: float64, whose exponents hold every product of float32 numbers here, and the plain multiplication by the
reciprocals where nothing leaves float32.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from altgrad.model import Recipe, quantize_model
from altgrad.model.quantized import operand
from altgrad.model.quantized.native import native_product
from altgrad.model.quantized.operand import Operand, apply_scales

LARGEST, SMALLEST, LAST = torch.finfo(torch.float32).max, 2.0**-126, 2.0**-149
SHAPE = (40, 24)
#: Shapes of the scales of the two factors.
SCALES = {
    "tensor": ((), ()), "row": ((40, 1), (1, 24)), "row and tensor": ((40, 1), ()), "tensor and row": ((), (1, 24)),
    "one": ((), None), "row alone": (None, (1, 24)), "none": (None, None),
}  # fmt: skip
RECIPES: dict[str, dict[str, Any]] = {
    "tensor": {}, "row": {"granularity": "row"}, "row of powers of two": {"granularity": "row", "scale": "E8M0"},
    "block": {"granularity": "block", "block": 16, "scale": "E8M0"},
    "two-level": {"granularity": "block", "block": 16, "scale": "E4M3"},
}  # fmt: skip


def random(shape: tuple[int, ...], low: float, high: float, seed: int, draw: int) -> Tensor:
    """Return positive float32 numbers of all magnitudes from 2^low to 2^high."""
    generator = torch.Generator().manual_seed(1000 * seed + draw)
    return torch.exp2(low + (high - low) * torch.rand(shape, generator=generator)).float()


def case(kind: str, seed: int, low: float = -126, high: float = 127) -> tuple[Tensor, list[Tensor | None]]:
    """Return a sum of products as those of the formats come, some of it zero or negative, and scales."""
    y = random(SHAPE, -32, 45, seed, 0) * torch.where(random(SHAPE, 0, 1, seed, 1) > 1.4, 1.0, -1.0)
    y[3, :] = y[:, 5] = 0.0
    shapes = enumerate(SCALES[kind])
    return y, [None if shape is None else random(shape, low, high, seed, 2 + i) for i, shape in shapes]


def truth(y: Tensor, scales: list[Tensor | None]) -> Tensor:
    result = y.double()
    for scale in scales:
        result = result if scale is None else result / scale.double()
    return result


def assert_near(found: Tensor, true: Tensor, relative: float | Tensor) -> None:
    """Assert that float32 ``found`` is ``true`` up to a share of its magnitude, and the last place of float32."""
    error = (found.double().clamp(-LARGEST, LARGEST) - true.clamp(-LARGEST, LARGEST)).abs()
    assert not found.isnan().any()
    assert found[true.abs() < LARGEST * (1 - 1e-6)].isfinite().all()
    assert (error <= relative * true.abs() + 2 * LAST).all()


@pytest.mark.parametrize("kind", SCALES)
def test_the_result_is_right_at_all_scales_that_there_are(kind: str) -> None:
    for seed in range(20):
        y, scales = case(kind, seed)
        assert_near(apply_scales(y.clone(), scales), truth(y, scales), 4 * 2.0**-24)


@pytest.mark.parametrize("kind", SCALES)
def test_no_bit_differs_from_the_plain_multiplications_that_stay_in_range(kind: str) -> None:
    for seed in range(20):
        y, scales = case(kind, seed, -70, 40)
        plain, common = y.clone(), torch.ones((), dtype=torch.float64)
        for scale in scales:
            if scale is not None and scale.ndim == 0:
                common = common * scale.double()
            elif scale is not None:
                plain = plain * scale.reciprocal()
        plain = plain * common.reciprocal().float()
        found = apply_scales(y.clone(), scales)
        normal = (truth(y, scales).abs() > 2 * SMALLEST) & plain.isfinite()
        usual = (common.reciprocal() > SMALLEST) & (common.reciprocal() < LARGEST)
        assert not usual or (torch.equal(found[normal], plain[normal]) and normal.any())


@pytest.mark.parametrize("kind", ["tensor", "row and tensor"])
def test_looking_at_the_scales_first_and_compiling_change_no_bit(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = torch.compile(apply_scales, fullgraph=True)
    for seed, (low, high) in enumerate([(-126, 127), (-60, 60), (100, 127), (-126, -100)]):
        y, scales = case(kind, seed, low, high)
        found = [apply_scales(y.clone(), scales), compiled(y.clone(), scales)]
        with monkeypatch.context() as patch:
            patch.setattr(operand, "_is_readable", lambda scale: False)
            found.append(apply_scales(y.clone(), scales))
        for other in found[1:]:
            assert torch.equal(found[0].view(torch.int32), other.view(torch.int32))


@pytest.mark.parametrize("kind", SCALES)
def test_a_result_in_bfloat16_is_rounded_once(kind: str) -> None:
    for seed in range(20):
        y, scales = case(kind, seed, -60, 60)
        found = apply_scales(y.bfloat16(), scales).bfloat16()
        assert torch.equal(found, apply_scales(y.bfloat16().float(), scales).bfloat16())


MAGNITUDES = [(1e-38, 1e-38), (1e-30, 1e-30), (1e-19, 1e-19), (1e-19, 1e-12), (1e-38, 1e38), (1e38, 1e-38), (1e35, 0.1),
              (1e33, 1e-3), (1e-3, 1e33), (1e17, 1e17), (1e38, 1e38), (1.0, 1.0)]  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES)
def test_layers_are_right_at_all_magnitudes_of_their_tensors(recipe: str) -> None:
    """Powers of two beside the tensors change no operand, so the results are those at 1, that many times as large.

    But in reach of float32's ends: subnormal numbers have fewer digits, and a scale ends at 2^127, at 2^-18 in E4M3.
    Scales of blocks stay in the operands, which end at 2^-126, and whose products may be infinite with both signs.
    """
    base = layer_results(recipe, 1.0, 1.0)
    for of_x, of_w in MAGNITUDES:
        a, b = nearest_power(of_x), nearest_power(of_w)
        tolerance = 2.0**-20 if min(a, b) > 2.0**-110 else 0.1
        found = layer_results(recipe, a, b)
        for name, factor in (("y", a * b), ("dx", b), ("dw", a)):
            true = base[name].double() * factor
            top = true.abs().max()
            assert not found[name][true.abs() > 2 * LARGEST].isfinite().any(), (of_x, of_w, name)
            assert (recipe == "block" and top > LARGEST) or not found[name].isnan().any(), (of_x, of_w, name)
            if 2.0**-100 < top < LARGEST:
                assert (found[name].double() - true).abs().max() <= tolerance * top, (of_x, of_w, name)


def nearest_power(x: float) -> float:
    return 2.0 ** round(torch.tensor(x, dtype=torch.float64).log2().item())


def layer_results(recipe: str, of_x: float, of_w: float) -> dict[str, Tensor]:
    """Return a layer's output and gradients for tensors that are multiplied by powers of two."""
    generator = torch.Generator().manual_seed(0)
    weight, x, g = (torch.randn(shape, generator=generator) / 4 for shape in ((24, 48), (16, 48), (16, 24)))
    layer = nn.Linear(48, 24, bias=False)
    layer.weight = nn.Parameter(weight * of_w)
    options = RECIPES[recipe] | {"accumulate": "float32"}
    (layer,) = quantize_model(nn.Sequential(layer), Recipe.uniform("E4M3", grad="E4M3", **options))
    x = (x * of_x).requires_grad_()
    y = layer(x)
    y.backward(g)
    return {"y": y.detach(), "dx": x.grad, "dw": layer.weight.grad}


@pytest.mark.parametrize("rows", [False, True])
def test_the_native_product_is_right_where_the_emulated_one_is(rows: bool) -> None:
    """torch's own product of 8-bit values, at scales whose reciprocals' product leaves float32."""
    generator = torch.Generator().manual_seed(0)
    a, b = ((2 * torch.randn(shape, generator=generator)).to(torch.float8_e4m3fn) for shape in ((16, 32), (16, 32)))
    for of_a, of_b in ((1e-35, 1e35), (1e30, 1e33), (1e-38, 1e38), (1.7e38, 1e-37), (1e18, 1e23), (1.0, 3.0)):
        shapes = ((16, 1), (1, 16)) if rows else ((), ())
        scales = [torch.full(shape, of) for shape, of in zip(shapes, (of_a, of_b), strict=True)]
        found = native_product(Operand(a, scales[0]), Operand(b.t(), scales[1]), torch.float32)
        true = truth(a.double() @ b.double().t(), scales)
        size = truth(a.double().abs() @ b.double().abs().t(), scales)
        last = 2.0**-132 if rows else 2 * LAST  # torch has bfloat16 alone for rows
        assert found.isfinite().all()
        assert ((found.double() - true).abs() <= 2.0**-7 * true.abs() + 2.0**-20 * size + last).all()
