"""Parts of a study with losses that are written down, as the pipeline leaves them in a folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
import yaml

Losses = Mapping[tuple[str, str], Sequence[float]]  # by format and arm, one per seed from 0 on


def grid_of(results: pd.DataFrame) -> dict[str, list]:
    """Return the grid of which ``results`` have every cell."""
    columns = {"formats": "format", "optimizers": "optimizer", "seeds": "seed", "lr_scales": "lr_scale"}
    return {name: results[column].drop_duplicates().tolist() for name, column in columns.items() if column in results}


def write_part(folder: Path, results: pd.DataFrame, **params: object) -> Path:
    """Write ``results`` and params.yaml, whose grid is theirs and whose arms with a geometry are named for one."""
    folder.mkdir(parents=True)
    results.to_csv(folder / "results.csv", index=False)
    arms = {
        arm: {"base": "adamw"} | ({"stiffness": "ulp"} if "matched" in arm or "stiff" in arm else {})
        for arm in results["optimizer"].unique().tolist()
    }
    settings = {"optimizers": arms, "grid": grid_of(results)} | params
    (folder / "params.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    return folder


def part_of(folder: Path, losses: Losses, **params: object) -> Path:
    """Write a part that has these losses."""
    rows = [(entry, arm, seed, loss) for (entry, arm), own in losses.items() for seed, loss in enumerate(own)]
    return write_part(folder, pd.DataFrame(rows, columns=["format", "optimizer", "seed", "val_loss"]), **params)


def without(folder: Path, entry: str, arm: str, *seeds: int) -> None:
    """Take the losses of an arm's seeds out of a part, as if these runs had diverged."""
    results = pd.read_csv(folder / "results.csv")
    lost = (results["format"] == entry) & (results["optimizer"] == arm) & results["seed"].isin(seeds)
    assert lost.sum() == len(seeds)
    results[~lost].to_csv(folder / "results.csv", index=False)
