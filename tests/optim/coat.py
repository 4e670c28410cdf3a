"""The mean squared error of AdamW's m / sqrt(v) when m and v are stored in a format: COAT's Table 1 on states of ours.

``python -m tests.optim.coat STATE.safetensors`` reads a checkpoint of training (``optimizer/<n>/exp_avg``) with float32
state. COAT (arXiv:2410.19313) has 20.1 for E4M3 and E4M3 in groups of 128, 12.3 with range expansion, 25.7 with v in
E5M2, 40.3 with both; Fishman et al. (arXiv:2409.12517) take m in E4M3 and v in E5M2, a scale per tensor. Elements with
v = 0 are left out; where storing makes v zero the direction has Adam's eps below it.
"""

from __future__ import annotations

import sys

import torch
from safetensors.torch import load_file
from torch import Tensor

from altgrad.config.state import LEAST, Moment
from altgrad.optim.coded import Coding

CASES = {
    "E4M3 / E4M3": ("E4M3", "E4M3", {}), "E4M3 / E4M3, expanded": ("E4M3", "E4M3", {"expand": True}),
    "E4M3 / E5M2": ("E4M3", "E5M2", {}), "E5M2 / E5M2": ("E5M2", "E5M2", {}),
    "E4M3 / UE5M3": ("E4M3", "UE5M3", {}), "E4M3 / UE4M4": ("E4M3", "UE4M4", {}),
    "E4M3 / root of v in UE4M4": ("E4M3", "UE4M4", {"root": True}),
    "dynamic8 / unsigned_dynamic8": ("dynamic8", "unsigned_dynamic8", {}),
}  # fmt: skip
EPS = 1e-8


def errors(moments: list[tuple[Tensor, Tensor]], granularity: str) -> dict[str, tuple[float, float, float]]:
    """Return, by case, the mean squared error, that where v stays above zero, and the share of v that becomes zero."""
    found = {}
    for name, (m_format, v_format, options) in CASES.items():
        kind = {"granularity": granularity} | ({"block": 128} if granularity == "block" else {})
        expand = {"expand": options.get("expand", False)}
        m_coding = Coding(Moment(m_format, **kind, **expand))
        v_coding = Coding(Moment(v_format, **kind, **options))
        squares, lost = [], []
        for m, v in moments:
            stored_m, stored_v = (c.decode(c.encode(x), x.shape) for c, x in ((m_coding, m), (v_coding, v)))
            there = v > 0
            apart = stored_m / (stored_v.sqrt() + EPS) - m / (v.sqrt() + EPS)
            squares.append(apart[there].double().square())
            lost.append(stored_v[there] == 0)
        square, zero = torch.cat(squares), torch.cat(lost)
        found[name] = square.mean().item(), square[~zero].mean().item(), zero.double().mean().item()
    return found


def main(path: str) -> None:
    """Print the table of a checkpoint."""
    tensors = load_file(path)
    names = [name for name in tensors if name.endswith("/exp_avg") and tensors[name].numel() >= LEAST]
    moments = [(tensors[name], tensors[name + "_sq"]) for name in names]
    for granularity in ("block", "tensor"):
        print(f"scales per {granularity}: m / v | MSE | MSE where v is not lost | share of v lost")
        for name, (mse, kept, zero) in errors(moments, granularity).items():
            print(f"{name:30s} | {mse:.4g} | {kept:.4g} | {zero:.3%}")


if __name__ == "__main__":
    main(sys.argv[1])
