"""Measures training steps of one model under several recipes, and steps of an optimizer alone: time and peak memory.

Each step is timed right before or after a bf16 step, in random order, so that the ratio of the two varies far less
than either time. Memory is in MB of 10^6 bytes; this package's README says what counts.

An optimizer's step is timed beside one of torch's fused AdamW. Only the optimizers run, on fixed random gradients.
They are given the gradients' norm, which clipping computes in training. Quantized weights have a scale per tensor.

``python -m altgrad.benchmark.steps JOB`` takes one step, to compile it into the cache on disk. Compiling a step of
twelve layers takes a minute, mostly on one core, so `compile_all` runs several such processes at a time.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from altgrad.benchmark.records import BASELINE
from altgrad.benchmark.timing import in_turn, ratio, seconds
from altgrad.common.errors import run_stage
from altgrad.config.recipe import TORCHAO_RECIPES, Rule
from altgrad.config.tensor_recipe import BLOCK_FORMATS
from altgrad.model import GPT, GPTConfig, Recipe, quantize_model
from altgrad.model.hardware import has_products, select_device
from altgrad.optim import Arm, build_optimizer
from altgrad.optim.update_gpu import Kernels
from altgrad.training import machine
from altgrad.training.graphs import compile_model
from altgrad.training.machine import bytes_per_parameter, choose_compute

CLIP = 1.0
STEPS = 3
MB = 1e6
COMPILED_AT_A_TIME = 6
ATTENTION = {"E4M3": "E5M2", "MXFP8": "MXFP8"}  # format of attention's products and of their gradients


class Contestant(NamedTuple):
    """A way to train that is compared with others. Without a ``recipe`` nothing is quantized.

    ``compute`` is as in `machine.choose_compute`. ``scales`` names the low-precision products that the device must
    have, as in `has_products`, such as ``"rows"``; None if it needs none.
    """

    name: str
    recipe: Recipe | None = None
    compute: str = "bf16"
    scales: str | None = None

    def runs_on(self, device: torch.device) -> bool:
        """Whether ``device`` has the low-precision products that this contestant needs."""
        return self.scales is None or has_products(self.scales, device)


def contestants(device: torch.device) -> list[Contestant]:
    """Return the ways to train: unquantized, formats and scalings, block formats, and torchao's layers.

    A CPU leaves out native FP8 and FP4 products, which torch emulates slowly there. A GPU leaves out float32.
    """
    nvfp4 = BLOCK_FORMATS["NVFP4"]
    stochastic, four_six = {"rounding": "stochastic"}, {**nvfp4, "scale_rounding": "4/6"}
    published: dict[str, Any] = {"weight": "NVFP4_16x16", "input": "NVFP4", "grad": nvfp4 | stochastic, "hadamard": 16}
    eden = {"weight": four_six, "input": four_six, "grad": {**nvfp4, "rounding": "MS-EDEN"}}
    both = [
        Contestant(BASELINE),
        *[Contestant(name, Recipe.uniform(name)) for name in ("E4M3", "E3M4", "E7M0", "POSIT8")],
        Contestant("E4M3, delayed scaling", Recipe.uniform("E4M3", scaling="delayed")),
        Contestant("E4M3, a scale per row", Recipe.uniform("E4M3", granularity="row")),
        Contestant("E4M3, a scale per block", Recipe.uniform("E4M3", granularity="block", scale="E8M0")),
        Contestant("E4M3, stochastic gradients", all_in("E4M3", {"format": "E4M3"} | stochastic)),
        *[Contestant(f"{name}, all tensors", all_in(name)) for name in ("MXFP8", "MXFP4", "NVFP4")],
        Contestant("NVFP4 as published", ruled("blocks.*", head=False, **published)),  # all layers but the head in it
        Contestant("NVFP4, MS-EDEN", ruled("blocks.*", head=False, **eden)),  # QUARTET_II of params.yaml
        Contestant("E4M3, codes kept", Recipe.uniform("E4M3", save="codes")),
        *[Contestant(f"attention in {name}", attention_in(name, grad)) for name, grad in ATTENTION.items()],
        *[Contestant(f"E4M3, torchao {name}", ruled("blocks.*", head=False, torchao=name)) for name in TORCHAO_RECIPES],
    ]
    if device.type == "cpu":
        return [*both, Contestant("fp32", compute="float32")]
    # DeepSeek-V3's scales (arXiv:2412.19437): tiles of weights, blocks of all else.
    rows, tiles = ({"format": "E4M3", "granularity": kind, "block": 128} for kind in ("block", "tile"))
    of_128 = ruled(head=False, weight=tiles, input=rows, grad=rows, backend="native")
    rowwise = Recipe.uniform("E4M3", grad="E4M3", granularity="row", backend="native")
    native_nvfp4: dict[str, Any] = published | {"layers": "blocks.*", "backend": "native"}
    return [
        *both,
        Contestant("E4M3, native tensorwise", Recipe.uniform("E4M3", backend="native"), scales="one scale"),
        Contestant("E4M3, native rowwise", rowwise, scales="rows"),
        Contestant("E4M3, native blocks of 128", of_128, scales="blocks of 128"),
        Contestant("MXFP8, native", Recipe.uniform("MXFP8", grad="MXFP8", backend="native"), scales="MXFP8"),
        Contestant("NVFP4 as published, native", ruled(head=False, **native_nvfp4), scales="NVFP4"),
    ]


def ruled(layers: str = "*", head: bool = True, **settings: Any) -> Recipe:
    """Return a recipe with the rule ``settings`` for ``layers`` and, if ``head``, weight and grad for the head."""
    rules = [Rule(layers=layers, **settings)]
    if head:
        rules.append(Rule(layers="head", weight=settings["weight"], grad=settings["grad"]))
    return Recipe(rules=tuple(rules))


def attention_in(name: str, grad: str) -> Recipe:
    """Return the recipe that quantizes attention's two products and nothing else."""
    products = ("blocks.*.attn.scores", "blocks.*.attn.values")
    return Recipe(rules=tuple(Rule(layers=layers, weight=name, input=name, grad=grad) for layers in products))


def all_in(name: str, grad: Any = None) -> Recipe:
    """Return the recipe with the format ``name`` for all tensors; ``grad`` replaces the gradients' format."""
    return ruled(weight=name, input=name, grad=grad or name)


class Step:
    """A training step of one contestant; each call takes one step on the same tokens.

    Args:
        config: the model's size.
        entry: the contestant.
        batch: number of sequences of random tokens, the same tokens in every process.
        device: the device of the model.
    """

    def __init__(self, config: GPTConfig, entry: Contestant, batch: int, device: torch.device) -> None:
        torch.manual_seed(0)
        self.model = GPT(config).to(device)
        if entry.recipe is not None:
            quantize_model(self.model, entry.recipe)
        self.optimizer = build_optimizer(self.model, Arm(lr=1e-4))
        self.device = device
        generator = torch.Generator().manual_seed(0)
        shape = (2, batch, config.context)  # inputs and targets
        self.tokens = torch.randint(config.vocab_size, shape, generator=generator).to(device)
        self._compiled = compile_model(self.model)
        self._bf16 = choose_compute(entry.compute, device)[0] == "bf16"

    def __call__(self) -> None:
        """Drop the old gradients and take one step: forward, backward, clipping, optimizer."""
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._bf16):
            loss = self._compiled(self.tokens[0], self.tokens[1])
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step(norm=norm.item())

    def warm(self) -> Step:
        """Take three steps, of which the first compiles; set ``first_s``, the first's seconds. Return self."""
        self.first_s = seconds(self, self.device)
        self()
        self()
        return self


def matmul_operations(config: GPTConfig, batch: int) -> int:
    """Return the floating-point operations of the linear layers in a training step on ``batch`` sequences."""
    with torch.device("meta"):
        return GPT(config).flops_per_token(attention=False) * batch * config.context


def result(name: str, config: GPTConfig, batch: int, first: float, taken: dict[str, list[float]]) -> dict[str, Any]:
    """Return the record's row of a contestant: sizes, median step time, rates, and time over the bf16 step's.

    Args:
        name: the contestant's name.
        config: the model's size.
        batch: number of sequences.
        first: seconds of the first step, compiling included.
        taken: seconds of each timed step, by name: the contestant's and the baseline's.
    """
    median = statistics.median(taken[name])
    return {
        "name": name, "layers": config.layers, "width": config.width, "context": config.context, "batch": batch,
        "first_step_s": round(first, 1), "step_ms": round(1e3 * median, 2),
        "tokens_per_s": round(batch * config.context / median), **ratio("over_bf16", taken[name], taken[BASELINE]),
        "matmul_operations_per_s": round(matmul_operations(config, batch) / median), "rounds": len(taken[name]),
    }  # fmt: skip


def state_mb(step: Step) -> float:
    """Return the MB of parameters, buffers and optimizer state; shared storage counts once."""
    state = [value for of_weight in step.optimizer.state.values() for value in of_weight.values()]
    tensors = [value for value in state if isinstance(value, torch.Tensor)]
    return tensors_mb([*step.model.parameters(), *step.model.buffers(), *tensors])


def tensors_mb(tensors: Iterable[torch.Tensor]) -> float:
    """Return the MB of the tensors' storage; storage that several tensors share counts once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values()) / MB


def peak_mb(step: Step) -> float | None:
    """Return the peak MB of three more steps, state included; ``None`` if the system does not report it.

    Call ``step`` before, so that it is compiled and the optimizer has its state.
    """
    step.optimizer.zero_grad(set_to_none=True)
    growth = growth_mb(step, step.device)
    return None if growth is None else state_mb(step) + growth


def growth_mb(run: Callable[[], object], device: torch.device) -> float | None:
    """Return the peak MB of three calls of ``run`` above the memory in use before; ``None`` if not reported.

    On a CPU the process's high-water mark is reset first: it starts at the size of the parent process.
    """
    gc.collect()
    # Return glibc's free pages to the system: if reused, they would not count as growth.
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
    if not machine.forget_peak_memory(device):
        return None
    before = machine.peak_memory_mb(device)
    for _ in range(STEPS):
        run()
    return machine.peak_memory_mb(device) - before


def measure_optimizer(
    config: GPTConfig, fmt: str, name: str, settings: dict[str, Any], rounds: int, device: torch.device
) -> dict[str, Any]:
    """Time an optimizer; return milliseconds, time ratios with quartiles, MB, and bytes per parameter.

    ``over_adamw`` is its time over that of torch's fused AdamW. ``over_rule``, only for an optimizer with a GPU kernel,
    is the kernel's time over that of the compiled rule. ``state_mb`` counts the optimizer's tensors. ``peak_mb`` adds
    the most that a step allocates besides; it is None if the system does not report it. MB are 10^6 bytes.

    Args:
        config: the model's size.
        fmt: the weights' format.
        name: name of the optimizer, for the result.
        settings: the arguments of `altgrad.optim.Arm`.
        rounds: number of timed steps of each optimizer.
        device: the device of the model.
    """
    (_, plain), (model, arm) = (_stepper(config, fmt, of, device) for of in (None, settings))
    runs = {"plain": plain.step, "arm": partial(arm.step, norm=1.0)}
    if any(isinstance(loops, Kernels) for loops in arm._loops.values()):
        _, by_rule = _stepper(config, fmt, settings, device)
        by_rule._loops.clear()  # so that the compiled rule steps all weights
        runs["rule"] = partial(by_rule.step, norm=1.0)
    for run in STEPS * list(runs.values()):
        run()
    taken = in_turn(runs, rounds, device)
    state = tensors_mb(t for tensors in arm.state.values() for t in tensors.values())
    growth = growth_mb(arm.step, device)
    return {
        "name": name,
        "parameters": sum(p.numel() for group in arm.param_groups for p in group["params"]),
        "step_ms": round(1e3 * statistics.median(taken["arm"]), 2),
        "adamw_ms": round(1e3 * statistics.median(taken["plain"]), 2),
        **ratio("over_adamw", taken["arm"], taken["plain"]),
        **(ratio("over_rule", taken["arm"], taken["rule"]) if "rule" in taken else {}),
        "rounds": rounds,
        **{role: round(count, 3) for role, count in bytes_per_parameter(model, arm).items()},
        "state_mb": round(state, 1), "peak_mb": None if growth is None else round(state + growth, 1),
    }  # fmt: skip


def _stepper(
    config: GPTConfig, fmt: str, settings: dict[str, Any] | None, device: torch.device
) -> tuple[nn.Module, Any]:
    """Return a model with random gradients, and its optimizer: torch's fused AdamW if ``settings`` is None."""
    torch.manual_seed(0)
    model = quantize_model(GPT(config).to(device), Recipe.uniform(fmt))
    if settings is None:
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    else:
        optimizer = build_optimizer(model, Arm(**settings), compiled=True)
    for p in model.parameters():  # only now: weights that are stored as codes have become other tensors
        p.grad = 1e-3 * torch.randn(p.shape, device=p.device)
    return model, optimizer


def compile_all(
    names: Sequence[str], config: GPTConfig, batch: int, cache: Path, at_a_time: int = COMPILED_AT_A_TIME
) -> dict[str, str]:
    """Compile the steps of the contestants ``names`` into the folder ``cache``, ``at_a_time`` processes at a time.

    Return ``{name: last line of stderr}`` of the processes that failed; ``{}`` if none did. A failed step is compiled
    when it is timed. A step that fails for lack of GPU memory beside the others has been compiled already.
    """
    failed: dict[str, str] = {}
    for start in range(0, len(names), at_a_time):
        running: dict[str, subprocess.Popen[str]] = {}
        try:
            for name in names[start : start + at_a_time]:
                job = {"name": name, "config": dataclasses.asdict(config), "batch": batch, "cache": str(cache)}
                command, quiet = [sys.executable, "-m", "altgrad.benchmark.steps", json.dumps(job)], subprocess.DEVNULL
                running[name] = subprocess.Popen(
                    command, stdin=quiet, stdout=quiet, stderr=subprocess.PIPE, text=True, errors="replace"
                )
            for name, process in running.items():
                _, said = process.communicate()
                if process.returncode:
                    failed[name] = (said.strip() or "killed").splitlines()[-1]
        finally:
            for process in running.values():
                process.kill()
    return failed


def main(arguments: list[str]) -> None:
    """Take one step of the job in ``arguments[0]``, JSON as `compile_all` writes it."""
    job = json.loads(arguments[0])
    machine.use_compile_cache(Path(job["cache"]))
    device = select_device("auto")
    config = GPTConfig(**job["config"] | {"labels": tuple(job["config"]["labels"])})  # JSON has no tuples
    entry = {entry.name: entry for entry in contestants(device)}[job["name"]]
    Step(config, entry, job["batch"], device)()


if __name__ == "__main__":
    run_stage(main)
