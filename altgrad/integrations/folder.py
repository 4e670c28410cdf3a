"""A project folder for runs that another program trains: what `make watch`, trackers and the report look for.

The files have the names and contents of those that the pipeline writes: ``data/grid`` lists the runs and their
settings, ``scratch`` has rows while they train, ``data/runs`` and ``data/diag`` what came of them.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from altgrad.common.errors import UserError
from altgrad.common.files import canonical_json, read_json, sha256_of, write_json, write_rows, write_text
from altgrad.common.fingerprint import only_worker
from altgrad.config import cell_key
from altgrad.config.params import GridSettings
from altgrad.diagnostics.diagnose import SCHEMA
from altgrad.model import layer_recipe, linear_layers, virtual_weight
from altgrad.optim import ArmOptimizer

LISTS = {"format": "formats", "optimizer": "optimizers", "seed": "seeds", "lr_scale": "lr_scales"}


def settings_of(model: nn.Module, optimizer: ArmOptimizer, identity: dict[str, Any], steps: int) -> dict[str, Any]:
    """Return the settings of a run, in the form of a resolved cell's, as far as ``model`` and ``optimizer`` have them.

    ``identity`` has format, optimizer, seed and lr_scale; ``steps`` counts the run's optimizer steps. Raises
    ``ValueError`` for a name that no file can have.
    """
    GridSettings(**{LISTS[name]: [value] for name, value in identity.items()})  # checks the names
    found = {name: layer_recipe(layer) for name, layer in linear_layers(model).items()}
    rules = [recipe.on(name) for name, recipe in found.items() if recipe is not None]
    tensors = [tensor for rule in rules for tensor in rule.tensors().values() if tensor is not None]
    tensors += [tensor for layer in linear_layers(model).values() if (tensor := virtual_weight(layer))]
    used = [tensor.format for tensor in tensors] + ([optimizer.arm.foreign] if optimizer.arm.foreign else [])
    arm = optimizer.arm.model_dump(mode="json")
    return {
        "key": cell_key(*identity.values()), **identity,
        "rules": [rule.model_dump(mode="json") for rule in rules],
        "formats": {fmt.name: asdict(fmt) for fmt in used},
        "arm": arm | {"lr": arm["lr"] / identity["lr_scale"]},
        "model": {"class": type(model).__name__, "parameters": sum(p.numel() for p in model.parameters())},
        "train": {"steps": steps},
    }  # fmt: skip


class Folder:
    """The files of one run in the project folder ``root``."""

    def __init__(self, root: Path, settings: dict[str, Any]) -> None:
        self.root, self.settings = root, settings
        key = settings["key"]
        self.scratch, self.run = root / f"scratch/{key}-recorded", root / "data/runs" / key
        self._grid, self._diagnosis = root / "data/grid", root / "data/diag" / key

    def begin(self, corpus: dict[str, Any], baseline: str) -> None:
        """Write the run into the folder's list, and remove what an earlier run of that name left.

        ``corpus`` is the content of ``data/tokens/meta.json``. Raises :class:`UserError` for a folder of the
        pipeline's, and for one whose runs read another corpus or have another baseline.
        """
        with only_worker(self.root / "scratch/recording", lambda: None):
            index = self._index(baseline)
            before = canonical_json(index)
            tokens = self.root / "data/tokens/meta.json"
            if index["cells"] and read_json(tokens) != corpus:
                raise UserError(f"{self.root}: its runs read another corpus or vocabulary; record into another folder")
            grid = index["params"]["grid"]
            if grid["baseline"] != baseline:
                raise UserError(f"{self.root}: its baseline is {grid['baseline']}, not {baseline}; take one for all")
            for name, values in LISTS.items():
                grid[values] += [self.settings[name]] if self.settings[name] not in grid[values] else []
            index["params"]["optimizers"][self.settings["optimizer"]] = self.settings["arm"]
            key = self.settings["key"]
            index["cells"] += [key] if key not in index["cells"] else []
            shutil.rmtree(self.run, ignore_errors=True)
            for suffix in (".json", ".parquet"):
                self._diagnosis.with_name(key + suffix).unlink(missing_ok=True)
            write_json(tokens, corpus)
            write_text(self._grid / f"{key}.json", canonical_json(self.settings))
            if canonical_json(index) != before:  # the page of `make watch` begins anew with another list
                write_json(self._grid / "index.json", index)
        self.scratch.mkdir(parents=True, exist_ok=True)

    def end(self, metrics: dict[str, Any], timing: dict[str, Any]) -> None:
        """Write what came of the run; its diagnosis says that no weight was looked at."""
        key = self.settings["key"]
        write_json(self.run / "metrics.json", metrics)
        write_json(self.run / "timing.json", timing)
        write_rows(self._diagnosis.with_name(f"{key}.parquet"), [], SCHEMA)
        diagnosis = {"key": key, "cell_sha256": sha256_of(self._grid / f"{key}.json"), "summary": {}, "flags": []}
        write_json(self._diagnosis.with_name(f"{key}.json"), diagnosis)

    def _index(self, baseline: str) -> dict[str, Any]:
        path = self._grid / "index.json"
        if not path.exists():
            grid: dict[str, Any] = {values: [] for values in LISTS.values()}
            return {"cells": [], "recorded": True, "params": {"grid": grid | {"baseline": baseline}, "optimizers": {}}}
        index: dict[str, Any] = read_json(path)
        if not index.get("recorded"):
            raise UserError(f"{self.root}: the pipeline's own runs are here; record into another folder")
        return index
