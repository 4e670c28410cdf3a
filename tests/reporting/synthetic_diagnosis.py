"""Made-up diagnoses: weights from a normal distribution, really rounded to each format.

Plain numpy, so what the report is tested on does not come from the code that it will read.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from altgrad.common.files import write_json
from altgrad.formats import Format

SPECIALS = {"E4M3": "fn", "E5M2": "ieee"}
COST = {
    "bf16": 0.0, "E0M7": 0.030, "E1M6": 0.030, "E2M5": 0.008, "E3M4": 0.006, "E4M3": 0.015, "E5M2": 0.055,
    "E6M1": 0.16, "E7M0": 0.48,
}  # fmt: skip
WEIGHTS = 4096  # drawn per layer for the diagnoses


def format_fields(name: str) -> dict[str, Any]:
    """Return the defining fields of ``ExMy``, as a resolved cell carries them."""
    exponent, mantissa = (int(part) for part in name[1:].split("M"))
    bias = 1 if exponent == 0 else 2 ** (exponent - 1) - 1
    return {"name": name, "exponent_bits": exponent, "mantissa_bits": mantissa, "bias": bias,
            "specials": SPECIALS.get(name, "finite"), "signed": True}  # fmt: skip


def layer_names(blocks: int) -> list[str]:
    """Return the names of the linear layers of a GPT with this many blocks."""
    parts = ("attn.qkv", "attn.out", "mlp.up", "mlp.down")
    return [f"blocks.{block}.{part}" for block in range(blocks) for part in parts] + ["head"]


def random_for(*names: object) -> np.random.Generator:
    """Return a generator that depends on the names alone."""
    return np.random.default_rng(zlib.crc32("/".join(map(str, names)).encode()))


def twin(name: str) -> str:
    """Return the format whose run ``name`` repeats: E0M7 repeats E1M6."""
    return "E1M6" if name == "E0M7" else name


def rounded(values: np.ndarray, fmt: Format) -> tuple[np.ndarray, np.ndarray]:
    """Return each value rounded to the nearest on the format's quantization grid, saturating, and its rung."""
    grid = fmt.magnitudes
    code = np.searchsorted((grid[1:] + grid[:-1]) / 2, np.abs(values))
    return np.sign(values) * grid[code], np.sign(values).astype(int) * code


def write_diagnosis(root: Path, cell: dict[str, Any], stale: bool, blocks: int) -> None:
    """Write data/diag/<key>.json and .parquet; a ``stale`` one is of other settings."""
    content = (root / "data/grid" / f"{cell['key']}.json").read_bytes()
    rows = []
    for depth, layer in enumerate(layer_names(blocks)):
        weights = 0.02 * random_for("weights", twin(cell["format"]), cell["seed"], layer).standard_normal(WEIGHTS)
        weights *= 1 + 0.02 * depth + 0.3 * COST[cell["format"]]
        for step in (0, cell["train"]["steps"]):
            rows += [(layer, "weight", step, *row) for row in _weight_rows(weights, cell, depth, step)]
        snr = 12 + 20 * math.exp(-6 * COST[cell["format"]]) - depth / 6
        rows.append((layer, "weight_grad", cell["train"]["steps"], "grad_snr_db", None, snr if cell["rules"] else 60.0))
        rows.append((layer, "weight_grad", cell["train"]["steps"], "grad_cosine", None, 1 - 10 ** (-snr / 10)))
    frame = pd.DataFrame(rows, columns=["layer", "role", "step", "metric", "x", "value"])
    frame["x"] = frame["x"].astype("float64")
    numbers = frame[frame["x"].isna() & (frame["step"] == cell["train"]["steps"])]
    low = numbers[(numbers["metric"] == "grad_snr_db") & (numbers["value"] < 10)]
    write_json(root / "data/diag" / f"{cell['key']}.json", {
        "key": cell["key"], "cell_sha256": "0" * 64 if stale else hashlib.sha256(content).hexdigest(),
        "status": "ok", "summary": dict(numbers.groupby("metric", sort=False)["value"].mean().items()),
        "flags": [{"layer": layer, "metric": "grad_snr_db", "value": value, "limit": 10.0}
                  for layer, value in zip(low["layer"], low["value"], strict=True)],
    })  # fmt: skip
    frame.to_parquet(root / "data/diag" / f"{cell['key']}.parquet", index=False)


def _shares(bins: np.ndarray) -> list[tuple[float, float]]:
    found, counts = np.unique(bins, return_counts=True)
    return [(float(x), float(share)) for x, share in zip(found, counts / len(bins), strict=True)]


def _weight_rows(
    weights: np.ndarray, cell: dict[str, Any], depth: int, step: int
) -> list[tuple[str, float | None, float]]:
    """Return (metric, x, value) of a layer's weights."""
    rows = [("log2_magnitude", x / 4, share) for x, share in _shares(np.floor(4 * np.log2(np.abs(weights))))]
    rows += [("stable_rank", None, 60.0 - depth), ("effective_rank_kept", None, 0.97)]
    if not cell["rules"]:
        return rows
    fmt = Format(**format_fields(twin(cell["format"])))
    scaled = weights * fmt.scale_target / np.abs(weights).max()
    on_grid, rungs = rounded(scaled, fmt)
    exponent = np.maximum(np.floor(np.log2(np.abs(scaled))), fmt.emin)
    distance = np.minimum(np.abs(scaled - on_grid) / 2.0 ** (exponent - fmt.mantissa_bits), 0.4999)
    used = np.unique(rungs, return_counts=True)[1] / len(rungs)
    rows += [("code_usage", x, share) for x, share in _shares(rungs)]
    rows += [
        ("misalignment", i / 32, float(share))
        for i, share in enumerate(np.histogram(distance, 16, (0, 0.5))[0] / len(weights))
    ]
    codes = np.abs(rungs) + (rungs < 0) * 2 ** (fmt.bits - 1)
    for bit in range(fmt.bits):
        ones = float(((codes >> bit) & 1).mean())
        rows.append(("bit_activity", float(bit), -sum(p * math.log2(p) for p in (ones, 1 - ones) if p > 0)))
    return [
        *rows,
        ("code_used_frac", None, len(used) / len(fmt.values)),
        ("code_entropy", None, float(-(used * np.log2(used)).sum())),
        ("sqnr_db", None, 10 * math.log10((scaled**2).sum() / ((scaled - on_grid) ** 2).sum())),
        ("misalignment_mean", None, float(distance.mean())), ("underflow_frac", None, float((on_grid == 0).mean())),
        ("boundary_frac", None, float((np.abs(on_grid) >= fmt.scale_target).mean())), ("code_stale_frac", None, 0.2),
    ]  # fmt: skip
