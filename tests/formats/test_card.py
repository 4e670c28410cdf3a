"""Format cards, as the command prints and draws them."""

from __future__ import annotations

import pytest

from altgrad.formats import format_names, get_format
from altgrad.formats.__main__ import card, main


def test_card_states_range_spacing_and_codes(capsys):
    assert main(["E3M4"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("E3M4 (3 exponent bits, 4 mantissa bits, bias 3, finite, max 31)\n")
    lines = [line.split() for line in printed.splitlines()]
    assert ["largest,", "smallest", "31,", "-31"] in lines
    assert ["0", "0.484375", "0.015625", "32"] in lines  # subnormals and the first binade share a spacing
    assert ["16", "31", "1", "16"] in lines
    assert "0x7F 31 " in printed
    assert "0xFF -31" in printed
    assert "infinity                0x7C\n" in card(get_format("E5M2"))
    assert "NaN                     0x80\n" in card(get_format("E4M3FNUZ"))
    assert "negative zero           none" in card(get_format("binary8p3"))


@pytest.mark.parametrize("name", format_names())
def test_every_format_has_a_card(name):
    fmt = get_format(name)
    printed = card(fmt)
    assert str(fmt) in printed
    if fmt.bits <= 8:
        assert printed.count("0x") >= 2**fmt.bits


def test_overview_lists_every_format(capsys):
    assert main([]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == ["format", *format_names()]


def test_two_formats_are_drawn_side_by_side(tmp_path):
    path = tmp_path / "formats.png"
    assert main(["POSIT8", "E4M3", "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["E3M4", "E7M0", "E0M7", "E8M0"])
def test_plot_is_written(name, tmp_path, capsys):
    path = tmp_path / "format.png"
    assert main([name, "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert str(path) in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["E3M"], ["--plot", "x.png"], ["E3M4", "E4M3", "HIF8", "--plot", "x.png"]])
def test_wrong_arguments_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "error: " in capsys.readouterr().err
