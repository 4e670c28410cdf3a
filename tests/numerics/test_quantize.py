"""quantize as callers meet it: dtypes, shapes, scales, gradients, transforms, randomness, errors."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import pytest
import torch

from altgrad.formats import get_format
from altgrad.numerics import (
    amax,
    broadcast_scale,
    compute_scale,
    eager,
    format_constants,
    quantization,
    quantize,
    round_to_grid,
)
from altgrad.numerics.rounding import OVERFLOW_POLICIES, ROUNDING_MODES
from tests.numerics.numerics_oracles import assert_identical, random_patterns


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3, 4), (70_001,)])
def test_shape_dtype_and_device_are_kept(shape, dtype):
    x = torch.randn(shape, generator=seeded()).to(dtype)
    y = quantize(x, "E3M4", scale=2.0)
    assert (y.shape, y.dtype, y.device) == (x.shape, x.dtype, x.device)
    assert torch.equal(y.double(), quantize(x.double(), "E3M4", scale=2.0))


@pytest.mark.parametrize("rounding", ROUNDING_MODES)
@pytest.mark.parametrize("overflow", OVERFLOW_POLICIES)
def test_strides_do_not_matter(rounding, overflow):
    x = torch.randn(6, 7, 8, generator=seeded()) * 20
    before = x.clone()
    for view in (x.permute(2, 0, 1), x[::2, :, 1::3], x[0].t(), x.expand(2, 6, 7, 8)):
        options = {"rounding": rounding, "overflow": overflow}
        ours = quantize(view, "E3M4", generator=seeded(), **options)
        assert_identical(ours, quantize(view.contiguous(), "E3M4", generator=seeded(), **options), view)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_scaled_rounding_is_product_then_rounding_then_quotient(dtype):
    x = torch.randn(64, 33, generator=seeded()).to(dtype)
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    rows = compute_scale(amax(x, "row"), "E4M3")
    blocks = broadcast_scale(compute_scale(amax(x, "block", block=8), "E4M3"), 33, block=8)
    for scale in (torch.tensor(2.7), rows, blocks):
        wide = scale.to(compute)
        expected = (quantize(x.to(compute) * wide, "E4M3") / wide).to(dtype)
        assert torch.equal(quantize(x, "E4M3", scale=scale), expected)
    assert torch.equal(quantize(x, "E4M3", scale=2.7), quantize(x, "E4M3", scale=torch.tensor(2.7, dtype=compute)))


@pytest.mark.parametrize("piece", [1, 7, 1000, 1 << 20])
def test_chunking_leaves_no_seam(piece, monkeypatch):
    x = random_patterns(2005)
    whole = round_to_grid(x, format_constants("E5M2"))
    drawn = quantize(x, "E5M2", rounding="stochastic", generator=seeded(3))
    in_pieces = partial(eager.map_chunks, piece=piece)
    monkeypatch.setattr(quantization, "map_chunks", lambda x, scale, round_, **_: in_pieces(x, scale, round_))
    assert_identical(quantize(x, "E5M2"), whole, x)
    assert_identical(quantize(x.bfloat16(), "E5M2"), round_to_grid(x.bfloat16().float(), format_constants("E5M2")), x)
    assert_identical(quantize(x, "E5M2", rounding="stochastic", generator=seeded(3)), drawn, x)


def test_gradient_passes_straight_through():
    x = torch.tensor([0.3, 100.0, -7.7], requires_grad=True)
    weight = torch.tensor([1.0, 2.0, 3.0])
    (quantize(x, "E3M4", scale=3.0) * weight).sum().backward()
    assert torch.equal(x.grad, weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_clipped_gradient_is_zero_beyond_the_range(dtype):
    x = torch.tensor([0.3, 31.0, 31.5, -62.0, 15.5, torch.nan], dtype=dtype, requires_grad=True)
    quantize(x, "E3M4", gradient="clipped").sum().backward()
    assert x.grad.tolist() == [1.0, 1.0, 0.0, 0.0, 1.0, 0.0]
    x.grad = None
    quantize(x, "E3M4", scale=torch.tensor(2.0), gradient="clipped").sum().backward()
    assert x.grad.tolist() == [1.0, 0.0, 0.0, 0.0, 1.0, 0.0]


PASSES = {"straight-through": torch.ones_like, "clipped": lambda x: x.abs() <= 31, "relu": lambda x: x > 0}


@pytest.mark.parametrize("gradient", PASSES)
@pytest.mark.parametrize("hessian", [torch.func.hessian, lambda f: lambda x: torch.autograd.functional.hessian(f, x)])
def test_hessian_is_that_of_the_surrounding_function(hessian, gradient):
    """With q in place of x and dq/dx = 1, the second derivative of q^3 is 6 q."""
    x = torch.tensor([1.03, -2.2, 40.0, 0.0])

    def cubed(x):
        return (quantize(x, "E3M4", gradient=gradient) ** 3).sum()

    expected = 6 * quantize(x, "E3M4") * PASSES[gradient](x)
    assert torch.allclose(hessian(cubed)(x), torch.diag(expected))


def test_vmap_is_quantizing_the_batch():
    x = torch.randn(5, 4, 3, generator=seeded())
    scale = torch.rand(5, generator=seeded(1)) + 0.5
    vmap = torch.func.vmap
    assert torch.equal(vmap(lambda a: quantize(a, "E4M3"))(x), quantize(x, "E4M3"))
    assert torch.equal(vmap(lambda a: quantize(a, "E4M3"), in_dims=2)(x), quantize(x, "E4M3").movedim(2, 0))
    expected = quantize(x, "E4M3", scale=scale[:, None, None])
    assert torch.equal(vmap(lambda a, s: quantize(a, "E4M3", scale=s))(x, scale), expected)
    one = vmap(lambda s: quantize(x[0], "E4M3", scale=s))(scale)
    assert torch.equal(one, quantize(x[0].expand(5, 4, 3), "E4M3", scale=scale[:, None, None]))


def test_autocast_does_not_lower_the_arithmetic():
    x = torch.randn(100, generator=seeded())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = quantize(x, "E2M5", scale=1.7)
    assert torch.equal(inside, quantize(x, "E2M5", scale=1.7))


@pytest.mark.parametrize(
    ("error", "match", "arguments"),
    [
        (TypeError, "^x: .*int64", {"x": torch.arange(3)}),
        (TypeError, "^x: .*bool", {"x": torch.ones(3, dtype=torch.bool)}),
        (TypeError, "^x: .*complex64", {"x": torch.ones(3, dtype=torch.complex64)}),
        (ValueError, "^x: torch.float16 cannot hold", {"x": torch.ones(3).half(), "fmt": "E7M0"}),
        (ValueError, "^x: torch.bfloat16 cannot hold", {"x": torch.ones(3).bfloat16(), "fmt": "FP16"}),
        (ValueError, "^x: torch.float32 cannot hold", {"fmt": "E9M6"}),
        (ValueError, "unknown format 'E4M9000'", {"fmt": "E4M9000"}),
        (ValueError, "^scale: ", {"scale": 0.0}),
        (ValueError, "^scale: ", {"scale": -1.0}),
        (ValueError, "^scale: ", {"scale": float("nan")}),
        (ValueError, "^scale: ", {"scale": float("inf")}),
        (ValueError, "^scale: ", {"scale": 1e-60}),
        (ValueError, "^scale: ", {"scale": torch.tensor([1.0, torch.nan, 1.0])}),
        (ValueError, "^scale: ", {"scale": torch.tensor([1.0, 0.0, 1.0])}),
        (ValueError, "^scale: shape", {"scale": torch.ones(2)}),
        (ValueError, "^scale: shape", {"scale": torch.ones(3, 1)}),
        (ValueError, "^rounding: .*nearest-even", {"rounding": "nearest"}),
        (ValueError, "^overflow: .*saturate", {"overflow": "wrap"}),
        (ValueError, "^gradient: .*clipped", {"gradient": "none"}),
        (TypeError, "^x: .*float32, got torch.float16", {"x": torch.ones(3).half(), "fmt": format_constants("E5M2")}),
        (ValueError, "^rounding: ", {"fmt": format_constants("E5M2"), "rounding": "up"}),
        (ValueError, "^rounding: ", {"fmt": format_constants("E5M2"), "overflow": "overflow"}),
        (ValueError, "^generator: ", {"rounding": "stochastic"}),
        (ValueError, "^random_bits: ", {"rounding": "stochastic", "generator": torch.Generator(), "random_bits": 32}),
        (ValueError, "^random_bits: ", {"rounding": "stochastic", "generator": torch.Generator(), "random_bits": 0}),
    ],
)
def test_errors_name_the_argument(error, match, arguments):
    arguments = {"x": torch.ones(3), "fmt": "E3M4"} | arguments
    with pytest.raises(error, match=match):
        quantize(arguments.pop("x"), arguments.pop("fmt"), **arguments)


def test_kernel_refuses_what_it_is_not_exact_for():
    with pytest.raises(TypeError, match="^x: expected torch.float32"):
        round_to_grid(torch.ones(3).bfloat16(), format_constants("E3M4"))
    for name in ("E8M0", "E9M6", "E8M3"):
        with pytest.raises(ValueError, match="^fmt: "):
            format_constants(get_format(name))


PROGRAM = """
import resource
import torch

limit = 4 << 30
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
torch.set_num_threads(1)
from altgrad.numerics import decode, encode, quantize

x = torch.randn(1 << 14, 1 << 14)
assert x.numel() * x.element_size() == 1 << 30
{work}
"""

WORK = {
    "nearest-even": "quantize(x, 'E3M4', scale=2.0)",
    "row scales": "quantize(x, 'E3M4', scale=torch.rand(1 << 14, 1) + 1)",
    "stochastic": "quantize(x, 'E3M4', rounding='stochastic', generator=torch.Generator())",
    "codes": "assert torch.equal(decode(encode(x, 'E3M4'), 'E3M4')[-1], quantize(x[-1], 'E3M4'))",
}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="limits on memory need a Unix system")
@pytest.mark.parametrize("work", WORK.values(), ids=WORK)
def test_a_gibibyte_fits_into_four(work):
    command = [sys.executable, "-c", PROGRAM.format(work=work)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
