"""The sizes of all measurements: on a GPU, on a CPU, and in the rehearsal of a GPU's list on any device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Sizes:
    """The sizes of each measurement.

    Attributes:
        operands: shape of the tensor that is quantized.
        steps: (model, batch) of the training steps.
        vocabulary: vocabulary size of these models.
        rounds: number of timed steps of each contestant.
        optimizers: names of the optimizers to time, on the last model in ``steps``.
        jobs: the numbers of runs of pico to try at a time.
        parts_of: ``{model: vocabulary size}`` of the runs whose parts are timed.
        changed: model sizes that replace those of the preset, such as ``{"layers": 1}``.
        entries: names of the contestants in training steps; None means all.
        operand_entries: names of the ways to make an operand; None means all.
        modes: modes of `torch.compile` to time beside the default one.
        checks: ``{name: tests for pytest}``, run first; ``later_checks`` run last.
        train: settings that replace those of the section ``train`` in whole runs.
    """

    operands: tuple[int, int]
    steps: tuple[tuple[str, int], ...]
    vocabulary: int
    rounds: int
    optimizers: tuple[str, ...]
    jobs: tuple[int, ...]
    parts_of: dict[str, int]
    changed: dict[str, int] = field(default_factory=dict)
    entries: tuple[str, ...] | None = None
    operand_entries: tuple[str, ...] | None = None
    modes: tuple[str, ...] = ()
    checks: dict[str, list[str]] = field(default_factory=dict)
    later_checks: dict[str, list[str]] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)


ON_GPU = Sizes(
    checks={"numerics": ["tests/gpu/test_numerics.py"], "runs": ["tests/gpu/test_cells.py"]},
    later_checks={"optimizers": ["tests/gpu/test_arms.py"]},
    operands=(1 << 16, 3072),
    steps=(("gpt-124m", 16),),
    vocabulary=50257,
    rounds=10,
    entries=(
        "bf16", "E4M3", "E3M4", "E7M0", "MXFP8, all tensors", "NVFP4, all tensors", "NVFP4 as published",
        "E4M3, native tensorwise", "E4M3, native rowwise", "E4M3, torchao tensorwise", "E4M3, torchao rowwise",
        "E4M3, torchao rowwise_with_gw_hp", "E4M3, codes kept", "E4M3, native blocks of 128", "MXFP8, native",
        "NVFP4 as published, native",
    ),
    modes=("reduce-overhead", "max-autotune-no-cudagraphs"),
    optimizers=("adamw", "spacing_unmatched", "spacing_scaled", "rung", "muon"),
    jobs=(1, 4, 8, 16),
    parts_of={"pico": 1024, "nano": 4096, "micro": 4096, "mini": 4096, "gpt-50m": 50257, "gpt-124m": 50257},
)  # fmt: skip
ON_CPU = Sizes(
    operands=(1 << 12, 1024),
    steps=(("nano", 16), ("micro", 16)),
    vocabulary=4096,
    rounds=15,
    optimizers=(
        "adamw", "spacing_unmatched", "spacing_scaled", "shuffled_unmatched", "rung", "muon",
        "adamw_e4m3_state", "adamw_coat", "adamw_fishman", "adamw_dynamic8", "eco_3_bytes", "rung_3_bytes",
    ),
    jobs=(1, 2),
    parts_of={"pico": 1024, "nano": 4096},
)  # fmt: skip
MINIATURE = Sizes(
    checks={"numerics": ["tests/gpu/test_numerics.py::test_codes_are_the_same_bytes"]},
    operands=(64, 96),
    steps=(("pico", 2),),
    vocabulary=128,
    rounds=2,
    changed={"layers": 1},
    entries=("bf16", "E4M3", "E3M4"),
    operand_entries=(
        "copy", "E4M3, a scale per row, to float8", "E2M1, MS-EDEN", "E4M3, a scale per tensor, by kernels",
    ),
    modes=("reduce-overhead",),
    optimizers=("adamw", "rung"),
    jobs=(2,),
    parts_of={"pico": 512},
    train={"steps": 4, "batch": 2, "eval_sequences": 4, "compile": "off"},
)
