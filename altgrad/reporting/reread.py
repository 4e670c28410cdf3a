"""Read a kept study's losses again by today's rules, without training anything.

    python -m altgrad.reporting.reread reports/study/matrix [FOLDER ...]

A folder has what ``make repro KEEP=FOLDER`` keeps: params.yaml, results.csv and REPORT.md. The sections of REPORT.md
that say what the losses mean (answer, result, fairness, definitions) and their two figures are written anew; what
was measured inside the runs is left as it is. Columns of the results that results.csv does not hold stay empty.
"""

from __future__ import annotations

import argparse
import itertools
import re
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd

from altgrad.config import UserError, run_stage
from altgrad.config.arms import Arm
from altgrad.config.cell import cell_key
from altgrad.config.files import read_yaml, write_text
from altgrad.reporting.answer import QUESTION, answer
from altgrad.reporting.compare import compare
from altgrad.reporting.control import check_twins
from altgrad.reporting.document import Document
from altgrad.reporting.figures import PLATES, draw
from altgrad.reporting.load import COLUMNS, COMPLETED, DIVERGED, IDENTITY, NUMBERS, TEXTS, Study
from altgrad.reporting.markdown import to_markdown
from altgrad.reporting.sections import definitions_section, fairness_section, result_section
from altgrad.reporting.simulated import load_rates

FILES = ("params.yaml", "results.csv", "REPORT.md")
FIGURES = ("gains", "final_differences")


def kept_study(folder: Path) -> Study:
    """Return the study of ``folder`` with its final losses and settings and nothing else.

    A cell that results.csv does not have counts as diverged. Raises :class:`UserError` for a folder without the files.
    """
    absent = [name for name in FILES if not (folder / name).is_file()]
    if absent:
        raise UserError(f"{folder}: no {absent[0]}; name a folder that make repro KEEP=FOLDER wrote")
    params = read_yaml(folder / "params.yaml")
    losses = pd.read_csv(folder / "results.csv").set_index(IDENTITY)["val_loss"].to_dict()
    grid, train = params["grid"], params["train"]
    stated = re.search(r"GPT of ([\d.]+) M parameters", (folder / "REPORT.md").read_text())
    model = params["models"][params["model"]]
    tokens = train["steps"] * train["batch"] * train["grad_accumulation"] * model["context"]
    rows, resolved = [], {}
    lists = (grid[name] for name in ("formats", "optimizers", "seeds", "lr_scales"))
    for entry, optimizer, seed, rate in itertools.product(*lists):
        key, loss = cell_key(entry, optimizer, seed, rate), losses.get((entry, optimizer, seed, rate))
        arm, rules = _arm(params["optimizers"][optimizer]), _rules(params, entry)
        resolved[key] = {"format": entry, "optimizer": optimizer, "arm": arm, "rules": rules, "train": train}
        rows.append({
            "key": key, "format": entry, "optimizer": optimizer, "seed": seed, "lr_scale": rate, "val_loss": loss,
            "status": DIVERGED if loss is None else COMPLETED, "steps": train["steps"], "planned_steps": train["steps"],
            "peak_lr": arm["lr"] * rate, "parameters": float(stated[1]) * 1e6 if stated else None, "tokens": tokens,
        })  # fmt: skip
    cells = pd.DataFrame(rows).set_index("key").reindex(columns=[*IDENTITY, *TEXTS, *NUMBERS, "reason"])
    cells[NUMBERS] = cells[NUMBERS].astype("float64")
    frames = {name: pd.DataFrame(columns=[*IDENTITY, *columns]) for name, columns in COLUMNS.items()}
    frames["history"] = cells[[*IDENTITY, "steps", "val_loss"]].rename(columns={"steps": "step"}).reindex(
        columns=frames["history"].columns
    )  # fmt: skip
    return Study(params, {"corpus": params["corpus"]}, resolved, cells, timing={}, **frames)


def _arm(settings: dict[str, Any]) -> dict[str, Any]:
    """Return an arm with its defaults."""
    defaults = {name: field.default for name, field in Arm.model_fields.items()}
    arm = defaults | {"betas": list(defaults["betas"])} | dict(settings)  # as JSON has it
    if arm["weights"] == "grid":
        arm["weights"] = "quantized"  # what it is called since
    return arm


def _rules(params: dict[str, Any], entry: str) -> list[dict[str, Any]]:
    """Return the rules of a grid entry with its format filled in, each role's settings or None."""
    recipes = params["recipes"]
    recipe, _, fmt = entry.partition(".") if "." in entry else (entry, "", "")
    if entry not in recipes and not fmt:
        recipe, fmt = params["grid"]["recipe"], entry

    def spec(value: Any) -> dict[str, Any] | None:
        settings = {"format": value} if isinstance(value, str) else value
        return settings and {**settings, "format": fmt if settings["format"] == "FORMAT" else settings["format"]}

    return [
        {"layers": rule["layers"], **{role: spec(rule.get(role)) for role in ("weight", "input", "grad")}}
        for rule in recipes[recipe]
    ]


def reread(folder: Path, simulation: Path) -> None:
    """Write the sections and figures of ``folder`` anew that say what the losses mean."""
    study = kept_study(folder)
    comparison, control = compare(study), check_twins(study)
    with TemporaryDirectory() as drawn:
        pictures = draw([plate for plate in PLATES if plate.name in FIGURES], study, comparison, Path(drawn))
        for name in pictures:
            shutil.copy(Path(drawn, f"{name}.png"), folder / "figures")
    fair = fairness_section(study, comparison, control)
    sections = [result_section(study, comparison, pictures), fair, definitions_section(study)]
    said = answer(study, comparison, control, load_rates(simulation, study))
    fresh = _parts(to_markdown(Document("", QUESTION, said, sections)))
    old = _parts((folder / "REPORT.md").read_text())
    text = "".join(fresh[heading].rstrip() + "\n\n" if heading in fresh and heading else part
                   for heading, part in old.items())  # fmt: skip
    write_text(folder / "REPORT.md", text.rstrip() + "\n")


def _parts(text: str) -> dict[str, str]:
    """Return the parts of a report by their headings, what stands before the first one under the empty heading."""
    parts = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    return {part[3:].split("\n", 1)[0] if part.startswith("## ") else "": part for part in parts}


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m altgrad.reporting.reread", description=__doc__.split("\n")[0])
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--simulation", type=Path, default=Path("reports/simulation.csv"), help="the rates to quote")
    settings = parser.parse_args(arguments)
    for folder in settings.folders:
        reread(folder, settings.simulation)
        print(f"read {folder} again")


if __name__ == "__main__":
    run_stage(main)
