"""Numbers and tables for DVC and other programs: metrics.json, summary.json, results.csv, and plots/.

Every table of plots/ begins with the columns format, optimizer, seed and lr_scale. So one plot serves ``dvc plots
show`` (many formats, one revision) and ``dvc plots diff`` (many revisions). The optimizer of a further model has its
name behind it, as ``adamw (nano)``, and so a panel of its own. The Vega-Lite templates in ``.dvc/plots`` read these
columns. The command ``python -m altgrad.reporting.dvc_outputs`` writes the script with which DVC's page of plots needs
no network. The script has 0.9 MB and is not in the repository.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from altgrad.common.files import replacing, write_json, write_text
from altgrad.reporting import optimizer_roles as roles
from altgrad.reporting.compare import BEYOND, CONTROL, COST, GAIN, MATCHED, Comparison, late
from altgrad.reporting.diagnosis_tables import raised
from altgrad.reporting.load import COMPLETED, DIVERGED, IDENTITY, MISSING, Study, joined
from altgrad.reporting.markdown import as_json, shown
from altgrad.reporting.statistics import UNTESTED, Difference
from altgrad.reporting.summary import ranked

Further = Mapping[str, tuple[Study, Comparison]]
PRIMARY = "primary"  # the column of the primary metric
LAYER_ROLES = ("weight", "input", "grad")
LAYER_METRICS = ["sqnr_db", "underflow_frac", "overflow_frac"]
VEGA_LITE = "5.21"  # the last version of the major version that the templates name


def write_outputs(study: Study, comparison: Comparison, flags: int, out: Path, further: Further | None = None) -> None:
    """Write metrics.json, summary.json, results.csv and plots/ into ``out``; ``flags`` is the number of flags.

    ``further``: by name, the models beside that of ``study``. Their numbers stand below their names in metrics.json,
    and in summary.json below ``models``. In results.csv the column ``model`` has the name.
    """
    further = further or {}
    of_models = {name: numbers(*its, flags=len(raised(its[0]))) for name, its in further.items()}
    shown_by_dvc = {name: metrics(*its) for name, its in further.items()}
    write_json(out / "metrics.json", metrics(study, comparison) | shown_by_dvc)
    write_json(out / "summary.json", numbers(study, comparison, flags) | ({"models": of_models} if further else {}))
    results = compared(study, comparison)
    if further:
        others = [compared(*its).assign(model=name) for name, its in further.items()]
        results = pd.concat([results.assign(model=study.models[0]), *others])
    whole = joined({"": study} | {name: its[0] for name, its in further.items()})
    tables = {"results": results} | {f"plots/{name}": table(whole) for name, table in PLOTS.items()}
    for name, table in tables.items():
        with replacing(out / f"{name}.csv") as path:
            table.to_csv(path, index=False, lineterminator="\n", float_format="%.7g")


def metrics(study: Study, comparison: Comparison) -> dict[str, Any]:
    """Return the content of metrics.json: numbers with four decimals or null, each a column of ``dvc exp show``.

    They are counts of runs, the primary metric of the baseline (of every entry in a grid without a baseline), and Δ and
    ΔΔ of each quantized format. Δ is the difference to the baseline under the baseline optimizer. ΔΔ is the
    format-specific effect of the first optimizer that follows the spacing (else the first that is no control), where
    the grid has the unquantized control.
    """
    plain, methods = comparison.reference or study.optimizers[0], roles.spacing_methods(study)
    methods += [name for name in comparison.references if not roles.role_of(study.arm(name)).control]
    table = comparison.best[comparison.best["optimizer"] == plain].set_index("format")
    entries = study.formats if study.baseline is None else [study.baseline]
    quantized = [entry for entry in study.formats if roles.is_quantized(study, entry)]
    counts = {status: len(study.of_status(status)) for status in (DIVERGED, MISSING)}
    columns = {
        study.primary.final.partition("_")[2]: {entry: _rounded(table["primary"][entry]) for entry in entries},
        "Δ": {entry: _mean(table["difference"][entry]) for entry in quantized if entry not in entries},
        "ΔΔ": {
            row.format: _mean(row.beyond and row.beyond.difference) for row in comparison.gains.itertuples()
            if row.optimizer in methods[:1] and pd.notna(row.twin) and row.format in quantized
        },
    }  # fmt: skip
    return {"runs": len(study.cells), **counts, **{name: values for name, values in columns.items() if values}}


def _mean(difference: Difference | None) -> float | None:
    return None if difference is None else _rounded(difference.mean)


def _rounded(value: float) -> float | None:
    return round(value, 4) + 0.0 if shown(value) else None  # + 0.0: no minus zero


def numbers(study: Study, comparison: Comparison, flags: int) -> dict[str, Any]:
    """Return the content of summary.json: numbers, names and nulls. Its keys do not depend on which runs completed.

    The primary metric and ``delta_format``, its difference to the baseline format, are means over seeds at each
    optimizer's best learning rate. ``delta_optimizer`` is the difference to the reference optimizer, and
    ``delta_format_specific`` the format-specific effect. ``best`` is the quantized run at the top of the report's
    ranking. ``noise_floor`` is the median of half the 95 % interval of a cost, ``flags`` the number of flags.
    """
    best, gains, column = comparison.best, comparison.gains, study.primary.final
    counts = {status: len(study.of_status(status)) for status in (COMPLETED, DIVERGED, MISSING)}
    first = next(iter(ranked(study, comparison)), None)
    entry, optimizer, _ = first or (None, None, None)
    return {
        "cells": {"total": len(study.cells), **counts},
        "best": {
            "format": entry, "optimizer": optimizer,
            column: first and as_json(comparison.runs.of_run(first).mean()),
        },
        column: _nested(best, best["primary"]),
        "delta_format": _nested(best, [row and row.mean for row in best["difference"]]),
        "delta_optimizer": _nested(gains, [claim and claim.difference.mean for claim in gains["claim"]]),
        "delta_format_specific": _nested(gains, [claim and claim.difference.mean for claim in gains["beyond"]]),
        "noise_floor": as_json(comparison.noise_floor),
        "flags": flags,
    }  # fmt: skip


def _nested(table: pd.DataFrame, values: Any) -> dict[str, dict[str, float | None]]:
    """Return ``{format: {optimizer: value}}`` in the table's order."""
    nested: dict[str, dict[str, float | None]] = {}
    for name, optimizer, value in zip(table["format"], table["optimizer"], values, strict=True):
        nested.setdefault(name, {})[optimizer] = as_json(value)
    return nested


def compared(study: Study, comparison: Comparison) -> pd.DataFrame:
    """Return the content of results.csv: a row per comparison of the report, with its own paired t-test and its result.

    ``delta`` is the loss of ``optimizer`` in ``format`` minus the loss of ``against``. For a format-specific effect it
    is the gain minus the gain in the unquantized control ``against``. ``p_adjusted`` is empty if nothing was tested.
    """
    rows = []
    for (kind, entry, *arms), claim in comparison.claims.items():
        arm, delta = arms[0] if arms else comparison.reference, claim.difference
        reference = comparison.references.get(str(arm))
        against = {COST: study.baseline, BEYOND: roles.unquantized_control(study, entry, arm or ""), GAIN: reference,
                   CONTROL: arms[-1] if arms else None, MATCHED: reference}[kind]  # fmt: skip
        half = delta.half_width
        rows.append((
            kind, entry, arms[-1] if kind == MATCHED else arm, against, delta.n, delta.mean, delta.mean - half,
            delta.mean + half, delta.mean / delta.error if delta.sd > 0 else None, delta.p_value(),
            None if claim.outcome in UNTESTED else claim.adjusted, claim.outcome, claim.exploratory,
        ))  # fmt: skip
    columns = ["comparison", "format", "optimizer", "against", "seeds", "delta", "ci_low_alone", "ci_high_alone",
               "t_alone", "p_alone", "p_adjusted", "result", "exploratory"]  # fmt: skip
    return pd.DataFrame(rows, columns=columns)


def training_table(study: Study) -> pd.DataFrame:
    """Return a row per logged step of every run: training loss, gradient norm, clipping, learning rate."""
    columns = [*IDENTITY, "outcome", "step", "tokens", "lr", "train_loss", "grad_norm", "clipped_frac"]
    unit = study.primary.unit if study.primary.in_nats else "nats per label"
    return _with_outcome(study, study.history.dropna(subset="train_loss"))[columns].assign(
        measure="training loss", unit=unit
    )


def validation_table(study: Study) -> pd.DataFrame:
    """Return a row per evaluation: the primary metric, and its difference to the baseline at the same seed and step."""
    history = study.history.assign(**{PRIMARY: study.history[study.primary.on_validation]}).dropna(subset=PRIMARY)
    table = _with_outcome(study, history)[[*IDENTITY, "outcome", "step", PRIMARY]]
    keys = ["optimizer", "seed", "lr_scale", "step"]
    baseline = table[table["format"] == study.baseline].set_index(keys)[PRIMARY]
    table["delta_to_baseline"] = table[PRIMARY].to_numpy() - baseline.reindex(
        pd.MultiIndex.from_frame(table[keys])
    ).to_numpy(dtype="float64")
    return table.assign(measure=f"validation {study.primary.noun}", unit=study.primary.unit, baseline=study.baseline)


def results_table(study: Study) -> pd.DataFrame:
    """Return a row per completed cell with its primary metric."""
    metric = study.primary
    completed = study.of_status(COMPLETED).rename(columns={metric.final: PRIMARY})
    split = "test" if metric.final.startswith("test_") else "validation"
    better = "higher" if metric.higher_is_better else "lower"
    table = completed[[*IDENTITY, PRIMARY]].reset_index(drop=True)
    return table.assign(measure=f"{split} {metric.noun}", unit=metric.unit, better=better)


def layers_table(study: Study) -> pd.DataFrame:
    """Return a row per cell, layer and role: the mean of each health metric over the second half of the run."""
    rows = late(study.monitors[study.monitors["role"].isin(LAYER_ROLES)])
    rows = rows[rows["metric"].isin(LAYER_METRICS)]
    table = rows.pivot_table(index=[*IDENTITY, "layer", "role"], columns="metric", values="value", sort=False)
    return table.reindex(columns=LAYER_METRICS).rename_axis(columns=None).reset_index()


def _with_outcome(study: Study, rows: pd.DataFrame) -> pd.DataFrame:
    """Return ``rows`` with the ``outcome`` of their run, by which plots leave diverged runs out of means."""
    outcomes = study.cells.rename(columns={"status": "outcome"})[[*IDENTITY, "outcome"]]
    return rows.merge(outcomes, on=IDENTITY, how="left")


PLOTS = {"training": training_table, "validation": validation_table, "results": results_table, "layers": layers_table}


def write_vega(folder: Path) -> Path:
    """Write Vega, Vega-Lite and Vega-Embed as one script, ``folder/vega.js``, and return its path."""
    import vl_convert  # which a report does not need

    bundle = vl_convert.javascript_bundle(vl_version=VEGA_LITE)  # type: ignore[call-arg] # the stub lacks a default
    path = folder / "vega.js"
    # In a function, since the bundle's short names would collide with the variables of DVC's own scripts.
    write_text(path, "(function () {\n" + bundle + "\n})();\n")
    return path


if __name__ == "__main__":
    print(write_vega(Path(".dvc/plots")))
