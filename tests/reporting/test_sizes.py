"""Planted gains of several parts are found where they are, and own parts only where twins are."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

import pandas as pd
import pytest
import yaml

from altgrad.config import UserError
from altgrad.model.gpt import GPT, GPTConfig
from altgrad.reporting import sizes
from altgrad.reporting.parts import MILLIONS
from tests.reporting.made_parts import without

STUDY = Path(__file__).parents[2] / "reports/study"
STEPS = (-1.0, 2.0, 0.5, -1.5)


def part(folder: Path, model: str, losses: Mapping[tuple[str, str], float], steps: int = 200) -> None:
    """Write a part whose losses, by format and arm, differ from seed to seed by far more than arms do."""
    rows = [
        (entry, arm, seed, 3 + 0.3 * seed + loss + 1e-4 * number * STEPS[seed])
        for (number, ((entry, arm), loss)), seed in itertools.product(enumerate(losses.items()), range(4))
    ]
    folder.mkdir(parents=True)
    pd.DataFrame(rows, columns=["format", "optimizer", "seed", "val_loss"]).to_csv(folder / "results.csv", index=False)
    params = {
        "model": model,
        "models": {model: {"context": 128}},
        "train": {"steps": steps, "batch": 16, "grad_accumulation": 2},
    }
    (folder / "params.yaml").write_text(yaml.safe_dump(params))


@pytest.fixture
def study(tmp_path: Path) -> Path:
    part(tmp_path / "formats", "pico", {("E4M3", "adamw"): 0.0, ("E4M3", "stiff_matched"): -0.02})
    twins = ("E4M3", "virtual.E4M3")
    for entry in twins:
        part(tmp_path / "rungs" / entry, "pico", {
            (entry, arm): loss - 0.01 * (arm == "rung" and entry == "E4M3")
            for arm, loss in {"adamw": 0.5, "adamw_sr": 0.53, "rung": 0.49}.items()
        })  # fmt: skip
    part(tmp_path / "ladder-nano-twin", "nano", {("E3M4", "adamw"): 0.0, ("E3M4", "stiff_matched"): 0.03}, steps=400)
    part(tmp_path / "ladder-nano-arms", "nano", {("E3M4", "adamw"): 0.0, ("E3M4", "stiff_matched"): -9.0}, steps=400)
    return tmp_path


def found(text: str) -> dict[tuple[str, str], list[float | None]]:
    """Return the numbers of the table by gain and format; None for a dash."""
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {
        (row[0], row[1].strip("*")): [
            None if cell == "–" else float(cell.split(" [")[0].replace("−", "-")) for cell in row[2:]
        ]
        for row in cells
        if "**" in row[1]
    }


def test_each_gain_stands_in_its_models_column_and_from_the_first_part_that_has_it(study, capsys):
    sizes.main([str(study)])
    assert (study / "figures" / "sizes.png").is_file() and "SIZES.md" in capsys.readouterr().out
    text = (study / "SIZES.md").read_text()
    assert found(text) == {
        ("`stiff_matched` over `adamw`", "E4M3"): [pytest.approx(0.02, abs=3e-4), None],
        ("`stiff_matched` over `adamw`", "E3M4"): [None, pytest.approx(-0.03, abs=3e-4)],
        ("`adamw_sr` over `adamw`", "E4M3"): [pytest.approx(-0.03, abs=3e-4), None],
        ("`rung` over `adamw_sr`", "E4M3"): [pytest.approx(0.05, abs=3e-4), None],
        ("own part of `rung`", "E4M3"): [pytest.approx(0.01, abs=3e-4), None],
    }
    assert "0.8 M tokens with 0.17 M parameters, 1.6 M tokens with 1.3 M parameters." in text
    assert "all of its cells: 0.17 M, `formats`, `rungs/*`; 1.3 M, `ladder-nano-twin`, `ladder-nano-arms`." in text
    assert "| 0.17 M | 1.3 M |" in text and "5.8" not in text, "models of which nothing is trained have no column"


def test_a_part_that_lost_a_cell_does_not_answer_where_another_is_whole(study):
    before = sizes.page(study)
    without(study / "ladder-nano-twin", "E3M4", "stiff_matched", 2)
    gains = found(sizes.page(study))["`stiff_matched` over `adamw`", "E3M4"]
    assert found(before)["`stiff_matched` over `adamw`", "E3M4"] == [None, pytest.approx(-0.03, abs=3e-4)]
    assert gains == [None, pytest.approx(9, abs=3e-4)], "that of ladder-nano-arms, the next part"


def test_figures_show_gains_of_one_format_and_own_parts_of_each(study, monkeypatch):
    drawn = {}
    monkeypatch.setattr(sizes, "draw_courses", lambda courses, _, __, name, of: drawn.update({name: (of, courses)}))
    text = sizes.page(study)
    about = {
        name: (of, {label: list(points) for label, points in courses.items()}) for name, (of, courses) in drawn.items()
    }
    assert about == {"sizes": ("gain", {"stiff_matched": [1.3]}), "own_parts": ("own part", {"E4M3": [0.17]})}
    gain, own = drawn["sizes"][1]["stiff_matched"][1.3], drawn["own_parts"][1]["E4M3"][0.17]
    assert gain[0] == pytest.approx(-0.03, abs=3e-4) and own[0] == pytest.approx(0.01, abs=3e-4)
    assert "figures/sizes.png" in text and "figures/own_parts.png" in text


def test_what_no_part_has_is_not_drawn(tmp_path):
    part(tmp_path / "formats", "pico", {("E4M3", "adamw"): 0.0, ("E4M3", "stiff_matched"): -0.02})
    assert "figures/" not in sizes.page(tmp_path) and not (tmp_path / "figures").exists()


def test_a_folder_without_parts_is_refused(tmp_path):
    with pytest.raises(UserError, match="no part of pico, nano, micro, mini, m50 and m124 in it"):
        sizes.page(tmp_path)


@pytest.mark.parametrize("model", MILLIONS)
def test_the_stated_parameters_are_those_of_the_models(model):
    """As the study trained them."""
    params = yaml.safe_load((STUDY / sizes.PARTS[model][0] / "params.yaml").read_text())
    preset = params["models"][model]
    shape = {name: preset[name] for name in ("layers", "width", "heads", "context")}
    built = GPT(GPTConfig(vocab_size=params["tokenizer"]["vocab_size"], **shape))
    assert sum(parameter.numel() for parameter in built.parameters()) / 1e6 == pytest.approx(MILLIONS[model], rel=0.03)
