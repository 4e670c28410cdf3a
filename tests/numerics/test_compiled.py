"""What torch.compile makes of the kernels: the same bits, from one graph for all formats."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo

from altgrad.numerics import (
    amax,
    broadcast_scale,
    compute_scale,
    format_constants,
    quantize,
    round_to_grid,
    scale_from_amax,
)
from altgrad.numerics.compile_utils import constant_in_graphs
from altgrad.numerics.prove import decision_points
from tests.numerics.numerics_oracles import KERNEL_FORMATS, assert_identical, every_bfloat16, random_patterns

INPUTS = torch.cat([every_bfloat16(), random_patterns(200_000)])


class _ScaledRounding(torch.autograd.Function):
    """As a layer would use it: quantize forward in one format and the gradient in another."""

    @staticmethod
    def forward(ctx, x, forward_format, grad_format):
        ctx.save_for_backward(grad_format)
        scale = scale_from_amax(amax(x), forward_format)
        return round_to_grid(x * scale, forward_format) / scale

    @staticmethod
    def backward(ctx, grad):
        (grad_format,) = ctx.saved_tensors
        scale = scale_from_amax(amax(grad), grad_format, scale_format="E8M0")
        return round_to_grid(grad * scale, grad_format) / scale, None, None


@pytest.fixture
def no_recompilation():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield


def test_one_compiled_graph_gives_the_eager_bits_in_every_format(no_recompilation):
    def step(x, weight, constants, grad_constants):
        return _ScaledRounding.apply(x, constants, grad_constants) * weight, round_to_grid(INPUTS, constants)

    compiled = torch.compile(step, fullgraph=True)
    x = torch.randn(300, 41, generator=torch.Generator().manual_seed(0), requires_grad=True)
    weight = torch.randn(300, 41, generator=torch.Generator().manual_seed(1))
    grad_constants = format_constants("E5M2")
    for fmt in KERNEL_FORMATS:
        results = []
        for function in (step, compiled):
            y, rounded = function(x, weight, format_constants(fmt), grad_constants)
            results.append((y.detach(), *torch.autograd.grad(y.sum(), x), rounded))
        for eager, fused in zip(*results, strict=True):
            assert_identical(fused, eager, eager)
        assert_identical(results[1][2], quantize(INPUTS, fmt), INPUTS)


def test_one_compiled_graph_differentiates_every_format(no_recompilation):
    def each(x, fmt):
        return [quantize(x, fmt, scale=1.7, gradient=gradient) for gradient in ("straight-through", "clipped", "relu")]

    compiled = torch.compile(each, fullgraph=True)
    x = torch.linspace(-40, 40, 999).requires_grad_()
    for fmt in KERNEL_FORMATS:
        constants = format_constants(fmt)
        for y, eager, expected in zip(compiled(x, constants), each(x, constants), each(x, fmt), strict=True):
            slope = torch.autograd.grad((expected**3).sum(), x)[0]
            for found in (y, eager):
                assert_identical(found.detach(), expected.detach(), x.detach())
                assert torch.equal(torch.autograd.grad((found**3).sum(), x, retain_graph=True)[0], slope)


def test_compiled_quantize_gives_the_eager_bits(no_recompilation):
    """In BF16 too, where rounding by casts would be compiled away."""

    def several(x, scale):
        return (
            quantize(x, "E4M3", scale=scale, gradient="clipped"),
            quantize(x, "BF16"),
            quantize(x.double(), "E3M4", rounding="nearest-away", overflow="overflow"),
        )

    x = torch.cat([INPUTS[::50], decision_points(KERNEL_FORMATS[7])])
    x = x[x.isfinite()].requires_grad_()
    scale = torch.tensor(1.7)
    eager, fused = several(x, scale), torch.compile(several, fullgraph=True)(x, scale)
    for expected, actual in zip(eager, fused, strict=True):
        assert_identical(actual.detach(), expected.detach(), x.detach())
    grads = [torch.autograd.grad(sum(y.nan_to_num().sum() for y in results), x)[0] for results in (eager, fused)]
    assert torch.equal(*grads)


def test_compiled_block_scales_reach_the_shorter_last_block():
    def in_blocks(x):
        scales = [compute_scale(amax(x, "block", dim=dim), "E3M4", scale_format="E8M0") for dim in (0, 1)]
        return [quantize(x, "E3M4", scale=broadcast_scale(scales[dim], x.shape[dim], dim=dim)) for dim in (0, 1)]

    x = torch.randn(70, 40, generator=torch.Generator().manual_seed(0))
    assert all(map(torch.equal, torch.compile(in_blocks, fullgraph=True)(x), in_blocks(x)))


def test_a_function_marked_constant_has_torchs_own_mark_and_a_graph_holds_its_first_result():
    theirs, ours = torch.compiler.assume_constant_result(lambda: 1), constant_in_graphs(lambda: 1)
    assert vars(ours) == vars(theirs) != {}
    answers = iter([2.0, 3.0])
    read = constant_in_graphs(lambda: next(answers))  # which could not be traced
    double = torch.compile(lambda x: x * read(), backend="eager", fullgraph=True)
    assert [double(torch.tensor(1.0)).item() for _ in range(2)] == [2.0, 2.0]
