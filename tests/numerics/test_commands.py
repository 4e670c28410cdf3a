"""What the benchmark of the numerics measures and writes."""

from __future__ import annotations

import json
import mmap

import pytest
import torch

from altgrad.numerics.check import bench


def test_benchmark_records_figures_for_every_contestant(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    output = tmp_path / "bench.json"
    sizes = ["1024", "8192"]
    assert bench.main(["--sizes", *sizes, "--rounds", "2", "--threads", "1", "--output", str(output)]) == 0
    record = json.loads(output.read_text())
    measured = {(result["name"], result["elements"]) for result in record["results"]}
    assert {name for name, _ in measured} >= {"ours, compiled", "ours, eager", "x * s, eager", "torch E4M3FN, eager"}
    assert len(measured) == len(record["results"])
    assert all(result["median_ns_per_element"] > 0 for result in record["results"])
    assert [row["elements"] for row in record["ratios"]] == [1024, 8192]
    assert "median ns per element" in capsys.readouterr().out


def test_slow_contestants_sit_out_the_large_sizes(monkeypatch):
    monkeypatch.setattr(bench, "SLOW_LIMIT", 2048)
    entries = [bench.Contestant("fast", lambda *_: None), bench.Contestant("slow", lambda *_: None, slow=True)]
    assert [result["name"] for result in bench.measure(entries, 2048, 2)] == ["fast", "slow"]
    assert [result["name"] for result in bench.measure(entries, 4096, 2)] == ["fast"]


def test_contestants_in_one_format_agree(monkeypatch):
    """What is timed is the same computation: every way of ours, and torch's cast where the format is its."""
    x = torch.randn(4, 1024, generator=torch.Generator().manual_seed(0))
    scale = torch.tensor(37.0)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    entries = {entry.name: entry.run for entry in bench.contestants("E4M3")}
    expected = entries["torch E4M3FN, eager"](x, x, scale, scale)
    for name in ("ours, compiled", "ours, eager", "ours, compiled, row scales", "ours, eager, row scales"):
        assert torch.equal(entries[name](x, x, scale, scale.expand(4, 1)), expected)
    out = torch.empty_like(x)
    entries["ours, compiled, into a buffer"](x, out, scale, scale)
    assert torch.equal(out, expected)


def test_extra_memory_counts_what_a_call_holds():
    # From the system itself: an allocator may have memory left that other tests have used.
    with mmap.mmap(-1, 1 << 25) as held:

        def touch_all_pages() -> None:
            held[:: mmap.PAGESIZE] = b"1" * (len(held) // mmap.PAGESIZE)

        factor = bench.extra_memory(touch_all_pages, len(held))
    if factor is None:
        pytest.skip("this system does not tell a process's peak memory")
    assert 0.8 < factor < 1.3


def test_eager_quantization_needs_little_more_than_its_output():
    x = torch.randn(1 << 23)
    factor = bench.extra_memory(lambda: bench.quantize(x, "E3M4", scale=2.0), x.numel() * 4)
    if factor is None:
        pytest.skip("this system does not tell a process's peak memory")
    assert factor < 1.5
