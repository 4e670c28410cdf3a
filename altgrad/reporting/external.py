"""``altgrad compare``: the report's tables and figures for runs that another program has trained, given as CSV files.

COMPARE.md is the page for users. A mistake in a file raises a `UserError`: one sentence with file and line.
"""

import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import pandas as pd
from pydantic import Field, ValidationError

from altgrad.common.errors import UserError, did_you_mean, sentences
from altgrad.common.files import csv_rows, read_yaml, write_text
from altgrad.common.run_table import KEY, STEP, read_locked
from altgrad.config.base import Settings
from altgrad.reporting.compare import compare
from altgrad.reporting.figures import draw, report_figures
from altgrad.reporting.html import to_html
from altgrad.reporting.load import COLUMNS, COMPLETED, DIVERGED, IDENTITY, MISSING, NUMBERS, TEXTS, PrimaryMetric, Study
from altgrad.reporting.markdown import NONE, Block, Table, listed, to_markdown, words
from altgrad.reporting.optimizer_roles import ROLE, EntryRole, OptimizerRole
from altgrad.reporting.statistics import SEEDS, SMALLEST_EFFECT
from altgrad.reporting.summary import outcomes, summary
from altgrad.reporting.tables import results_table

ALL = "all"  # the configuration (or optimizer) of every run in a table without that column
QUESTION = "What does each configuration change, and what each optimizer?"
SECTIONS = ("gains", "costs", "curves")  # their figures need only losses


class Family(Settings):
    """The settings of a comparison: references, controls, and the metric that is compared.

    ``reference`` is a configuration. ``optimizer_controls`` maps a control to its optimizer, ``configuration_controls``
    a control to its configuration. An optimizer's control may take the same steps in another order. A configuration's
    control may give the optimizer a format and quantize nothing. In ``unquantized`` configurations every optimizer
    counts as trained like the reference: a difference there comes from tuning, and no smaller effect counts anywhere.
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
    def read(cls, path: Path | None, flags: Mapping[str, Any]) -> Self:
        """Return the family in the YAML file ``path``, if given; ``flags`` that are not ``None`` replace its settings.

        Raises :class:`altgrad.config.UserError` that names every mistake and its place.
        """
        settings = {name: value for name, value in flags.items() if value is not None}
        try:
            return cls.model_validate((read_yaml(path) if path else {}) | settings)
        except ValidationError as error:
            raise UserError("\n".join(sentences(error, str(path or "flags")))) from None

    def checked(self, rows: pd.DataFrame, source: str) -> Self:
        """Return the family with its references filled in: if none is set, the only configuration or optimizer.

        Raises :class:`altgrad.config.UserError` if a name has no run, a reference is not known or a control is wrong.
        """
        named = {"configuration": list(rows["configuration"].unique()), "optimizer": list(rows["optimizer"].unique())}
        if all(len(known) == 1 for known in named.values()):
            raise UserError(f"{source}: one configuration under one optimizer; there is nothing to compare it with")
        references = {}
        for name, (kind, known) in zip(("reference", "reference_optimizer"), named.items(), strict=True):
            reference = references[name] = getattr(self, name) or (known[0] if len(known) == 1 else None)
            if reference is None:
                flag = f"--{name.replace('_', '-')}"
                raise UserError(f"{source}: which {kind} is the reference? Say {flag} {' or '.join(known)}")
            controls = getattr(self, f"{kind}_controls")
            unquantized = self.unquantized if kind == "configuration" else ()
            for used in (reference, *controls, *controls.values(), *unquantized):
                if used not in known:
                    raise UserError(f"{source}: no run of {kind} {used!r}{did_you_mean(used, known)}")
            for control, of in controls.items():
                if control in (of, reference) or of in controls or of == reference:
                    raise UserError(f"{kind}_controls: {control!r} cannot be the control of {of!r}; "
                                    "neither may be the reference, nor a control have one")  # fmt: skip
        return self.model_copy(update=references)

    def optimizer_role(self, name: str) -> OptimizerRole:
        """Return the role of an optimizer. Each one except the reference counts as following a format's spacing."""
        plain, of = name == self.reference_optimizer, self.optimizer_controls.get(name)
        return OptimizerRole(plain, of is not None, not plain, not plain, control_of=of)

    def entry_role(self, name: str) -> EntryRole:
        """Return the role of a configuration."""
        of = self.configuration_controls.get(name)
        return EntryRole(name not in self.unquantized, of is not None, of or name)


def study_of(rows: pd.DataFrame, curves: pd.DataFrame | None, family: Family) -> Study:
    """Return ``rows`` as a study. A configuration, optimizer and seed without a row are a missing run."""
    losses = rows.set_index(KEY)["loss"]
    runs = pd.MultiIndex.from_product([rows[name].unique() for name in KEY], names=IDENTITY[:3])
    table = pd.DataFrame({"lr_scale": 1, "val_loss": losses.reindex(runs)}, runs).reset_index()
    table["status"] = np.select([~runs.isin(losses.index), table["val_loss"].notna()], [MISSING, COMPLETED], DIVERGED)
    table.index = pd.Index(["-".join(map(str, run)) for run in runs], name="key")
    resolved = {
        key: {
            "format": entry, "rules": [], ROLE: family.entry_role(entry),
            "arm": {"base": family.reference_optimizer, ROLE: family.optimizer_role(optimizer)},
        }
        for key, (entry, optimizer, _) in zip(table.index, runs, strict=True)
    }  # fmt: skip
    frames = {name: pd.DataFrame(columns=[*IDENTITY, *columns]) for name, columns in COLUMNS.items()}
    if curves is not None:
        columns = dict(zip(KEY, IDENTITY, strict=False)) | {"loss": "val_loss"}
        history = curves.rename(columns=columns).assign(lr_scale=1).reindex(columns=frames["history"].columns)
        numbers = dict.fromkeys(COLUMNS["history"], "float64")
        frames["history"] = history.astype(numbers).sort_values("step", ignore_index=True)
    return Study(
        {"grid": {"baseline": family.reference}}, {}, resolved,
        table.reindex(columns=[*IDENTITY, *TEXTS, *NUMBERS]).astype(dict.fromkeys(NUMBERS, "float64")), timing={},
        primary=PrimaryMetric(
            title=family.metric, unit=family.unit, higher_is_better=family.higher_is_better, entry="configuration",
            smallest_effect=family.smallest_effect,
        ), **frames,
    )  # fmt: skip


def write_comparison(results: Path, family: Family, curves: Path | None, out: Path) -> str:
    """Write ``REPORT.md``, ``index.html`` and ``figures/`` of the runs in ``results`` into ``out``.

    Args:
        results: final losses, a row per run.
        family: what is compared with what.
        curves: losses by step, a row per run and step.
        out: the folder to write. It is made only after everything has been read and compared.

    Returns:
        The result in a sentence.

    Raises:
        UserError: for a mistake in a file, a name that no run has, or if no comparison has two seeds in common.
    """
    rows = read_rows(results, family.metric)
    family = family.checked(rows, str(results))
    study = study_of(rows, read_curves(curves, family.metric, rows) if curves else None, family)
    comparison = compare(study)
    if max((claim.difference.n for claim in comparison.claims.values()), default=0) < 2:
        raise UserError(f"{results}: no comparison has two seeds in common; an interval takes two, a test {SEEDS}")
    pictures = draw([spec for spec in report_figures() if spec.section in SECTIONS], study, comparison, out / "figures")
    result = outcomes(study, comparison)
    curves_shown = [pictures[name] for name in ("loss_curves", "loss_differences") if name in pictures]
    page: list[Block | None] = [
        f"# Comparison of {results.name}", f"**{QUESTION}**", result, study.primary.direction, pictures.get("gains"),
        *summary(study, comparison, costs="What each configuration changes", why="`altgrad/reporting/STATISTICS.md`"),
        "## Result in detail", pictures.get("gains_over_run"), results_table(study, comparison),
        *["## Curves"] * bool(curves_shown), *curves_shown,
        "## What was asked", _family_table(results, family, rows.attrs["unread"]),
    ]  # fmt: skip
    text = to_markdown(page) + "\n"
    write_text(out / "REPORT.md", text)
    write_text(out / "index.html", to_html(text, out / "figures"))
    return result.replace("**", "").replace("`", "")


def _family_table(results: Path, family: Family, unread: list[str]) -> Table:
    """Return a table of the family's settings, defaults included, and of the columns of ``results`` left unread."""

    def text(value: object) -> str:
        if isinstance(value, dict):
            value = [f"{control} ({of})" for control, of in value.items()]
        if isinstance(value, bool):
            return "yes" if value else "no"
        return (listed(value) if isinstance(value, list) else str(value)) or NONE

    rows = [[name.replace("_", " "), text(value)] for name, value in family.model_dump().items()]
    return Table(
        [words("what"), words("value")],
        [["results", results.name], ["columns not read", text([name for name in unread if name])], *rows],
        "Controls stand with what they are controls of.",
    )  # fmt: skip


def read_rows(path: Path, metric: str, key: Sequence[str] = KEY) -> pd.DataFrame:
    """Return the column ``metric`` of a CSV file as ``loss``, with the columns ``key``, in the order of its rows.

    ``loss`` is float64, NaN if the run diverged. The index is the line number in the file, and ``attrs["unread"]``
    names the file's other columns. Raises :class:`altgrad.config.UserError` if the file is no such table or has a run
    twice.
    """
    rows: dict[tuple[str | int, ...], tuple[int, float]] = {}
    unread: list[str] = []
    for line, values in _lines(path, [*key, metric]):
        place = f"{path}, line {line}"
        run = tuple(_key(place, name, values[name]) for name in key)
        unread = unread or [name for name in values if name not in (*key, metric)]
        if run in rows:
            first = dict(_lines(path, [*key, metric]))[rows[run][0]]
            apart = [name for name in unread if name and ALL in run and values[name] != first[name]]
            rename = f", or rename what tells them apart ({', '.join(apart)}) {KEY[run.index(ALL)]}" if apart else ""
            raise UserError(f"{place}: {_named(run)} stands in line {rows[run][0]} too; remove one{rename}")
        rows[run] = line, _loss(place, metric, values[metric])
    if not rows:
        raise UserError(f"{path}: no row below the names of the columns")
    lines, losses = zip(*rows.values(), strict=True)
    table = pd.DataFrame(list(rows), lines, key).assign(loss=losses)
    table.attrs["unread"] = unread
    return table


def read_curves(path: Path, metric: str, runs: pd.DataFrame) -> pd.DataFrame:
    """Return the losses by ``step`` in ``path``, a row per run and step; each run must be one of ``runs``."""
    curves = read_rows(path, metric, [*KEY, STEP])
    known = pd.MultiIndex.from_frame(curves[KEY]).isin(pd.MultiIndex.from_frame(runs[KEY]))
    for line, *run in curves[~known][[*KEY, STEP]].itertuples(name=None):
        raise UserError(f"{path}, line {line}: the results have no run of {_named(run)}")
    return curves


def _lines(path: Path, needed: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield each row's line number and values by column; a missing column configuration or optimizer gives `ALL`."""
    try:
        text = read_locked(path).decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    rows = csv_rows(io.StringIO(text, newline=""), path)
    columns = [name.strip() for name in next(rows, (1, []))[1]]
    if not columns:
        raise UserError(f"{path} is empty; expected the columns {', '.join(needed)} in its first line")
    if len(columns) == 1 and (separator := re.search("[;\t|]", columns[0])):
        raise UserError(f"{path}, line 1: columns are separated by {separator[0]!r}; save the table with commas")
    absent = [name for name in KEY[:2] if not any(column.lower()[:4] == name[:4] for column in columns)]
    alike = dict.fromkeys(absent[:1], ALL)
    for name in needed:
        if columns.count(name) > 1:
            raise UserError(f"{path}, line 1: {columns.count(name)} columns {name!r}; rename all but one")
        if name not in columns and name not in alike:
            hint = did_you_mean(name, columns)
            raise UserError(
                f"{path}, line 1: no column {' or '.join(map(repr, absent if name in absent else [name]))}{hint}"
                f"{'' if hint.endswith('?') else '.'} Each row is a run; --metric names the column that is compared"
            )
    for line, values in rows:
        yield line, alike | dict(zip(columns, (value.strip() for value in values), strict=True))


def _key(place: str, name: str, text: str) -> str | int:
    if name in KEY[:2]:
        if not text:
            raise UserError(f"{place}: {name} is empty")
        return text
    try:
        return int(re.sub(r"\.0*$", "", text))  # pandas writes 0.0 where the column had a gap
    except ValueError:
        raise UserError(f"{place}: {name} is {text!r}; expected a whole number") from None


def _loss(place: str, metric: str, text: str) -> float:
    try:
        value = math.nan if text == DIVERGED else float(text)
    except ValueError:
        value = math.inf
    if text != DIVERGED and not math.isfinite(value):
        raise UserError(f"{place}: {metric} is {text!r}; expected a finite number, or {DIVERGED!r} if the run diverged")
    return value


def _named(run: Sequence[str | int]) -> str:
    configuration, optimizer, seed, *step = run
    return f"{configuration!r} under {optimizer!r} with seed {seed}" + "".join(f" at step {one}" for one in step)
