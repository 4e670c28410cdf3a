"""A kept study is read again by today's rules. Oracle: its results.csv by pandas, and what must stay as it was."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pandas as pd
import pytest

from altgrad.config import UserError
from altgrad.reporting.compare import compare
from altgrad.reporting.reread import kept_study, main
from altgrad.reporting.roles import regime

KEPT = Path(__file__).parents[2] / "reports/study"
# Trained on a GPU and not diagnosed, which a REPORT.md takes: HYPOTHESES.md, after L51.
WITHOUT_REPORT = {"ladder-m50", "ladder-m124", "ladder-micro-3300", "tuning-m50", "tuning-m50-lower", "tuning-m124",
                  "tuning-m124-lower", "tuning-micro-3300"}  # fmt: skip
PARTS = {str(path.parent.relative_to(KEPT)) for path in KEPT.rglob("results.csv")} - WITHOUT_REPORT


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kept") / "controls"
    shutil.copytree(KEPT / "controls", folder)
    report = folder / "REPORT.md"
    report.write_text(report.read_text().replace("## Result", "## Result\n\nan old sentence", 1))
    main([str(folder), "--simulation", str(folder / "none.csv")])
    return folder


def test_gains_are_those_of_the_losses_kept(folder: Path) -> None:
    losses = pd.read_csv(folder / "results.csv").pivot_table("val_loss", ["format", "seed"], "optimizer")
    by_hand = (losses["adamw"] - losses["stiff_matched"]).groupby("format").mean()
    gains = compare(kept_study(folder)).gains
    own = gains[gains["optimizer"] == "stiff_matched"].set_index("format")
    assert {name: -claim.difference.mean for name, claim in own["claim"].items()} == pytest.approx(by_hand.to_dict())
    said = (folder / "REPORT.md").read_text()
    row = re.search(r"\| \*\*E3M4\*\* \| stiff\\_matched \| matched size \| 8 \| (\S+) ", said)
    assert float(row[1]) == pytest.approx(by_hand["E3M4"], abs=5e-5)


def test_what_was_measured_inside_the_runs_stays(folder: Path) -> None:
    def parts(text: str) -> dict[str, str]:
        return {part.split("\n", 1)[0]: part for part in re.split(r"^## ", text, flags=re.MULTILINE)}

    old, new = (parts((where / "REPORT.md").read_text()) for where in (KEPT / "controls", folder))
    assert list(old) == list(new)
    for heading in ("What the updates did", "Why: precision and range", "Flags", "Time and cost"):
        assert old[heading] == new[heading]
    assert "an old sentence" not in new["Result"]


def test_a_second_reading_changes_nothing(folder: Path) -> None:
    before = (folder / "REPORT.md").read_bytes()
    main([str(folder), "--simulation", str(folder / "none.csv")])
    assert (folder / "REPORT.md").read_bytes() == before


@pytest.mark.parametrize("part", sorted(PARTS))
def test_every_kept_study_can_be_read(part: str) -> None:
    study = kept_study(KEPT / part)
    kept = pd.read_csv(KEPT / part / "results.csv")
    assert study.count("completed") == len(kept)
    assert study.cells["val_loss"].sum() == pytest.approx(kept["val_loss"].sum())


def test_another_folder_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no params\.yaml; name a folder that make repro KEEP=FOLDER wrote"):
        main([str(tmp_path)])


def test_an_earlier_word_for_quantized_weights_is_understood() -> None:
    assert "weights: grid" in (KEPT / "low-bits/params.yaml").read_text()
    study = kept_study(KEPT / "low-bits")
    assert {regime(study.arm(name)) for name in study.optimizers} == {"quantized"}
    assert regime(kept_study(KEPT / "matrix").arm("adamw")) == "master"
