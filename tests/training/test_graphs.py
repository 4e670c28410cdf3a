"""A graph serves all models of one structure and no other. Oracles: the uncompiled model, and a process of its own."""

from __future__ import annotations

import dataclasses
import json
import math
import multiprocessing
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from altgrad.config import UserError
from altgrad.model import GPT, GPTConfig, Recipe, quantize_model, requantize_model
from altgrad.model.hardware import multiplies_bf16
from altgrad.model.quantized.quantizer import Quantizer
from altgrad.training import graphs, machine, trainer
from altgrad.training.graphs import compile_model, structure
from altgrad.training.run import train_cell
from tests.training.conftest import make_cell, without_dropout

CONFIG = GPTConfig(vocab_size=61, layers=2, width=16, heads=2, context=8)
SAME = {
    "another format": lambda: quantized("E3M4"),
    "other weights": lambda: quantized("E4M3", seed=5),
    "another gradient": lambda: quantized("E4M3", grad="E3M4"),
    "another recipe before": lambda: requantize_model(quantized("E3M4", granularity="row"), Recipe.uniform("E4M3")),
}
OTHER = {
    "unquantized": lambda: quantize_model(GPT(CONFIG), Recipe(rules=())),
    "wider": lambda: quantized("E4M3", config=GPTConfig(vocab_size=61, layers=2, width=32, heads=2, context=8)),
    "more heads": lambda: quantized("E4M3", config=GPTConfig(vocab_size=61, layers=2, width=16, heads=4, context=8)),
    "dropout": lambda: quantized("E4M3", config=GPTConfig(61, 2, 16, 2, 8, dropout=0.1)),
    "the other gelu": lambda: quantized("E4M3", config=GPTConfig(61, 2, 16, 2, 8, gelu="tanh")),
    "a scale per row": lambda: quantized("E4M3", granularity="row"),
    "another scale": lambda: quantized("E4M3", scale="E8M0"),
    "scales of two levels": lambda: quantized("E4M3", granularity="block", scale="E4M3"),
    "a scale per block": lambda: quantized("E4M3", granularity="block", scale="E8M0"),
    "delayed scales": lambda: quantized("E4M3", scaling="delayed"),
    "another estimator": lambda: quantized("E4M3", gradient="relu"),
    "float32 operands": lambda: quantized("FP16"),
}  # fmt: skip


def quantized(fmt: str, seed: int = 0, config: GPTConfig = CONFIG, **settings: object) -> GPT:
    torch.manual_seed(seed)
    return quantize_model(GPT(config), Recipe.uniform(fmt, **settings))


def test_formats_and_weights_are_no_part_of_the_structure_and_everything_else_is():
    assert {structure(make()) for make in SAME.values()} == {structure(quantized("E4M3"))}
    found = {name: structure(make()) for name, make in OTHER.items()} | {"plain": structure(quantized("E4M3"))}
    for change in ("untied", "frozen", "hooked"):
        model = quantized("E4M3")
        if change == "untied":
            model.tokens.weight = nn.Parameter(model.tokens.weight.detach().clone())
        elif change == "frozen":
            model.positions.weight.requires_grad_(False)
        else:
            model.blocks[0].register_forward_hook(lambda *_: None)
        found[change] = structure(model)
    if not multiplies_bf16():  # all operands are float32
        del found["float32 operands"]
    assert None not in found.values()
    unknown = quantized("E4M3")
    unknown.blocks[0].mlp = nn.Sequential(nn.Linear(16, 16, bias=False))
    assert structure(unknown) is None
    assert len(set(found.values())) == len(found), "two of these have one structure"


@pytest.mark.slow  # compiles
@pytest.mark.usefixtures("products")
def test_models_that_share_a_graph_keep_their_own_tensors(monkeypatch):
    monkeypatch.setattr(graphs, "_graphs", {})
    tokens = torch.randint(0, 61, (2, 4, 8), generator=torch.Generator().manual_seed(3))
    models = [quantized("E4M3"), quantized("E2M5", seed=1), quantized("E4M3", seed=2)]
    compiled = [compile_model(model) for model in models]
    assert len(graphs._graphs) == 1
    for _ in range(2):  # in turns
        for model, call in zip(models, compiled, strict=True):
            found = call(*tokens)
            found.backward()
            gradients = [p.grad.clone() for p in model.parameters()]
            model.zero_grad()
            expected = model(*tokens)
            expected.backward()
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
            torch.testing.assert_close(gradients, [p.grad for p in model.parameters()], rtol=1e-3, atol=1e-6)
            model.zero_grad()


def test_a_mode_is_the_compilers_and_its_graphs_are_its_own(monkeypatch):
    """Oracle: what `torch.compile` is told for each mode, by the names in its documentation."""
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(graphs, "_graphs", {})
    monkeypatch.setattr(graphs, "compile_apart", lambda call, options, **_: told.append(options) or call)
    for mode in ("default", "reduce-overhead", "max-autotune-no-cudagraphs", "default"):
        compile_model(quantized("E4M3"), mode)
    assert len(told) == 3 and [options.get("triton.cudagraphs", False) for options in told] == [False, True, False]
    assert [options.get("max_autotune", False) for options in told] == [False, False, True]


@pytest.mark.slow  # seven graphs are compiled
def test_a_graph_notices_modes_recipes_and_shapes():
    """Oracles: the uncompiled models; the scales of a delayed recipe, which training alone moves."""
    tokens = torch.randint(0, 61, (2, 4, 8), generator=torch.Generator().manual_seed(3))
    model = quantized("E4M3", scaling="delayed")
    compiled = compile_model(model)

    def histories() -> Tensor:
        return torch.stack([module.history for module in model.modules() if isinstance(module, Quantizer)]).clone()

    compiled(*tokens).backward()
    learned = histories()
    model.eval()
    compiled(*tokens)
    with torch.no_grad():
        compiled(*tokens)
    assert torch.equal(histories(), learned)
    model.train()
    compiled(*tokens)
    assert not torch.equal(histories(), learned)
    per_tensor, per_row = quantized("E4M3"), quantized("E4M3", granularity="row")
    one, other = compile_model(per_tensor), compile_model(per_row)
    losses = [one(*tokens), other(*tokens), one(*tokens[:, :2])]
    expected = [per_tensor(*tokens), per_row(*tokens), per_tensor(*tokens[:, :2])]
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=0)
    assert losses[0] != losses[1]


PICO = GPTConfig(vocab_size=1024, layers=2, width=64, heads=4, context=128)  # of the default run


@pytest.mark.long
@pytest.mark.parametrize("layers", [1, pytest.param(PICO.layers, marks=pytest.mark.slow)])
def test_the_graph_that_the_default_run_compiles_computes_what_the_model_does(layers):
    """At its own sizes, since a compiler makes other code for others, and wrong code where it errs.

    One of its equal layers takes half the time.

    Sums that differ in their last digit are now and then rounded to another value of 8 bits: gradients differ by up to
    0.11 of their norm. A wrong sum or place differs by about 1.
    """
    torch.manual_seed(0)
    model = quantize_model(GPT(dataclasses.replace(PICO, layers=layers)), Recipe.uniform("E3M4"))
    batch = torch.randint(0, 1024, (16, 128)), torch.randint(0, 1024, (16, 128))
    found = []
    for loss_of in (model, compile_model(model)):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=multiplies_bf16()):
            loss = loss_of(*batch)
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    for plain, compiled in zip(*found, strict=True):
        assert (compiled - plain).norm() <= 0.25 * plain.norm()


CELLS = """
import json, sys
from pathlib import Path
from altgrad.config import Cell
from altgrad.training.run import train_cell

root = Path(sys.argv[1])
for number, text in enumerate(json.loads(sys.argv[2])):
    cell = Cell.model_validate(text)
    train_cell(cell, root / "tokens", root / sys.argv[3] / str(number), root)
"""


@pytest.mark.slow  # compiles two graphs
def test_a_cells_bits_do_not_depend_on_what_its_process_did_before(tokens, tmp_path):
    """Alone, after one that shares its graph, and after others that do not."""
    on = {"compile": "on", "steps": 6, "grad_accumulation": 1}
    one = make_cell("E4M3", **on)
    before = [make_cell("E3M4", seed=1, arm={"lr": 0.02, "stiffness": "ulp"}, **on), make_cell("bf16", seed=2, **on)]
    (tmp_path / "tokens").symlink_to(tokens)
    for name, cells in {"alone": [one], "after": [*before, one, one]}.items():
        texts = json.dumps([cell.model_dump(mode="json") for cell in cells])
        command = [sys.executable, "-c", CELLS, str(tmp_path), texts, name]
        subprocess.run(command, check=True, env={**os.environ, "ALTGRAD_COMPILE_CACHE": str(tmp_path / "compiled")})
    for number in ("2", "3"):
        for name in ("metrics.json", "model.safetensors", "history.csv", "monitors.parquet", "probes.safetensors"):
            found = (tmp_path / "after" / number / name).read_bytes()
            assert found == (tmp_path / "alone/0" / name).read_bytes(), f"{name} of the one in place {number}"
    timing = json.loads((tmp_path / "alone/0/timing.json").read_text())
    assert timing["compile_s"] > 1 and timing["compile_s"] + timing["evaluate_s"] < timing["train_s"]


def compile_for(seconds: float, told: Connection) -> None:
    """Take the time that compiling takes; tell when it begins and when it is over, before another may begin."""
    with graphs._compiled_by_one_process("a graph"):
        told.send(time.time())
        time.sleep(seconds)
        told.send(time.time())


def test_one_process_compiles_and_the_others_wait_until_it_is_made(tmp_path, monkeypatch):
    """Processes that this one forks, which have loaded torch already."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    context = multiprocessing.get_context("fork")

    def start(seconds: float) -> tuple[BaseProcess, Connection]:
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=compile_for, args=(seconds, there))
        process.start()
        there.close()
        return process, here

    first, told = start(1)
    began = told.recv()
    second, told_second = start(0)
    ended = told.recv()
    assert told_second.recv() >= ended >= began + 1
    for process in (first, second):
        process.join()
        assert process.exitcode == 0


@pytest.mark.parametrize("factor", [1.02, math.nan, 1.001])
def test_a_graph_that_computes_something_else_ends_in_a_sentence_and_one_that_rounds_elsewhere_trains(
    tokens, tmp_path, monkeypatch, factor
):
    monkeypatch.setattr(trainer, "compile_model", lambda model: lambda *batch: factor * model(*batch))
    monkeypatch.setattr(machine, "use_compile_cache", lambda _: None)
    cell = without_dropout(make_cell("E4M3", compile="on"))
    said = nullcontext() if factor == 1.001 else pytest.raises(UserError, match="the C\\+\\+ compiler made an error")
    with said:
        train_cell(cell, tokens, tmp_path / "out", tmp_path)
    assert (tmp_path / "out").exists() == (factor == 1.001)
