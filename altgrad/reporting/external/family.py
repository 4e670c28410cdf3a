"""What is asked of a table of runs, declared in YAML or by flags, and the study that the report's code reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pydantic import Field, ValidationError

from altgrad.common.errors import UserError, did_you_mean, sentences
from altgrad.common.files import read_yaml
from altgrad.common.run_table import KEY
from altgrad.config.section import Section
from altgrad.reporting.load import COLUMNS, COMPLETED, DIVERGED, IDENTITY, MISSING, NUMBERS, TEXTS, Study
from altgrad.reporting.measure import Measure
from altgrad.reporting.results import SMALLEST_EFFECT


class Family(Section):
    """What each configuration and each optimizer is compared with, and what the numbers are.

    ``reference`` is a configuration. Controls are named with what they are the control of: an optimizer with the same
    steps in another order, say, or a configuration that lends an optimizer a format and quantizes nothing. In those
    that are ``unquantized`` all optimizers are their reference's form, so that what differs there is their tuning, and
    no smaller effect counts anywhere.
    """

    reference: str | None = None
    reference_optimizer: str | None = None
    optimizer_controls: dict[str, str] = Field(default_factory=dict)
    configuration_controls: dict[str, str] = Field(default_factory=dict)
    unquantized: list[str] = Field(default_factory=list)
    metric: str = "loss"
    unit: str = ""
    higher_is_better: bool = False
    smallest_effect: float = Field(default=SMALLEST_EFFECT, gt=0, allow_inf_nan=False)

    @classmethod
    def read(cls, path: Path | None, flags: Mapping[str, Any]) -> Family:
        """Return the family in the YAML file ``path``, if there is one, with the flags that are given in its place.

        Raises :class:`altgrad.config.UserError` with every mistake, by its place.
        """
        given = {name: value for name, value in flags.items() if value is not None}
        try:
            return cls.model_validate((read_yaml(path) if path else {}) | given)
        except ValidationError as error:
            raise UserError("\n".join(sentences(error, str(path or "flags")))) from None

    def checked(self, rows: pd.DataFrame, source: str) -> Family:
        """Return the family with its references filled in; where there is one alone it need not be named.

        Raises :class:`altgrad.config.UserError` for a name that no run has, and where a reference is not known.
        """
        named = {"configuration": list(rows["configuration"].unique()), "optimizer": list(rows["optimizer"].unique())}
        if all(len(known) == 1 for known in named.values()):
            raise UserError(f"{source}: one configuration under one optimizer; there is nothing to compare it with")
        found = {}
        for name, (kind, known) in zip(("reference", "reference_optimizer"), named.items(), strict=True):
            value = found[name] = getattr(self, name) or (known[0] if len(known) == 1 else None)
            if value is None:
                flag = f"--{name.replace('_', '-')}"
                raise UserError(f"{source}: which {kind} is the reference? Say {flag} {' or '.join(known)}")
            controls = getattr(self, f"{kind}_controls")
            for used in (value, *controls, *controls.values(), *(self.unquantized if kind == "configuration" else ())):
                if used not in known:
                    raise UserError(f"{source}: no run of {kind} {used!r}{did_you_mean(used, known)}")
            for control, of in controls.items():
                if control in (of, value) or of in controls or of == value:
                    raise UserError(f"{kind}_controls: {control!r} cannot be the control of {of!r}; "
                                    "neither may be the reference, nor a control have one")  # fmt: skip
        return self.model_copy(update=found)


def study_of(rows: pd.DataFrame, curves: pd.DataFrame | None, family: Family) -> Study:
    """Return the study of ``rows``: a run that a configuration and an optimizer lack for a seed is missing.

    Of each run no settings are known but the part that `family` gives it, so these are settings with which
    `altgrad.reporting.roles` sees that part.
    """
    losses = rows.set_index(KEY)["loss"]
    runs = pd.MultiIndex.from_product([rows[name].unique() for name in KEY], names=IDENTITY[:3])
    table = pd.DataFrame({"lr_scale": 1, "val_loss": losses.reindex(runs)}, runs).reset_index()
    table["status"] = np.select([~runs.isin(losses.index), table["val_loss"].notna()], [MISSING, COMPLETED], DIVERGED)
    table.index = pd.Index(["-".join(map(str, run)) for run in runs], name="key")
    resolved = {
        key: {"format": entry, "arm": _arm(optimizer, family), "rules": _rules(entry, family)}
        for key, (entry, optimizer, _) in zip(table.index, runs, strict=True)
    }
    frames = {name: pd.DataFrame(columns=[*IDENTITY, *columns]) for name, columns in COLUMNS.items()}
    if curves is not None:
        columns = dict(zip(KEY, IDENTITY, strict=False)) | {"loss": "val_loss"}
        history = curves.rename(columns=columns).assign(lr_scale=1).reindex(columns=frames["history"].columns)
        numbers = dict.fromkeys(COLUMNS["history"], "float64")
        frames["history"] = history.astype(numbers).sort_values("step", ignore_index=True)
    return Study(
        {"grid": {"baseline": family.reference}}, {}, resolved,
        table.reindex(columns=[*IDENTITY, *TEXTS, *NUMBERS]).astype(dict.fromkeys(NUMBERS, "float64")), timing={},
        measure=Measure(
            family.metric, family.metric, family.unit, "configuration", family.higher_is_better, family.smallest_effect
        ), **frames,
    )  # fmt: skip


def _arm(optimizer: str, family: Family) -> dict[str, Any]:
    if optimizer == family.reference_optimizer:
        return {"base": "adamw"}
    of = family.optimizer_controls.get(optimizer)
    return {"base": "adamw", "stiffness": "permuted" if of else "own", "of": of or optimizer}


def _rules(configuration: str, family: Family) -> list[dict[str, Any]]:
    if configuration in family.unquantized:
        return []
    of = family.configuration_controls.get(configuration)
    weight = {"format": of or configuration, "virtual": bool(of)}
    return [{"layers": "*", "weight": weight, "input": None, "grad": None}]
