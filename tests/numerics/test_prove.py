"""The proof accepts the quantizer, and catches quantizers that are broken in the usual ways."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

from altgrad.formats import get_format
from altgrad.numerics import format_constants, prove, round_to_grid

FMT = get_format("E3M4")
# Magnitude patterns around E3M4's smallest normal 0.25, its largest value 31, and infinity.
REDUCED = [range(0x3E700000, 0x3E900000), range(0x41F00000, 0x42000000), range(0x7F7F0000, 0x7F810000)]


def ours(x: Tensor) -> Tensor:
    return round_to_grid(x, format_constants(FMT))


def by_logarithm(x: Tensor) -> Tensor:
    ulp = torch.exp2(torch.floor(torch.log2(x.abs())).clamp_min(FMT.emin) - FMT.mantissa_bits)
    return (torch.round(x / ulp) * ulp).clamp(-FMT.max, FMT.max)


def by_adding_to_the_bits(x: Tensor) -> Tensor:
    bits = x.view(torch.int32)
    rounded = (bits + (1 << 18) - 1 + ((bits >> 19) & 1)) & -(1 << 19)
    return rounded.view(torch.float32).clamp(-FMT.max, FMT.max)


def by_magic_number(x: Tensor) -> Tensor:
    ulp = 2.0 ** ((x.view(torch.int32) >> 23 & 0xFF) - 127).clamp(FMT.emin, 103) / 2**FMT.mantissa_bits
    magic = 1.5 * 2.0**23 * ulp
    return ((x + magic) - magic).clamp(-FMT.max, FMT.max)


def wrong_once(x: Tensor) -> Tensor:
    return torch.where(x.view(torch.int32) == 0x41F12345, FMT.max, ours(x))


@pytest.mark.parametrize("magnitudes", REDUCED, ids=lambda span: hex(span.start))
def test_the_quantizer_passes(magnitudes):
    for overflow in ("saturate", "overflow"):
        result = prove.prove(FMT, "nearest-even", overflow, "eager", magnitudes)
        assert result["mismatches"] == 0
        assert result["patterns"] == 2 * len(magnitudes)


@pytest.mark.parametrize("mode", prove.MODES)
@pytest.mark.parametrize("name", ["E4M3FNUZ", "E0M7", "E7M0", "binary8p1"])
def test_every_mode_passes(name, mode):
    span = range(0x3F7F0000, 0x3F810000)
    assert prove.prove(get_format(name), mode, "saturate", "eager", span)["mismatches"] == 0


@pytest.mark.parametrize("broken", [by_logarithm, by_adding_to_the_bits, by_magic_number])
def test_broken_quantizers_fail_at_a_decision_point(broken):
    points, mismatches = prove.check_decision_points(broken, FMT, "nearest-even", "saturate")
    assert points > 1500
    assert mismatches
    assert prove.check_decision_points(ours, FMT, "nearest-even", "saturate") == (points, [])


@pytest.mark.parametrize(
    ("broken", "magnitudes", "complaint"),
    [
        (by_adding_to_the_bits, REDUCED[2], "loses NaN"),
        (by_magic_number, range(1 << 16), "wrong sign"),
        (wrong_once, REDUCED[1], "steps back"),
    ],
)
def test_broken_quantizers_fail_in_the_sweep(broken, magnitudes, complaint):
    patterns, violations = prove.check_order(broken, FMT, magnitudes)
    assert patterns == 2 * len(magnitudes)
    assert any(complaint in line for line in violations)


def test_steps_between_chunks_are_compared(monkeypatch):
    monkeypatch.setitem(prove._CHUNKS, "cpu", 8)
    edge = 0x41F12340  # the last pattern of one chunk steps above the first of the next
    assert (edge - REDUCED[1].start) % 8 == 0

    def wrong_at_the_edge(x: Tensor) -> Tensor:
        return torch.where(x.view(torch.int32) == edge - 1, FMT.max, ours(x))

    _, violations = prove.check_order(wrong_at_the_edge, FMT, range(edge - 32, edge + 32))
    assert violations == [f"1 times from 0x{edge - 1:08x}: steps back"]


def test_the_record_says_what_was_checked_and_wrong(tmp_path, monkeypatch, capsys):
    sweep = prove.check_order
    monkeypatch.setattr(prove, "check_order", lambda round_, fmt, _, *more: sweep(round_, fmt, REDUCED[0], *more))
    output = tmp_path / "reports" / "proof.json"
    arguments = ["--formats", "E3M4", "--modes", "nearest-even", "up", "--paths", "eager", "--output", str(output)]
    assert prove.main(arguments) == 0
    record = json.loads(output.read_text())
    assert [(r["format"], r["mode"], r["mismatches"]) for r in record["results"]] == [
        ("E3M4", "nearest-even", 0),
        ("E3M4", "up", 0),
    ]
    assert {"torch", "processor", "commit"} <= record.keys()
    assert "2 proofs, 0 mismatches" in capsys.readouterr().out
    assert list(output.parent.iterdir()) == [output]
    monkeypatch.setattr(prove, "rounder", lambda *_: by_logarithm)
    assert prove.main(arguments) == 1  # a mismatch is an error exit
    assert json.loads(output.read_text())["results"][0]["examples"]


@pytest.mark.parametrize("name", prove.DEFAULT_FORMATS)
def test_the_kernels_are_proven_where_they_round(name):
    """They serve one mode alone; the whole sweep is the command's."""
    fmt = get_format(name)
    assert not prove._in_kernels(fmt, "up", "saturate") and prove._in_kernels(fmt, "nearest-even", "saturate")
    for span in (range(0x3F7F0000, 0x3F810000), REDUCED[2]):
        assert prove.prove(fmt, "nearest-even", "saturate", "kernels", span)["mismatches"] == 0


@pytest.mark.parametrize(("arguments", "gpu", "words"), [
    (["--device", "cuda"], False, "sees no CUDA device"),
    (["--device", "cuda", "--paths", "kernels"], True, "needs Triton"),
    (["--formats", "E3M"], False, "did you mean E3M4"),
])  # fmt: skip
def test_what_cannot_be_proven_is_refused(capsys, monkeypatch, arguments, gpu, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(prove.gpu_launch, "available", lambda: False)
    with pytest.raises(SystemExit):
        prove.main(arguments)
    assert words in capsys.readouterr().err
