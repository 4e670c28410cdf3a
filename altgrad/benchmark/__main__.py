"""``python -m altgrad.benchmark``: step times of this machine, to reports/bench/<machine>.json."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from altgrad.config import UserError, run_stage
from altgrad.config.params import load_params

FORMATS = ("E4M3", "E3M4", "E7M0")
MODELS = ("nano", "micro", "mini")
BATCHES = (8, 16, 32, 64)
VOCABULARY = 4096


def main(arguments: list[str]) -> None:
    """Measure, write the record, print the table."""
    parser = argparse.ArgumentParser(prog="python -m altgrad.benchmark", description="Time training steps.")
    parser.add_argument("--formats", nargs="+", default=FORMATS, help="formats with a scale per tensor")
    parser.add_argument("--models", nargs="+", default=MODELS, help="names from models: in params.yaml, at batch 16")
    parser.add_argument("--batches", nargs="*", type=int, default=BATCHES, help="batches of the first model")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--output", type=Path, help="default: reports/bench/<machine>.json")
    options = parser.parse_args(arguments)
    presets = load_params().models
    for name in options.models:
        if name not in presets:
            raise UserError(f"--models: {name} is not in models: of params.yaml, which has {', '.join(presets)}")
    if options.rounds < 2 or min(options.batches, default=1) < 1:
        raise UserError("--rounds and --batches: expected at least 2 rounds and batches of at least 1")

    import torch  # after run_stage has set the variables that training runs under

    from altgrad.benchmark import limits, steps
    from altgrad.model import GPTConfig
    from altgrad.numerics import get_format
    from altgrad.numerics.records import environment, write_record
    from altgrad.training import machine

    try:
        formats = [get_format(name).name for name in options.formats]
    except ValueError as error:
        raise UserError(f"--formats: {error}") from None
    machine.use_compile_cache(Path.cwd())
    device = machine.select_device(options.device)
    threads = machine.use_threads(0)
    sizes = [(name, 16) for name in options.models]
    sizes += [(options.models[0], batch) for batch in options.batches if batch != 16]
    record: dict[str, Any] = {
        **environment("altgrad.benchmark", arguments),
        "device": machine.device_name(device),
        "on_gpu": device.type == "cuda",
        "limits": {
            "copy_bytes_per_s": round(limits.copy_bandwidth(device)),
            "bf16_gemm_operations_per_s": round(limits.gemm_rate(torch.bfloat16, device)),
            "fp32_gemm_operations_per_s": round(limits.gemm_rate(torch.float32, device)),
        },
        "steps": [],
    }
    slug = re.sub(r"[^a-z0-9]+", "-", f"{record['device']} {threads} threads".lower()).strip("-")
    output = options.output or Path("reports/bench") / f"{slug}.json"
    for name, batch in sizes:
        config = GPTConfig(vocab_size=VOCABULARY, **presets[name].model_dump())
        machine.choose_attention(device, config.context)
        found = steps.measure(config, batch, steps.contestants(formats), options.rounds, device)
        record["steps"] += [{"model": name, **result} for result in found]
        write_record(output, record)  # after each size: a larger one takes many minutes to compile
        print(_table(record["steps"][-len(found) :]), flush=True)
    print(f"written to {output}")


def _table(results: list[dict[str, Any]]) -> str:
    head = f"{results[0]['model']}, batch {results[0]['batch']}".ljust(30)
    lines = [head + "ms per step  over bf16  (quartiles)     tokens/s  first step s"]
    for result in results:
        low, high = result["over_bf16_quartiles"]
        lines.append(
            f"{result['name']:<30}{result['step_ms']:>11.1f}{result['over_bf16']:>11.3f}  ({low:.3f}-{high:.3f})"
            f"{result['tokens_per_s']:>13,}{result['first_step_s']:>14.1f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    run_stage(main)
