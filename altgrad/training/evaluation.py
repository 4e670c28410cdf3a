"""The loss on the fixed validation sample, and whether the compiled graph computes what the model does."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from altgrad.config import Cell, UserError
from altgrad.data.tasks import Task
from altgrad.model.quantized.quantizer import Quantizer
from altgrad.training import machine
from altgrad.training.ranks import Ranks

TOLERANCE = 0.01  # relative, of a loss compiled and not; these differ by 1e-5 or so, where sums are rounded elsewhere


class Evaluation:
    """Evaluates ``model``, or ``loss_of`` which is it or its compiled graph, in ``compute``: bf16 or float32."""

    def __init__(
        self, cell: Cell, model: nn.Module, task: Task, device: torch.device, compute: str, ranks: Ranks
    ) -> None:  # fmt: skip
        self._model, self._ranks = model, ranks
        self.loss_of: Callable[..., Tensor] = model
        self._device, self._compute = device, compute
        self._batch = cell.train.batch
        self._sample = task.sample()
        self._dropout = cell.model.dropout > 0
        self.seconds: list[float] = []  # of each batch

    def loss(self) -> float | None:
        """Return the mean loss in nats, per token or label; ``None`` if it is not finite.

        Where training and evaluation compute the same function, the compiled graph of training is used, whose guards
        ask for its modes; a second one would have to be compiled otherwise.
        """
        inputs, targets = self._sample
        total, same = 0.0, self._is_as_in_training()
        self._model.train(same)
        with self._ranks.gathered(), torch.set_grad_enabled(same):
            for start in range(0, len(inputs), self._batch):
                given = [t[start : start + self._batch] for t in (inputs, targets)]
                loss_of: Callable[..., Tensor] = self._model
                count = len(given[0])  # for a last, smaller batch, that each process does whole
                if count == self._batch:
                    given, loss_of = [self._ranks.share(t) for t in given], self.loss_of
                began = time.perf_counter()
                total += self._of(loss_of, given) * count
                self.seconds.append(time.perf_counter() - began)
        self._model.train()
        mean = total / len(inputs)
        return mean if math.isfinite(mean) else None

    def check_graph(self) -> None:
        """Raise :class:`UserError` where the compiled graph does not compute what the model does.

        A compiler's error would be taken for a format's divergence. One batch is evaluated both ways, where that
        changes nothing of the model's.
        """
        first = [t[: self._batch] for t in self._sample]
        if self.loss_of is self._model or len(first[0]) < self._batch or not self._is_as_in_training():
            return
        given = [self._ranks.share(t) for t in first]
        with self._ranks.gathered():
            compiled = self._of(self.loss_of, given)
            with torch.no_grad():
                plain = self._of(self._model, given)
        if math.isfinite(plain) and not abs(compiled - plain) <= TOLERANCE * abs(plain):
            raise UserError(
                f"the compiled model's first loss is {compiled:.6g} and the model's own {plain:.6g}: the C++ compiler "
                "made an error. Set train.compile to off, or CXX to another compiler, and delete "
                f"{machine.compile_cache(Path())}"
            )

    def _of(self, loss_of: Callable[..., Tensor], given: list[Tensor]) -> float:
        """Return the loss of a batch, of which each process has its share."""
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._compute == "bf16"):
            loss = loss_of(*(t.to(self._device) for t in given))
        return self._ranks.sum(loss.detach() / self._ranks.count).item()

    def _is_as_in_training(self) -> bool:
        """Whether training and evaluation compute the same: nothing dropped, remembered or stochastically rounded."""
        changes = (module.changes for module in self._model.modules() if isinstance(module, Quantizer))
        return not self._dropout and not any(changes)
