"""Cells that store weights or optimizer state in a format: the bits of float32 storage, and bytes as they say."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from altgrad.model import GPT, GPTConfig, Recipe, embedded_weights, linear_layers, quantize_model
from altgrad.optim import build_optimizer, weight_grids
from altgrad.optim.weight_grid import CodeWeight
from altgrad.training.machine import bytes_per_parameter
from tests.optim.arms import ARMS, arm_named
from tests.training.conftest import make_cell, trained

STOCHASTIC = {"format": "UE4M4", "rounding": "stochastic"}


STATE = {"m": "E4M3", "v": STOCHASTIC, "least": 0}
CODED = {
    "state": {"lr": 1e-2, "stiffness": "ulp", "state": STATE},
    "rung": ARMS["rung_3_bytes"] | {"lr": 0.5, "plain_lr": 1e-2, "state": STATE},
    "eco": ARMS["eco_3_bytes"] | {"lr": 1e-2, "plain_lr": 1e-2, "state": STATE},
}


@pytest.mark.parametrize("name", CODED)
def test_a_run_of_codes_has_the_bits_of_one_whose_weights_lie_in_float32(tokens, tmp_path, name):
    arm, root = CODED[name], tmp_path / "codes"
    assert trained(make_cell(arm=arm), tokens, root) == trained(
        make_cell(arm=arm | {"store": "float32"}), tokens, tmp_path / "float32"
    )
    saved = load_file(max((root / "scratch").rglob("step-*.safetensors")))
    codes = [t for name, t in saved.items() if name.startswith("codes/") or name.endswith(("exp_avg", "exp_avg_sq"))]
    assert codes and all(t.dtype == torch.uint8 for t in codes)
    timing = json.loads((root / "out" / "timing.json").read_text())
    assert timing["bytes_grads"] == 4
    assert 1 < timing["bytes_m"] == timing["bytes_v"] < 1.2


CONFIG = GPTConfig(vocab_size=64, layers=1, width=32, heads=2, context=16)


ONE_OF_A_KIND = ("adamw", "muon", "rung", "rung_3_bytes", "eco_3_bytes", "adamw_coat")


@pytest.mark.parametrize(
    ("name", "recipe"), [*((name, "E4M3") for name in ONE_OF_A_KIND), ("adamw", "bf16"), ("adamw", "virtual")]
)
def test_bytes_per_parameter_are_those_of_every_tensor_there_is(name, recipe):
    """Storages, each once; masters are the weights that a product quantizes and their optimizer does not keep so."""
    model, arm = GPT(CONFIG), arm_named(name)
    if arm.store == "codes":
        arm = arm.but(state=arm.state.but(least=0))
    if recipe != "bf16":
        weight = {"format": "E4M3", "virtual": recipe == "virtual"}
        quantize_model(model, Recipe(rules=[{"layers": "*", "weight": weight}]))
    optimizer = build_optimizer(model, arm, weight_grids(model, on_grid=arm.weights == "quantized"))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    found = bytes_per_parameter(model, optimizer)
    parameters = list(model.parameters())
    kept = [t for state in optimizer.state.values() for t in state.values()]
    weights = (p.memory.codes if isinstance(p, CodeWeight) else p for p in parameters)
    everything = (*weights, *(p.grad for p in parameters), *kept)
    storages = {t.data_ptr(): t.untyped_storage() for t in everything}
    count = sum(p.numel() for p in parameters)
    assert math.isclose(found["bytes_per_parameter"], sum(s.nbytes() for s in storages.values()) / count)
    assert math.isclose(found["bytes_per_parameter"] * 2, sum(found.values()))
    quantized = {layer.weight for layer in linear_layers(model).values()} if recipe == "E4M3" else set()
    kept_so = set() if arm.weights == "master" else quantized - embedded_weights(model)
    masters = sum(p.nbytes for p in quantized - kept_so)
    assert math.isclose(found["bytes_masters"], masters / count)
    coded = sum(p.numel() for p in kept_so) if arm.store == "codes" else 0
    assert math.isclose((found["bytes_masters"] + found["bytes_weights"]) * count, 4 * (count - coded) + coded)
    if arm.store == "codes":  # and two scales of 4 bytes per 128 elements, where both moments are codes
        for p in optimizer.grids:
            moments = [t for name, t in optimizer.state[p].items() if name != "step"]
            assert p.nbytes + sum(t.nbytes for t in moments) == p.numel() * (3 + 8 / 128)
