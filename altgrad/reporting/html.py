"""The report's pages: index.html, rendered from the report's Markdown, and cells.html, which shows every run.

Both are single files that need nothing else: styles and scripts inline, figures inside. Figures are PNG, because the
size of a drawing then does not grow with the length of a run or the depth of a model. The SVG files lie beside the
page. cells.html holds all runs as JSON that its script draws: a file for each would take 15 MB for 500 runs.
"""

import base64
import io
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import jinja2
import numpy as np
import pandas as pd
from markdown_it import MarkdownIt
from markupsafe import Markup
from ruamel.yaml import YAML

from altgrad.config.cell import Cell
from altgrad.config.params import validated
from altgrad.config.tasks import ON_TEST
from altgrad.formats import format_names, from_definition, get_format
from altgrad.metrics import METRICS
from altgrad.reporting.anomalies import Case, sentences
from altgrad.reporting.load import IDENTITY, MISSING, Study
from altgrad.reporting.markdown import as_json, named_runs, significant

LONG = 24  # a table cell with more characters of text is broken into lines
PAGES = jinja2.Environment(
    loader=jinja2.PackageLoader("altgrad.reporting", "."), autoescape=True, undefined=jinja2.StrictUndefined,
    trim_blocks=True, lstrip_blocks=True,
)  # fmt: skip
MARKDOWN = MarkdownIt("commonmark").enable("table")
MARKDOWN.add_render_rule(
    "table_open", lambda *_: '<div class="scroll" tabindex="0" role="group" aria-label="table"><table>\n'
)
MARKDOWN.add_render_rule("table_close", lambda *_: "</table></div>\n")

POINTS = 60  # about so many points of a curve are kept, and all evaluations
OUTCOME = ["signature", "outcome_step", "first_nonfinite", "first_rows"]
RESULTS = [
    "val_loss", "val_loss_best", "val_loss_best_step", "train_loss", "perplexity", "clipped_frac", "peak_lr", "steps",
    "tokens", "tokens_per_s", "tflops", "gpu_busy", "step_ms_median", "total_s", "peak_memory_mb",
    "bytes_per_parameter",
]  # fmt: skip


def to_html(text: str, figures: Path, links: Mapping[str, str] | None = None) -> str:
    """Return a report in Markdown as a page.

    Args:
        text: a title, a question and the answer, each a paragraph at least, then sections below ``##``.
        figures: the folder of the figures' PNG files.
        links: addresses on the page of all runs by strong or code text, such as a format's name; ``None`` if there is
            no such page.
    """
    top, *sections = named_runs(text, links or {}).split("\n\n## ")
    title, question, answer = top.split("\n\n", 2)
    return PAGES.get_template("index.html.j2").render(
        title=Markup(MARKDOWN.renderInline(title.removeprefix("# "))), question=_rendered(question, figures),
        answer=_rendered(answer, figures), every_run=links is not None,
        sections=[
            (re.sub(r"\W+", "-", name.lower()), name, _rendered(body, figures))
            for name, _, body in (section.partition("\n\n") for section in sections)
        ],
    )  # fmt: skip


def _rendered(text: str, figures: Path) -> Markup:
    """Return Markdown as HTML, with the figures embedded and with the CSS classes of page.css."""
    tokens = MARKDOWN.parse(text)
    above = ""  # the kind of block above
    for token, content in itertools.pairwise(tokens):
        if token.type in ("th_open", "td_open"):
            numeric = "right" in str(token.attrs.pop("style", ""))
            length = sum(len(part.content) for part in content.children or ())
            token.attrs |= {"class": "number"} if numeric else {"class": "long"} if length > LONG else {}
        elif token.type == "paragraph_open" and content.children:
            image = content.children[0]
            if image.type == "image":
                png = (figures / Path(str(image.attrs["src"])).name).read_bytes()
                image.attrs["src"] = f"data:image/png;base64,{base64.b64encode(png).decode('ascii')}"
                token.attrs["class"] = "figure"
            elif above in ("table", "figure") and image.type == "em_open":
                token.attrs["class"] = "note"
            above = str(token.attrs.get("class", ""))
        elif token.type == "table_close":
            above = "table"
    return Markup(MARKDOWN.renderer.render(tokens, MARKDOWN.options, {}))


def links_of(study: Study) -> dict[str, str]:
    """Return the address on the page of all runs for each key of a run, each format and each optimizer."""
    shown = {name: urlencode({"optimizer": name}) for name in study.optimizers}
    shown |= {name: urlencode({"format": name}) for name in study.formats}
    addresses = {name: f"?{words}" for name, words in shown.items()} | {key: quote(key) for key in study.cells.index}
    return {name: f"cells.html#{address}" for name, address in addresses.items()}


def to_cells_page(study: Study, flags: pd.DataFrame, cases: Sequence[Case]) -> str:
    """Return the text of cells.html: each run at ``cells.html#KEY``, with its ``flags`` and its case, if it has one."""
    # A "<" would end the script element that holds it, whatever stands around it.
    data = json.dumps(contents(study, flags, cases), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    above = "minus" if study.primary.higher_is_better else "above"
    return PAGES.get_template("cells.html.j2").render(
        title="AltGrad cells", data=Markup(data), metric=study.primary.full, above=above
    )


def contents(study: Study, flags: pd.DataFrame, cases: Sequence[Case]) -> dict[str, Any]:
    """Return the data of cells.html, ready for JSON: every run, and the names and definitions of the metrics."""
    histories, summaries, flagged = (
        dict(list(frame.groupby(IDENTITY, sort=False))) for frame in (study.history, study.summary, flags)
    )
    names, known = list(study.summary["metric"].unique()), METRICS | study.metrics
    causes = {case.key: " ".join(sentences(case)) for case in cases}
    primary = study.primary.final
    columns = dict.fromkeys([primary, *(name for name in ON_TEST.values() if name in study.cells), *RESULTS])
    results = [name for name in columns if name == primary or study.cells[name].notna().any()]
    cells = []
    for key, cell in study.cells.iterrows():
        run: dict[str, Any] = {
            "key": key, **{name: cell[name] for name in IDENTITY}, "status": cell["status"],
            "settings": settings(study.resolved[key]),
        }  # fmt: skip
        cells.append(run)
        if cell["status"] == MISSING:
            run["reason"] = cell["reason"]
            continue
        identity = tuple(cell[IDENTITY])
        summary = summaries[identity].set_index("metric")["value"] if identity in summaries else {}
        run |= {
            "outcome": {name: cell[name] for name in OUTCOME if cell[name] != "" and cell[name] == cell[name]},
            "results": {name: as_json(cell[name]) for name in results},
            "curve": _curve(histories[identity], study.primary.on_validation),
            "summary": [as_json(summary.get(name), 6) for name in names],
        }
        if identity in flagged:
            run["flags"] = [
                [flag.what, flag.layer, significant(flag.value), f"{flag.limit:g}"]
                for flag in flagged[identity].itertuples()
            ]
        if key in causes:
            run["cause"] = causes[key]
    return {
        "baseline": study.baseline,
        "measure": [getattr(study.primary, name) for name in ("final", "full", "noun", "unit")],
        "metrics": [
            (name, name, "") if (metric := known.get(name)) is None
            else (name, f"{metric.title or name.replace('_', ' ')} ({metric.unit})", metric.definition.replace("`", ""))
            for name in names
        ],
        "cells": cells,
    }  # fmt: skip


def _curve(history: pd.DataFrame, value: str) -> list[list[float | None]]:
    """Return step, training loss, ``value`` and gradient norm at each evaluation and about `POINTS` other steps."""
    every = max(1, math.ceil(len(history) / POINTS))
    kept = (np.arange(len(history)) % every == 0) | history["val_loss"].notna().to_numpy()
    columns = ["step", "train_loss", value, "grad_norm"]
    return [[as_json(value, 6) for value in row] for row in history.loc[kept, columns].to_numpy()]


def settings(cell: dict[str, Any]) -> str:
    """Return the settings of a resolved cell as YAML, without defaults, the parts of its key and registered formats."""
    left_out = {"key", *IDENTITY}
    if "monitor" in cell:
        checked = validated(Cell, cell, f"data/grid/{cell['key']}.json")
        kept = checked.model_dump(mode="json", exclude_defaults=True, exclude=left_out)
    else:  # another program's, which has no defaults here
        kept = {name: value for name, value in cell.items() if name not in left_out}
    known = {name: get_format(name) for name in format_names()}
    formats = {name: fields for name, fields in cell["formats"].items() if known.get(name) != from_definition(fields)}
    yaml, text = YAML(typ="safe"), io.StringIO()
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment] # ruamel.yaml says None
    yaml.dump({name: value for name, value in (kept | {"formats": formats}).items() if value}, text)
    return text.getvalue()
