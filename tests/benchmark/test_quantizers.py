"""One quantization beside its peers. Oracle: torch's own cast, for what is timed."""

from __future__ import annotations

import torch

from altgrad.benchmark import quantizers

CPU = torch.device("cpu")


def test_slow_contestants_sit_out_the_large_sizes(monkeypatch):
    monkeypatch.setattr(quantizers, "SLOW_LIMIT", 2048)
    entries = [quantizers.Contestant(name, lambda *_: None, slow=name == "slow") for name in ("fast", "slow")]
    assert [result["name"] for result in quantizers.timed(entries, 2048, 2, CPU)] == ["fast", "slow"]
    assert [result["name"] for result in quantizers.timed(entries, 4096, 2, CPU)] == ["fast"]


def test_contestants_in_one_format_agree(monkeypatch):
    """What is timed is the same computation: every way of ours, and torch's cast where the format is its."""
    x = torch.randn(4, 1024, generator=torch.Generator().manual_seed(0))
    scale = torch.tensor(37.0)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    entries = {entry.name: entry.run for entry in quantizers.contestants("E4M3", CPU)}
    expected = entries["torch E4M3FN, eager"](x, x, scale, scale)
    for name in ("ours, compiled", "ours, eager", "ours, compiled, row scales", "ours, eager, row scales"):
        assert torch.equal(entries[name](x, x, scale, scale.expand(4, 1)), expected)
    out = torch.empty_like(x)
    entries["ours, compiled, into a buffer"](x, out, scale, scale)
    assert torch.equal(out, expected)
