"""Steps all weights of a group at once on a GPU, by the kernels of `update_gpu_kernels`.

The kernels take AdamW and SGD with a spacing-scaled update. A compiled rule is called per weight, and its guards and
launches take the CPU longer than the GPU needs for a few million elements. The kernels take two to six launches per
group. The rules of `update` step the rest: weights stored on their grid or sharded, moments in codes, base `rung`,
metrics, Muon, and a stiffness that needs more than the tensor's amax.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from altgrad.config.arms import BASES, Arm
from altgrad.model.quantized.data_parallel import is_sharded
from altgrad.numerics import gpu_launch as launch
from altgrad.numerics import scale_rule
from altgrad.optim import update
from altgrad.optim.stiffness import Stiffness
from altgrad.optim.weight_grid import WeightGrid

FORMULAS = ("ulp", "range", "foreign")
LENGTH = 4096  # elements of a chunk


def available(arm: Arm, p: Tensor, grid: WeightGrid, names: Sequence[str]) -> bool:
    """Whether the kernels can step ``p`` by ``arm``; ``names``: names of its state tensors, from `state_names`."""
    base, one_scale = BASES[arm.base], grid.options.get("granularity", "tensor") == "tensor"
    known = base.direction in ("adam", "momentum") and base.unit == "weight" and not base.metric
    of_adam = "reference_avg" not in names and (base.direction == "adam" or not arm.match_rms)
    taken = known and of_adam and one_scale and arm.stiffness in FORMULAS and arm.schedule == "constant"
    taken = taken and arm.weights == "master" and arm.state is None and p.numel() > 0
    fits = p.device.type == launch.DEVICE and p.dtype == torch.float32 and p.is_contiguous() and not is_sharded(p)
    return taken and fits and launch.available()


class Waiting(NamedTuple):
    """A queued step of one weight: the arm and the arguments of its rule in `update`."""

    arm: Arm
    grid: update.GridTensors
    p: Tensor
    g: Tensor
    state: update.State
    numbers: Tensor

    @property
    def rule(self) -> int:
        """The number of the scale rule, from `scale_rule`; steps with one number are launched together."""
        options = self.grid.options
        return scale_rule(options.get("scale_format", "float32"), options.get("scale_rounding", "rceil"))

    @property
    def moments(self) -> tuple[Tensor, Tensor]:
        """The first and second moment; the weight is a placeholder for a moment that the arm lacks."""
        first = self.state.get("momentum_buffer", self.state.get("exp_avg", self.p))
        return first, self.state.get("exp_avg_sq", self.p)


class Kernels:
    """The GPU counterpart of `update_cpu.Loops` for one weight: `step` only appends to ``queue``; `run` computes."""

    reads_codes = False

    def __init__(self, arm: Arm, grid: WeightGrid, stiff: Stiffness, queue: list[Waiting]) -> None:
        self._arm, self._queue = arm, queue
        tensors = (grid.constants, stiff.constants, stiff.numbers, None, None, grid.options, None, None)
        self._grid = update.GridTensors(*tensors)

    def step(
        self, p: Tensor, g: Tensor, state: update.State, numbers: Tensor, stream: tuple[int, int, int],
        remembered: Tensor | None,
    ) -> None:  # fmt: skip
        """Queue a step for the next `run`; arguments as in `update_cpu.Loops.step`."""
        grid = self._grid._replace(remembered=remembered)
        self._queue.append(Waiting(self._arm, grid, p, g.float().contiguous(), state, numbers))


def run(queue: list[Waiting]) -> None:
    """Take all steps in ``queue``, together per device and scale rule, and empty the queue."""
    together: dict[tuple[torch.device, int], list[Waiting]] = {}
    for each in queue:
        together.setdefault((each.p.device, each.rule), []).append(each)
    queue.clear()
    for steps in together.values():
        launch.by_kernels(steps[0].p, partial(_launch, steps), partial(_by_rules, steps))


def _by_rules(steps: Sequence[Waiting]) -> None:
    for arm, grid, p, g, state, numbers in steps:
        update.rule_of(arm, False)(p, g, state, numbers, grid)


def _launch(steps: Sequence[Waiting]) -> None:
    from altgrad.optim import update_gpu_kernels as kernels

    arm, device, count = steps[0].arm, steps[0].p.device, len(steps)
    rows, chunks = [], 0
    for each in steps:
        grid, size = each.grid, each.p.numel()
        tensors = (each.p, each.g, *each.moments, each.numbers, grid.constants, grid.stiff_constants, grid.numbers)
        rows.append([*(0 if t is None else t.data_ptr() for t in (*tensors, grid.remembered)), size, chunks])
        chunks += -(-size // LENGTH)
    table = torch.tensor(rows).to(device, non_blocking=True)
    tensor_of = _tensor_of(tuple(-(-each.p.numel() // LENGTH) for each in steps), device)
    largest = torch.zeros(count, dtype=torch.int32, device=device)
    sums = torch.empty((2, chunks), dtype=torch.float64, device=device)
    means, sizes = (torch.empty((2, count), dtype=torch.float32, device=device) for _ in range(2))
    options: dict[str, Any] = {"LENGTH": LENGTH, "num_warps": 8, "enable_fp_fusion": False}
    kernels.find_largest[(chunks,)](table, tensor_of, largest, FORMULA=arm.stiffness, **options)

    def go(phase: str) -> None:
        kernels.step[(chunks,)](
            table, tensor_of, largest, means, sizes, sums, chunks, count, PHASE=phase,
            ADAM=BASES[arm.base].direction == "adam", FORMULA=arm.stiffness, RULE=steps[0].rule,
            ON_GRADIENT=arm.acts == "gradient", POWER=arm.power, RMS=arm.normalise == "rms",
            MOMENTUM_KEPT=arm.momentum > 0, MATCH=arm.match_rms, **options,
        )  # fmt: skip

    if arm.normalise == "rms":
        go("spacings")
        kernels.add_up[(count,)](table, sums, chunks, means, count, TERMS=1, **options)
    if arm.match_rms:
        go("sizes")
        kernels.add_up[(count,)](table, sums, chunks, sizes, count, TERMS=2, **options)
    go("step")


@lru_cache(maxsize=8)
def _tensor_of(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """Return each chunk's tensor index, (chunks,) int32; ``counts``: number of chunks of each tensor."""
    return torch.arange(len(counts), dtype=torch.int32).repeat_interleave(torch.tensor(counts)).to(device)
