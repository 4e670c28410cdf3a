"""What a power-of-two scale clamps, as `altgrad.formats.clamping` says it, against tensors that are quantized."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch.nn import functional as F

from altgrad.formats import clamping, get_format
from altgrad.numerics import compute_scale, format_constants, quantize
from altgrad.numerics.sums import block_statistics

FORMATS = ("E4M3", "E5M2", "E3M2", "E2M3", "E2M1", "E7M0")


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("rule", clamping.RULES)
def test_it_is_what_quantizing_with_that_scale_takes_away(fmt, rule):
    """At the edges of every interval, their neighbours, and at random: float32 values have an exact answer."""
    found = get_format(fmt)
    edges = torch.tensor([*[1 + part / 64 for part in range(65)], *found.values[-4:]], dtype=torch.float32)
    close = torch.cat([edges.nextafter(torch.tensor(end)) for end in (0.0, torch.inf)])
    amax = torch.cat([edges, close, 1 + torch.rand(64, generator=torch.Generator().manual_seed(0))]) / 768
    scale = compute_scale(amax, fmt, scale_format="E8M0", scale_rounding=rule)
    scaled = amax.double() * scale.double()
    took = (1 - found.max / scaled).clamp(min=0)
    said = [float(clamping.cut_off(Fraction(value), fmt, rule)) for value in amax.double().tolist()]
    assert said == pytest.approx(took.tolist(), rel=1e-12, abs=1e-15)
    clamped = took > 0
    assert rule == "even" or bool(clamped.any()) == (rule == "floor" and fmt != "E7M0")
    assert torch.equal(quantize(amax, fmt, scale=scale)[clamped] * scale[clamped],
                       torch.full_like(amax, found.max)[clamped])  # fmt: skip


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("bf16", [False, True])
def test_the_right_tokens_gradient_is_that_of_the_mean_loss(bf16, smoothing):
    for tokens in (7, 48, 64, 100):
        logits = torch.randn(tokens, 16, generator=torch.Generator().manual_seed(tokens)) * 3
        logits = (logits.bfloat16() if bf16 else logits.double()).requires_grad_()
        targets = torch.arange(tokens) % 16
        wide = logits.double()
        F.cross_entropy(wide, targets, label_smoothing=smoothing).backward()
        assert logits.grad is not None
        label, right = 1 - smoothing + smoothing / 16, (torch.arange(tokens), targets)
        p, seen = wide.detach().softmax(dim=-1)[right], logits.grad[right].abs()
        for value, gradient in zip(p.tolist(), seen.double().tolist(), strict=True):
            said = float(clamping.right_token(tokens, value, label=label, bf16=bf16))
            assert said == pytest.approx(gradient, rel=1e-2 if bf16 else 1e-12, abs=(1e-4 if bf16 else 0) / tokens)
            assert not bf16 or torch.tensor(said).bfloat16().item() == said


@pytest.mark.parametrize(("fmt", "scale"), [("E4M3", "E8M0"), ("E2M1", "E4M3")])
def test_scales_under_one_of_the_tensor_know_nothing_of_tokens(fmt, scale):
    """NVFP4's float32 scale brings the largest block to the same place whatever the mean is over, MX's does not."""
    p = torch.randn(256, 64, generator=torch.Generator().manual_seed(0)).softmax(dim=-1)
    gradient = p - F.one_hot(torch.arange(256) % 64, 64)
    constants = format_constants(fmt, scale_format=scale)
    options = {"block": 16, "scale_format": scale, "scale_rounding": "floor" if scale == "E8M0" else "rceil"}
    shares = [block_statistics(gradient / tokens, constants, **options).clamped for tokens in (1024, 1088, 1536)]
    assert (max(shares) - min(shares) < 1e-6) == (scale == "E4M3")
    assert shares[0] > 0.03 if scale == "E8M0" else shares[0] < 0.02


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("label", [1.0, 0.9])
def test_floor_leaves_whole_the_batches_that_it_is_said_to(fmt, label):
    def cut(tokens: int) -> Fraction:
        return clamping.cut_off(clamping.right_token(tokens, 1e-9, label=label), fmt, "floor")

    for tokens in (64, 100, 1000, 1024, 1040, 4095):
        first, last = clamping.unclamped(tokens, fmt, label)
        assert 0 < first <= last < 2 * tokens
        assert not any(cut(inside) for inside in (first, last, (first + last) // 2) if first <= inside <= last)
        if fmt != "E7M0":  # of which floor clamps nothing, ever
            assert cut(first - 1) > 0 and cut(last + 2) > 0


def test_the_command_tells_it_and_refuses_what_is_none(capsys):
    assert clamping.main(["1024"]) == 0
    said = capsys.readouterr().out
    assert "floor   float32       12.4" in said and "1,171 to 2,047 tokens" in said
    smoothed = ["8", "--smoothing", "1"], "less than 1"
    for wrong, why in (["0"], "1 or more"), (["8", "--format", "E9"], "unknown format"), smoothed:
        with pytest.raises(SystemExit):
            clamping.main(wrong)
        assert why in capsys.readouterr().err
