"""A made-up project on disk: a grid, runs and diagnoses with the shapes and sizes of real ones.

Losses fall exponentially, each format adds a cost of its own and each seed a shift of its own. E0M7
repeats E1M6's run to the bit, as it must in the bench.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import shutil
import zlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from altgrad.common.files import read_json, sha256_of, write_json
from altgrad.formats import Format, get_format
from altgrad.reporting.load import Study, load_study

COST = {
    "bf16": 0.0, "E0M7": 0.030, "E1M6": 0.030, "E2M5": 0.008, "E3M4": 0.006, "E4M3": 0.015, "E5M2": 0.055,
    "E6M1": 0.16, "E7M0": 0.48,
}  # fmt: skip
WEIGHTS = 4096  # drawn per layer for the diagnoses
DEFAULT_FORMATS = ["bf16", "E4M3", "E5M2", "E3M4", "E1M6", "E7M0"]
TRAIN = {
    "steps": 300, "batch": 16, "grad_accumulation": 1, "warmup": 0.1, "final_lr": 0.1, "clip": 1.0, "log_every": 10,
    "eval_every": 50, "eval_sequences": 256, "checkpoint_every": 100, "compute": "bf16", "device": "auto",
    "compile": "auto", "divergence": {"spike": 2.0, "window": 50},
}  # fmt: skip
ARM = {"base": "adamw", "lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "decay": 3e-4, "plain_decay": 1.2e-3}
MODEL = {"layers": 4, "width": 256, "heads": 8, "context": 128, "mlp_ratio": 4.0, "dropout": 0.0, "threads": 1}
SMALL = {"steps": 60, "blocks": 1}  # settings of write_project for a grid that is read in a blink
PARAMETERS, QUANTIZED = 5_277_696, 4_194_304


def write_project(
    root: Path,
    formats: list[str] | None = None,
    optimizers: list[str] | None = None,
    seeds: tuple[int, ...] = (0, 1),
    lr_scales: tuple[float, ...] = (1,),
    *,
    baseline: str = "bf16",
    diverged: dict[str, int] | None = None,
    missing: tuple[str, ...] = (),
    stale: tuple[str, ...] = (),
    arms: dict[str, dict[str, Any]] | None = None,
    steps: int = 300,
    blocks: int = 4,
    diagnosed: bool = True,
) -> list[str]:
    """Write data/{grid,tokens,runs,diag} under ``root`` and return the cells' keys.

    ``diverged`` maps a key to the step at which its run blew up; ``missing`` cells have no run;
    ``stale`` ones a diagnosis of other settings. ``arms`` adds settings to optimizer arms by name.
    """
    formats, optimizers = formats or DEFAULT_FORMATS, optimizers or ["adamw"]
    keys = []
    for name, optimizer, seed, lr_scale in itertools.product(formats, optimizers, seeds, lr_scales):
        key = f"{name}-{optimizer}-{seed}-{lr_scale}"
        keys.append(key)
        cell = _cell(key, name, optimizer, seed, lr_scale, (arms or {}).get(optimizer, {}), steps, blocks)
        write_json(root / "data/grid" / f"{key}.json", cell)
        if key not in missing:
            _write_run(root / "data/runs" / key, cell, (diverged or {}).get(key), blocks)
            if diagnosed:
                write_diagnosis(root, cell, key in stale, blocks)
    grid = {"formats": formats, "optimizers": optimizers, "seeds": list(seeds), "lr_scales": list(lr_scales),
            "recipe": "uniform", "baseline": baseline}  # fmt: skip
    params = {
        "corpus": "licences", "corpora": {"licences": {"source": "licences", "min_characters": 200}},
        "tokenizer": {"name": "gpt2", "vocab_size": 4096}, "model": "gpt-nano", "models": {"gpt-nano": MODEL},
        "grid": grid, "train": TRAIN | {"steps": steps}, "monitor": {"every": 50, "probes": 3},
        "optimizers": {name: ARM | (arms or {}).get(name, {}) for name in optimizers},
    }  # fmt: skip
    write_json(root / "data/grid/index.json", {"cells": keys, "params": params})
    splits = {
        "train": (3331, 9_700_000, 3_360_000),
        "val": (470, 1_350_000, 466_000),
        "test": (416, 1_200_000, 415_000),
    }
    units = ("documents", "characters", "tokens")
    counts = {split: dict(zip(units, sizes, strict=True)) for split, sizes in splits.items()}
    write_json(root / "data/tokens/meta.json", {"corpus": "licences", "vocab_size": 4096, "splits": counts})
    return keys


def add_model(root: Path, name: str, parameters: int, tokens: int, losses: Callable[[dict[str, Any]], float]) -> None:
    """Add a model to the project's ``grid.models``: a copy of each cell, with other sizes and final losses.

    ``losses`` takes the resolved cell and returns its final validation loss.
    """
    data = root / "data"
    index = read_json(data / "grid/index.json")
    params = index["params"]
    if "models" not in params["grid"]:
        params |= {"model": {params["model"]: MODEL}}
    params["grid"].setdefault("models", []).append(name)
    params["model"][name] = MODEL
    for key in [key for key in index["cells"] if "model_name" not in read_json(data / f"grid/{key}.json")]:
        new = f"{key}-{name}"
        index["cells"].append(new)
        cell = read_json(data / f"grid/{key}.json") | {"key": new, "model_name": name}
        write_json(data / f"grid/{new}.json", cell)
        if not (data / "runs" / key).exists():
            continue
        shutil.copytree(data / "runs" / key, data / "runs" / new)
        changed = {"key": new, "model_name": name, "parameters": parameters, "tokens": tokens, "val_loss": losses(cell)}
        write_json(data / "runs" / new / "metrics.json", read_json(data / "runs" / key / "metrics.json") | changed)
        shutil.copy(data / f"diag/{key}.parquet", data / f"diag/{new}.parquet")
        diagnosis = read_json(data / f"diag/{key}.json") | {"cell_sha256": sha256_of(data / f"grid/{new}.json")}
        write_json(data / f"diag/{new}.json", diagnosis)
    write_json(data / "grid/index.json", index)


def read(root: Path) -> Study:
    """Return the study under ``root``."""
    return load_study(root / "data")


def _cell(
    key: str, name: str, optimizer: str, seed: int, lr_scale: float, arm: dict, steps: int, blocks: int
) -> dict[str, Any]:
    quantized = name != "bf16"

    def spec(fmt: str) -> dict[str, Any]:
        scaling = {"scaling": "dynamic", "history": 16, "reduce": "max", "scale": "float32"}
        return {"format": fmt, **scaling, "granularity": "tensor", "block": 32}

    rules = [{"layers": "*", "weight": spec(name), "input": spec(name), "grad": spec("E5M2"),
              "gradient": "straight-through", "accumulate": "bf16"}] if quantized else []  # fmt: skip
    return {
        "key": key, "format": name, "optimizer": optimizer, "seed": seed, "lr_scale": lr_scale,
        "model": MODEL | {"layers": blocks}, "rules": rules,
        "formats": {used: asdict(get_format(used)) for used in sorted({name, "E5M2"})} if quantized else {},
        "arm": ARM | arm, "train": TRAIN | {"steps": steps}, "monitor": {"every": 50, "probes": 3},
    }  # fmt: skip


def loss_at(step: int, cell: dict[str, Any]) -> float:
    """Return the noise-free loss of a cell after ``step`` steps."""
    name = twin(cell["format"])
    learned = step / cell["train"]["steps"]
    rate = 0.05 * math.log2(cell["lr_scale"]) ** 2
    gain = {"spacing_unmatched": 0.3}.get(cell["optimizer"], 0.0) * COST[name]
    seed = 0.03 * random_for("seed", cell["seed"]).standard_normal()
    chaos = 0.003 * random_for("chaos", name, cell["optimizer"], cell["seed"], cell["lr_scale"]).standard_normal()
    return 3.1 + 5.2 * math.exp(-6 * learned) + (COST[name] - gain + rate + chaos) * learned + seed * learned


def _write_run(folder: Path, cell: dict[str, Any], blown_up: int | None, blocks: int) -> None:
    train = cell["train"]
    noise = random_for("batches", cell["seed"])
    last = blown_up or train["steps"]
    rows = []
    for step in range(0, last + 1, train["log_every"]):
        loss = loss_at(step, cell)
        train_loss = loss + 0.05 * noise.standard_normal() if step else None
        if blown_up and step > last - 30:
            train_loss = 3.0 * loss
        val = loss + 0.05 if step % train["eval_every"] == 0 or step == train["steps"] else None
        rate, norm, clipped = 1e-3 * cell["lr_scale"] * min(1, step / 30), 0.4 + 2 * math.exp(-step / 60), step < 40
        logged = (rate, train_loss, val, norm, 0.9 if clipped else 0.1) if step else (None, None, val, None, None)
        rows.append((step, step * 2048, *logged))
    history = pd.DataFrame(
        rows, columns=["step", "tokens", "lr", "train_loss", "val_loss", "grad_norm", "clipped_frac"]
    )
    folder.mkdir(parents=True, exist_ok=True)
    history.to_csv(folder / "history.csv", index=False, lineterminator="\n")
    evaluated = history.dropna(subset="val_loss")
    final = None if blown_up else float(evaluated["val_loss"].iloc[-1])
    write_json(folder / "metrics.json", {
        **{field: cell[field] for field in ("key", "format", "optimizer", "seed", "lr_scale")},
        "outcome": "diverged" if blown_up else "completed", "signature": "spike" if blown_up else "none",
        "outcome_step": blown_up, "first_nonfinite": None, "first_rows": None, "steps": last, "tokens": last * 2048,
        "parameters": PARAMETERS, "quantized_parameters": QUANTIZED if cell["rules"] else 0,
        "train_loss": float(history["train_loss"].iloc[-1]), "val_loss": final,
        "val_loss_best": float(evaluated["val_loss"].min()),
        "val_loss_best_step": int(evaluated["step"].iloc[evaluated["val_loss"].argmin()]),
        "perplexity": None if final is None else math.exp(final),
        "clipped_frac": float(history["clipped_frac"].mean()),
    })  # fmt: skip
    _monitors(cell, last, blocks).to_parquet(folder / "monitors.parquet", index=False)
    speed = 5600 + 300 * random_for("speed", cell["key"]).random()
    write_json(folder / "timing.json", {
        "device": "cpu", "machine": "Example processor, 2 cores", "devices": 1, "threads": 2,
        "machine_class": "Example processor, torch 2.13.0", "compiled": True, "compile_s": 21.5,
        "train_s": last * 2048 / speed, "total_s": last * 2048 / speed + 30, "tokens_per_s": speed,
        "step_ms_median": 2048e3 / speed, "step_ms_p90": 2300e3 / speed, "peak_memory_mb": 1210.5,
        "checkpoint_mb": 63.4, "versions": {"altgrad": "0.1.0", "python": "3.11.7", "torch": "2.13.0"},
    })  # fmt: skip


def _monitors(cell: dict[str, Any], last: int, blocks: int) -> pd.DataFrame:
    name, rows = twin(cell["format"]), []
    random = random_for("monitors", name, cell["optimizer"], cell["seed"])
    layers = layer_names(blocks)
    for step in range(0, last + 1, cell["monitor"]["every"]):
        for depth, layer in enumerate(layers):
            for role, used in (("weight", name), ("input", name), ("grad", "E5M2")):
                values = {
                    "amax": (0.1, 4.0, 1e-4)[("weight", "input", "grad").index(role)] * (1 + 0.1 * random.random()),
                    "nonfinite": 0.0,
                }
                if cell["rules"] and not (layer == "head" and role == "input"):
                    fmt, activation = get_format(used), role != "weight"
                    lost = {"E1M6": 0.05, "E2M5": 0.02, "E3M4": 0.004}.get(used, 0.0)
                    precision = 6.02 * min(fmt.mantissa_bits, 4.6) + 13 - 3 * activation - depth / 8
                    values |= {
                        "scale": fmt.scale_target / values["amax"],
                        "overflow_frac": 0.0,
                        "underflow_frac": lost * (1 + depth / 8) * activation,
                        "sqnr_db": precision + random.standard_normal() / 4,
                    }
                rows += [(step, layer, role, metric, value) for metric, value in values.items()]
        for block in range(blocks):
            kurtosis = 0.3 + block * step / 120 + 0.2 * random.random()
            seen = {"kurtosis": kurtosis, "attention_entropy": 3.0 - step / 500, "attention_low_heads": 0.0}
            rows += [(step, f"blocks.{block}", "output", metric, value) for metric, value in seen.items()]
        for depth, layer in enumerate(layers) if step else ():
            norm = 0.05 * math.exp(-depth / 12) * (1 + 0.1 * random.random())
            statistics = {"l2": norm, "linf": norm / 9, "mean": 1e-9, "var": norm**2 / 65536}
            rows += [(step, layer, "weight_grad", metric, value) for metric, value in statistics.items()]
            moved = {"rungs": 1.5, "cosine_adamw": 1.0 if cell["optimizer"] == "adamw" else 0.7}
            flat = cell["optimizer"] != "adamw"
            moved |= {"stall_ratio": 0.8, "update_success": 0.6, "representability_gap": 0.2}
            moved |= {f"rungs_2^{b}": 1.0 if flat else 2.0 ** -(b + 6) for b in (-12, -8, -4)}
            moved = {"update_l2": 0.01, "update_size": 0.005} | (moved if cell["rules"] else {})
            rows += [(step, layer, "update", metric, value) for metric, value in moved.items()]
    return pd.DataFrame(rows, columns=["step", "layer", "role", "metric", "value"])


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
    fmt = get_format(twin(cell["format"]))
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
