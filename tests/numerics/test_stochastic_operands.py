"""Operands rounded by chance. Oracles: a format's neighbours in its list of values, and the mean over many streams."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from altgrad.formats import get_format
from altgrad.numerics import format_constants, operand_scale, quantize_operands

SCALINGS = {
    "tensor": {},
    "row": {"granularity": "row"},
    "MX blocks": {"granularity": "block", "block": 8, "scale_format": "E8M0"},
    "two levels": {"granularity": "block", "block": 16, "scale_format": "E4M3"},
}
STREAMS, ALIKE = 200, 20  # draws of a value: as many streams, and places in each that hold the same


def stream(step: int, number: int = 1) -> Tensor:
    return torch.tensor([3, number, step])


def x_of(rows: int = 6, columns: int = 40) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).mul(2.0).exp() - 1


def drawn(x: Tensor, name: str, scaling: dict[str, Any], which: Tensor) -> Tensor:
    """Return ``x`` rounded by chance, its scales taken off again."""
    constants = format_constants(name, scale_format=scaling.get("scale_format", "float32"))
    found = quantize_operands([x], [constants], (), [which], **scaling, dtype=torch.float32)[0]
    return found.values if found.scale is None else found.values / found.scale


def neighbours(x: Tensor, name: str, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the format's values next to ``x * scale``, and that itself."""
    values = torch.tensor(sorted(set(get_format(name).values)), dtype=torch.float32)
    scaled = (x * scale).clamp(values[0], values[-1])
    place = torch.searchsorted(values, scaled, right=True).clamp(1, len(values) - 1)
    return values[place - 1], values[place], scaled


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", ["E2M1", "E4M3"])
def test_a_value_becomes_one_of_its_two_neighbours(name: str, dim: int, scaling: dict[str, Any]) -> None:
    x, options = x_of(), scaling | {"dim": dim}
    constants = format_constants(name, scale_format=scaling.get("scale_format", "float32"))
    scale = operand_scale(x, constants, **options).expand_as(x)
    below, above, scaled = neighbours(x, name, scale)
    for step in range(20):
        found = drawn(x, name, options, stream(step)) * scale
        near = lambda target: torch.isclose(found, target, rtol=1e-6, atol=0.0)  # noqa: B023,E731 # the scale is off and on
        assert (near(below) | near(above) | (scaled == found)).all()


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_it_is_right_on_average(scaling: dict[str, Any]) -> None:
    """And to nearest it is not: the same bound tells the two apart."""
    x = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    constants = format_constants("E2M1", scale_format=scaling.get("scale_format", "float32"))
    scale = operand_scale(x, constants, **scaling).expand_as(x)
    below, above, scaled = neighbours(x, "E2M1", scale)
    # Of a value that is drawn with that probability; the second term where it hardly ever is.
    spread = ((scaled - below) * (above - scaled)).sqrt() / scale
    draws = STREAMS * ALIKE
    far = 5 * spread / draws**0.5 + 20 * (above - below) / scale / draws
    repeated = x.repeat(ALIKE, 1)
    total = sum(drawn(repeated, "E2M1", scaling, stream(step)).double() for step in range(STREAMS))
    mean = total.unflatten(0, (ALIKE, len(x))).sum(0) / draws
    reachable = scaled / scale  # blocks in E4M3 have values beyond their largest
    assert ((mean - reachable).abs() <= far).all()
    nearest = quantize_operands([x], [constants], **scaling, dtype=torch.float32)[0]
    nearest = nearest.values if nearest.scale is None else nearest.values / nearest.scale
    assert ((nearest - reachable).abs() > far).double().mean() > 0.5


def test_streams_differ_and_repeat() -> None:
    x = x_of()
    first = drawn(x, "E2M1", {}, stream(0))
    assert torch.equal(first, drawn(x, "E2M1", {}, stream(0)))
    assert not torch.equal(first, drawn(x, "E2M1", {}, stream(1)))
    assert not torch.equal(first, drawn(x, "E2M1", {}, stream(0, number=2)))


def test_histories_set_the_scale_and_learn_as_with_nearest() -> None:
    x, constants = x_of(), format_constants("E4M3")
    by_chance, to_nearest = torch.tensor([50.0, 0.0]), torch.tensor([50.0, 0.0])
    found = quantize_operands([x], [constants], [by_chance], [stream(0)], learns="each")[0]
    expected = quantize_operands([x], [constants], [to_nearest], learns="each")[0]
    assert torch.equal(found.scale, expected.scale) and torch.equal(by_chance, to_nearest)
    assert by_chance.tolist() == [x.abs().max().item(), 50.0]


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_a_compiled_graph_draws_the_same(scaling: dict[str, Any]) -> None:
    x, constants = x_of(), format_constants("E2M1", scale_format=scaling.get("scale_format", "float32"))

    def both(x: Tensor, which: Tensor) -> Tensor:
        return quantize_operands([x], [constants], (), [which], **scaling, dtype=torch.float32)[0].values

    compiled = torch.compile(both, dynamic=False)
    for step in range(3):
        assert torch.equal(compiled(x, stream(step)), both(x, stream(step)))
