"""What a report shows is added as the pages say: one test per page, all in one copy that is run once.

Oracles: the report and the files of its runs; sums over the weights; the files of a package.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from safetensors.numpy import load_file

from altgrad.diagnostics import ANALYSES, diagnose
from altgrad.diagnostics.diagnose import Row
from altgrad.metrics import Limit, Metric
from altgrad.reporting.figures import SECTIONS, in_report, report_figures
from tests.howto.conftest import Followed, Sources, blocks

KEY, LAYER = "E4M3-adamw-0-1", "blocks.0.mlp.up"


def content(followed: Followed, name: str) -> Any:
    return json.loads((followed.project.folder / "data" / name).read_text())


def definition(followed: Followed, metric: str) -> str:
    return followed.said.split(f"{metric} [")[1].splitlines()[1]


def weight(followed: Followed, file: str, name: str) -> Any:
    return load_file(followed.project.folder / f"data/runs/{KEY}" / file)[name].astype("float64")


def test_a_format_a_recipe_an_arm_and_a_corpus_are_settings_alone(followed) -> None:
    report = followed.report.replace("\\_", "_")
    for row in ("low** | adamw", "attention_only.E4M3** | adamw", "E4M3** | spacing_fading"):
        assert f"| **{row} |" in report  # the table of results
    facts = {"exponent_bits": 4, "mantissa_bits": 3, "bias": 11, "specials": "finite"}
    assert facts.items() <= content(followed, "grid/low-adamw-0-1.json")["formats"]["low"].items()
    layers = content(followed, "diag/attention_only.E4M3-adamw-0-1.json")["layers"]
    quantized = {name for name, layer in layers.items() if layer["formats"]["weight"]}
    assert quantized == {"blocks.0.attn.qkv", "blocks.0.attn.out"}
    arm = content(followed, "grid/E4M3-spacing_fading-0-1.json")["arm"]
    assert arm["schedule"] == "cosine" and arm["stiffness"] == "ulp"
    assert content(followed, "tokens/meta.json")["corpus"] == "own"
    assert "Corpus `own`" in report.split("## What it was")[1]


def test_a_setting_is_declared_in_one_place_and_read_in_one(followed) -> None:
    assert followed.changes["a setting"] == {"altgrad/config/schema.py", "altgrad/training/trainer.py"}
    page = (followed.project.folder / "altgrad/config/settings/train.md").read_text(encoding="utf-8")
    assert "| `centre` | `true` or `false` | `false` | take its mean over the inputs from" in page
    cells = [json.loads(path.read_text()) for path in followed.project.folder.glob("data/grid/*-*.json")]
    assert len(cells) > 3 and all(cell["train"]["centre"] is True for cell in cells)
    rows = pd.read_parquet(followed.project.folder / f"data/runs/{KEY}/monitors.parquet")
    rows = rows[rows["role"] == "weight_grad"].pivot_table(index=["step", "layer"], columns="metric", values="value")
    assert len(rows) > 4 and (rows["mean"].abs() <= 1e-6 * rows["linf"]).all() and (rows["linf"] > 0).all()


def test_a_source_of_text_is_a_section_and_a_module(followed) -> None:
    assert followed.changes["a source"] == {"altgrad/config/schema.py", "altgrad/data/package.py"}
    page = (followed.project.folder / "altgrad/config/settings/corpora.md").read_text(encoding="utf-8")
    assert "## PackageCorpus" in page and "| `source` | `package` | – | which kind of corpus this is |" in page
    meta = json.loads((followed.project.folder / "elsewhere/data/tokens/meta.json").read_text())
    texts = [path.read_text(encoding="utf-8") for path in Path(asyncio.__file__).parent.rglob("*.py")]
    found = {unit: sum(split[unit] for split in meta["splits"].values()) for unit in ("documents", "characters")}
    assert meta["corpus"] == "asyncio" and found == {"documents": len(texts), "characters": sum(map(len, texts))}
    assert "asincio is no package that is installed here" in followed.said
    assert "corpora.asyncio: source is missing; add source: licences, hub, local, package" in followed.said


def test_a_live_metric_is_measured_in_one_place_and_defined_in_another(followed) -> None:
    assert followed.changes["a live metric"] == {"altgrad/training/monitor.py", "altgrad/metrics/table.py"}
    assert definition(followed, "crest").endswith("over its root mean square. Flagged above 30 in inputs.")
    rows = pd.read_parquet(followed.project.folder / f"data/runs/{KEY}/monitors.parquet")
    rows = rows[rows["metric"] == "crest"]
    assert set(rows["role"]) == {"input", "weight", "grad"} and (rows["value"] >= 1).all()
    found = rows[(rows["step"] == 1) & (rows["role"] == "weight") & (rows["layer"] == LAYER)]["value"]
    w = weight(followed, "probes.safetensors", f"weight/0/{LAYER}")
    assert found.item() == pytest.approx(abs(w).max() / (w**2).mean() ** 0.5, rel=1e-6)


def test_a_metric_of_the_diagnosis_is_one_file_with_its_limit(followed, monkeypatch, tmp_path) -> None:
    assert followed.changes["a metric"] == {"altgrad/diagnostics/cancellation.py"}
    assert "| cancellation |" in followed.report
    said = definition(followed, "cancellation")
    assert "near 0 where positive and negative weights cancel" in said and "Flagged above 0.9." in said
    rows = pd.read_parquet(followed.project.folder / f"data/diag/{KEY}.parquet")
    found = rows[(rows["metric"] == "cancellation") & (rows["layer"] == LAYER)].iloc[-1]["value"]
    w = weight(followed, "model.safetensors", f"{LAYER}.weight")
    assert found == pytest.approx(abs(w.sum()) / abs(w).sum(), rel=1e-9)
    (source,) = blocks("diagnostics/README.md", "python", "How to add a metric")
    names: dict[str, Any] = {}
    exec(source, names)
    monkeypatch.setattr(diagnose, "ANALYSES", (*ANALYSES, *names["ANALYSES"]))
    rows = [Row(layer, "weight", 3, "cancellation", None, value) for layer, value in (("a", 0.9), ("b", 0.91))]
    flags = [{"layer": "b", "metric": "cancellation", "value": 0.91, "limit": 0.9}]
    assert list(diagnose._flags(rows)) == flags
    copy = Sources(tmp_path)
    (copy.folder / "altgrad/diagnostics/again.py").write_text(source.replace("cancellation", "stable_rank"))
    with pytest.raises(AssertionError, match="metric stable_rank has two homes"):
        copy.run("-c", "import altgrad.diagnostics")
    limit = Limit(above=False, value=0.4, strict=0.5)
    row = Metric("mine", "share of weights", "What it is.", offline="weight", limit=limit)
    assert Metric.from_json("mine", row.to_json()) == row


def test_a_figure_is_one_file_and_stands_where_it_says(followed) -> None:
    assert followed.changes["a figure"] == {"altgrad/reporting/figures/seeds.py"}
    curves = followed.report.split("## Loss curves")[1].split("\n## ")[0]
    places = [curves.index(f"figures/{name}.") for name in ("loss_curves", "loss_differences", "final_losses")]
    assert places == sorted(places)
    assert "Final validation loss of bf16, E4M3" in curves and "a mark per seed" in curves
    assert (followed.project.folder / "reports/figures/final_losses.svg").stat().st_size > 0


def test_figures_stand_in_the_order_that_they_say_and_a_wrong_place_or_name_is_an_error() -> None:
    def gains(*_: object) -> None:
        """Named like one of the report's."""

    places = [(SECTIONS.index(spec.section), spec.order) for spec in report_figures()]
    assert places == sorted(places) and len(set(places)) == len(places)
    with pytest.raises(ValueError, match="no section 'curve' in the report; there are .*curves"):
        in_report(section="curve", order=10, alt="", caption="")(lambda *_: None)
    with pytest.raises(ValueError, match="two figures are called gains"):
        in_report(section="gains", order=99, alt="", caption="")(gains)


def test_a_part_of_the_benchmark_is_a_module_and_three_lines(followed) -> None:
    files = {f"altgrad/benchmark/{name}.py" for name in ("calls", "session", "records")}
    assert followed.changes["a part"] == files
    records = [json.loads(path.read_text()) for path in followed.project.folder.glob("reports/bench/*.json")]
    (record,) = [record for record in records if "calls" in record]
    (row,) = record["calls"]
    assert row["name"] == "x + x" and 0 < row["call_us"] < 1e5
    assert record["sessions"][row["session"]]["command"].endswith("altgrad.benchmark --only calls")
    speed = (followed.project.folder / "reports/bench/README.md").read_text()
    assert "| operation | µs |" in speed and "| `x + x` |" in speed and "the price of the call itself" in speed
