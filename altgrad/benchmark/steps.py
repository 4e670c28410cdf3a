"""Training steps of one model under several recipes, in one process, turn by turn, and their peak memory.

Each step is timed right beside a bf16 step, before or after it at random, so that the ratio of the two is far steadier
than either time. Memory is in MB of 10^6 bytes; this package's README says what counts.

``python -m altgrad.benchmark.steps JOB`` takes one step, to compile it into the cache on disk. Compiling a step of
twelve layers takes a process a minute, most of it on one core, so `compile_all` has several processes do it at a time.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from altgrad.benchmark.tables import BASELINE
from altgrad.benchmark.timing import ratio, seconds
from altgrad.common.errors import run_stage
from altgrad.config.recipe import TORCHAO_RECIPES, Rule
from altgrad.config.tensor_recipe import BLOCK_FORMATS
from altgrad.model import GPT, GPTConfig, Recipe, linear_layers, quantize_model
from altgrad.model.hardware import has_products, select_device
from altgrad.optim import Arm, build_optimizer
from altgrad.training import machine
from altgrad.training.graphs import compile_model
from altgrad.training.machine import choose_compute

CLIP = 1.0
STEPS = 3
MB = 1e6
COMPILED_AT_A_TIME = 6
POLL_S = 0.2


class Contestant(NamedTuple):
    """A way to train; without a recipe nothing is quantized.

    ``compute`` is as in `machine.choose_compute`; ``scales`` are those that a device must have products with, as
    `has_products` names them.
    """

    name: str
    recipe: Recipe | None = None
    compute: str = "bf16"
    scales: str | None = None

    def runs_on(self, device: torch.device) -> bool:
        """Whether ``device`` has the products of this contestant."""
        return self.scales is None or has_products(self.scales, device)


def contestants(device: torch.device) -> list[Contestant]:
    """Return the ways to train: unquantized, formats and scalings, block formats, and layers of torchao.

    Products by FP8 units are left out on a CPU, where torch emulates them slowly; so is float32 on a GPU, where nobody
    trains in it.
    """
    nvfp4 = BLOCK_FORMATS["NVFP4"]
    stochastic, four_six = {"rounding": "stochastic"}, {**nvfp4, "scale_rounding": "4/6"}
    published: dict[str, Any] = {"weight": "NVFP4_16x16", "input": "NVFP4", "grad": nvfp4 | stochastic, "hadamard": 16}
    eden = {"weight": four_six, "input": four_six, "grad": {**nvfp4, "rounding": "MS-EDEN"}}
    both = [
        Contestant(BASELINE),
        *[Contestant(name, Recipe.uniform(name)) for name in ("E4M3", "E3M4", "E7M0")],
        Contestant("E4M3, delayed scaling", Recipe.uniform("E4M3", scaling="delayed")),
        Contestant("E4M3, a scale per row", Recipe.uniform("E4M3", granularity="row")),
        Contestant("E4M3, a scale per block", Recipe.uniform("E4M3", granularity="block", scale="E8M0")),
        Contestant("E4M3, stochastic gradients", all_in("E4M3", {"format": "E4M3"} | stochastic)),
        *[Contestant(f"{name}, all tensors", all_in(name)) for name in ("MXFP8", "MXFP4", "NVFP4")],
        Contestant("NVFP4 as published", ruled("blocks.*", head=False, **published)),  # all layers but the head in it
        Contestant("NVFP4, MS-EDEN", ruled("blocks.*", head=False, **eden)),  # QUARTET_II of params.yaml
        Contestant("E4M3, codes kept", Recipe.uniform("E4M3", save="codes")),
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
    """Return the recipe with a rule for ``layers``, and one for the weight and gradient of the ``head``."""
    rules = [Rule(layers=layers, **settings)]
    if head:
        rules.append(Rule(layers="head", weight=settings["weight"], grad=settings["grad"]))
    return Recipe(rules=tuple(rules))


def all_in(name: str, grad: Any = None) -> Recipe:
    """Return the recipe with one format for all tensors, or with another for ``grad``."""
    return ruled(weight=name, input=name, grad=grad or name)


class Step:
    """A training step of one contestant, to be called again and again on the same tokens.

    Args:
        config: the model's size.
        entry: the contestant.
        batch: sequences of random tokens, the same ones in every process.
        device: where.
        mode: of `torch.compile`.
    """

    def __init__(
        self, config: GPTConfig, entry: Contestant, batch: int, device: torch.device, mode: str = "default"
    ) -> None:
        torch.manual_seed(0)
        self.model = GPT(config).to(device)
        if entry.recipe is not None:
            quantize_model(self.model, entry.recipe)
        self.optimizer = build_optimizer(self.model, Arm(lr=1e-4))
        self.device = device
        generator = torch.Generator().manual_seed(0)
        shape = (2, batch, config.context)  # inputs and targets
        self.tokens = torch.randint(config.vocab_size, shape, generator=generator).to(device)
        self._compiled = compile_model(self.model, mode)
        self._bf16 = choose_compute(entry.compute, device)[0] == "bf16"

    def __call__(self) -> None:
        """Take one step; the gradients of the one before are dropped first."""
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._bf16):
            loss = self._compiled(self.tokens[0], self.tokens[1])
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step(norm=norm.item())

    def warm(self) -> Step:
        """Take the first steps, which compile and record CUDA graphs; ``first_s`` are the seconds of the first."""
        self.first_s = seconds(self, self.device)
        self()
        self()
        return self


def matmul_operations(config: GPTConfig, batch: int) -> int:
    """Return the floating-point operations of the linear layers in a step: one product forward and two backward."""
    with torch.device("meta"):
        model = GPT(config)
    weights = sum(layer.weight.numel() for layer in linear_layers(model).values())
    return 3 * 2 * weights * batch * config.context


def result(name: str, config: GPTConfig, batch: int, first: float, taken: dict[str, list[float]]) -> dict[str, Any]:
    """Return the result of a contestant: its size, and the medians of its steps and of their ratios.

    Args:
        name: of the contestant.
        config: the model's size.
        batch: sequences.
        first: seconds to its first step.
        taken: seconds of its steps, and of the baseline's beside each.
    """
    median = statistics.median(taken[name])
    return {
        "name": name, "layers": config.layers, "width": config.width, "context": config.context, "batch": batch,
        "first_step_s": round(first, 1), "step_ms": round(1e3 * median, 2),
        "tokens_per_s": round(batch * config.context / median), **ratio("over_bf16", taken[name], taken[BASELINE]),
        "matmul_operations_per_s": round(matmul_operations(config, batch) / median), "rounds": len(taken[name]),
    }  # fmt: skip


def mode_result(name: str, mode: str, taken: dict[str, list[float]]) -> dict[str, Any]:
    """Return the result of a contestant compiled in ``mode``; ``taken`` are its seconds, and those of ``default``."""
    median = statistics.median(taken[mode])
    return {
        "name": f"{name}, {mode}", "contestant": name, "mode": mode, "step_ms": round(1e3 * median, 2),
        **ratio("over_default", taken[mode], taken["default"]), "rounds": len(taken[mode]),
    }  # fmt: skip


def state_mb(step: Step) -> float:
    """Return the MB of parameters, buffers and optimizer state; each tensor counts once."""
    state = [value for of_weight in step.optimizer.state.values() for value in of_weight.values()]
    tensors = [value for value in state if isinstance(value, torch.Tensor)]
    return tensors_mb([*step.model.parameters(), *step.model.buffers(), *tensors])


def tensors_mb(tensors: Iterable[torch.Tensor]) -> float:
    """Return the MB that tensors take; those that share storage count once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values()) / MB


def peak_mb(step: Step) -> float | None:
    """Return the peak MB of three more steps, state included; ``None`` where the system does not tell.

    ``step`` must have run before, so that it is compiled and the optimizer has its state.
    """
    step.optimizer.zero_grad(set_to_none=True)
    growth = growth_mb(step, step.device)
    return None if growth is None else state_mb(step) + growth


def growth_mb(run: Callable[[], object], device: torch.device) -> float | None:
    """Return the peak MB of three calls of ``run`` beyond what is allocated; ``None`` where that is not told.

    On a CPU the high-water mark of the process is set back first: it starts at the size of the parent process.
    """
    gc.collect()
    # Give free pages of the C library (glibc) back to the system: used again, they would not count as growth.
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
    if not machine.forget_peak_memory(device):
        return None
    before = machine.peak_memory_mb(device)
    for _ in range(STEPS):
        run()
    return machine.peak_memory_mb(device) - before


def compile_all(
    names: Sequence[str], config: GPTConfig, batch: int, cache: Path, at_a_time: int = COMPILED_AT_A_TIME
) -> dict[str, str]:
    """Compile the steps of the contestants ``names`` into ``cache``.

    Returns the names whose process failed, with the last line of its errors. Such a step is compiled when it is timed;
    one that has no room on the GPU beside the others has been compiled by then.
    """
    waiting, failed = list(names), {}
    running: dict[str, tuple[subprocess.Popen[bytes], Path]] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            while waiting or running:
                while waiting and len(running) < at_a_time:
                    name = waiting.pop(0)
                    job = {"name": name, "config": dataclasses.asdict(config), "batch": batch, "cache": str(cache)}
                    command = [sys.executable, "-m", "altgrad.benchmark.steps", json.dumps(job)]
                    quiet, log = subprocess.DEVNULL, Path(folder, name.replace("/", "_"))
                    with log.open("wb") as errors:
                        running[name] = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=errors), log
                time.sleep(POLL_S)
                for name in [name for name, (process, _) in running.items() if process.poll() is not None]:
                    process, log = running.pop(name)
                    if process.returncode:
                        failed[name] = (log.read_text(errors="replace").strip() or "killed").splitlines()[-1]
        finally:
            for process, _ in running.values():
                process.kill()
    return failed


def main(arguments: list[str]) -> None:
    """Take one step of the job in ``arguments``."""
    job = json.loads(arguments[0])
    machine.use_compile_cache(Path(job["cache"]))
    device = select_device("auto")
    config = GPTConfig(**job["config"] | {"labels": tuple(job["config"]["labels"])})  # JSON has no tuples
    entry = {entry.name: entry for entry in contestants(device)}[job["name"]]
    Step(config, entry, job["batch"], device)()


if __name__ == "__main__":
    run_stage(main)
