"""What AdamW's m / sqrt(v) loses when m and v are stored in a format: COAT's Table 1, and all splits of 8 bits.

``python -m tests.optim.coat NAME=FILE ... [--csv FILE]`` reads checkpoints of training (safetensors with
``optimizer/<n>/exp_avg``) with float32 state, prints the table, and writes the search. COAT (arXiv:2410.19313) has mean
squared errors of 20.1 for E4M3 and E4M3 in groups of 128, 12.3 with range expansion, 25.7 with v in E5M2, 40.3 with
both; Fishman et al. (arXiv:2409.12517) take m in E4M3 and v in E5M2, a scale per tensor. Elements with v = 0 are left
out; where storing makes v zero the direction has Adam's eps below it.
"""

from __future__ import annotations

import argparse
import csv
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from altgrad.config.state import LEAST, Moment
from altgrad.optim.state_codec import Coding

CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "E4M3 / E4M3": ("E4M3", "E4M3", {}), "E4M3 / E4M3, expanded": ("E4M3", "E4M3", {"expand": True}),
    "E4M3 / E5M2": ("E4M3", "E5M2", {}), "E5M2 / E5M2": ("E5M2", "E5M2", {}),
    "E4M3 / UE5M3": ("E4M3", "UE5M3", {}), "E4M3 / UE4M4": ("E4M3", "UE4M4", {}),
    "E4M3 / root of v in UE4M4": ("E4M3", "UE4M4", {"root": True}),
    "dynamic8 / unsigned_dynamic8": ("dynamic8", "unsigned_dynamic8", {}),
}  # fmt: skip
SIGNED = [f"E{e}M{7 - e}" for e in range(8)]
UNSIGNED = [f"UE{e}M{8 - e}" for e in range(9)]
GRANULARITIES: dict[str, dict[str, Any]] = {"block": {"block": 128}, "tensor": {}}
EPS = 1e-8


class Errors(NamedTuple):
    """Of m / sqrt(v): mean squares, SQNR in dB, and the share of v that becomes zero."""

    mse: float
    mse_kept: float  # where v stays above zero
    sqnr: float
    sqnr_kept: float
    lost: float


def stored(x: list[Tensor], moment: Moment) -> list[Tensor]:
    """Return tensors as they come back."""
    coding = Coding(moment)
    return [coding.decode(coding.encode(t), t.shape) for t in x]


def errors(m: list[Tensor], v: list[Tensor], stored_m: list[Tensor], stored_v: list[Tensor]) -> Errors:
    """Return what storing costs the direction, over the elements of all tensors."""
    before, after, zero = [], [], []
    for a, b, c, d in zip(m, v, stored_m, stored_v, strict=True):
        there = b > 0
        before.append((a / (b.sqrt() + EPS))[there].double())
        after.append((c / (d.sqrt() + EPS))[there].double())
        zero.append(d[there] == 0)
    signal, lost = torch.cat(before).square(), torch.cat(zero)
    apart = (torch.cat(after) - torch.cat(before)).square()
    mse, kept = apart.mean().item(), apart[~lost].mean().item()
    of = (signal.mean().item() / mse, signal[~lost].mean().item() / kept)
    return Errors(mse, kept, *(10 * math.log10(ratio) for ratio in of), lost.double().mean().item())


def table(m: list[Tensor], v: list[Tensor], granularity: str) -> dict[str, Errors]:
    """Return COAT's rows, and others."""
    found = {}
    for name, (m_format, v_format, options) in CASES.items():
        kind = {"granularity": granularity, **GRANULARITIES[granularity]}
        of_m = Moment(format=m_format, **kind, expand=options.get("expand", False))
        found[name] = errors(m, v, stored(m, of_m), stored(v, Moment(format=v_format, **kind, **options)))
    return found


def search(m: list[Tensor], v: list[Tensor], granularity: str) -> dict[tuple[str, str, bool], Errors]:
    """Return what each split of 8 bits costs, by the formats of m and v and whether the root of v is stored."""
    kind = {"granularity": granularity, **GRANULARITIES[granularity]}
    of_m = {name: stored(m, Moment(format=name, **kind)) for name in SIGNED}
    found = {}
    for root in (False, True):
        for name in UNSIGNED:
            of_v = stored(v, Moment(format=name, **kind, root=root))
            found.update({(first, name, root): errors(m, v, of_m[first], of_v) for first in SIGNED})
    return found


def main() -> None:
    """Print the table of each checkpoint, and write the search."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("states", nargs="+", metavar="NAME=FILE")
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    rows: list[list[object]] = []
    for entry in arguments.states:
        model, path = entry.split("=", 1)
        tensors = load_file(path)
        names = [name for name in tensors if name.endswith("/exp_avg") and tensors[name].numel() >= LEAST]
        m, v = [tensors[name] for name in names], [tensors[name + "_sq"] for name in names]
        for granularity in GRANULARITIES:
            print(f"{model}, scales per {granularity}: m / v | MSE | where v is not lost | SQNR | there | share lost")
            for name, e in table(m, v, granularity).items():
                print(f"{name:30s} | {e.mse:.4g} | {e.mse_kept:.4g} | {e.sqnr:.1f} | {e.sqnr_kept:.1f} | {e.lost:.3%}")
            if arguments.csv:
                rows += [
                    [model, granularity, *key[:2], int(key[2]), *(f"{number:.5g}" for number in found)]
                    for key, found in search(m, v, granularity).items()
                ]
    if arguments.csv:
        with arguments.csv.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerows([["model", "granularity", "m", "v", "root_of_v", *Errors._fields], *rows])


if __name__ == "__main__":
    main()
